"""Defaults chosen from the amount of data and the device (model size, dropout, schedule), and estimates of training
time.

The rules of thumb are few; docs/log.md says how each was found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attent import settings
from attent.data.estimate import CorpusEstimate, TextPairs, TokenRows, TrainingEstimate, estimate_tokens
from attent.models import Seq2Seq, Seq2SeqConfig, build, presets, shift_right
from attent.text.tokenizer import Tokenizer
from attent.training import config as run_config
from attent.training.config import M, RunConfig, Size, TrainConfig, TrainError, UserSettings
from attent.training.hardware import activate_device, pick_precision
from attent.training.schedule import compute_paper_lr

T = TypeVar("T")
PaddedBatch = tuple[Tensor, Tensor, Tensor, Tensor]  # source, its lengths, target, its lengths

# (minimum number of pairs, (size, epochs until such a model stops improving))
SIZE_AND_EPOCHS_BY_PAIRS: tuple[tuple[int, tuple[Size, int]], ...] = (
    (0, ("tiny", 60)),
    (100_000, ("small", 25)),
    (2_000_000, ("base", 8)),
    (20_000_000, ("base", 3)),
)
MIN_STEPS = 2_000  # with fewer, no model has learned much, however few the pairs are
MAX_STEPS = 300_000  # the paper's big model
NUM_VALIDATIONS = 50
DROPOUT_BY_PAIRS = ((0, 0.3), (500_000, 0.2), (2_000_000, 0.1))  # larger models overfit more
BATCH_TOKENS_BY_SIZE: dict[Size, int] = {"tiny": 4_096, "small": 8_192, "base": 25_600, "big": 25_600}
FINETUNE_DIVISOR, FINETUNE_LR = 10, 2e-4  # fine-tuning takes a tenth of the epochs and of `MIN_STEPS`
FIXED_SETTINGS = ("size", "data.tokenizer.vocab")  # besides the model's shape, when fine-tuning
CPU_BATCH_TOKENS = 4_096  # with more, there would be too few updates a day
CPU_MICRO_BATCH_TOKENS = 2_048  # as fast as a whole batch, in half the memory; smaller ones are slower

MEASURE_SECONDS = 2.0
BUDGET_MARGIN = 0.97  # of --minutes: checkpoints, curves and the model card
MAX_SCORING_SHARE = 0.4  # of --minutes: an estimate from an untrained model must not take more
VALID_SHARE = 0.1  # of the time, unless the user chooses when to validate
# (target tokens of a micro-batch, micro-batches of a step). On a CPU larger ones are no faster and cost memory: 400 x 8
# is as fast as 3,200.
CPU_MICRO_BATCHES, GPU_MICRO_BATCHES = (400, 8), (16_000, 1)
MAX_MEASURED_BATCHES = 64
TIME_MARGIN = 0.7, 1.6  # few steps are measured, and other programs run too


@dataclass(frozen=True, kw_only=True)
class DataSize:
    num_examples: int
    num_tokens: int  # of the larger side, per epoch


def look_up(thresholds: Sequence[tuple[int, T]], count: int) -> T:
    """The value of the largest threshold that `count` reaches."""
    return next(value for minimum, value in reversed(thresholds) if count >= minimum)


# ---- the model -------------------------------------------------------------------------------------------------------


def choose_size_and_epochs(num_pairs: int, device_type: str) -> tuple[Size, int]:
    size, epochs = look_up(SIZE_AND_EPOCHS_BY_PAIRS, num_pairs)
    return ("small" if size == "base" and device_type == "cpu" else size), epochs  # base on a CPU would take weeks


def choose_model(
    run: RunConfig, requested: UserSettings, data_size: DataSize, tokenizer: Tokenizer, device_type: str
) -> tuple[Size, Seq2SeqConfig, str]:
    """Return (size, config, reason) of a translation model."""
    num_pairs = data_size.num_examples
    size = run.size or choose_size_and_epochs(num_pairs, device_type)[0]
    reason = "as requested" if run.size else f"for {num_pairs:,} pairs"
    if not run.size and size != "base":
        too_slow = device_type == "cpu" and size == "small" and num_pairs >= 2_000_000
        reason += ": base would take weeks on a CPU" if too_slow else ": a larger model would overfit"
    preset = fit_to_tokenizer(getattr(presets, size)(tokenizer.source.size), tokenizer)
    dropout = max(look_up(DROPOUT_BY_PAIRS, num_pairs), preset.encoder.dropout if size == "big" else 0.0)
    encoder, decoder = (replace(stack, dropout=dropout) for stack in (preset.encoder, preset.decoder))
    config = run_config.build_model_config(requested, replace(preset, encoder=encoder, decoder=decoder))
    if config.encoder.dropout == dropout:
        reason += f"; dropout {dropout:g}" + (", since few pairs are easily overfitted" if dropout > 0.1 else "")
    return size, config, reason


def fit_to_tokenizer(config: Seq2SeqConfig, tokenizer: Tokenizer) -> Seq2SeqConfig:
    """The config with the vocabulary, start and end token of a tokenizer."""
    source, target = tokenizer.source, tokenizer.target
    return replace(
        config,
        vocab=source.size,
        target_vocab=None if tokenizer.joint else target.size,
        share_embeddings=tokenizer.joint and config.share_embeddings,
        start_id=target.start,
        end_id=target.end,
    )


def build_finetune_config(config: M, requested: UserSettings, vocab_sizes: tuple[int, ...], origin: str) -> M:
    """The config of the model of `--from origin` with the requested dropout; it keeps everything else.

    `vocab_sizes` are those of its tokenizer, of each side.
    """
    own = {f"model.{name}": value for name, value in run_config.flatten_settings(settings.to_dict(config))}
    fixed = [
        path
        for path, value in run_config.flatten_settings(requested)
        if (path in FIXED_SETTINGS or path.startswith("model."))
        and not path.endswith("dropout")
        and (path, value) not in own.items()
    ]
    if fixed:
        raise TrainError(
            f"`{fixed[0]}` cannot be changed with --from {origin}: fine-tuning keeps the shape of the model and its "
            "vocabulary; leave it out"
        )
    sizes = (config.vocab, config.output_vocab) if isinstance(config, Seq2SeqConfig) else (getattr(config, "vocab", 0),)
    if any(ids > rows for ids, rows in zip(vocab_sizes, sizes, strict=False)):
        ids, rows = (" and ".join(f"{size:,}" for size in counts) for counts in (vocab_sizes, sizes))
        raise TrainError(
            f"{origin}: its tokenizer does not match its model: {ids} subwords for embeddings of {rows}; copy the "
            "model again"
        )
    return run_config.build_model_config(requested, config)


# ---- the schedule ----------------------------------------------------------------------------------------------------


def fill_train_config(
    train: TrainConfig,
    size: Size | None,
    model: Seq2SeqConfig,
    data_size: DataSize,
    device: torch.device,
    *,
    finetune: bool = False,
) -> TrainConfig:
    """Replace every None of a translation model's training config."""
    batch = train.batch_tokens or (CPU_BATCH_TOKENS if device.type == "cpu" else BATCH_TOKENS_BY_SIZE[size or "small"])
    steps_per_epoch = data_size.num_tokens / (batch * train.accumulate)
    divisor = FINETUNE_DIVISOR if finetune else 1
    epochs = choose_size_and_epochs(data_size.num_examples, device.type)[1] / divisor
    steps = train.steps or min(MAX_STEPS, max(MIN_STEPS // divisor, math.ceil(epochs * steps_per_epoch)))
    warmup = train.warmup if train.warmup is not None else max(1, min(4_000, steps // 4))
    # Equation 3, without a higher rate after a short warm-up; doubled for small models as in the paper's own code
    # (tensor2tensor), given enough steps.
    paper_lr = compute_paper_lr(model.encoder.width, max(warmup, 1_600))
    paper_lr *= 2 if model.encoder.width < 512 and steps >= MIN_STEPS else 1
    lr = train.lr or (FINETUNE_LR if finetune else float(f"{paper_lr:.3g}"))
    return fill_defaults(train, device, batch_tokens=batch, steps=steps, warmup=warmup, lr=lr)


def fill_defaults(
    train: TrainConfig, device: torch.device, *, batch_tokens: int, steps: int, warmup: int, lr: float
) -> TrainConfig:
    """Replace every None of a training config, given the four values that depend on the task."""
    every = train.valid_every or max(10, min(5_000, round(steps / NUM_VALIDATIONS)))
    return replace(
        train,
        batch_tokens=batch_tokens,
        steps=steps,
        valid_every=every,
        valid_share=(0.0 if train.valid_every else VALID_SHARE) if train.valid_share is None else train.valid_share,
        save_every=train.save_every or every,
        warmup=warmup,
        lr=lr,
        rdrop=0.0 if train.rdrop is None else train.rdrop,
        precision=train.precision or pick_precision(device),
        micro_batch_tokens=train.micro_batch_tokens or (CPU_MICRO_BATCH_TOKENS if device.type == "cpu" else None),
        compile=device.type == "cuda" if train.compile is None else train.compile,
    )


def describe_choices(run: RunConfig, size_reason: str, data_size: DataSize) -> Iterator[str]:
    """Sentences about the model and the schedule of a translation run."""
    model = run.model
    assert isinstance(model, Seq2SeqConfig)
    yield (
        f"model: {f'{run.size}, ' if run.size else ''}{model.encoder.layers}+{model.decoder.layers} layers, "
        f"width {model.encoder.width}, vocabulary {model.vocab:,}; {size_reason}"
    )
    yield from describe_schedule(run.train, count_batches(run.train, data_size), "greedy")


def count_batches(train: TrainConfig, data_size: DataSize) -> int:
    """Batches of an epoch."""
    assert train.batch_tokens
    return math.ceil(data_size.num_tokens / train.batch_tokens)


def describe_schedule(train: TrainConfig, num_batches: int, note: str = "", batches: str = "") -> Iterator[str]:
    """Sentences about the steps and validations; `num_batches` of an epoch, `note` about validation."""
    assert train.steps
    epochs = train.steps * train.accumulate / max(1, num_batches)
    times = f" x {train.accumulate}" if train.accumulate > 1 else ""
    batches = batches or f"batches of {train.batch_tokens:,} tokens{times}"
    yield (
        f"schedule: {train.optimizer}, learning rate up to {train.lr:g} after {train.warmup:,} steps, {batches}, at "
        f"most {train.steps:,} steps (about {epochs:,.{0 if epochs >= 10 else 1}f} epochs)"
    )
    patience = f"; stops after {train.patience} without improvement" if train.patience else ""
    note = f" ({note})" if note else ""
    yield f"validate every {train.valid_every:,} steps{note}, checkpoint every {train.save_every:,}{patience}"


def apply_budget_defaults(train: TrainConfig, requested: UserSettings) -> TrainConfig:
    """With `--minutes`: a learning rate that falls to zero at the end, and no early stop before it has."""
    if train.minutes is None:
        return train
    changes: dict[str, Any] = {"schedule": "cosine", "patience": 0}
    return replace(train, **{name: value for name, value in changes.items() if name not in requested})


def plan_steps(seconds: float, step_seconds: float, scoring_seconds: float, valid_share: float | None) -> int:
    """Return the steps that fit into `seconds` together with validations, checkpoints and the final scores."""
    usable = BUDGET_MARGIN * (seconds - min(scoring_seconds, MAX_SCORING_SHARE * seconds))
    return max(1, int(usable * (1 - (valid_share or VALID_SHARE)) / step_seconds))


# ---- estimates -------------------------------------------------------------------------------------------------------


def estimate_corpus(
    texts: TextPairs, num_pairs: int, num_characters: int, *, seconds: float = MEASURE_SECONDS
) -> CorpusEstimate | None:
    """Estimate tokens and training time of a corpus from a sample of its pairs; None if the sample is too small."""
    sample = estimate_tokens(texts, num_pairs, num_characters)
    if sample is None:
        return None
    training = estimate_training(sample.rows, sample.tokenizer, num_pairs, sample.estimate.total, seconds)
    return CorpusEstimate(sample.estimate, training)


def estimate_training(
    rows: tuple[TokenRows, TokenRows], tokenizer: Tokenizer, num_pairs: int, num_tokens: int, seconds: float
) -> TrainingEstimate:
    """Measure training steps for `seconds`, and extrapolate."""
    device = activate_device(None)
    size, epochs = choose_size_and_epochs(num_pairs, device.type)
    model = build(getattr(presets, size)(tokenizer.target.size)).to(device).train()
    speed, device_name = _measure_best_speed(model, _build_batches(rows, device), device, seconds)
    total = num_tokens * epochs / speed
    return TrainingEstimate(
        size=size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=epochs,
        device=device_name,
        tokens_per_second=round(speed),
        seconds=(round(total * TIME_MARGIN[0]), round(total * TIME_MARGIN[1])),
    )


def _measure_best_speed(
    model: Seq2Seq, batches: list[PaddedBatch], device: torch.device, seconds: float
) -> tuple[float, str]:
    """(tokens a second, device). On a CPU with all threads and with one: small models are often faster with one."""
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return _measure_speed(model, batches, device, seconds), name
    threads = torch.get_num_threads()
    speeds = {}
    try:
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            name = f"CPU, {count} {'thread' if count == 1 else 'threads'}"
            speeds[name] = _measure_speed(model, batches, device, seconds / 2)
    finally:
        torch.set_num_threads(threads)
    best = max(speeds, key=speeds.__getitem__)
    return speeds[best], best


def _build_batches(rows: tuple[TokenRows, TokenRows], device: torch.device) -> list[PaddedBatch]:
    """Batches of pairs of similar length, from everywhere in the sample."""
    max_tokens, _ = CPU_MICRO_BATCHES if device.type == "cpu" else GPU_MICRO_BATCHES
    order = sorted(range(len(rows[1])), key=lambda i: (len(rows[1][i]), len(rows[0][i])))
    groups: list[list[int]] = [[]]
    for i in order:
        if groups[-1] and len(rows[1][i]) * (len(groups[-1]) + 1) > max_tokens:
            groups.append([])
        groups[-1].append(i)
    shuffled = sorted(range(len(groups)), key=lambda g: (g * 2_654_435_761) % 2**32)
    return [
        (*_pad_rows([rows[0][i] for i in groups[g]], device), *_pad_rows([rows[1][i] for i in groups[g]], device))
        for g in shuffled[:MAX_MEASURED_BATCHES]
    ]


def _pad_rows(rows: TokenRows, device: torch.device) -> tuple[Tensor, Tensor]:
    length = min(max(map(len, rows)), 512)
    ids = torch.tensor([(row + [0] * length)[:length] for row in rows], device=device)
    return ids, torch.tensor([min(len(row), length) for row in rows], device=device)


def _measure_speed(model: Seq2Seq, batches: list[PaddedBatch], device: torch.device, seconds: float) -> float:
    """Tokens of both sides a second. The first batch, which pays for the set-up, does not count."""
    optimizer = torch.optim.AdamW(model.parameters())
    _, accumulate = CPU_MICRO_BATCHES if device.type == "cpu" else GPU_MICRO_BATCHES
    _train_step(model, batches[0])
    tokens, done, start = 0, 0, time.perf_counter()
    while done == 0 or time.perf_counter() - start < seconds:
        tokens += sum(_train_step(model, batches[(done + i) % len(batches)]) for i in range(accumulate))
        optimizer.step()
        optimizer.zero_grad()
        done += accumulate
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tokens / (time.perf_counter() - start)


def _train_step(model: Seq2Seq, batch: PaddedBatch) -> int:
    """Run forward and backward; return the number of tokens without padding."""
    source, source_lengths, target, target_lengths = batch
    with torch.autocast(source.device.type, torch.bfloat16, enabled=source.device.type == "cuda"):
        logits = model(source, shift_right(target, model.config.start_id), source_lengths, target_lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
    loss.backward()
    return int(source_lengths.sum() + target_lengths.sum())
