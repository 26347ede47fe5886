"""`--task mlm`: some words of each text are hidden or exchanged, and an encoder tells what they were (BERT, Devlin et
al. 2019). Which words, `attent.data.rows` draws, anew in every epoch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from attent.data.batch_plan import BatchConfig
from attent.data.encode import add_special_tokens, split_long_texts
from attent.data.text_batches import TextLoader, TokenMasker, list_regular_ids
from attent.data.text_corpus import TextCorpus
from attent.data.token_store import EncodedTexts
from attent.models import EncoderConfig, TextEncoder
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import Vocabulary
from attent.training import model_card, model_presets
from attent.training.autoconfig import DataSize
from attent.training.config import Run, Size, TrainError
from attent.training.events import ValidationSample
from attent.training.objective import MaskedLMObjective, gather_masked
from attent.training.tasks.base import BatchLoader, EvalResult, Evaluator, FinalScores, ObjectiveFactory, RunContext
from attent.training.tasks.text_task import (
    VALID_BATCH_TOKENS,
    TaskDefaults,
    TextTask,
    eval_mode,
    format_ids,
    get_tokenizer,
    load_splits,
)

NUM_SAMPLES = 2  # samples of a validation
PYTHON_EXAMPLE = """\
import attent

reader = attent.Reader.load({folder!r})"""


class MaskedLMTask(TextTask):
    defaults = TaskDefaults(
        epochs_by_tokens=((0, 100), (5_000_000, 40), (50_000_000, 15), (500_000_000, 4)),
        finetune_epochs=3,
        min_steps=2_000,
        lr_by_size={"tiny": 1e-3, "small": 5e-4, "base": 2e-4, "big": 1e-4},  # the norm stands last: more would diverge
        finetune_lr_by_size={"tiny": 5e-4, "small": 2e-4, "base": 5e-5, "big": 3e-5},
        dropout_by_tokens=((0, 0.1),),
        batch_tokens_by_size={"tiny": 16_384, "small": 16_384, "base": 32_768, "big": 32_768},
    )
    metrics = ("loss", "accuracy")
    model_class: type[Any] = TextEncoder
    objective_class: ObjectiveFactory = MaskedLMObjective

    def __init__(self, run: Run, tokenizer: Tokenizer | None, context: RunContext) -> None:
        source = load_splits(run, context, self.text_format)
        super().__init__(run, source, get_tokenizer(run, source.train, tokenizer, context, add_mask=True), context)
        self.masking = build_masking(self.vocabulary, run.init_from or "the tokenizer")
        self.encoded_texts = self.frame_texts(source.train)
        self.data_size = DataSize(num_examples=len(source.train.texts), num_tokens=len(self.encoded_texts.ids))

    def frame_texts(self, texts: TextCorpus) -> EncodedTexts:
        before, after = self.vocabulary.prefix_ids, self.vocabulary.suffix_ids
        room = self.max_tokens - len(before) - len(after)
        if room < 1:
            raise TrainError(
                f"`data.max_tokens` must be {self.max_tokens - room + 1} or more, but is {self.max_tokens}"
            )
        return EncodedTexts.from_sentences(
            add_special_tokens(split_long_texts(self.encode_texts(texts), room), before, after), self.data_key
        )

    def build_config(self, size: Size) -> EncoderConfig:
        return replace(model_presets.encoder_config(size, self.vocabulary.size, self.max_tokens), masked_lm=True)

    def adapt_config(self, model: TextEncoder) -> EncoderConfig:
        """Heads for whole texts would learn nothing here."""
        return replace(model.config, masked_lm=True, pooler=False, labels=())

    def build_train_batches(self, run: Run) -> BatchLoader:
        assert run.train.batch_tokens
        assert run.data.layout
        longest = min(self.max_tokens, run.train.batch_tokens)
        config = BatchConfig(
            batch_tokens=run.train.batch_tokens, max_tokens=longest, layout=run.data.layout, too_long="cut"
        )
        return TextLoader(self.encoded_texts, config, self.masking, pad=self.vocabulary.pad, seed=run.train.seed)

    def build_eval_batches(self, texts: TextCorpus) -> BatchLoader:
        """The same words are hidden every time, so that validations can be compared."""
        tokens = max(VALID_BATCH_TOKENS, self.max_tokens)
        config = BatchConfig(batch_tokens=tokens, max_tokens=self.max_tokens, layout="bucketed", too_long="cut")
        return TextLoader(self.frame_texts(texts), config, self.masking, pad=self.vocabulary.pad, fixed=True)

    def build_evaluator(self, run: Run) -> Evaluator | None:
        valid = self.splits.valid
        if valid is None:
            return None
        batches = self.get_eval_batches(valid)

        def judge(model: TextEncoder) -> EvalResult:
            share, samples = self.measure_accuracy(model, batches)
            return EvalResult(metrics={"accuracy": share}, samples=samples)

        return judge

    def measure_accuracy(self, model: TextEncoder, batches: BatchLoader) -> tuple[float, tuple[ValidationSample, ...]]:
        """Per cent of the hidden words that are told right, and how that looks."""
        right, units = 0, 0
        samples: list[ValidationSample] = []
        with eval_mode(model):
            for batch in self.iter_batches(batches):
                text = batch.text
                states = model(text.ids, text.lengths, packing=text.packing)
                guesses = model.masked_logits(gather_masked(states, batch)).argmax(-1)
                right += int((guesses == batch.wanted).sum())
                units += batch.units
                if len(samples) < NUM_SAMPLES:
                    samples.append(self.build_sample(batch, guesses))
        return 100 * right / max(1, units), tuple(samples)

    def build_sample(self, batch: Any, predictions: Any) -> ValidationSample:
        """The first row of a batch."""
        told = batch.wanted[0] >= 0
        length = int(batch.text.lengths[0])
        places = batch.places[0][told].tolist()
        order = sorted(range(len(places)), key=places.__getitem__)
        wanted, guessed = (side[0][told].tolist() for side in (batch.wanted, predictions))
        ids = batch.text.ids[0, len(self.vocabulary.prefix_ids) : length - len(self.vocabulary.suffix_ids)].tolist()
        return ValidationSample(
            source=format_ids(self.vocabulary, ids),
            reference=" ".join(format_ids(self.vocabulary, [wanted[i]]) for i in order),
            output=" ".join(format_ids(self.vocabulary, [guessed[i]]) for i in order),
        )

    def score_texts(self, model: TextEncoder, texts: TextCorpus, split: Any) -> FinalScores:
        batches = self.get_eval_batches(texts)
        total, units = self.compute_loss(model, batches)
        share, samples = self.measure_accuracy(model, batches)
        loss = total / max(1, units)
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 50.0)), "accuracy": share}
        told = f"loss {loss:.4f}, perplexity {figures['perplexity']:.2f}, {share:.1f}% of {units:,} hidden words told"
        return FinalScores(
            name=texts.name,
            split=split,
            num_examples=len(texts.texts),
            metrics=figures,
            summary=told,
            extra_columns=(("Accuracy", f"{share:.1f}%"), ("Perplexity", f"{figures['perplexity']:.2f}")),
            samples=samples,
        )

    def words(self, out: Path) -> model_card.ModelDescription:
        folder = model_card.quote_path(str(out))
        mask = self.vocabulary.to_pieces([self.masking.mask_id])[0]
        return model_card.ModelDescription(
            title="A masked language model",
            unit=self.unit,
            shell_example=f'attent fill {folder} "The {mask} is here."\n'
            f"attent train --task classify --from {folder} --data labels.tsv --out labels",
            python_example=PYTHON_EXAMPLE.format(folder=str(out)),
            next_step=f'try it: attent fill {folder} "The {mask} is here."',
            loss_unit="hidden word",
            note="Accuracy is the share of hidden words that are told right at the first guess.",
            samples_title="Hidden words",
            sample_labels=("Text", "Were", "It says"),
            has_two_sides=False,
        )


def build_masking(vocabulary: Vocabulary, origin: str) -> TokenMasker:
    if vocabulary.mask is None:
        raise TrainError(
            f"{origin}: its tokenizer has no mask such as [MASK], which --task mlm needs; begin with a model that was "
            "trained so, or leave --from out"
        )
    specials = [vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unknown, vocabulary.mask]
    specials += [
        *vocabulary.prefix_ids,
        *vocabulary.suffix_ids,
        *vocabulary.sentinels,
        *map(vocabulary.get_tag_id, vocabulary.tags),
    ]
    others = list_regular_ids(vocabulary.size, specials)
    return TokenMasker(vocabulary.mask, others, len(vocabulary.prefix_ids), len(vocabulary.suffix_ids))
