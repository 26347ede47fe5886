"""`--task spans`: remove spans of a text and predict them with an encoder-decoder (T5, Raffel et al. 2020)."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from attent.data.encode import split_long_texts
from attent.data.loader import PairLoader
from attent.data.text_batches import MIN_TEXT_TOKENS, SpanCorruption
from attent.data.text_corpus import TextCorpus
from attent.data.token_store import EncodedTexts
from attent.models import Seq2Seq, Seq2SeqConfig, presets
from attent.models.config import mirror_encoder
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.config import RunConfig, Size, TrainError
from attent.training.objective import Seq2SeqObjective
from attent.training.tasks import base, text_task
from attent.training.tasks.translation_data import build_valid_batches

NUM_SENTINELS = 100
SMALL_VOCAB, NUM_SENTINELS_SMALL_VOCAB = 2_000, 32
# Gated feed-forwards have two input matrices, so the width counts twice. `base` and `big` are T5 1.1's small and base.
STACK_BY_SIZE: dict[Size, dict[str, Any]] = {
    "tiny": {"layers": 3, "width": 128, "heads": 4, "head_width": 32, "ffn_width": 256},
    "small": {"layers": 4, "width": 256, "heads": 4, "head_width": 64, "ffn_width": 640},
    "base": {"layers": 8, "width": 512, "heads": 8, "head_width": 64, "ffn_width": 1024},
    "big": {"layers": 12, "width": 768, "heads": 12, "head_width": 64, "ffn_width": 2048},
}


class SpanCorruptionTask(text_task.TextTask):
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
    stack = replace(tied.stacks[0], **STACK_BY_SIZE[size])
    return replace(tied, encoder=stack, decoder=mirror_encoder(stack))
