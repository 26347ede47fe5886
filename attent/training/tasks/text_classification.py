"""`--task classify`: predict the label of a text with an encoder, from scratch or pre-trained by `--task mlm`."""

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from attent.data.encode import truncate_texts
from attent.data.text_batches import TextLabeler
from attent.data.text_corpus import TextCorpus, sort_labels
from attent.models import EncoderConfig, TextEncoder
from attent.nn.eval_mode import eval_mode
from attent.text.bulk_encoder import EncodedSentences
from attent.training.config import RunConfig, Size, TrainError
from attent.training.objective import TextClassificationObjective
from attent.training.tasks import base, text_task
from attent.training.tasks.text_task import EncoderTask, encoder_config

NUM_SAMPLES, NUM_CARD_SAMPLES, MAX_LISTED_LABELS = 3, 5, 12


class TextClassificationTask(EncoderTask):
    size_defaults = text_task.TaskDefaults(
        size_by_tokens=((0, "tiny"), (1_000_000, "small"), (1_000_000_000, "base")),
        epochs_by_tokens=((0, 15), (1_000_000, 10), (50_000_000, 4)),
        finetune_epochs=4,
        min_steps=300,
        lr_by_size={"tiny": 5e-4, "small": 3e-4, "base": 1e-4, "big": 5e-5},
        finetune_lr_by_size={"tiny": 3e-4, "small": 1e-4, "base": 3e-5, "big": 2e-5},
        dropout_by_tokens=((0, 0.3), (1_000_000, 0.2), (100_000_000, 0.1)),
        batch_tokens_by_size={"tiny": 4_096, "small": 4_096, "base": 4_096, "big": 4_096},
    )
    default_settings: ClassVar[dict[str, Any]] = {"train": base.MODERN_RECIPE | {"weight_decay": 0.01}}
    metrics = ("accuracy", "loss")
    objective_class = TextClassificationObjective
    has_labels = True

    def on_splits_loaded(self, run: RunConfig) -> None:
        splits = self.splits
        self.labels = sort_labels(splits.train.labels)
        check_labels(self.labels, splits, run)
        tests = []
        for texts in splits.tests:
            if problem := describe_unknown_label(texts, self.labels):
                base.reject_or_skip_test_set(problem, bool(run.data.test), self.context)
            else:
                tests.append(texts)
        self.splits = replace(splits, tests=tuple(tests))

    def on_tokenizer_ready(self, run: RunConfig) -> None:
        counts = Counter(self.splits.train.labels)
        listed = ", ".join(f"{label} ({counts[label]:,})" for label in self.labels[:MAX_LISTED_LABELS])
        self.context.note(f"labels: {listed}{', ...' if len(self.labels) > MAX_LISTED_LABELS else ''}")

    def fit_length(self, texts: TextCorpus, sentences: EncodedSentences, max_tokens: int) -> EncodedSentences:
        if count := int((sentences.lengths > max_tokens).sum()):
            self.context.warn(
                f"{texts.name}: {count:,} of {len(texts.texts):,} texts have more than {max_tokens} tokens and are "
                "truncated; a larger `max_tokens` keeps more"
            )
        return truncate_texts(sentences, max_tokens)

    def build_labeler(self, texts: TextCorpus) -> TextLabeler:
        ids = {label: i for i, label in enumerate(self.labels)}
        return TextLabeler(np.array([ids[label] for label in texts.labels], np.int64))

    def build_config(self, size: Size) -> EncoderConfig:
        config = encoder_config(size, self.vocabulary.size, self.max_tokens)
        return replace(config, pooler=True, labels=self.labels)

    def adapt_config(self, model: TextEncoder) -> EncoderConfig:
        return replace(model.config, masked_lm=False, pooler=True, labels=self.labels)

    def evaluate(self, model: TextEncoder, texts: TextCorpus) -> base.EvalResult:
        predictions = self.predict_labels(model, texts)
        metrics = {"accuracy": compute_accuracy(predictions, texts)}
        samples = base.select_samples(texts.texts, texts.labels, predictions, NUM_SAMPLES)
        return base.EvalResult(metrics=metrics, samples=samples)

    def predict_labels(self, model: TextEncoder, texts: TextCorpus) -> list[str]:
        predictions = [""] * len(texts.texts)
        with eval_mode(model), torch.no_grad():
            for batch in self.iter_batches(self.get_eval_batches(texts)):
                inputs = batch.inputs
                states = model(inputs.ids, inputs.lengths, packing=inputs.packing)
                label_ids = model.classify(states).argmax(-1).tolist()
                for example, label_id in zip(batch.example_ids, label_ids, strict=True):
                    predictions[int(example)] = self.labels[label_id]
        return predictions

    def score_texts(self, model: TextEncoder, texts: TextCorpus, split: base.Split) -> base.FinalScores:
        total, num_targets = self.compute_loss(model, self.get_eval_batches(texts))
        predictions = self.predict_labels(model, texts)
        accuracy = compute_accuracy(predictions, texts)
        scores = build_accuracy_scores(texts.name, split, accuracy, len(predictions), "texts")
        samples = base.select_samples(texts.texts, texts.labels, predictions, NUM_CARD_SAMPLES)
        return replace(scores, metrics={"loss": total / max(1, num_targets), **scores.metrics}, samples=samples)

    def describe_model(self, out: Path) -> base.ModelDescription:
        folder = shlex.quote(str(out))
        return base.ModelDescription(
            title="A text classifier",
            shell_example=f"attent classify {folder} < texts.txt",
            python_example=base.build_python_example("Predictor", out, '.classify(["..."])[0].label'),
            next_step=f'try it: attent classify {folder} "a text"',
            loss_unit="text",
            note=f"Labels: {format_labels(self.labels)}.",
            sample_labels=("Text", "Label", "Predicted"),
        )


