"""`--task classify`: what is to be said of a whole text, one of a few labels; from nothing, or from an encoder that has
learned its language by masked words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attent.data.encoded import Encoded, cut_short, framed
from attent.data.labels import in_order
from attent.data.plan import BatchConfig
from attent.data.rows import Labels, Packed
from attent.data.texts import Texts
from attent.models import Encoder, EncoderConfig
from attent.text.tokenizer import Tokenizer
from attent.train import card, shapes
from attent.train.choose import Amount
from attent.train.config import Run, Size, TrainError
from attent.train.events import Note, Sample
from attent.train.objective import TextLabels
from attent.train.task import Batches, Judge, Judged, MakeObjective, Outcome, Place
from attent.train.texts import PER_VALIDATION, Habits, Source, TextTask, find, judging, learned

SHOWN, ON_CARD, LISTED = 3, 5, 12
PYTHON = """\
import attent

reader = attent.Reader.load({folder!r})
print(reader.classify(["..."])[0].label)"""


class Labelled(TextTask):
    habits = Habits(
        sizes=((0, "tiny"), (1_000_000, "small"), (1_000_000_000, "base")),
        epochs=((0, 15), (1_000_000, 10), (50_000_000, 4)),
        further_epochs=4,
        fewest=300,
        rates={"tiny": 5e-4, "small": 3e-4, "base": 1e-4, "big": 5e-5},
        further_rates={"tiny": 3e-4, "small": 1e-4, "base": 3e-5, "big": 2e-5},
        dropout=((0, 0.3), (1_000_000, 0.2), (100_000_000, 0.1)),
        batch={"tiny": 4_096, "small": 4_096, "base": 4_096, "big": 4_096},
    )
    metrics = ("accuracy", "loss")
    kind: type[Any] = Encoder
    objective: MakeObjective = TextLabels

    def __init__(self, run: Run, tokenizer: Tokenizer | None, place: Place) -> None:
        source = find(run, place, self.form, with_labels=True)
        labels = in_order(source.train.labels)
        check_labels(labels, source, run)
        source = replace(source, tests=tuple(known_only(source.tests, labels, run, place)))
        super().__init__(run, source, learned(run, source.train, tokenizer, place), place)
        self.labels = labels
        counts = Counter(source.train.labels)
        told = ", ".join(f"{label} ({counts[label]:,})" for label in self.labels[:LISTED])
        place.tell(Note(text=f"labels: {told}{', ...' if len(self.labels) > LISTED else ''}"))
        self.texts = self.framed(source.train)
        self.amount = Amount(pairs=len(source.train.texts), tokens=len(self.texts.ids))

    def framed(self, texts: Texts) -> Encoded:
        before, after = self.vocabulary.before, self.vocabulary.after
        room = self.longest - len(before) - len(after)
        if room < 1:
            raise TrainError(f"`data.longest` must be {self.longest - room + 1} or more, but is {self.longest}")
        found = self.encoded(texts)
        if long := int((found.lengths > room).sum()):
            told = f"{long:,} of {len(texts.texts):,} texts of {texts.name} have more than {room} tokens and are cut"
            self.place.tell(Note(text=f"{told}; a larger `longest` keeps more", weight="warning"))
        return Encoded.of(framed(cut_short(found, room), before, after), self.key)

    def asked_of(self, texts: Texts) -> Labels:
        number = {label: i for i, label in enumerate(self.labels)}
        return Labels(np.array([number[label] for label in texts.labels], np.int64))

    def fresh(self, size: Size) -> EncoderConfig:
        config = shapes.encoder(size, self.vocabulary.size, self.longest)
        return replace(config, pooler=True, labels=self.labels)

    def further(self, model: Encoder) -> EncoderConfig:
        return replace(model.config, masked=False, pooler=True, labels=self.labels)

    def batches(self, run: Run) -> Batches:
        assert run.train.batch_tokens
        assert run.data.layout
        longest = min(self.longest, run.train.batch_tokens)
        config = BatchConfig(tokens=run.train.batch_tokens, longest=longest, layout=run.data.layout, too_long="cut")
        asked = self.asked_of(self.source.train)
        return Packed(self.texts, config, asked, pad=self.vocabulary.pad, seed=run.train.seed)

    def batches_of(self, texts: Texts) -> Batches:
        tokens = max(PER_VALIDATION, self.longest)
        config = BatchConfig(tokens=tokens, longest=self.longest, layout="bucketed", too_long="cut")
        return Packed(self.framed(texts), config, self.asked_of(texts), pad=self.vocabulary.pad, fixed=True)

    def judge(self, run: Run) -> Judge | None:
        valid = self.source.valid
        if valid is None:
            return None
        batches = self.looked_at(valid)

        def judge(model: Encoder) -> Judged:
            found = self.said(model, valid, batches)
            return Judged(figures={"accuracy": accuracy(found, valid)}, samples=samples_of(found, valid, SHOWN))

        return judge

    def said(self, model: Encoder, texts: Texts, batches: Batches) -> list[str]:
        """The label that the model gives each text."""
        found = [""] * len(texts.texts)
        with judging(model):
            for batch in self.each(batches):
                states = model(batch.text.ids, batch.text.lengths, packing=batch.text.packing)
                for number, label in zip(batch.pairs, model.classify(states).argmax(-1).tolist(), strict=True):
                    found[int(number)] = self.labels[label]
        return found

    def outcome(self, model: Encoder, texts: Texts, part: Any) -> Outcome:
        batches = self.looked_at(texts)
        total, units = self.loss_of(model, batches)
        found = self.said(model, texts, batches)
        share = accuracy(found, texts)
        low, high = interval(share / 100, len(found))
        figures = {"loss": total / max(1, units), "accuracy": share, "low": 100 * low, "high": 100 * high}
        between = f"{100 * low:.1f} to {100 * high:.1f}"
        return Outcome(
            name=texts.name,
            part=part,
            count=len(found),
            figures=figures,
            told=f"accuracy {share:.2f}% ({between} with 95% confidence, {len(found):,} texts)",
            more=(("Accuracy", f"{share:.1f}%"), ("95% interval", between)),
            samples=samples_of(found, texts, ON_CARD),
        )

    def words(self, out: Path) -> card.Words:
        folder = card.quoted(str(out))
        return card.Words(
            title="A classifier of texts",
            unit=self.unit,
            shell=f"attent classify {folder} < texts.txt",
            python=PYTHON.format(folder=str(out)),
            try_it=f'try it: attent classify {folder} "a text"',
            loss="text",
            note=f"It tells {listed(self.labels)}.",
            samples="Samples",
            parts=("Text", "Label", "It says"),
            both_sides=False,
        )


def check_labels(known: tuple[str, ...], source: Source, run: Run) -> None:
    if len(known) < 2:
        raise TrainError(f"{source.train.name}: there must be 2 labels or more to tell apart, but all are {known[0]!r}")
    if isinstance(run.model, EncoderConfig) and run.model.labels != known:
        raise TrainError(
            f"{source.train.name}: its labels must be those that this run began with, {listed(run.model.labels)}, but "
            f"are {listed(known)}; give the data of then, or another --out for a new run"
        )
    if source.valid is not None and (strange := strangers(source.valid, known)):
        raise TrainError(strange)


def known_only(tests: Iterable[Texts], known: tuple[str, ...], run: Run, place: Place) -> Iterator[Texts]:
    """Those that can be scored; one that was asked for must be."""
    for texts in tests:
        strange = strangers(texts, known)
        if strange and run.data.test:
            raise TrainError(strange)
        if strange:
            place.tell(Note(text=f"{strange}; it lies beside the data, and is not scored", weight="warning"))
        else:
            yield texts


def strangers(texts: Texts, known: tuple[str, ...]) -> str | None:
    strange = sorted(set(texts.labels) - set(known))
    if not strange:
        return None
    told = f"{texts.name}: has the label {strange[0]!r}, which none of the texts to train on has"
    return f"{told}; they have {listed(known)}"


def listed(labels: tuple[str, ...]) -> str:
    return f"{', '.join(labels[:LISTED])}{' and others' * (len(labels) > LISTED)}"


def accuracy(found: list[str], texts: Texts) -> float:
    right = sum(one == other for one, other in zip(found, texts.labels, strict=True))
    return 100 * right / max(1, len(found))


def samples_of(found: list[str], texts: Texts, most: int) -> tuple[Sample, ...]:
    count = min(most, len(found))
    places = [len(found) * i // count for i in range(count)]
    return tuple(Sample(source=texts.texts[i], reference=texts.labels[i], output=found[i]) for i in places)


def interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share: where the true one lies, 95 times of 100."""
    if not count:
        return 0.0, 1.0
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - reach), min(1.0, middle + reach)
