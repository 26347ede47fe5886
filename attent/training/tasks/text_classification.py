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

from attent.data.batch_plan import BatchConfig
from attent.data.encode import add_special_tokens, truncate_texts
from attent.data.labeled_text import sort_labels
from attent.data.text_batches import TextLabeler, TextLoader
from attent.data.text_corpus import TextCorpus
from attent.data.token_store import EncodedTexts
from attent.models import EncoderConfig, TextEncoder
from attent.text.tokenizer import Tokenizer
from attent.training import model_card, model_presets
from attent.training.autoconfig import DataSize
from attent.training.config import Run, Size, TrainError
from attent.training.events import Note, ValidationSample
from attent.training.objective import TextClassificationObjective
from attent.training.tasks.base import BatchLoader, EvalResult, Evaluator, FinalScores, ObjectiveFactory, RunContext
from attent.training.tasks.text_task import (
    VALID_BATCH_TOKENS,
    TaskDefaults,
    TextSplits,
    TextTask,
    eval_mode,
    get_tokenizer,
    load_splits,
)

NUM_SAMPLES, NUM_CARD_SAMPLES, MAX_LISTED_LABELS = 3, 5, 12
PYTHON_EXAMPLE = """\
import attent

reader = attent.Reader.load({folder!r})
print(reader.classify(["..."])[0].label)"""


class TextClassificationTask(TextTask):
    defaults = TaskDefaults(
        size_by_tokens=((0, "tiny"), (1_000_000, "small"), (1_000_000_000, "base")),
        epochs_by_tokens=((0, 15), (1_000_000, 10), (50_000_000, 4)),
        finetune_epochs=4,
        min_steps=300,
        lr_by_size={"tiny": 5e-4, "small": 3e-4, "base": 1e-4, "big": 5e-5},
        finetune_lr_by_size={"tiny": 3e-4, "small": 1e-4, "base": 3e-5, "big": 2e-5},
        dropout_by_tokens=((0, 0.3), (1_000_000, 0.2), (100_000_000, 0.1)),
        batch_tokens_by_size={"tiny": 4_096, "small": 4_096, "base": 4_096, "big": 4_096},
    )
    metrics = ("accuracy", "loss")
    model_class: type[Any] = TextEncoder
    objective_class: ObjectiveFactory = TextClassificationObjective

    def __init__(self, run: Run, tokenizer: Tokenizer | None, context: RunContext) -> None:
        source = load_splits(run, context, self.text_format, with_labels=True)
        labels = sort_labels(source.train.labels)
        check_labels(labels, source, run)
        source = replace(source, tests=tuple(select_scorable(source.tests, labels, run, context)))
        super().__init__(run, source, get_tokenizer(run, source.train, tokenizer, context), context)
        self.labels = labels
        counts = Counter(source.train.labels)
        told = ", ".join(f"{label} ({counts[label]:,})" for label in self.labels[:MAX_LISTED_LABELS])
        context.report(Note(text=f"labels: {told}{', ...' if len(self.labels) > MAX_LISTED_LABELS else ''}"))
        self.encoded_texts = self.frame_texts(source.train)
        self.data_size = DataSize(num_examples=len(source.train.texts), num_tokens=len(self.encoded_texts.ids))

    def frame_texts(self, texts: TextCorpus) -> EncodedTexts:
        before, after = self.vocabulary.prefix_ids, self.vocabulary.suffix_ids
        room = self.max_tokens - len(before) - len(after)
        if room < 1:
            raise TrainError(
                f"`data.max_tokens` must be {self.max_tokens - room + 1} or more, but is {self.max_tokens}"
            )
        found = self.encode_texts(texts)
        if long := int((found.lengths > room).sum()):
            told = f"{long:,} of {len(texts.texts):,} texts of {texts.name} have more than {room} tokens and are cut"
            self.context.report(Note(text=f"{told}; a larger `longest` keeps more", level="warning"))
        return EncodedTexts.from_sentences(
            add_special_tokens(truncate_texts(found, room), before, after), self.data_key
        )

    def build_labels(self, texts: TextCorpus) -> TextLabeler:
        number = {label: i for i, label in enumerate(self.labels)}
        return TextLabeler(np.array([number[label] for label in texts.labels], np.int64))

    def build_config(self, size: Size) -> EncoderConfig:
        config = model_presets.encoder_config(size, self.vocabulary.size, self.max_tokens)
        return replace(config, pooler=True, labels=self.labels)

    def adapt_config(self, model: TextEncoder) -> EncoderConfig:
        return replace(model.config, masked_lm=False, pooler=True, labels=self.labels)

    def build_train_batches(self, run: Run) -> BatchLoader:
        assert run.train.batch_tokens
        assert run.data.layout
        longest = min(self.max_tokens, run.train.batch_tokens)
        config = BatchConfig(
            batch_tokens=run.train.batch_tokens, max_tokens=longest, layout=run.data.layout, too_long="cut"
        )
        asked = self.build_labels(self.splits.train)
        return TextLoader(self.encoded_texts, config, asked, pad=self.vocabulary.pad, seed=run.train.seed)

    def build_eval_batches(self, texts: TextCorpus) -> BatchLoader:
        tokens = max(VALID_BATCH_TOKENS, self.max_tokens)
        config = BatchConfig(batch_tokens=tokens, max_tokens=self.max_tokens, layout="bucketed", too_long="cut")
        return TextLoader(
            self.frame_texts(texts), config, self.build_labels(texts), pad=self.vocabulary.pad, fixed=True
        )

    def build_evaluator(self, run: Run) -> Evaluator | None:
        valid = self.splits.valid
        if valid is None:
            return None
        batches = self.get_eval_batches(valid)

        def judge(model: TextEncoder) -> EvalResult:
            found = self.predict_labels(model, valid, batches)
            return EvalResult(
                metrics={"accuracy": compute_accuracy(found, valid)}, samples=select_samples(found, valid, NUM_SAMPLES)
            )

        return judge

    def predict_labels(self, model: TextEncoder, texts: TextCorpus, batches: BatchLoader) -> list[str]:
        """The label that the model gives each text."""
        found = [""] * len(texts.texts)
        with eval_mode(model):
            for batch in self.iter_batches(batches):
                states = model(batch.text.ids, batch.text.lengths, packing=batch.text.packing)
                for number, label in zip(batch.pairs, model.classify(states).argmax(-1).tolist(), strict=True):
                    found[int(number)] = self.labels[label]
        return found

    def score_texts(self, model: TextEncoder, texts: TextCorpus, split: Any) -> FinalScores:
        batches = self.get_eval_batches(texts)
        total, units = self.compute_loss(model, batches)
        found = self.predict_labels(model, texts, batches)
        share = compute_accuracy(found, texts)
        low, high = wilson_interval(share / 100, len(found))
        figures = {"loss": total / max(1, units), "accuracy": share, "low": 100 * low, "high": 100 * high}
        between = f"{100 * low:.1f} to {100 * high:.1f}"
        return FinalScores(
            name=texts.name,
            split=split,
            num_examples=len(found),
            metrics=figures,
            summary=f"accuracy {share:.2f}% ({between} with 95% confidence, {len(found):,} texts)",
            extra_columns=(("Accuracy", f"{share:.1f}%"), ("95% interval", between)),
            samples=select_samples(found, texts, NUM_CARD_SAMPLES),
        )

    def words(self, out: Path) -> model_card.ModelDescription:
        folder = model_card.quote_path(str(out))
        return model_card.ModelDescription(
            title="A classifier of texts",
            unit=self.unit,
            shell_example=f"attent classify {folder} < texts.txt",
            python_example=PYTHON_EXAMPLE.format(folder=str(out)),
            next_step=f'try it: attent classify {folder} "a text"',
            loss_unit="text",
            note=f"It tells {format_labels(self.labels)}.",
            samples_title="Samples",
            sample_labels=("Text", "Label", "It says"),
            has_two_sides=False,
        )


