"""The facts of a finished run, gathered for its card."""

from __future__ import annotations

import datetime
import hashlib
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attent import __version__
from attent.data.corpus import Corpus
from attent.score.metrics import Scores
from attent.train import choose
from attent.train.card import Card, Data, Model, Origin, Score, Setting, Training
from attent.train.config import Asked
from attent.train.hardware import describe
from attent.train.prepare import Prepared, Texts

if TYPE_CHECKING:
    from attent.cli.training import Final

Scored = Sequence[tuple[Texts, str, Scores, list[str]]]
ENDED = {
    "steps": "all updates were done",
    "patience": "the validations got no better",
    "stopped": "stopped by hand",
}
SETTINGS = (
    "optimiser", "lr", "schedule", "warmup", "batch_tokens", "accumulate", "label_smoothing", "rdrop", "ema",
    "clip_norm", "weight_decay", "precision", "average", "freeze", "lora",
)  # fmt: skip


def card_of(final: Final, scored: Scored) -> Card:
    from attent.cli.training import samples_of

    run, prepared = final.run, final.prepared
    languages = prepared.found.languages
    return Card(
        folder=str(final.session.out),
        source=languages.source or "",
        target=languages.target or "",
        data=_data(prepared),
        model=_model(final),
        recipe=tuple(_recipe(final)),
        scores=tuple(
            Score(
                name=texts.name,
                pairs=len(outputs),
                weights=final.weights,
                decoding=f"beam {run.decode.beam_size}, length penalty {run.decode.length_penalty:g}",
                bleu=result.bleu,
                chrf=result.chrf,
                exact=result.exact,
                signatures=(result.bleu_signature, result.chrf_signature),
            )
            for texts, _, result, outputs in scored
        ),
        training=_training(final),
        samples=samples_of(scored[-1][0], scored[-1][3], 5) if scored else (),
        curves="curves.svg",
        to=_to(prepared),
    )


def _to(prepared: Prepared) -> str | None:
    """An example for --to; "" where the tokenizer has tags that this model has not been trained with."""
    tags = prepared.tokenizer.source.tags
    return None if not tags else tags[0] if prepared.found.tags else ""


def _data(prepared: Prepared) -> Data:
    store, found = prepared.store, prepared.found
    origins = []
    for corpus, part in zip(found.train, store.meta.parts, strict=True):
        dropped = tuple(part.dropped.items())
        read = part.pairs + sum(count for _, count in dropped)
        origins.append(
            Origin(
                name=part.name, read=read, used=part.pairs, dropped=dropped, files=_files(corpus), weight=corpus.weight
            )
        )
    how = "" if prepared.valid is None else ", ".join(file for corpus in found.valid for file in corpus.files)
    if found.held_out:
        how = (
            "chosen from the corpus by a hash of the source; no pair that shares a side with one of them was trained on"
        )
    return Data(
        origins=tuple(origins),
        source_tokens=store.meta.tokens["source"],
        target_tokens=store.meta.tokens["target"],
        key=store.folder.name,
        held_out=0 if prepared.valid is None else len(prepared.valid),
        held_out_how=how,
    )


def _files(corpus: Corpus) -> tuple[tuple[str, str], ...]:
    """With checksums; one that has gone since it was read has none, and a model that is done does not fail by it."""
    try:
        stamps = corpus.fingerprint()
        return tuple((name, sha256(Path(path))) for name, (path, *_) in zip(corpus.files, stamps, strict=True))
    except OSError:
        return tuple((name, "") for name in corpus.files)


def sha256(path: Path) -> str:
    """Of the whole file, so that anybody can compare it with their own by `sha256sum`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _model(final: Final) -> Model:
    config, training, tokenizer = final.training.model.config, final.training, final.prepared.tokenizer
    kind = final.run.data.tokenizer.kind if not final.run.start else "that of the model before"
    return Model(
        size=final.run.size or "",
        encoder_layers=config.encoder.layers,
        decoder_layers=config.decoder.layers,
        width=config.encoder.width,
        heads=config.encoder.heads,
        inner=config.encoder.inner,
        parameters=sum(parameter.numel() for parameter in training.named.values()),
        trained=sum(parameter.numel() for parameter in training.learning.values()),
        vocabulary=config.vocab,
        tokenizer=f"{kind}, {'one for both languages' if tokenizer.joint else 'one for each language'}",
        tokenizer_sha256=tokenizer.fingerprint,
        started_from=final.run.start or "",
        pruned=config.encoder.removed + config.decoder.removed,
    )


def _recipe(final: Final) -> list[Setting]:
    run, asked = final.run, final.session.asked
    assert run.model is not None
    values: dict[str, str] = {} if run.size is None else {"size": run.size}
    values |= {f"train.{name}": _shown(getattr(run.train, name)) for name in SETTINGS}
    values["model.dropout"] = _shown(run.model.encoder.dropout)
    values["model.norm_order"] = run.model.encoder.norm_order
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
    run, asked, prepared = final.run, final.session.asked, final.prepared
    open_run = run if was_asked(asked, "size") else replace(run, size=None)
    kind = final.session.team.device.type
    size, _, why = choose.sized(open_run, asked, prepared.amount, prepared.tokenizer, kind)
    if size != run.size:  # it has gone on elsewhere, where another would have been chosen
        return reasons
    why_size, _, rest = why.partition("; ")
    return reasons | {"size": why_size, "model.dropout": rest.partition(", since ")[2]}


def was_asked(asked: Asked, name: str) -> bool:
    """Whether a person said it; what is said of both stacks stands with each."""
    table: object = asked
    for key in name.replace("model.", "model.encoder.").split("."):
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
