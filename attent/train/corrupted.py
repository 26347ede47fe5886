"""`--task spans`: spans of each text are taken out, and a model of encoder and decoder writes them (T5, Raffel et al.
2020). Which spans, `attent.data.spans` draws, anew in every epoch; what comes of it is trained further as a translator.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from attent.data.batches import Batches as PairBatches
from attent.data.encoded import Encoded, in_parts
from attent.data.plan import BatchConfig
from attent.data.spans import FEWEST, Corruption
from attent.data.texts import Texts
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.text.tokenizer import Tokenizer
from attent.train import card, shapes
from attent.train.choose import Amount, for_tokenizer
from attent.train.config import Run, Size, TrainError
from attent.train.objective import Objective
from attent.train.prepare import valid_batches
from attent.train.task import Batches, MakeObjective, Outcome, Place
from attent.train.texts import Habits, TextTask, find, learned

SENTINELS = 100
TINY_VOCABULARY, FEW = 2_000, 32  # fewer sentinels where there are fewer subwords
PYTHON = """\
import attent

model = attent.load({folder!r})"""


class Corrupted(TextTask):
    habits = Habits(
        epochs=((0, 60), (5_000_000, 30), (50_000_000, 10), (500_000_000, 3)),
        further_epochs=3,
        fewest=2_000,
        # Measured on an H200: `small` with 2e-3 and 32,768 tokens a batch fell to 3.97 by update 604, then rose to 5.4.
        rates={"tiny": 1e-3, "small": 1e-3, "base": 5e-4, "big": 3e-4},
        further_rates={"tiny": 5e-4, "small": 3e-4, "base": 2e-4, "big": 1e-4},
        dropout=((0, 0.1), (500_000_000, 0.0)),
        batch={"tiny": 16_384, "small": 16_384, "base": 16_384, "big": 16_384},
    )
    kind: type[Any] = Seq2Seq
    objective: MakeObjective = Objective

    def __init__(self, run: Run, tokenizer: Tokenizer | None, place: Place) -> None:
        source = find(run, place, self.form)
        asked = run.data.tokenizer.vocab
        sentinels = FEW if asked is not None and asked < TINY_VOCABULARY else SENTINELS
        super().__init__(run, source, learned(run, source.train, tokenizer, place, sentinels=sentinels), place)
        if not self.vocabulary.sentinels:
            raise TrainError(
                f"{run.start}: its tokenizer has no sentinels such as <extra_id_0>, which --task spans needs; begin "
                "with a model that was trained so, or leave --from out"
            )
        self.texts = self.parts(source.train)
        self.amount = Amount(pairs=len(source.train.texts), tokens=len(self.texts.ids))

    def parts(self, texts: Texts) -> Encoded:
        """Texts as parts of at most `longest` tokens; one of a single token has nothing to be taken out of."""
        cut = in_parts(self.encoded(texts), self.longest)
        kept = cut.where(cut.lengths >= FEWEST)
        if not len(kept.lengths):
            raise TrainError(f"{texts.name}: every text in it is a single token; give longer ones")
        return Encoded.of(kept, self.key)

    def corruption(self, texts: Encoded, seed: int, name: str) -> Corruption:
        vocabulary = self.vocabulary
        return Corruption(texts, vocabulary.sentinels, vocabulary.end, vocabulary.pad, seed, name)

    def fresh(self, size: Size) -> Seq2SeqConfig:
        return for_tokenizer(shapes.spans(size, self.vocabulary.size), self.tokenizer)

    def layers(self, config: Any) -> str:
        return f"{config.encoder.layers}+{config.decoder.layers}"

    def batches(self, run: Run) -> Batches:
        assert run.train.batch_tokens
        assert run.data.layout
        longest = min(self.longest + 1, run.train.batch_tokens)
        config = BatchConfig(tokens=run.train.batch_tokens, longest=longest, layout=run.data.layout, too_long="cut")
        drawn = self.corruption(self.texts, run.train.seed, self.source.train.name)
        return PairBatches(drawn(0), config, seed=run.train.seed, resampled=drawn)

    def batches_of(self, texts: Texts) -> Batches:
        """The same spans every time, so that validations can be compared."""
        return valid_batches(self.corruption(self.parts(texts), 0, texts.name)(0), self.longest + 1)

    def outcome(self, model: Seq2Seq, texts: Texts, part: Any) -> Outcome:
        total, units = self.loss_of(model, self.looked_at(texts))
        loss = total / max(1, units)
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 50.0))}
        told = f"loss {loss:.4f}, perplexity {figures['perplexity']:.2f} ({units:,} tokens)"
        more = (("Perplexity", f"{figures['perplexity']:.2f}"),)
        return Outcome(name=texts.name, part=part, count=len(texts.texts), figures=figures, told=told, more=more)

    def words(self, out: Path) -> card.Words:
        folder = card.quoted(str(out))
        further = f"attent train --from {folder} --data pairs.tsv --out further"
        return card.Words(
            title="A text-to-text model before its task",
            unit=self.unit,
            shell=further,
            python=PYTHON.format(folder=str(out)),
            try_it=f"now teach it a task: {further} (summaries are much shorter than their texts: for them add "
            "--set data.filters.ratio=0)",
            loss="target token",
            note="It has learned to write what was taken out of a text, and no task yet.",
            both_sides=True,
        )
