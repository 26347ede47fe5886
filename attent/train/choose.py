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
from attent.data.estimate import suited
from attent.models import presets
from attent.models.config import ModelConfig, Seq2SeqConfig
from attent.text.tokenizer import Tokenizer
from attent.train.config import Asked, M, Run, Size, TrainConfig, TrainError, flat, model_of
from attent.train.hardware import pick_precision
from attent.train.schedule import paper_rate

FEWEST_STEPS = 2_000  # below these no model has learned much, however few the pairs are
MOST_STEPS = 300_000  # the paper's big model
VALIDATIONS = 50  # of a whole run
DROPOUT = ((0, 0.3), (500_000, 0.2), (2_000_000, 0.1))  # from so many pairs on; larger models overfit more
BATCH_TOKENS: dict[Size, int] = {"tiny": 4_096, "small": 8_192, "base": 25_600, "big": 25_600}
FURTHER, FURTHER_RATE = 10, 2e-4  # a model trained further: of epochs and fewest steps the tenth, and a gentle rate
KEPT = ("size", "data.tokenizer.vocab")  # of a model that is trained further, beside its own shape
CPU_BATCH = 4_096  # more tokens an update would be too few updates a day
CPU_PIECE = 2_048  # as fast as a whole batch, in half the memory; fewer lose speed


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much there is to learn from."""

    pairs: int
    tokens: int  # of the larger side, once through


def sized(run: Run, asked: Asked, amount: Amount, tokenizer: Tokenizer, kind: str) -> tuple[Size, Seq2SeqConfig, str]:
    """The size, the model and the reason."""
    size = run.size or suited(amount.pairs, kind)[0]
    why = "as asked for" if run.size else _why_size(size, amount.pairs, kind)
    preset = for_tokenizer(getattr(presets, size)(tokenizer.source.size), tokenizer)
    rate = max(_by_amount(DROPOUT, amount.pairs), preset.encoder.dropout if size == "big" else 0.0)
    preset = replace(
        preset, encoder=replace(preset.encoder, dropout=rate), decoder=replace(preset.decoder, dropout=rate)
    )
    model: Seq2SeqConfig = model_of(asked, preset)
    if model.encoder.dropout == rate:
        why += f"; dropout {rate:g}, since few pairs are soon learned by heart" if rate > 0.1 else f"; dropout {rate:g}"
    return size, model, why


def for_tokenizer(config: Seq2SeqConfig, tokenizer: Tokenizer) -> Seq2SeqConfig:
    """With the vocabulary, start and end of a tokenizer."""
    source, target = tokenizer.source, tokenizer.target
    return replace(
        config,
        vocab=source.size,
        target_vocab=None if tokenizer.joint else target.size,
        share_embeddings=tokenizer.joint and config.share_embeddings,
        start=target.start,
        end=target.end,
    )


def kept(config: M, asked: Asked, subwords: tuple[int, ...], where: str) -> M:
    """The config of a model that is trained further: its dropout may be another, and nothing else. `subwords` are those
    of its tokenizer, of each side."""
    own = {f"model.{name}": value for name, value in flat(settings.to_dict(config))}
    said = [(path, value) for path, value in flat(asked) if path in KEPT or path.startswith("model.")]
    if wrong := [path for path, value in said if not path.endswith("dropout") and (path, value) not in own.items()]:
        raise TrainError(
            f"`{wrong[0]}` cannot be chosen with --from {where}: a model that is trained further keeps its shape and "
            "its subwords; leave it out"
        )
    sizes = (config.vocab, config.targets) if isinstance(config, Seq2SeqConfig) else (getattr(config, "vocab", 0),)
    if any(has > room for has, room in zip(subwords, sizes, strict=False)):
        has, room = (" and ".join(f"{size:,}" for size in all_of) for all_of in (subwords, sizes))
        raise TrainError(
            f"{where}: its tokenizer does not match its model: {has} subwords for embeddings of {room}; copy the model "
            "again"
        )
    return model_of(asked, config)


def model_of_any(asked: Asked, preset: ModelConfig) -> ModelConfig:
    """`config.model_of`, whichever kind of model it is."""
    return model_of(asked, preset)  # type: ignore[type-var]  # one of them


def kept_any(config: ModelConfig, asked: Asked, subwords: tuple[int, ...], where: str) -> ModelConfig:
    """`kept`, whichever kind of model it is."""
    return kept(config, asked, subwords, where)  # type: ignore[type-var]  # one of them


def _why_size(size: Size, pairs: int, kind: str) -> str:
    beside = " (base would take weeks on a CPU)" if kind == "cpu" and size == "small" and pairs >= 2_000_000 else ""
    return (
        f"for {pairs:,} pairs: a larger one would learn them by heart{beside}"
        if size != "base"
        else f"for {pairs:,} pairs"
    )


def recipe(
    train: TrainConfig,
    size: Size | None,
    model: Seq2SeqConfig,
    amount: Amount,
    device: torch.device,
    *,
    further: bool = False,
) -> TrainConfig:
    """Every None of the recipe filled in. A model that is trained further needs less of everything."""
    batch = train.batch_tokens or (CPU_BATCH if device.type == "cpu" else BATCH_TOKENS[size or "small"])
    an_epoch = amount.tokens / (batch * train.accumulate)
    epochs = suited(amount.pairs, device.type)[1] / (FURTHER if further else 1)
    fewest = FEWEST_STEPS // FURTHER if further else FEWEST_STEPS
    steps = train.steps or min(MOST_STEPS, max(fewest, math.ceil(epochs * an_epoch)))
    warmup = train.warmup if train.warmup is not None else max(1, min(4_000, steps // 4))
    lr = train.lr or (FURTHER_RATE if further else _rate(model, warmup, steps))
    return filled(train, device, batch=batch, steps=steps, warmup=warmup, lr=lr)


def filled(train: TrainConfig, device: torch.device, *, batch: int, steps: int, warmup: int, lr: float) -> TrainConfig:
    """Every None of a recipe, of which these four are chosen: the rest follows from them and from the machine."""
    every = train.valid_every or max(10, min(5_000, round(steps / VALIDATIONS)))
    return replace(
        train,
        batch_tokens=batch,
        steps=steps,
        valid_every=every,
        save_every=train.save_every or every,
        warmup=warmup,
        lr=lr,
        rdrop=0.0 if train.rdrop is None else train.rdrop,
        precision=train.precision or pick_precision(device)[0],
        piece_tokens=train.piece_tokens or (CPU_PIECE if device.type == "cpu" else None),
        compile=device.type == "cuda" if train.compile is None else train.compile,
    )


def _rate(model: Seq2SeqConfig, warmup: int, steps: int) -> float:
    """Equation 3; for small models twice that, as the paper's own code (tensor2tensor), if there are steps enough."""
    rate = paper_rate(model.encoder.width, max(warmup, 1_600))  # a short warm-up must not lead up higher
    twice = model.encoder.width < 512 and steps >= FEWEST_STEPS
    return float(f"{2 * rate if twice else rate:.3g}")


