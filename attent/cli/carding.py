"""The facts of a finished run, gathered for its card."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attent import __version__
from attent.models import CausalConfig, ModelConfig, Seq2SeqConfig
from attent.nn import StackConfig
from attent.train.card import Card, Model, Score, Setting, Training
from attent.train.config import Asked, kind_of, stacks
from attent.train.hardware import describe
from attent.train.task import Outcome

if TYPE_CHECKING:
    from attent.cli.training import Final

ENDED = {
    "steps": "all updates were done",
    "patience": "the validations got no better",
    "stopped": "stopped by hand",
}
SETTINGS = (
    "optimiser", "lr", "schedule", "warmup", "batch_tokens", "accumulate", "label_smoothing", "rdrop", "ema",
    "clip_norm", "weight_decay", "precision", "average", "freeze", "lora",
)  # fmt: skip


def card_of(final: Final, outcomes: Sequence[Outcome]) -> Card:
    return Card(
        folder=str(final.session.out),
        source="",
        target="",
        data=final.material.data(),
        model=_model(final),
        recipe=tuple(_recipe(final)),
        scores=tuple(_score(final, outcome) for outcome in outcomes),
        training=_training(final),
        samples=outcomes[-1].samples if outcomes else (),
        curves="curves.svg",
        task=final.material.words(final.session.out),
    )


def _score(final: Final, outcome: Outcome) -> Score:
    figures = outcome.figures
    return Score(
        name=outcome.name,
        pairs=outcome.count,
        weights=final.weights,
        decoding=outcome.how,
        loss=figures.get("loss"),
        bleu=figures.get("bleu"),
        chrf=figures.get("chrf"),
        exact=figures.get("exact"),
        signatures=outcome.signatures,
        more=outcome.more,
    )


def stacks_of(config: ModelConfig) -> tuple[StackConfig | None, StackConfig | None]:
    """Encoder and decoder, of which some models have one only."""
    if isinstance(config, Seq2SeqConfig):
        return config.encoder, config.decoder
    return (None, config.stack) if isinstance(config, CausalConfig) else (config.stack, None)


def _model(final: Final) -> Model:
    config, training, tokenizer = final.training.model.config, final.training, final.material.tokenizer
    kind = final.run.data.tokenizer.kind if not final.run.start else "that of the model before"
    sides = ", one for both languages" if tokenizer and tokenizer.joint else ", one for each language"
    encoder, decoder = stacks_of(config)
    stack = encoder or decoder
    assert stack is not None
    return Model(
        size=final.run.size or "",
        encoder_layers=encoder.layers if encoder else 0,
        decoder_layers=decoder.layers if decoder else 0,
        width=stack.width,
        heads=stack.heads,
        inner=stack.inner,
        parameters=sum(parameter.numel() for parameter in training.named.values()),
        trained=sum(parameter.numel() for parameter in training.learning.values()),
        vocabulary=getattr(config, "vocab", 0),
        tokenizer=kind + (sides if final.run.task == "translate" else "") if tokenizer else "",
        tokenizer_sha256=tokenizer.fingerprint if tokenizer else "",
        started_from=final.run.start or "",
        pruned=sum(one.removed for one in (encoder, decoder) if one),
    )


def _recipe(final: Final) -> list[Setting]:
    run, asked = final.run, final.session.asked
    assert run.model is not None
    values: dict[str, str] = {} if run.size is None else {"size": run.size}
    values |= {f"train.{name}": _shown(getattr(run.train, name)) for name in SETTINGS}
    stack = next(stack for stack in stacks_of(run.model) if stack)
    values["model.dropout"] = _shown(stack.dropout)
    values["model.norm_order"] = stack.norm_order
    if run.task == "translate":
        values["data.sampling"] = _shown(run.data.sampling)
    why = _reasons(final)
    return [
        Setting(name=name, value=value, reason="as asked for" if was_asked(asked, name) else why.get(name, ""))
        for name, value in values.items()
    ]


def _reasons(final: Final) -> dict[str, str]:
    """Why the settings that nobody named are as they are; those with one default for everybody need no reason."""
    reasons = {"train.precision": "by its speed here, measured when the run began"}
    if final.run.start:
        return reasons | {"train.lr": "a model that is trained further learns gently"}
    run, asked = final.run, final.session.asked
    open_run = run if was_asked(asked, "size") else replace(run, size=None)
    size, _, why = final.material.sized(open_run, asked)
    if size != run.size:  # it has gone on elsewhere, where another would have been chosen
        return reasons
    why_size, _, rest = why.partition("; ")
    return reasons | {"size": why_size, "model.dropout": rest.partition(", since ")[2]}


def was_asked(asked: Asked, name: str) -> bool:
    """Whether a person said it; what is said of both stacks stands with each."""
    table: object = asked
    for key in name.replace("model.", f"model.{stacks(kind_of(asked))[0]}.").split("."):
        if not isinstance(table, dict) or key not in table:
            return False
        table = table[key]
    return True


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _training(final: Final) -> Training:
    marks, run = final.training.marks, final.run
    assert run.train.precision
    processes = f", {final.session.team.size} processes" if final.session.team.size > 1 else ""
    return Training(
        updates=marks.step,
        epochs=marks.epoch + marks.at / max(1, final.training.batches.steps(marks.epoch)),
        seconds=marks.seconds,
        tokens_per_second=marks.tokens / max(1e-9, marks.seconds),
        hardware=describe(final.session.team.device, run.train.precision, final.training.compiled) + processes,
        ended=ENDED[final.ended.reason],
        attent=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        seed=run.train.seed,
        date=datetime.date.today().isoformat(),
    )
