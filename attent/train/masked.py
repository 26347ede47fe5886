"""`--task mlm`: some words of each text are hidden or exchanged, and an encoder tells what they were (BERT, Devlin et
al. 2019). Which words, `attent.data.rows` draws, anew in every epoch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from attent.data.encoded import Encoded, framed, in_parts
from attent.data.plan import BatchConfig
from attent.data.rows import Masks, Packed, other_words
from attent.data.texts import Texts
from attent.models import Encoder, EncoderConfig
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import Vocabulary
from attent.train import card, shapes
from attent.train.choose import Amount
from attent.train.config import Run, Size, TrainError
from attent.train.events import Sample
from attent.train.objective import MaskedWords, at_places
from attent.train.task import Batches, Judge, Judged, MakeObjective, Outcome, Place
from attent.train.texts import PER_VALIDATION, Habits, TextTask, find, judging, learned, shown

SHOWN = 2  # samples of a validation
PYTHON = """\
import attent

reader = attent.Reader.load({folder!r})"""


class Masked(TextTask):
    habits = Habits(
        epochs=((0, 100), (5_000_000, 40), (50_000_000, 15), (500_000_000, 4)),
        further_epochs=3,
        fewest=2_000,
        rates={"tiny": 1e-3, "small": 5e-4, "base": 2e-4, "big": 1e-4},  # the norm stands last: more would diverge
        further_rates={"tiny": 5e-4, "small": 2e-4, "base": 5e-5, "big": 3e-5},
        dropout=((0, 0.1),),
        batch={"tiny": 16_384, "small": 16_384, "base": 32_768, "big": 32_768},
    )
    metrics = ("loss", "accuracy")
    kind: type[Any] = Encoder
    objective: MakeObjective = MaskedWords

    def __init__(self, run: Run, tokenizer: Tokenizer | None, place: Place) -> None:
        source = find(run, place, self.form)
        super().__init__(run, source, learned(run, source.train, tokenizer, place, mask=True), place)
        self.masks = masks_of(self.vocabulary, run.start or "the tokenizer")
        self.texts = self.framed(source.train)
        self.amount = Amount(pairs=len(source.train.texts), tokens=len(self.texts.ids))

    def framed(self, texts: Texts) -> Encoded:
        before, after = self.vocabulary.before, self.vocabulary.after
        room = self.longest - len(before) - len(after)
        if room < 1:
            raise TrainError(f"`data.longest` must be {self.longest - room + 1} or more, but is {self.longest}")
        return Encoded.of(framed(in_parts(self.encoded(texts), room), before, after), self.key)

    def fresh(self, size: Size) -> EncoderConfig:
        return replace(shapes.encoder(size, self.vocabulary.size, self.longest), masked=True)

    def further(self, model: Encoder) -> EncoderConfig:
        """Heads for whole texts would learn nothing here."""
        return replace(model.config, masked=True, pooler=False, labels=())

    def batches(self, run: Run) -> Batches:
        assert run.train.batch_tokens
        assert run.data.layout
        longest = min(self.longest, run.train.batch_tokens)
        config = BatchConfig(tokens=run.train.batch_tokens, longest=longest, layout=run.data.layout, too_long="cut")
        return Packed(self.texts, config, self.masks, pad=self.vocabulary.pad, seed=run.train.seed)

    def batches_of(self, texts: Texts) -> Batches:
        """The same words are hidden every time, so that validations can be compared."""
        tokens = max(PER_VALIDATION, self.longest)
        config = BatchConfig(tokens=tokens, longest=self.longest, layout="bucketed", too_long="cut")
        return Packed(self.framed(texts), config, self.masks, pad=self.vocabulary.pad, fixed=True)

    def judge(self, run: Run) -> Judge | None:
        valid = self.source.valid
        if valid is None:
            return None
        batches = self.looked_at(valid)

        def judge(model: Encoder) -> Judged:
            share, samples = self.judged(model, batches)
            return Judged(figures={"accuracy": share}, samples=samples)

        return judge

    def judged(self, model: Encoder, batches: Batches) -> tuple[float, tuple[Sample, ...]]:
        """Per cent of the hidden words that are told right, and how that looks."""
        right, units = 0, 0
        samples: list[Sample] = []
        with judging(model):
            for batch in self.each(batches):
                text = batch.text
                states = model(text.ids, text.lengths, packing=text.packing)
                guesses = model.masked_logits(at_places(states, batch)).argmax(-1)
                right += int((guesses == batch.wanted).sum())
                units += batch.units
                if len(samples) < SHOWN:
                    samples.append(self.sample(batch, guesses))
        return 100 * right / max(1, units), tuple(samples)

    def sample(self, batch: Any, guesses: Any) -> Sample:
        """The first row of a batch."""
        told = batch.wanted[0] >= 0
        length = int(batch.text.lengths[0])
        places = batch.places[0][told].tolist()
        order = sorted(range(len(places)), key=places.__getitem__)
        wanted, guessed = (side[0][told].tolist() for side in (batch.wanted, guesses))
        ids = batch.text.ids[0, len(self.vocabulary.before) : length - len(self.vocabulary.after)].tolist()
        return Sample(
            source=shown(self.vocabulary, ids),
            reference=" ".join(shown(self.vocabulary, [wanted[i]]) for i in order),
            output=" ".join(shown(self.vocabulary, [guessed[i]]) for i in order),
        )

    def outcome(self, model: Encoder, texts: Texts, part: Any) -> Outcome:
        batches = self.looked_at(texts)
        total, units = self.loss_of(model, batches)
        share, samples = self.judged(model, batches)
        loss = total / max(1, units)
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 50.0)), "accuracy": share}
        told = f"loss {loss:.4f}, perplexity {figures['perplexity']:.2f}, {share:.1f}% of {units:,} hidden words told"
        return Outcome(
            name=texts.name,
            part=part,
            count=len(texts.texts),
            figures=figures,
            told=told,
            more=(("Accuracy", f"{share:.1f}%"), ("Perplexity", f"{figures['perplexity']:.2f}")),
            samples=samples,
        )

    def words(self, out: Path) -> card.Words:
        folder = card.quoted(str(out))
        mask = self.vocabulary.pieces([self.masks.mask])[0]
        return card.Words(
            title="A masked language model",
            unit=self.unit,
            shell=f'attent fill {folder} "The {mask} is here."\n'
            f"attent train --task classify --from {folder} --data labels.tsv --out labels",
            python=PYTHON.format(folder=str(out)),
            try_it=f'try it: attent fill {folder} "The {mask} is here."',
            loss="hidden word",
            note="Accuracy is the share of hidden words that are told right at the first guess.",
            samples="Hidden words",
            parts=("Text", "Were", "It says"),
            both_sides=False,
        )


def masks_of(vocabulary: Vocabulary, where: str) -> Masks:
    if vocabulary.mask is None:
        raise TrainError(
            f"{where}: its tokenizer has no mask such as [MASK], which --task mlm needs; begin with a model that was "
            "trained so, or leave --from out"
        )
    specials = [vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unknown, vocabulary.mask]
    specials += [*vocabulary.before, *vocabulary.after, *vocabulary.sentinels, *map(vocabulary.tag, vocabulary.tags)]
    others = other_words(vocabulary.size, specials)
    return Masks(vocabulary.mask, others, len(vocabulary.before), len(vocabulary.after))
