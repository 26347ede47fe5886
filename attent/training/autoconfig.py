"""What a run takes by itself where nothing was said, from the amount of data and the machine, each with its reason.

The rules of thumb are few and stand here; how each was found stands in docs/log.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attent import settings
from attent.data.estimate import choose_size_and_epochs
from attent.models import presets
from attent.models.config import ModelConfig, Seq2SeqConfig
from attent.text.tokenizer import Tokenizer
from attent.training.config import (
    M,
    Run,
    Size,
    TrainConfig,
    TrainError,
    UserSettings,
    build_model_config,
    flatten_settings,
)
from attent.training.hardware import pick_precision
from attent.training.schedule import compute_paper_lr

MIN_STEPS = 2_000  # below these no model has learned much, however few the pairs are
MAX_STEPS = 300_000  # the paper's big model
NUM_VALIDATIONS = 50  # of a whole run
DROPOUT_BY_PAIRS = ((0, 0.3), (500_000, 0.2), (2_000_000, 0.1))  # from so many pairs on; larger models overfit more
BATCH_TOKENS_BY_SIZE: dict[Size, int] = {"tiny": 4_096, "small": 8_192, "base": 25_600, "big": 25_600}
FINETUNE_DIVISOR, FINETUNE_LR = (
    10,
    2e-4,
)  # a model trained further: of epochs and fewest steps the tenth, and a gentle rate
FIXED_SETTINGS = ("size", "data.tokenizer.vocab")  # of a model that is trained further, beside its own shape
CPU_BATCH_TOKENS = 4_096  # more tokens an update would be too few updates a day
CPU_MICRO_BATCH_TOKENS = 2_048  # as fast as a whole batch, in half the memory; fewer lose speed


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """How much there is to learn from."""

    num_examples: int
    num_tokens: int  # of the larger side, once through


def choose_model(
    run: Run, requested: UserSettings, data_size: DataSize, tokenizer: Tokenizer, device_type: str
) -> tuple[Size, Seq2SeqConfig, str]:
    """The size, the model and the reason."""
    size = run.size or choose_size_and_epochs(data_size.num_examples, device_type)[0]
    why = "as asked for" if run.size else _explain_size(size, data_size.num_examples, device_type)
    preset = fit_to_tokenizer(getattr(presets, size)(tokenizer.source.size), tokenizer)
    rate = max(_look_up(DROPOUT_BY_PAIRS, data_size.num_examples), preset.encoder.dropout if size == "big" else 0.0)
    preset = replace(
        preset, encoder=replace(preset.encoder, dropout=rate), decoder=replace(preset.decoder, dropout=rate)
    )
    model: Seq2SeqConfig = build_model_config(requested, preset)
    if model.encoder.dropout == rate:
        why += f"; dropout {rate:g}, since few pairs are soon learned by heart" if rate > 0.1 else f"; dropout {rate:g}"
    return size, model, why


def fit_to_tokenizer(config: Seq2SeqConfig, tokenizer: Tokenizer) -> Seq2SeqConfig:
    """With the vocabulary, start and end of a tokenizer."""
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
    """The config of a model that is trained further: its dropout may be another, and nothing else. `subwords` are those
    of its tokenizer, of each side."""
    own = {f"model.{name}": value for name, value in flatten_settings(settings.to_dict(config))}
    said = [
        (path, value)
        for path, value in flatten_settings(requested)
        if path in FIXED_SETTINGS or path.startswith("model.")
    ]
    if wrong := [path for path, value in said if not path.endswith("dropout") and (path, value) not in own.items()]:
        raise TrainError(
            f"`{wrong[0]}` cannot be chosen with --from {origin}: a model that is trained further keeps its shape and "
            "its subwords; leave it out"
        )
    sizes = (config.vocab, config.output_vocab) if isinstance(config, Seq2SeqConfig) else (getattr(config, "vocab", 0),)
    if any(has > room for has, room in zip(vocab_sizes, sizes, strict=False)):
        has, room = (" and ".join(f"{size:,}" for size in all_of) for all_of in (vocab_sizes, sizes))
        raise TrainError(
            f"{origin}: its tokenizer does not match its model: {has} subwords for embeddings of {room}; copy the model "
            "again"
        )
    return build_model_config(requested, config)


def build_any_model_config(requested: UserSettings, preset: ModelConfig) -> ModelConfig:
    """`config.model_of`, whichever kind of model it is."""
    return build_model_config(requested, preset)  # type: ignore[type-var]  # one of them


def build_any_finetune_config(
    config: ModelConfig, requested: UserSettings, vocab_sizes: tuple[int, ...], origin: str
) -> ModelConfig:
    """`kept`, whichever kind of model it is."""
    return build_finetune_config(config, requested, vocab_sizes, origin)  # type: ignore[type-var]  # one of them


def _explain_size(size: Size, pairs: int, device_type: str) -> str:
    beside = (
        " (base would take weeks on a CPU)" if device_type == "cpu" and size == "small" and pairs >= 2_000_000 else ""
    )
    return (
        f"for {pairs:,} pairs: a larger one would learn them by heart{beside}"
        if size != "base"
        else f"for {pairs:,} pairs"
    )


def fill_train_config(
    train: TrainConfig,
    size: Size | None,
    model: Seq2SeqConfig,
    data_size: DataSize,
    device: torch.device,
    *,
    finetune: bool = False,
) -> TrainConfig:
    """Every None of the recipe filled in. A model that is trained further needs less of everything."""
    batch = train.batch_tokens or (CPU_BATCH_TOKENS if device.type == "cpu" else BATCH_TOKENS_BY_SIZE[size or "small"])
    an_epoch = data_size.num_tokens / (batch * train.accumulate)
    epochs = choose_size_and_epochs(data_size.num_examples, device.type)[1] / (FINETUNE_DIVISOR if finetune else 1)
    fewest = MIN_STEPS // FINETUNE_DIVISOR if finetune else MIN_STEPS
    steps = train.steps or min(MAX_STEPS, max(fewest, math.ceil(epochs * an_epoch)))
    warmup = train.warmup if train.warmup is not None else max(1, min(4_000, steps // 4))
    lr = train.lr or (FINETUNE_LR if finetune else _choose_lr(model, warmup, steps))
    return fill_defaults(train, device, batch_tokens=batch, steps=steps, warmup=warmup, lr=lr)


def fill_defaults(
    train: TrainConfig, device: torch.device, *, batch_tokens: int, steps: int, warmup: int, lr: float
) -> TrainConfig:
    """Every None of a recipe, of which these four are chosen: the rest follows from them and from the machine."""
    every = train.valid_every or max(10, min(5_000, round(steps / NUM_VALIDATIONS)))
    return replace(
        train,
        batch_tokens=batch_tokens,
        steps=steps,
        valid_every=every,
        save_every=train.save_every or every,
        warmup=warmup,
        lr=lr,
        rdrop=0.0 if train.rdrop is None else train.rdrop,
        precision=train.precision or pick_precision(device)[0],
        micro_batch_tokens=train.micro_batch_tokens or (CPU_MICRO_BATCH_TOKENS if device.type == "cpu" else None),
        compile=device.type == "cuda" if train.compile is None else train.compile,
    )


def _choose_lr(model: Seq2SeqConfig, warmup: int, steps: int) -> float:
    """Equation 3; for small models twice that, as the paper's own code (tensor2tensor), if there are steps enough."""
    rate = compute_paper_lr(model.encoder.width, max(warmup, 1_600))  # a short warm-up must not lead up higher
    twice = model.encoder.width < 512 and steps >= MIN_STEPS
    return float(f"{2 * rate if twice else rate:.3g}")


