"""The tasks on plain text: next tokens, masked tokens (Devlin et al. 2019), removed spans (Raffel et al. 2020)."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from attent.data.encode import add_special_tokens, split_long_texts
from attent.data.loader import PairLoader
from attent.data.text_batches import MIN_TEXT_TOKENS, SpanCorruption, TokenMasker, WindowLoader
from attent.data.text_corpus import TextCorpus
from attent.data.token_store import EncodedTexts
from attent.decoding.generation.loop import generate_greedy
from attent.models import CausalConfig, CausalLM, EncoderConfig, Seq2Seq, Seq2SeqConfig, TextEncoder, presets
from attent.models.config import mirror_encoder
from attent.nn import RotaryConfig
from attent.nn.eval_mode import eval_mode
from attent.text.bulk_encoder import EncodedSentences
from attent.text.vocabulary import Vocabulary
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.config import RunConfig, Size, TrainError
from attent.training.events import ValidationSample
from attent.training.objective import CausalLMObjective, MaskedLMObjective, Seq2SeqObjective, gather_masked
from attent.training.tasks import base, text_task
from attent.training.tasks.text_task import EncoderTask, encoder_config
from attent.training.tasks.translation_data import build_valid_batches

PROMPT_TOKENS, SAMPLE_TOKENS = 24, 64  # of the sample of a validation
NUM_SAMPLES = 2  # of a validation
NUM_SENTINELS = 100
SMALL_VOCAB, NUM_SENTINELS_SMALL_VOCAB = 2_000, 32
# Gated feed-forwards have two input matrices, so the width counts twice. `base` and `big` are T5 1.1's small and base.
SPAN_STACK_BY_SIZE: dict[Size, dict[str, Any]] = {
    "tiny": {"layers": 3, "width": 128, "heads": 4, "head_width": 32, "ffn_width": 256},
    "small": {"layers": 4, "width": 256, "heads": 4, "head_width": 64, "ffn_width": 640},
    "base": {"layers": 8, "width": 512, "heads": 8, "head_width": 64, "ffn_width": 1024},
    "big": {"layers": 12, "width": 768, "heads": 12, "head_width": 64, "ffn_width": 2048},
}


class CausalLMTask(text_task.TextTask):
    """`--task lm`: predict the next token with a decoder-only model; each validation generates a greedy sample."""

    text_layout = "documents"
    unit = "document"
    size_defaults = text_task.TaskDefaults(
        epochs_by_tokens=((0, 60), (5_000_000, 20), (50_000_000, 6), (500_000_000, 2)),
        finetune_epochs=3,
        min_steps=2_000,
        lr_by_size={"tiny": 2e-3, "small": 1e-3, "base": 6e-4, "big": 3e-4},
        finetune_lr_by_size={"tiny": 3e-4, "small": 2e-4, "base": 1e-4, "big": 5e-5},
        dropout_by_tokens=((0, 0.2), (20_000_000, 0.1), (500_000_000, 0.0)),
        batch_tokens_by_size={"tiny": 16_384, "small": 16_384, "base": 32_768, "big": 32_768},
        warmup_ratio=0.05,
    )
    default_settings: ClassVar[dict[str, Any]] = {"train": base.MODERN_RECIPE | {"betas": [0.9, 0.95]}}
    used_settings = frozenset({"data.tokenizer", "data.max_tokens"})
    model_class = CausalLM
    config_class = CausalConfig
    objective_class = CausalLMObjective

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> CausalConfig:
        return causal_lm_config("tiny", vocab)

    def prepare_texts(self, texts: TextCorpus) -> EncodedTexts:
        """Documents end to end, each closed by the end token, also where the tokenizer adds none to a prompt."""
        framed = add_special_tokens(self.encode_texts(texts), self.vocabulary.prefix_ids, (self.vocabulary.end,))
        return EncodedTexts.from_sentences(framed, self.data_key)

    def build_config(self, size: Size) -> CausalConfig:
        vocabulary = self.vocabulary
        start = vocabulary.start if vocabulary.prefix_ids else None
        return replace(causal_lm_config(size, vocabulary.size), start_id=start, end_ids=(vocabulary.end,))

    def build_train_batches(self, run: RunConfig) -> base.BatchLoader:
        assert run.train.batch_tokens
        return WindowLoader(
            self.encoded_texts,
            batch_tokens=run.train.batch_tokens,
            window_size=min(self.max_tokens, run.train.batch_tokens),
            pad=self.vocabulary.pad,
            seed=run.train.seed,
        )

    def build_eval_batches(self, texts: TextCorpus) -> base.BatchLoader:
        return WindowLoader(
            self.prepare_texts(texts),
            batch_tokens=max(base.VALID_BATCH_TOKENS, self.max_tokens),
            window_size=self.max_tokens,
            pad=self.vocabulary.pad,
            fixed=True,
        )

    def evaluate(self, model: CausalLM, texts: TextCorpus) -> base.EvalResult:
        return base.EvalResult(samples=(self.generate_sample(model, texts),))

    def generate_sample(self, model: CausalLM, texts: TextCorpus) -> ValidationSample:
        prefix = self.vocabulary.prefix_ids
        ids = self.vocabulary.encode([texts.texts[0][: 40 * SAMPLE_TOKENS]])[0]
        positions = text_task.max_positions(model.config)
        room = PROMPT_TOKENS + SAMPLE_TOKENS if positions is None else positions - len(prefix)
        prompt = max(1, min(PROMPT_TOKENS, room // 2))
        count = max(1, min(SAMPLE_TOKENS, room - prompt))
        with eval_mode(model), torch.no_grad():
            generated = generate_greedy(model, [*prefix, *ids[:prompt]], count, model.config.end_ids)
        parts = (ids[:prompt], ids[prompt : prompt + count], list(generated.token_ids))
        source, reference, output = (self.vocabulary.decode(part) for part in parts)
        return ValidationSample(source=source, reference=reference, output=output)

    def score_texts(self, model: CausalLM, texts: TextCorpus, split: base.Split) -> base.FinalScores:
        total, num_targets = self.compute_loss(model, self.get_eval_batches(texts))
        scores, bits = self.build_scores(texts, split, total, num_targets), total / math.log(2)
        num_bytes = sum(len(text.encode(errors="replace")) for text in texts.texts)
        rates = {"character": bits / max(1, texts.char_count), "byte": bits / max(1, num_bytes)}
        columns = [(f"Bits per {unit}", f"{rate:.3f}") for unit, rate in rates.items()]
        return replace(
            scores,
            metrics={**scores.metrics, **{f"bits_per_{unit}": rate for unit, rate in rates.items()}},
            summary=f"{scores.summary}, {rates['character']:.3f} bits per character",
            extra_columns=(*scores.extra_columns, *columns),
            samples=(self.generate_sample(model, texts),),
        )

    def describe_model(self, out: Path) -> base.ModelDescription:
        folder = shlex.quote(str(out))
        return base.ModelDescription(
            title="A language model",
            shell_example=f'attent generate {folder} "Once upon a time"',
            python_example=base.build_python_example("Generator", out, '.generate(["Once"])[0][0].text'),
            next_step=f'try it: attent generate {folder} "Once"',
            loss_unit="token",
            note="Bits per character and byte do not depend on the tokenizer.",
            samples_title="Generated text",
            sample_labels=("Prompt", "Original", "Generated"),
        )


def causal_lm_config(size: Size, vocab: int) -> CausalConfig:
    """GPT-2 with rotary positions: they have no maximum length and learn faster."""
    return CausalConfig(
        vocab=vocab, stack=replace(presets.GPT2, positions=RotaryConfig(), **text_task.STACK_BY_SIZE[size])
    )


class MaskedLMTask(EncoderTask):
    """`--task mlm`: predict masked or replaced tokens with an encoder."""

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
    regular_ids = np.setdiff1d(np.arange(vocabulary.size), special)
    return TokenMasker(vocabulary.mask, regular_ids, len(prefix), len(suffix))


class SpanCorruptionTask(text_task.TextTask):
    """`--task spans`: remove spans of a text and predict them with an encoder-decoder."""

    size_defaults = text_task.TaskDefaults(
        epochs_by_tokens=((0, 60), (5_000_000, 30), (50_000_000, 10), (500_000_000, 3)),
        finetune_epochs=3,
        min_steps=2_000,
        # Measured on an H200: `small` with 2e-3 and 32,768 tokens a batch fell to 3.97 by step 604, then rose to 5.4.
        lr_by_size={"tiny": 1e-3, "small": 1e-3, "base": 5e-4, "big": 3e-4},
        finetune_lr_by_size={"tiny": 5e-4, "small": 3e-4, "base": 2e-4, "big": 1e-4},
        dropout_by_tokens=((0, 0.1), (500_000_000, 0.0)),
        batch_tokens_by_size={"tiny": 16_384, "small": 16_384, "base": 16_384, "big": 16_384},
    )
    default_settings: ClassVar[dict[str, Any]] = {"train": base.MODERN_RECIPE | {"weight_decay": 0.01}}
    model_class = Seq2Seq
    config_class = Seq2SeqConfig
    objective_class = Seq2SeqObjective

    def count_sentinels(self, run: RunConfig) -> int:
        vocab = run.data.tokenizer.vocab
        return NUM_SENTINELS_SMALL_VOCAB if vocab is not None and vocab < SMALL_VOCAB else NUM_SENTINELS

    def on_tokenizer_ready(self, run: RunConfig) -> None:
        if not self.vocabulary.sentinels:
            raise TrainError(
                f"{run.init_from}: its tokenizer has no sentinels such as <extra_id_0>, which --task spans needs; "
                "start from a model that was trained with them, or leave --from out"
            )

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> Seq2SeqConfig:
        return span_corruption_config("tiny", vocab)

    def prepare_texts(self, texts: TextCorpus) -> EncodedTexts:
        """Split texts into parts of at most `max_tokens`, without those that are too short for a span."""
        parts = split_long_texts(self.encode_texts(texts), self.max_tokens)
        parts = parts.select(parts.lengths >= MIN_TEXT_TOKENS)
        if not len(parts.lengths):
            raise TrainError(f"{texts.name}: every text in it is a single token; give longer ones")
        return EncodedTexts.from_sentences(parts, self.data_key)

    def build_corruption(self, texts: EncodedTexts, seed: int, name: str) -> SpanCorruption:
        vocabulary = self.vocabulary
        return SpanCorruption(texts, vocabulary.sentinels, vocabulary.end, vocabulary.pad, seed, name)

    def build_config(self, size: Size) -> Seq2SeqConfig:
        return fit_to_tokenizer(span_corruption_config(size, self.vocabulary.size), self.tokenizer)

    def build_train_batches(self, run: RunConfig) -> base.BatchLoader:
        config = base.build_batch_config(run.data, run.train, self.max_tokens + 1)
        corruption = self.build_corruption(self.encoded_texts, run.train.seed, self.splits.train.name)
        return PairLoader(
            corruption.build_epoch_store(0), config, seed=run.train.seed, store_for_epoch=corruption.build_epoch_store
        )

    def build_eval_batches(self, texts: TextCorpus) -> base.BatchLoader:
        corruption = self.build_corruption(self.prepare_texts(texts), 0, texts.name)
        return build_valid_batches(corruption.build_epoch_store(0), self.max_tokens + 1)

    def describe_model(self, out: Path) -> base.ModelDescription:
        command = f"attent train --from {shlex.quote(str(out))} --data pairs.tsv --out further"
        return base.ModelDescription(
            title="A pre-trained text-to-text model",
            shell_example=command,
            python_example=f"import attent\n\nmodel = attent.load({str(out)!r})",
            next_step=f"fine-tune it: {command}",
            note="It is trained to predict removed spans, and for no task yet.",
            has_two_sides=True,
        )


def span_corruption_config(size: Size, vocab: int) -> Seq2SeqConfig:
    """T5 1.1 with the output tied to the embedding, which would be half of the parameters of a small model."""
    tied = replace(presets.t5_v1_1_small(), vocab=vocab, tie_output=True, scale_output=True)
    stack = replace(tied.stacks[0], **SPAN_STACK_BY_SIZE[size])
    return replace(tied, encoder=stack, decoder=mirror_encoder(stack))
