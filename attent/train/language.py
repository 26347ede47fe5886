"""`--task lm`: a text goes on from what it has. Running text or documents, a decoder alone, the loss per token.

Windows of text are `attent.data.rows`' business; the text that a validation shows is written word by likeliest word.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from attent.data.encoded import Encoded, framed
from attent.data.rows import Windows
from attent.data.texts import Form, Texts
from attent.models import CausalConfig, CausalLM
from attent.text.tokenizer import Tokenizer
from attent.train import card, shapes
from attent.train.choose import Amount
from attent.train.config import Run, Size
from attent.train.events import Sample
from attent.train.objective import NextWords
from attent.train.task import Batches, Judge, Judged, MakeObjective, Outcome, Place
from attent.train.texts import PER_VALIDATION, Habits, TextTask, find, judging, learned, reach_of

PROMPT, WRITTEN = 24, 64  # tokens of the sample that a validation shows
PYTHON = """\
import attent

generator = attent.Generator.load({folder!r})
print(generator.generate(["Once"])[0][0].text)"""


class Language(TextTask):
    form: ClassVar[Form] = "documents"
    unit: ClassVar[str] = "document"
    habits = Habits(
        epochs=((0, 60), (5_000_000, 20), (50_000_000, 6), (500_000_000, 2)),
        further_epochs=3,
        fewest=2_000,
        rates={"tiny": 2e-3, "small": 1e-3, "base": 6e-4, "big": 3e-4},
        further_rates={"tiny": 3e-4, "small": 2e-4, "base": 1e-4, "big": 5e-5},
        dropout=((0, 0.2), (20_000_000, 0.1), (500_000_000, 0.0)),
        batch={"tiny": 16_384, "small": 16_384, "base": 32_768, "big": 32_768},
        warmup=0.05,
    )
    kind: type[Any] = CausalLM
    objective: MakeObjective = NextWords

    def __init__(self, run: Run, tokenizer: Tokenizer | None, place: Place) -> None:
        source = find(run, place, self.form)
        super().__init__(run, source, learned(run, source.train, tokenizer, place), place)
        self.documents = self.stream(source.train)
        self.amount = Amount(pairs=len(self.documents), tokens=len(self.documents.ids))

    def stream(self, texts: Texts) -> Encoded:
        """Documents end to end. One that is trained on ends, whatever stands behind a prompt."""
        around = framed(self.encoded(texts), self.vocabulary.before, (self.vocabulary.end,))
        return Encoded.of(around, self.key)

    def fresh(self, size: Size) -> CausalConfig:
        start = self.vocabulary.start if self.vocabulary.before else None
        return replace(shapes.causal(size, self.vocabulary.size), start=start, ends=(self.vocabulary.end,))

    def batches(self, run: Run) -> Batches:
        assert run.train.batch_tokens
        longest = min(self.longest, run.train.batch_tokens)
        return Windows(
            self.documents,
            tokens=run.train.batch_tokens,
            longest=longest,
            pad=self.vocabulary.pad,
            seed=run.train.seed,
        )

    def batches_of(self, texts: Texts) -> Batches:
        tokens = max(PER_VALIDATION, self.longest)
        return Windows(self.stream(texts), tokens=tokens, longest=self.longest, pad=self.vocabulary.pad, fixed=True)

    def judge(self, run: Run) -> Judge | None:
        """Nothing is scored but the loss; a few words are written to be looked at."""
        if self.source.valid is None:
            return None
        valid = self.source.valid

        def judge(model: CausalLM) -> Judged:
            return Judged(samples=(self.sample(model, valid),))

        return judge

    def sample(self, model: CausalLM, texts: Texts) -> Sample:
        """How the first of these texts begins, goes on, and is gone on with."""
        ids = self.vocabulary.encode([texts.texts[0][: 40 * WRITTEN]])[0]
        room = (reach_of(model.config) or PROMPT + WRITTEN + len(self.vocabulary.before)) - len(self.vocabulary.before)
        prompt = max(1, min(PROMPT, room // 2))
        count = max(1, min(WRITTEN, room - prompt))
        with judging(model):
            written = continued(model, [*self.vocabulary.before, *ids[:prompt]], count)
        parts = (ids[:prompt], ids[prompt : prompt + count], written)
        source, reference, output = (self.vocabulary.decode(part) for part in parts)
        return Sample(source=source, reference=reference, output=output)

    def outcome(self, model: CausalLM, texts: Texts, part: Any) -> Outcome:
        total, units = self.loss_of(model, self.looked_at(texts))
        loss = total / max(1, units)
        bits, size = total / math.log(2), sum(len(text.encode(errors="replace")) for text in texts.texts)
        figures = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 50.0)),
            "bits_per_character": bits / max(1, texts.characters),
            "bits_per_byte": bits / max(1, size),
        }
        told = f"loss {loss:.4f}, perplexity {figures['perplexity']:.2f}, "
        told += f"{figures['bits_per_character']:.3f} bits per character ({units:,} tokens)"
        more = (
            ("Perplexity", f"{figures['perplexity']:.2f}"),
            ("Bits per character", f"{figures['bits_per_character']:.3f}"),
            ("Bits per byte", f"{figures['bits_per_byte']:.3f}"),
        )
        samples = (self.sample(model, texts),)
        return Outcome(
            name=texts.name, part=part, count=len(texts.texts), figures=figures, told=told, more=more, samples=samples
        )

    def words(self, out: Path) -> card.Words:
        folder = card.quoted(str(out))
        return card.Words(
            title="A language model",
            unit=self.unit,
            shell=f'attent generate {folder} "Once upon a time"',
            python=PYTHON.format(folder=str(out)),
            try_it=f'try it: attent generate {folder} "Once"',
            loss="token",
            note="Bits per character and byte do not depend on how the text is cut into tokens.",
            samples="How it goes on with a text",
            parts=("Text", "Went on", "It writes"),
            both_sides=False,
        )


def continued(model: CausalLM, ids: list[int], count: int) -> list[int]:
    """The likeliest next tokens, one after another."""
    device = next(model.parameters()).device
    cache = model.begin(rows=1, capacity=len(ids) + count)
    logits = model.step(torch.tensor([ids], device=device), cache)[:, -1]
    written: list[int] = []
    for _ in range(count):
        chosen = logits.argmax(-1)
        written.append(int(chosen))
        if written[-1] in model.config.ends or len(written) == count:
            break
        logits = model.step(chosen[:, None], cache)[:, -1]
    return written
