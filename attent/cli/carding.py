"""The facts of a finished run, gathered for its card."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attent import __version__
from attent.data.digests import file_digest
from attent.score.metrics import Scores
from attent.train.card import Card, Data, Model, Origin, Score, Setting, Training
from attent.train.config import Run
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
        recipe=tuple(_recipe(run)),
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
    )


def _data(prepared: Prepared) -> Data:
    store, found = prepared.store, prepared.found
    origins = []
    for corpus, part in zip(found.train, store.meta.parts, strict=True):
        stamps = zip(corpus.files, corpus.fingerprint(), strict=True)
        files = tuple((name, file_digest(Path(path), prepared.folder / "digests.json")) for name, (path, *_) in stamps)
        dropped = tuple(part.dropped.items())
        read = part.pairs + sum(count for _, count in dropped)
        origins.append(
            Origin(name=part.name, read=read, used=part.pairs, dropped=dropped, files=files, weight=corpus.weight)
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
    )


def _recipe(run: Run) -> list[Setting]:
    assert run.model is not None
    found = [Setting(name=f"train.{name}", value=_shown(getattr(run.train, name))) for name in SETTINGS]
    found.append(Setting(name="model.dropout", value=_shown(run.model.encoder.dropout)))
    found.append(Setting(name="model.norm_order", value=run.model.encoder.norm_order))
    found.append(Setting(name="data.sampling", value=_shown(run.data.sampling)))
    return found


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
