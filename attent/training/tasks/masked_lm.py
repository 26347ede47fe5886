"""`--task mlm`: predict masked or replaced tokens with an encoder (BERT, Devlin et al. 2019)."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from attent.data.encode import split_long_texts
from attent.data.text_batches import TokenMasker, list_regular_ids
from attent.data.text_corpus import TextCorpus
from attent.models import EncoderConfig, TextEncoder
from attent.nn.eval_mode import eval_mode
from attent.text.bulk_encoder import EncodedSentences
from attent.text.vocabulary import Vocabulary
from attent.training.config import RunConfig, Size, TrainError
from attent.training.events import ValidationSample
from attent.training.objective import MaskedLMObjective, gather_masked
from attent.training.tasks import base, text_task
from attent.training.tasks.text_task import EncoderTask, encoder_config

NUM_SAMPLES = 2  # of a validation


class MaskedLMTask(EncoderTask):
    size_defaults = text_task.TaskDefaults(
        epochs_by_tokens=((0, 100), (5_000_000, 40), (50_000_000, 15), (500_000_000, 4)),
        finetune_epochs=3,
        min_steps=2_000,
        lr_by_size={"tiny": 1e-3, "small": 5e-4, "base": 2e-4, "big": 1e-4},  # post-norm: higher rates diverge
        finetune_lr_by_size={"tiny": 5e-4, "small": 2e-4, "base": 5e-5, "big": 3e-5},
        dropout_by_tokens=((0, 0.1),),
        batch_tokens_by_size={"tiny": 16_384, "small": 16_384, "base": 32_768, "big": 32_768},
    )
    default_settings: ClassVar[dict[str, Any]] = {"train": base.MODERN_RECIPE | {"weight_decay": 0.01}}
    metrics = ("loss", "accuracy")
    objective_class = MaskedLMObjective
    needs_mask = True
    target_noun = "masked tokens"

    def on_tokenizer_ready(self, run: RunConfig) -> None:
        self.masker = build_masker(self.vocabulary, run.init_from or "the tokenizer")

    def fit_length(self, texts: TextCorpus, sentences: EncodedSentences, max_tokens: int) -> EncodedSentences:
        return split_long_texts(sentences, max_tokens)

    def build_labeler(self, texts: TextCorpus) -> TokenMasker:
        return self.masker

    def build_config(self, size: Size) -> EncoderConfig:
        return replace(encoder_config(size, self.vocabulary.size, self.max_tokens), masked_lm=True)

    def adapt_config(self, model: TextEncoder) -> EncoderConfig:
        return replace(model.config, masked_lm=True, pooler=False, labels=())

    def evaluate(self, model: TextEncoder, texts: TextCorpus) -> base.EvalResult:
        accuracy, samples = self.measure_accuracy(model, self.get_eval_batches(texts))
        return base.EvalResult(metrics={"accuracy": accuracy}, samples=samples)

    def measure_accuracy(
        self, model: TextEncoder, batches: base.BatchLoader
    ) -> tuple[float, tuple[ValidationSample, ...]]:
        correct, num_targets = 0, 0
        samples: list[ValidationSample] = []
        with eval_mode(model), torch.no_grad():
            for batch in self.iter_batches(batches):
                inputs = batch.inputs
                states = model(inputs.ids, inputs.lengths, packing=inputs.packing)
                predictions = model.masked_logits(gather_masked(states, batch)).argmax(-1)
                correct += int((predictions == batch.labels).sum())
                num_targets += batch.num_targets
                if len(samples) < NUM_SAMPLES:
                    samples.append(self.build_sample(batch, predictions))
        return 100 * correct / max(1, num_targets), tuple(samples)

    def build_sample(self, batch: Any, predictions: Any) -> ValidationSample:
        is_target = batch.labels[0] >= 0
        length = int(batch.inputs.lengths[0])
        positions = batch.label_positions[0][is_target].tolist()
        order = sorted(range(len(positions)), key=positions.__getitem__)
        labels, predicted = (side[0][is_target].tolist() for side in (batch.labels, predictions))
        ids = batch.inputs.ids[0, len(self.vocabulary.prefix_ids) : length - len(self.vocabulary.suffix_ids)].tolist()
        return ValidationSample(
            source=text_task.format_ids(self.vocabulary, ids),
            reference=" ".join(text_task.format_ids(self.vocabulary, [labels[i]]) for i in order),
            output=" ".join(text_task.format_ids(self.vocabulary, [predicted[i]]) for i in order),
        )

    def score_texts(self, model: TextEncoder, texts: TextCorpus, split: base.Split) -> base.FinalScores:
        scores = super().score_texts(model, texts, split)
        accuracy, samples = self.measure_accuracy(model, self.get_eval_batches(texts))
        metrics, summary = {**scores.metrics, "accuracy": accuracy}, f"accuracy {accuracy:.1f}%, {scores.summary}"
        return replace(scores, metrics=metrics, summary=summary, samples=samples)

    def describe_model(self, out: Path) -> base.ModelDescription:
        folder = shlex.quote(str(out))
        mask = self.vocabulary.to_pieces([self.masker.mask_id])[0]
        fill = f'attent fill {folder} "The {mask} is here."'
        return base.ModelDescription(
            title="A masked language model",
            shell_example=f"{fill}\nattent train --task classify --from {folder} --data labels.tsv --out labels",
            python_example=base.build_python_example("Predictor", out, f'.fill(["The {mask} is here."])'),
            next_step=f"try it: {fill}",
            loss_unit="masked token",
            note="Accuracy is the share of masked tokens whose first prediction is right.",
            samples_title="Masked tokens",
            sample_labels=("Text", "Masked", "Predicted"),
        )


def build_masker(vocabulary: Vocabulary, origin: str) -> TokenMasker:
    if vocabulary.mask is None:
        raise TrainError(
            f"{origin}: its tokenizer has no mask token such as [MASK], which --task mlm needs; start from a model "
            "that was trained with one, or leave --from out"
        )
    prefix, suffix = vocabulary.prefix_ids, vocabulary.suffix_ids
    special = [vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unknown, vocabulary.mask]
    special += [*prefix, *suffix, *vocabulary.sentinels, *map(vocabulary.get_tag_id, vocabulary.tags)]
    return TokenMasker(vocabulary.mask, list_regular_ids(vocabulary.size, special), len(prefix), len(suffix))