def check_labels(labels: tuple[str, ...], splits: TextSplits, run: Run) -> None:
    if len(labels) < 2:
        raise TrainError(
            f"{splits.train.name}: there must be 2 labels or more to tell apart, but all are {labels[0]!r}"
        )
    if isinstance(run.model, EncoderConfig) and run.model.labels != labels:
        raise TrainError(
            f"{splits.train.name}: its labels must be those that this run began with, {format_labels(run.model.labels)}, but "
            f"are {format_labels(labels)}; give the data of then, or another --out for a new run"
        )
    if splits.valid is not None and (strange := describe_unknown_label(splits.valid, labels)):
        raise TrainError(strange)


def select_scorable(
    tests: Iterable[TextCorpus], labels: tuple[str, ...], run: Run, context: RunContext
) -> Iterator[TextCorpus]:
    """Those that can be scored; one that was asked for must be."""
    for texts in tests:
        strange = describe_unknown_label(texts, labels)
        if strange and run.data.test:
            raise TrainError(strange)
        if strange:
            context.report(Note(text=f"{strange}; it lies beside the data, and is not scored", level="warning"))
        else:
            yield texts


def describe_unknown_label(texts: TextCorpus, labels: tuple[str, ...]) -> str | None:
    strange = sorted(set(texts.labels) - set(labels))
    if not strange:
        return None
    told = f"{texts.name}: has the label {strange[0]!r}, which none of the texts to train on has"
    return f"{told}; they have {format_labels(labels)}"


def format_labels(labels: tuple[str, ...]) -> str:
    return f"{', '.join(labels[:MAX_LISTED_LABELS])}{' and others' * (len(labels) > MAX_LISTED_LABELS)}"


def compute_accuracy(predictions: list[str], texts: TextCorpus) -> float:
    right = sum(one == other for one, other in zip(predictions, texts.labels, strict=True))
    return 100 * right / max(1, len(predictions))


def select_samples(predictions: list[str], texts: TextCorpus, max_samples: int) -> tuple[ValidationSample, ...]:
    count = min(max_samples, len(predictions))
    places = [len(predictions) * i // count for i in range(count)]
    return tuple(
        ValidationSample(source=texts.texts[i], reference=texts.labels[i], output=predictions[i]) for i in places
    )


def wilson_interval(proportion: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share: where the true one lies, 95 times of 100."""
    if not count:
        return 0.0, 1.0
    middle = (proportion + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * math.sqrt(proportion * (1 - proportion) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - reach), min(1.0, middle + reach)
