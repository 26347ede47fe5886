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
from attent.training.config import UserSettings, get_run_class, get_stack_names
from attent.training.hardware import describe_device
from attent.training.model_card import CardScore, CardSetting, ModelCard, ModelSummary, TrainingSummary
from attent.training.tasks.base import FinalScores

if TYPE_CHECKING:
    from attent.training.run import Finalizer

END_REASONS = {
    "steps": "all updates were done",
    "patience": "the validations got no better",
    "stopped": "stopped by hand",
}
LISTED_SETTINGS = (
    "optimizer", "lr", "schedule", "warmup", "batch_tokens", "accumulate", "label_smoothing", "rdrop", "ema",
    "clip_norm", "weight_decay", "precision", "average", "freeze", "lora",
)  # fmt: skip


def build_card(final: Finalizer, scores: Sequence[FinalScores]) -> ModelCard:
    return ModelCard(
        folder=str(final.session.out),
        source_language="",
        target_language="",
        data=final.task.describe_data(),
        model=_summarize_model(final),
        settings=tuple(_list_settings(final)),
        scores=tuple(_build_score(final, outcome) for outcome in scores),
        training=_summarize_training(final),
        samples=scores[-1].samples if scores else (),
        curves_file="curves.svg",
        description=final.task.describe_model(final.session.out),
    )


def _build_score(final: Finalizer, scores: FinalScores) -> CardScore:
    figures = scores.metrics
    return CardScore(
        name=scores.name,
        num_examples=scores.num_examples,
        weights=final.weights,
        decoding=scores.decoding,
        loss=figures.get("loss"),
        bleu=figures.get("bleu"),
        chrf=figures.get("chrf"),
        exact=figures.get("exact"),
        signatures=scores.signatures,
        extra_columns=scores.extra_columns,
    )


def get_stacks(config: ModelConfig) -> tuple[StackConfig | None, StackConfig | None]:
    """Encoder and decoder, of which some models have one only."""
    if isinstance(config, Seq2SeqConfig):
        return config.encoder, config.decoder
    return (None, config.stack) if isinstance(config, CausalConfig) else (config.stack, None)


def _summarize_model(final: Finalizer) -> ModelSummary:
    config, training, tokenizer = final.trainer.model.config, final.trainer, final.task.tokenizer
    kind = final.run.data.tokenizer.kind if not final.run.init_from else "that of the model before"
    sides = ", one for both languages" if tokenizer and tokenizer.joint else ", one for each language"
    encoder, decoder = get_stacks(config)
    stack = encoder or decoder
    assert stack is not None
    return ModelSummary(
        size=final.run.size or "",
        encoder_layers=encoder.layers if encoder else 0,
        decoder_layers=decoder.layers if decoder else 0,
        width=stack.width,
        heads=stack.heads,
        ffn_width=stack.ffn_width,
        parameters=sum(parameter.numel() for parameter in training.parameters.values()),
        trainable_parameters=sum(parameter.numel() for parameter in training.trainable_parameters.values()),
        vocab_size=getattr(config, "vocab", 0),
        tokenizer=kind + (sides if final.run.task == "translate" else "") if tokenizer else "",
        tokenizer_sha256=tokenizer.fingerprint if tokenizer else "",
        base_model=final.run.init_from or "",
        pruned_heads=sum(one.num_removed_heads for one in (encoder, decoder) if one),
    )


def _list_settings(final: Finalizer) -> list[CardSetting]:
    run, asked = final.run, final.session.requested
    assert run.model is not None
    values: dict[str, str] = {} if run.size is None else {"size": run.size}
    values |= {f"train.{name}": _format_value(getattr(run.train, name)) for name in LISTED_SETTINGS}
    stack = next(stack for stack in get_stacks(run.model) if stack)
    values["model.dropout"] = _format_value(stack.dropout)
    values["model.norm_order"] = stack.norm_order
    if run.task == "translate":
        values["data.subword_sampling"] = _format_value(run.data.subword_sampling)
    why = _explain_settings(final)
    return [
        CardSetting(name=name, value=value, reason="as asked for" if is_requested(asked, name) else why.get(name, ""))
        for name, value in values.items()
    ]


def _explain_settings(final: Finalizer) -> dict[str, str]:
    """Why the settings that nobody named are as they are; those with one default for everybody need no reason."""
    reasons = {"train.precision": "by its speed here, measured when the run began"}
    if final.run.init_from:
        return reasons | {"train.lr": "a model that is trained further learns gently"}
    run, asked = final.run, final.session.requested
    open_run = run if is_requested(asked, "size") else replace(run, size=None)
    size, _, why = final.task.choose_model(open_run, asked)
    if size != run.size:  # it has gone on elsewhere, where another would have been chosen
        return reasons
    why_size, _, rest = why.partition("; ")
    return reasons | {"size": why_size, "model.dropout": rest.partition(", since ")[2]}


def is_requested(requested: UserSettings, name: str) -> bool:
    """Whether a person said it; what is said of both stacks stands with each."""
    table: object = requested
    for key in name.replace("model.", f"model.{get_stack_names(get_run_class(requested))[0]}.").split("."):
        if not isinstance(table, dict) or key not in table:
            return False
        table = table[key]
    return True


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _summarize_training(final: Finalizer) -> TrainingSummary:
    marks, run = final.trainer.state, final.run
    assert run.train.precision
    processes = (
        f", {final.session.distributed.world_size} processes" if final.session.distributed.world_size > 1 else ""
    )
    return TrainingSummary(
        steps=marks.step,
        epochs=marks.epoch + marks.batch_index / max(1, final.trainer.train_batches.num_steps(marks.epoch)),
        seconds=marks.seconds,
        tokens_per_second=marks.tokens / max(1e-9, marks.seconds),
        hardware=describe_device(final.session.distributed.device, run.train.precision, final.trainer.compiled)
        + processes,
        end_reason=END_REASONS[final.ended.reason],
        attent_version=__version__,
        torch_version=str(torch.__version__),
        python_version=platform.python_version(),
        seed=run.train.seed,
        date=datetime.date.today().isoformat(),
    )
