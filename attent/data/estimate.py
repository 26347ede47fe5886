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

    Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # source, its lengths, target, its lengths

Size = Literal["tiny", "small", "base", "big"]

SECONDS = 2.0  # of measuring
FEWEST = 200  # pairs: of fewer an estimate would say nothing
# Target tokens that go through the model at once, and how often before a step is taken. On a CPU more at once are no
# faster, and cost memory: a step of 400 x 8 is as quick as one of 3,200.
CPU_BATCH, GPU_BATCH = (400, 8), (16_000, 1)
SPREAD = 0.7, 1.6  # the steps that were measured were few, and other programs run too

# From so many pairs on: the preset that suits them, and epochs until such a model stops to get better.
SIZES: tuple[tuple[int, Size, int], ...] = (
    (0, "tiny", 60),
    (100_000, "small", 25),
    (2_000_000, "base", 8),
    (20_000_000, "base", 3),
)

Texts = Sequence[tuple[str, str]]
Rows = list[list[int]]


@dataclass(frozen=True)
class Tokens:
    """What a tokenizer makes of a corpus."""

    vocabulary: int
    sampled: int  # pairs that were looked at
    source: int  # tokens of all pairs, once; the end of each sentence counts
    target: int
    source_per_word: float
    target_per_word: float


@dataclass(frozen=True)
class Training:
    """What training would take here."""

    model: str  # a preset
    parameters: int
    epochs: int  # assumed
    device: str
    tokens_per_second: int  # of both sides, as measured
    seconds: tuple[int, int]  # from, to


@dataclass(frozen=True)
class Estimate:
    tokens: Tokens
    training: Training


def estimate(texts: Texts, pairs: int, characters: int, *, seconds: float = SECONDS) -> Estimate | None:
    """For a corpus of so many pairs and characters, of which `texts` is a fair sample; None for too few of them."""
    if len(texts) < FEWEST:
        return None
    tokenizer = _tokenizer(texts, characters)
    rows = tokenizer.encode_source([s for s, _ in texts]), tokenizer.encode_target([t for _, t in texts])
    tokens = _tokens(texts, pairs, rows, tokenizer)
    return Estimate(tokens, measure(rows, tokenizer, pairs, tokens.source + tokens.target, seconds))


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _tokenizer(texts: Texts, characters: int) -> Tokenizer:
    """Learnt from the sample, with as many ids as the whole corpus would get, where the sample is enough for that."""
    from attent.text.tokenizer import TokenizerError
    from attent.text.train import Sample, TokenizerConfig, choose_size, letters, train

    sources, targets = [source for source, _ in texts], [target for _, target in texts]
    sample = Sample([*sources, *targets], characters)
    try:
        return train(sources, targets, TokenizerConfig(vocab=choose_size(sample, letters(sample))))
    except TokenizerError:
        return train(sources, targets)


def _tokens(texts: Texts, pairs: int, rows: tuple[Rows, Rows], tokenizer: Tokenizer) -> Tokens:
    counts = [sum(map(len, side)) for side in rows]
    words = [max(sum(len(pair[side].split()) for pair in texts), 1) for side in (0, 1)]
    whole = pairs / len(texts)
    return Tokens(
        vocabulary=tokenizer.target.size,
        sampled=len(texts),
        source=round(counts[0] * whole),
        target=round(counts[1] * whole),
        source_per_word=round((counts[0] - len(texts)) / words[0], 2),
        target_per_word=round((counts[1] - len(texts)) / words[1], 2),
    )


# ---- time ------------------------------------------------------------------------------------------------------------


def measure(rows: tuple[Rows, Rows], tokenizer: Tokenizer, pairs: int, tokens: int, seconds: float) -> Training:
    """Take real training steps for so many seconds, and see how far they would have come."""
    from attent.models import build, presets

    device = _device()
    name, epochs = suited(pairs, device.type)
    model = build(getattr(presets, name)(tokenizer.target.size)).to(device).train()
    speed, where = _fastest(model, _batches(rows, device), device, seconds)
    whole = tokens * epochs / speed
    return Training(
        model=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=epochs,
        device=where,
        tokens_per_second=round(speed),
        seconds=(round(whole * SPREAD[0]), round(whole * SPREAD[1])),
    )


def _fastest(model: Seq2Seq, batches: list[Batch], device: torch.device, seconds: float) -> tuple[float, str]:
    """(tokens a second, where). On a CPU with all threads and with one: small models often are faster with one."""
    import torch

    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return _speed(model, batches, device, seconds), name
    threads = torch.get_num_threads()
    speeds = {}
    try:
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            speeds[f"CPU, {count} {'thread' if count == 1 else 'threads'}"] = _speed(
                model, batches, device, seconds / 2
            )
    finally:
        torch.set_num_threads(threads)
    best = max(speeds, key=speeds.__getitem__)
    return speeds[best], best


def _device() -> torch.device:
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def suited(pairs: int, kind: str) -> tuple[Size, int]:
    """The size of model for so many pairs on this kind of device, and how many epochs it may take."""
    name, epochs = next((name, epochs) for least, name, epochs in reversed(SIZES) if pairs >= least)
    return ("small" if name == "base" and kind == "cpu" else name), epochs  # base on a CPU would take weeks


def _batches(rows: tuple[Rows, Rows], device: torch.device) -> list[Batch]:
    """Pairs of about the same length together, from everywhere in the sample."""
    budget, _ = CPU_BATCH if device.type == "cpu" else GPU_BATCH
    order = sorted(range(len(rows[1])), key=lambda i: (len(rows[1][i]), len(rows[0][i])))
    groups: list[list[int]] = [[]]
    for i in order:
        if groups[-1] and len(rows[1][i]) * (len(groups[-1]) + 1) > budget:
            groups.append([])
        groups[-1].append(i)
    shuffled = sorted(range(len(groups)), key=lambda g: (g * 2_654_435_761) % 2**32)
    return [
        (*_padded([rows[0][i] for i in groups[g]], device), *_padded([rows[1][i] for i in groups[g]], device))
        for g in shuffled[:64]
    ]


def _padded(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    import torch

    longest = min(max(map(len, rows)), 512)
    ids = torch.tensor([(row + [0] * longest)[:longest] for row in rows], device=device)
    return ids, torch.tensor([min(len(row), longest) for row in rows], device=device)


def _speed(model: Seq2Seq, batches: list[Batch], device: torch.device, seconds: float) -> float:
    """Tokens of both sides a second. The first batch, at which everything is set up, does not count."""
    import torch

    optimiser = torch.optim.AdamW(model.parameters())
    _, parts = CPU_BATCH if device.type == "cpu" else GPU_BATCH
    _learn(model, batches[0])
    tokens, done, began = 0, 0, time.perf_counter()
    while done == 0 or time.perf_counter() - began < seconds:
        tokens += sum(_learn(model, batches[(done + part) % len(batches)]) for part in range(parts))
        optimiser.step()
        optimiser.zero_grad()
        done += parts
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tokens / (time.perf_counter() - began)


def _learn(model: Seq2Seq, batch: Batch) -> int:
    """Forward and backward; the real tokens of both sides."""
    import torch
    import torch.nn.functional as F

    from attent.models import shift_right

    source, source_lengths, target, target_lengths = batch
    with torch.autocast(source.device.type, torch.bfloat16, enabled=source.device.type == "cuda"):
        logits = model(source, shift_right(target, model.config.start), source_lengths, target_lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
    loss.backward()
    return int(source_lengths.sum() + target_lengths.sum())