def check_labels(labels: tuple[str, ...], splits: text_task.TextSplits, run: RunConfig) -> None:
    if len(labels) < 2:
        raise TrainError(f"{splits.train.name}: must have at least 2 labels, but all are {labels[0]!r}")
    if isinstance(run.model, EncoderConfig) and run.model.labels != labels:
        raise TrainError(
            f"{splits.train.name}: must have the labels that this run started with, {format_labels(run.model.labels)}, "
            f"but has {format_labels(labels)}; give the original data, or another --out for a new run"
        )
    if splits.valid is not None and (problem := describe_unknown_label(splits.valid, labels)):
        raise TrainError(problem)


def describe_unknown_label(texts: TextCorpus, labels: tuple[str, ...]) -> str | None:
    unknown = sorted(set(texts.labels) - set(labels))
    if not unknown:
        return None
    return f"{texts.name}: has the label {unknown[0]!r}, which no training text has; they have {format_labels(labels)}"


def format_labels(labels: tuple[str, ...]) -> str:
    return f"{', '.join(labels[:MAX_LISTED_LABELS])}{' and others' * (len(labels) > MAX_LISTED_LABELS)}"


def compute_accuracy(predictions: Sequence[str], texts: TextCorpus) -> float:
    correct = sum(label == predicted for label, predicted in zip(texts.labels, predictions, strict=True))
    return 100 * correct / max(1, len(predictions))


def build_accuracy_scores(name: str, split: base.Split, accuracy: float, count: int, unit: str) -> base.FinalScores:
    """The scores of an accuracy in percent, with its 95% confidence interval."""
    low, high = (100 * bound for bound in compute_wilson_interval(accuracy / 100, count))
    interval = f"{low:.2f} to {high:.2f}"
    return base.FinalScores(
        name=name,
        split=split,
        num_examples=count,
        metrics={"accuracy": accuracy, "accuracy_low": low, "accuracy_high": high},
        summary=f"accuracy {accuracy:.2f}% (95% confidence interval {interval}, {count:,} {unit})",
        extra_columns=(("95% interval", interval),),
    )


def compute_wilson_interval(proportion: float, count: int, z: float = 1.96) -> tuple[float, float]:
    if not count:
        return 0.0, 1.0
    center = (proportion + z * z / (2 * count)) / (1 + z * z / count)
    variance = proportion * (1 - proportion) / count + z * z / (4 * count * count)
    half_width = z * math.sqrt(variance) / (1 + z * z / count)
    return max(0.0, center - half_width), min(1.0, center + half_width)
