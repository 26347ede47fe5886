"""Translation as a task of `attent train`: pairs of texts, a model of encoder and decoder, judged by what it writes.

It stands here and not in `attent.train`, since it needs the search and the scores beside the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attent.data.corpus import Corpus
from attent.decode.align import AlignmentError, agreed, remember
from attent.decode.translate import Stopped, translate
from attent.look import properties
from attent.models import Seq2Seq, Seq2SeqConfig, build, build_empty
from attent.models.store import fill
from attent.score.metrics import scores
from attent.text.tokenizer import Tokenizer
from attent.train import card, choose
from attent.train import prepare as pairs
from attent.train.config import Asked, Run, Size, TrainConfig
from attent.train.events import Sample
from attent.train.loop import Stopping
from attent.train.objective import Objective
from attent.train.prepare import Prepared, Texts, texts_of
from attent.train.task import Batches, Judge, Judged, MakeObjective, Outcome, Place

SAMPLES, ON_CARD = 3, 5


def prepare(run: Run, tokenizer: Tokenizer | None, place: Place) -> Translation:
    found = pairs.find(run.data, place.folder, run.train.seed, place.tell)
    return Translation(pairs.tokens(found, tokenizer, run.data, place.folder, run.train.seed, place.tell), place)


@dataclass(frozen=True)
class Translation:
    """See `attent.train.task.Material`."""

    prepared: Prepared
    place: Place
    kind: type[Any] = Seq2Seq
    objective: MakeObjective = Objective

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prepared.tokenizer

    @property
    def title(self) -> str:
        languages = self.prepared.found.languages
        return "-".join(filter(None, (languages.source, languages.target)))

    @property
    def identity(self) -> Mapping[str, str]:
        return {"data": self.prepared.store.folder.name, "tokenizer": self.tokenizer.fingerprint}

    # ---- the model and the recipe ------------------------------------------------------------------------------------

    def sized(self, run: Run, asked: Asked) -> tuple[Size, Seq2SeqConfig, str]:
        return choose.sized(run, asked, self.prepared.amount, self.tokenizer, self.place.device.type)

    def kept(self, model: Seq2Seq, asked: Asked, where: str) -> Seq2SeqConfig:
        return choose.kept(model.config, asked, (self.tokenizer.source.size, self.tokenizer.target.size), where)

    def begin(self, config: Seq2SeqConfig, loaded: Seq2Seq | None) -> Seq2Seq:
        return build(config) if loaded is None else fill(build_empty(config), loaded.state_dict(), "--from").train()

    def recipe(self, run: Run, size: Size | None, config: Seq2SeqConfig, *, further: bool) -> TrainConfig:
        return choose.recipe(run.train, size, config, self.prepared.amount, self.place.device, further=further)

    def told(self, run: Run, why: str) -> Iterator[str]:
        return choose.told(run, why, self.prepared.amount, self.place.device)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def batches(self, run: Run) -> Batches:
        return pairs.batches_of(self.prepared, run.data, run.train)

    def valid(self, run: Run) -> Batches | None:
        return None if self.prepared.valid is None else pairs.valid_batches(self.prepared.valid, run.data.longest)

    # ---- judging -----------------------------------------------------------------------------------------------------

    def judge(self, run: Run) -> Judge | None:
        """How the model is judged on the way: a part of the validation set, translated word by likeliest word."""
        found = self.prepared.found
        if self.prepared.valid is None or not run.train.valid_sentences:
            return None
        texts = texts_of(found.valid, found.tags, run.train.valid_sentences)

        def judge(model: Seq2Seq) -> Judged:
            outputs = self.translated(model, texts, beam_size=1, length_penalty=0.0)
            found = scores(outputs, texts.references, texts.language)
            figures = {"bleu": found.bleu, "chrf": found.chrf, "exact": found.exact}
            return Judged(figures=figures, samples=samples_of(texts, outputs))

        return judge

    def translated(self, model: Seq2Seq, texts: Texts, *, beam_size: int, length_penalty: float) -> list[str]:
        outputs = [""] * len(texts.sources)
        for to in dict.fromkeys(texts.to):
            places = [i for i, other in enumerate(texts.to) if other == to]
            try:
                written = translate(
                    model,
                    self.tokenizer,
                    [texts.sources[i] for i in places],
                    to=to,
                    beam_size=beam_size,
                    length_penalty=length_penalty,
                    stop=self.place.stop,
                )
            except Stopped as stopped:
                raise Stopping from stopped
            for i, text in zip(places, written, strict=True):
                outputs[i] = text
        return outputs

    def outcomes(self, model: Seq2Seq, run: Run) -> Iterator[Outcome]:
        """Every set of sentences, translated and scored."""
        found, decode = self.prepared.found, run.decode
        sets = [(texts_of(found.valid, found.tags), "validation")] if found.valid else []
        sets += [(texts_of([corpus], found.tags), "test") for corpus in found.tests]
        for texts, part in sets:
            outputs = self.translated(model, texts, beam_size=decode.beam_size, length_penalty=decode.length_penalty)
            result = scores(outputs, texts.references, texts.language)
            figures = f"BLEU {result.bleu:.2f}, chrF {result.chrf:.2f}, exact {result.exact:.1f}%"
            yield Outcome(
                name=texts.name,
                part="validation" if part == "validation" else "test",
                count=len(outputs),
                figures=asdict(result),
                told=f"{figures} ({len(outputs):,} sentences, beam {decode.beam_size})",
                how=f"beam {decode.beam_size}, length penalty {decode.length_penalty:g}",
                signatures=(result.bleu_signature, result.chrf_signature),
                samples=samples_of(texts, outputs, ON_CARD),
            )

    def after(self, model: Seq2Seq, out: Path) -> None:
        """Which heads tell best which word comes from which, by the validation pairs: for `translate --alignment`; and
        what each head does: for `look`."""
        found = self.prepared.found
        if not found.valid:
            return
        texts = texts_of(found.valid, found.tags)
        places = [place for place, to in enumerate(texts.to) if to == texts.to[0]]
        sources, references = ([side[place] for place in places] for side in (texts.sources, texts.references))
        with suppress(AlignmentError):  # pairs without words have nothing to tell
            measured = agreed(model, self.tokenizer, sources, references, to=texts.to[0])
            remember(out, measured)
        habits = properties.measure(
            model, self.tokenizer, sources, references, to=texts.to[0], of="the validation pairs"
        )
        properties.remember(out, habits)

    # ---- the card ----------------------------------------------------------------------------------------------------

    def data(self) -> card.Data:
        prepared = self.prepared
        store, found = prepared.store, prepared.found
        origins = []
        for corpus, part in zip(found.train, store.meta.parts, strict=True):
            dropped = tuple(part.dropped.items())
            read = part.pairs + sum(count for _, count in dropped)
            origins.append(
                card.Origin(
                    name=part.name,
                    read=read,
                    used=part.pairs,
                    dropped=dropped,
                    files=_files(corpus),
                    weight=corpus.weight,
                )
            )
        how = "" if prepared.valid is None else ", ".join(file for corpus in found.valid for file in corpus.files)
        if found.held_out:
            how = "chosen from the corpus by a hash of the source; no pair that shares a side with one of them was "
            how += "trained on"
        return card.Data(
            origins=tuple(origins),
            source_tokens=store.meta.tokens["source"],
            target_tokens=store.meta.tokens["target"],
            key=store.folder.name,
            held_out=0 if prepared.valid is None else len(prepared.valid),
            held_out_how=how,
        )

    def words(self, out: Path) -> card.Words:
        found = self.prepared.found
        tags = self.tokenizer.source.tags
        # An example for --to; "" where the tokenizer has tags that this model has not been trained with.
        to = None if not tags else tags[0] if found.tags else ""
        languages = found.languages
        words = card.translator(str(out), languages.source or "", languages.target or "", to)
        flag = f" --to {found.train[0].languages.target}" if found.tags else ""
        return replace(words, try_it=f"try it: attent translate {out}{flag}")


def _files(corpus: Corpus) -> tuple[tuple[str, str], ...]:
    """With checksums; one that has gone since it was read has none, and a model that is done does not fail by it."""
    try:
        return card.with_checksums(corpus.files, [Path(path) for path, *_ in corpus.fingerprint()])
    except OSError:
        return tuple((name, "") for name in corpus.files)


def samples_of(texts: Texts, outputs: Sequence[str], most: int = SAMPLES) -> tuple[Sample, ...]:
    count = min(most, len(outputs))
    places = [len(outputs) * i // count for i in range(count)]
    return tuple(Sample(source=texts.sources[i], reference=texts.references[i], output=outputs[i]) for i in places)
