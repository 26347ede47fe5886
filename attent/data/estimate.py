"""How many tokens a corpus will be, and how long training on it may take on this machine.

Both rest on a sample: a quick tokenizer learns from it and counts, and a model of the size that suits the amount of
data takes real steps on it for a second or two. How many epochs a corpus needs nobody knows beforehand; what is
assumed is part of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attent.models import Seq2Seq
    from attent.text.tokenizer import Tokenizer

    PaddedBatch = tuple[Tensor, Tensor, Tensor, Tensor]  # source, its lengths, target, its lengths

Size = Literal["tiny", "small", "base", "big"]

MEASURE_SECONDS = 2.0  # of measuring
MIN_PAIRS = 200  # pairs: of fewer an estimate would say nothing
# Target tokens that go through the model at once, and how often before a step is taken. On a CPU more at once are no
# faster, and cost memory: a step of 400 x 8 is as quick as one of 3,200.
CPU_MICRO_BATCHES, GPU_MICRO_BATCHES = (400, 8), (16_000, 1)
TIME_MARGIN = 0.7, 1.6  # the steps that were measured were few, and other programs run too

# From so many pairs on: the preset that suits them, and epochs until such a model stops to get better.
SIZE_AND_EPOCHS_BY_PAIRS: tuple[tuple[int, Size, int], ...] = (
    (0, "tiny", 60),
    (100_000, "small", 25),
    (2_000_000, "base", 8),
    (20_000_000, "base", 3),
)

TextPairs = Sequence[tuple[str, str]]
TokenRows = list[list[int]]


@dataclass(frozen=True)
class TokenEstimate:
    """What a tokenizer makes of a corpus."""

    vocab_size: int
    sampled_pairs: int  # pairs that were looked at
    source_tokens: int  # tokens of all pairs, once; the end of each sentence counts
    target_tokens: int
    source_tokens_per_word: float
    target_tokens_per_word: float


@dataclass(frozen=True)
class TrainingEstimate:
    """What training would take here."""

    size: str  # a preset
    parameters: int
    epochs: int  # assumed
    device: str
    tokens_per_second: int  # of both sides, as measured
    seconds: tuple[int, int]  # from, to


@dataclass(frozen=True)
class CorpusEstimate:
    tokens: TokenEstimate
    training: TrainingEstimate


def estimate_corpus(
    texts: TextPairs, pairs: int, characters: int, *, seconds: float = MEASURE_SECONDS
) -> CorpusEstimate | None:
    """For a corpus of so many pairs and characters, of which `texts` is a fair sample; None for too few of them."""
    if len(texts) < MIN_PAIRS:
        return None
    tokenizer = _train_tokenizer(texts, characters)
    rows = tokenizer.encode_source([s for s, _ in texts]), tokenizer.encode_target([t for _, t in texts])
    tokens = _estimate_tokens(texts, pairs, rows, tokenizer)
    return CorpusEstimate(
        tokens, estimate_training(rows, tokenizer, pairs, tokens.source_tokens + tokens.target_tokens, seconds)
    )


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _train_tokenizer(texts: TextPairs, characters: int) -> Tokenizer:
    """Learnt from the sample, with as many ids as the whole corpus would get, where the sample is enough for that."""
    from attent.text.tokenizer import TokenizerError
    from attent.text.tokenizer_training import (
        CorpusSample,
        TokenizerConfig,
        choose_vocab_size,
        count_characters,
        train_tokenizer,
    )

    sources, targets = [source for source, _ in texts], [target for _, target in texts]
    sample = CorpusSample([*sources, *targets], characters)
    try:
        return train_tokenizer(
            sources, targets, TokenizerConfig(vocab=choose_vocab_size(sample, count_characters(sample)))
        )
    except TokenizerError:
        return train_tokenizer(sources, targets)


def _estimate_tokens(
    texts: TextPairs, pairs: int, rows: tuple[TokenRows, TokenRows], tokenizer: Tokenizer
) -> TokenEstimate:
    counts = [sum(map(len, side)) for side in rows]
    words = [max(sum(len(pair[side].split()) for pair in texts), 1) for side in (0, 1)]
    whole = pairs / len(texts)
    return TokenEstimate(
        vocab_size=tokenizer.target.size,
        sampled_pairs=len(texts),
        source_tokens=round(counts[0] * whole),
        target_tokens=round(counts[1] * whole),
        source_tokens_per_word=round((counts[0] - len(texts)) / words[0], 2),
        target_tokens_per_word=round((counts[1] - len(texts)) / words[1], 2),
    )


# ---- time ------------------------------------------------------------------------------------------------------------


def estimate_training(
    rows: tuple[TokenRows, TokenRows], tokenizer: Tokenizer, pairs: int, tokens: int, seconds: float
) -> TrainingEstimate:
    """Take real training steps for so many seconds, and see how far they would have come."""
    from attent.models import build, presets

    device = _choose_device()
    name, epochs = choose_size_and_epochs(pairs, device.type)
    model = build(getattr(presets, name)(tokenizer.target.size)).to(device).train()
    speed, where = _measure_best_speed(model, _build_batches(rows, device), device, seconds)
    whole = tokens * epochs / speed
    return TrainingEstimate(
        size=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=epochs,
        device=where,
        tokens_per_second=round(speed),
        seconds=(round(whole * TIME_MARGIN[0]), round(whole * TIME_MARGIN[1])),
    )


def _measure_best_speed(
    model: Seq2Seq, batches: list[PaddedBatch], device: torch.device, seconds: float
) -> tuple[float, str]:
    """(tokens a second, where). On a CPU with all threads and with one: small models often are faster with one."""
    import torch

    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return _measure_speed(model, batches, device, seconds), name
    threads = torch.get_num_threads()
    speeds = {}
    try:
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            speeds[f"CPU, {count} {'thread' if count == 1 else 'threads'}"] = _measure_speed(
                model, batches, device, seconds / 2
            )
    finally:
        torch.set_num_threads(threads)
    best = max(speeds, key=speeds.__getitem__)
    return speeds[best], best


def _choose_device() -> torch.device:
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def choose_size_and_epochs(pairs: int, device_type: str) -> tuple[Size, int]:
    """The size of model for so many pairs on this kind of device, and how many epochs it may take."""
    name, epochs = next((name, epochs) for least, name, epochs in reversed(SIZE_AND_EPOCHS_BY_PAIRS) if pairs >= least)
    return ("small" if name == "base" and device_type == "cpu" else name), epochs  # base on a CPU would take weeks


def _build_batches(rows: tuple[TokenRows, TokenRows], device: torch.device) -> list[PaddedBatch]:
    """Pairs of about the same length together, from everywhere in the sample."""
    budget, _ = CPU_MICRO_BATCHES if device.type == "cpu" else GPU_MICRO_BATCHES
    order = sorted(range(len(rows[1])), key=lambda i: (len(rows[1][i]), len(rows[0][i])))
    groups: list[list[int]] = [[]]
    for i in order:
        if groups[-1] and len(rows[1][i]) * (len(groups[-1]) + 1) > budget:
            groups.append([])
        groups[-1].append(i)
    shuffled = sorted(range(len(groups)), key=lambda g: (g * 2_654_435_761) % 2**32)
    return [
        (*_pad_rows([rows[0][i] for i in groups[g]], device), *_pad_rows([rows[1][i] for i in groups[g]], device))
        for g in shuffled[:64]
    ]


def _pad_rows(rows: TokenRows, device: torch.device) -> tuple[Tensor, Tensor]:
    import torch

    longest = min(max(map(len, rows)), 512)
    ids = torch.tensor([(row + [0] * longest)[:longest] for row in rows], device=device)
    return ids, torch.tensor([min(len(row), longest) for row in rows], device=device)


def _measure_speed(model: Seq2Seq, batches: list[PaddedBatch], device: torch.device, seconds: float) -> float:
    """Tokens of both sides a second. The first batch, at which everything is set up, does not count."""
    import torch

    optimiser = torch.optim.AdamW(model.parameters())
    _, parts = CPU_MICRO_BATCHES if device.type == "cpu" else GPU_MICRO_BATCHES
    _train_step(model, batches[0])
    tokens, done, began = 0, 0, time.perf_counter()
    while done == 0 or time.perf_counter() - began < seconds:
        tokens += sum(_train_step(model, batches[(done + part) % len(batches)]) for part in range(parts))
        optimiser.step()
        optimiser.zero_grad()
        done += parts
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tokens / (time.perf_counter() - began)


def _train_step(model: Seq2Seq, batch: PaddedBatch) -> int:
    """Forward and backward; the real tokens of both sides."""
    import torch
    import torch.nn.functional as F

    from attent.models import shift_right

    source, source_lengths, target, target_lengths = batch
    with torch.autocast(source.device.type, torch.bfloat16, enabled=source.device.type == "cuda"):
        logits = model(source, shift_right(target, model.config.start_id), source_lengths, target_lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
    loss.backward()
    return int(source_lengths.sum() + target_lengths.sum())
