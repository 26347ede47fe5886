"""`--task lm`: a text goes on from what it has. Running text or documents, a decoder alone, the loss per token.

Windows of text are `attent.data.rows`' business; the text that a validation shows is written word by likeliest word.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from attent.data.encode import add_special_tokens
from attent.data.text_batches import WindowLoader
from attent.data.text_corpus import TextCorpus, TextLayout
from attent.data.token_store import EncodedTexts
from attent.models import CausalConfig, CausalLM
from attent.text.tokenizer import Tokenizer
from attent.training import model_card, model_presets
from attent.training.autoconfig import DataSize
from attent.training.config import Run, Size
from attent.training.events import ValidationSample
from attent.training.objective import CausalLMObjective
from attent.training.tasks.base import BatchLoader, EvalResult, Evaluator, FinalScores, ObjectiveFactory, RunContext
from attent.training.tasks.text_task import (
    VALID_BATCH_TOKENS,
    TaskDefaults,
    TextTask,
    eval_mode,
    get_tokenizer,
    load_splits,
    max_positions,
)

PROMPT_TOKENS, SAMPLE_TOKENS = 24, 64  # tokens of the sample that a validation shows
PYTHON_EXAMPLE = """\
import attent

generator = attent.Generator.load({folder!r})
print(generator.generate(["Once"])[0][0].text)"""


class CausalLMTask(TextTask):
    text_format: ClassVar[TextLayout] = "documents"
    unit: ClassVar[str] = "document"
    defaults = TaskDefaults(
        epochs_by_tokens=((0, 60), (5_000_000, 20), (50_000_000, 6), (500_000_000, 2)),
        finetune_epochs=3,
        min_steps=2_000,
        lr_by_size={"tiny": 2e-3, "small": 1e-3, "base": 6e-4, "big": 3e-4},
        finetune_lr_by_size={"tiny": 3e-4, "small": 2e-4, "base": 1e-4, "big": 5e-5},
        dropout_by_tokens=((0, 0.2), (20_000_000, 0.1), (500_000_000, 0.0)),
        batch_tokens_by_size={"tiny": 16_384, "small": 16_384, "base": 32_768, "big": 32_768},
        warmup_ratio=0.05,
    )
    model_class: type[Any] = CausalLM
    objective_class: ObjectiveFactory = CausalLMObjective

    def __init__(self, run: Run, tokenizer: Tokenizer | None, context: RunContext) -> None:
        source = load_splits(run, context, self.text_format)
        super().__init__(run, source, get_tokenizer(run, source.train, tokenizer, context), context)
        self.documents = self.concatenate_documents(source.train)
        self.data_size = DataSize(num_examples=len(self.documents), num_tokens=len(self.documents.ids))

    def concatenate_documents(self, texts: TextCorpus) -> EncodedTexts:
        """Documents end to end. One that is trained on ends, whatever stands behind a prompt."""
        around = add_special_tokens(self.encode_texts(texts), self.vocabulary.prefix_ids, (self.vocabulary.end,))
        return EncodedTexts.from_sentences(around, self.data_key)

    def build_config(self, size: Size) -> CausalConfig:
        start = self.vocabulary.start if self.vocabulary.prefix_ids else None
        return replace(
            model_presets.causal_lm_config(size, self.vocabulary.size), start_id=start, end_ids=(self.vocabulary.end,)
        )

    def build_train_batches(self, run: Run) -> BatchLoader:
        assert run.train.batch_tokens
        longest = min(self.max_tokens, run.train.batch_tokens)
        return WindowLoader(
            self.documents,
            batch_tokens=run.train.batch_tokens,
            window_size=longest,
            pad=self.vocabulary.pad,
            seed=run.train.seed,
        )

    def build_eval_batches(self, texts: TextCorpus) -> BatchLoader:
        tokens = max(VALID_BATCH_TOKENS, self.max_tokens)
        return WindowLoader(
            self.concatenate_documents(texts),
            batch_tokens=tokens,
            window_size=self.max_tokens,
            pad=self.vocabulary.pad,
            fixed=True,
        )

    def build_evaluator(self, run: Run) -> Evaluator | None:
        """Nothing is scored but the loss; a few words are written to be looked at."""
        if self.splits.valid is None:
            return None
        valid = self.splits.valid

        def judge(model: CausalLM) -> EvalResult:
            return EvalResult(samples=(self.generate_sample(model, valid),))

        return judge

    def generate_sample(self, model: CausalLM, texts: TextCorpus) -> ValidationSample:
        """How the first of these texts begins, goes on, and is gone on with."""
        ids = self.vocabulary.encode([texts.texts[0][: 40 * SAMPLE_TOKENS]])[0]
        room = (max_positions(model.config) or PROMPT_TOKENS + SAMPLE_TOKENS + len(self.vocabulary.prefix_ids)) - len(
            self.vocabulary.prefix_ids
        )
        prompt = max(1, min(PROMPT_TOKENS, room // 2))
        count = max(1, min(SAMPLE_TOKENS, room - prompt))
        with eval_mode(model):
            written = generate_greedy(model, [*self.vocabulary.prefix_ids, *ids[:prompt]], count)
        parts = (ids[:prompt], ids[prompt : prompt + count], written)
        source, reference, output = (self.vocabulary.decode(part) for part in parts)
        return ValidationSample(source=source, reference=reference, output=output)

    def score_texts(self, model: CausalLM, texts: TextCorpus, split: Any) -> FinalScores:
        total, units = self.compute_loss(model, self.get_eval_batches(texts))
        loss = total / max(1, units)
        bits, size = total / math.log(2), sum(len(text.encode(errors="replace")) for text in texts.texts)
        figures = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 50.0)),
            "bits_per_character": bits / max(1, texts.char_count),
            "bits_per_byte": bits / max(1, size),
        }
        told = f"loss {loss:.4f}, perplexity {figures['perplexity']:.2f}, "
        told += f"{figures['bits_per_character']:.3f} bits per character ({units:,} tokens)"
        more = (
            ("Perplexity", f"{figures['perplexity']:.2f}"),
            ("Bits per character", f"{figures['bits_per_character']:.3f}"),
            ("Bits per byte", f"{figures['bits_per_byte']:.3f}"),
        )
        samples = (self.generate_sample(model, texts),)
        return FinalScores(
            name=texts.name,
            split=split,
            num_examples=len(texts.texts),
            metrics=figures,
            summary=told,
            extra_columns=more,
            samples=samples,
        )

    def words(self, out: Path) -> model_card.ModelDescription:
        folder = model_card.quote_path(str(out))
        return model_card.ModelDescription(
            title="A language model",
            unit=self.unit,
            shell_example=f'attent generate {folder} "Once upon a time"',
            python_example=PYTHON_EXAMPLE.format(folder=str(out)),
            next_step=f'try it: attent generate {folder} "Once"',
            loss_unit="token",
            note="Bits per character and byte do not depend on how the text is cut into tokens.",
            samples_title="How it goes on with a text",
            sample_labels=("Text", "Went on", "It writes"),
            has_two_sides=False,
        )


def generate_greedy(model: CausalLM, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The likeliest next tokens, one after another."""
    device = next(model.parameters()).device
    cache = model.begin(rows=1, capacity=len(prompt) + max_new_tokens)
    logits = model.step(torch.tensor([prompt], device=device), cache)[:, -1]
    written: list[int] = []
    for _ in range(max_new_tokens):
        chosen = logits.argmax(-1)
        written.append(int(chosen))
        if written[-1] in model.config.end_ids or len(written) == max_new_tokens:
            break
        logits = model.step(chosen[:, None], cache)[:, -1]
    return written