def _look_up(thresholds: tuple[tuple[int, Any], ...], count: int) -> Any:
    return next(value for least, value in reversed(thresholds) if count >= least)


def describe_choices(run: Run, size_reason: str, data_size: DataSize, device: torch.device) -> Iterator[str]:
    """What was chosen, as sentences."""
    train, model = run.train, run.model
    assert isinstance(model, Seq2SeqConfig)
    assert train.batch_tokens
    assert train.steps
    stack = model.encoder
    yield (
        f"model: {f'{run.size}, ' if run.size else ''}{stack.layers}+{model.decoder.layers} layers, "
        f"width {stack.width}, vocabulary {model.vocab:,}; {size_reason}"
    )
    yield from describe_schedule(train, data_size, "by the likeliest word each time")


def describe_schedule(train: TrainConfig, data_size: DataSize, validation_note: str = "") -> Iterator[str]:
    """The updates and the validations; `how` is what these do beside working out the loss."""
    assert train.batch_tokens
    assert train.steps
    epochs = train.steps * train.accumulate / max(1, math.ceil(data_size.num_tokens / train.batch_tokens))
    yield (
        f"recipe: {train.optimizer}, learning rate up to {train.lr:g} after {train.warmup:,} updates, batches of "
        f"{train.batch_tokens:,} tokens{f' x {train.accumulate}' if train.accumulate > 1 else ''}, at most "
        f"{train.steps:,} updates (about {epochs:,.{0 if epochs >= 10 else 1}f} epochs)"
    )
    patience = f"; ends after {train.patience} without a better one" if train.patience else ""
    yield (
        f"validation every {train.valid_every:,} updates{f' ({validation_note})' if validation_note else ''}, checkpoint every "
        f"{train.save_every:,}{patience}"
    )