def _by_amount(table: tuple[tuple[int, Any], ...], pairs: int) -> Any:
    return next(value for least, value in reversed(table) if pairs >= least)


def told(run: Run, why_size: str, amount: Amount, device: torch.device) -> Iterator[str]:
    """What was chosen, as sentences."""
    train, model = run.train, run.model
    assert isinstance(model, Seq2SeqConfig)
    assert train.batch_tokens
    assert train.steps
    stack = model.encoder
    yield (
        f"model: {f'{run.size}, ' if run.size else ''}{stack.layers}+{model.decoder.layers} layers, "
        f"width {stack.width}, vocabulary {model.vocab:,}; {why_size}"
    )
    yield from told_recipe(train, amount, "by the likeliest word each time")


def told_recipe(train: TrainConfig, amount: Amount, how: str = "") -> Iterator[str]:
    """The updates and the validations; `how` is what these do beside working out the loss."""
    assert train.batch_tokens
    assert train.steps
    epochs = train.steps * train.accumulate / max(1, math.ceil(amount.tokens / train.batch_tokens))
    yield (
        f"recipe: {train.optimiser}, learning rate up to {train.lr:g} after {train.warmup:,} updates, batches of "
        f"{train.batch_tokens:,} tokens{f' x {train.accumulate}' if train.accumulate > 1 else ''}, at most "
        f"{train.steps:,} updates (about {epochs:,.{0 if epochs >= 10 else 1}f} epochs)"
    )
    patience = f"; ends after {train.patience} without a better one" if train.patience else ""
    yield (
        f"validation every {train.valid_every:,} updates{f' ({how})' if how else ''}, checkpoint every "
        f"{train.save_every:,}{patience}"
    )
