"""`--task spans`: spans of each text are taken out, and a model of encoder and decoder writes them (T5, Raffel et al.
2020). Which spans, `attent.data.spans` draws, anew in every epoch; what comes of it is trained further as a translator.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from attent.data.batch_plan import BatchConfig
from attent.data.encode import split_long_texts
from attent.data.loader import PairLoader as PairBatches
from attent.data.span_corruption import MIN_TEXT_TOKENS, SpanCorruption
from attent.data.text_corpus import TextCorpus
from attent.data.token_store import EncodedTexts
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.text.tokenizer import Tokenizer
from attent.training import model_card, model_presets
from attent.training.autoconfig import DataSize, fit_to_tokenizer
from attent.training.config import Run, Size, TrainError
from attent.training.objective import Seq2SeqObjective
from attent.training.tasks.base import BatchLoader, FinalScores, ObjectiveFactory, RunContext
from attent.training.tasks.text_task import TaskDefaults, TextTask, get_tokenizer, load_splits
from attent.training.tasks.translation_data import build_valid_batches

NUM_SENTINELS = 100
SMALL_VOCAB, NUM_SENTINELS_SMALL_VOCAB = 2_000, 32  # fewer sentinels where there are fewer subwords
PYTHON_EXAMPLE = """\
import attent

model = attent.load({folder!r})"""


class SpanCorruptionTask(TextTask):
    defaults = TaskDefaults(
        epochs_by_tokens=((0, 60), (5_000_000, 30), (50_000_000, 10), (500_000_000, 3)),
        finetune_epochs=3,
        min_steps=2_000,
        # Measured on an H200: `small` with 2e-3 and 32,768 tokens a batch fell to 3.97 by update 604, then rose to 5.4.
        lr_by_size={"tiny": 1e-3, "small": 1e-3, "base": 5e-4, "big": 3e-4},
        finetune_lr_by_size={"tiny": 5e-4, "small": 3e-4, "base": 2e-4, "big": 1e-4},
        dropout_by_tokens=((0, 0.1), (500_000_000, 0.0)),
        batch_tokens_by_size={"tiny": 16_384, "small": 16_384, "base": 16_384, "big": 16_384},
    )
    model_class: type[Any] = Seq2Seq
    objective_class: ObjectiveFactory = Seq2SeqObjective

    def __init__(self, run: Run, tokenizer: Tokenizer | None, context: RunContext) -> None:
        source = load_splits(run, context, self.text_format)
        asked = run.data.tokenizer.vocab
        sentinels = NUM_SENTINELS_SMALL_VOCAB if asked is not None and asked < SMALL_VOCAB else NUM_SENTINELS
        super().__init__(
            run, source, get_tokenizer(run, source.train, tokenizer, context, num_sentinels=sentinels), context
        )
        if not self.vocabulary.sentinels:
            raise TrainError(
                f"{run.init_from}: its tokenizer has no sentinels such as <extra_id_0>, which --task spans needs; begin "
                "with a model that was trained so, or leave --from out"
            )
        self.encoded_texts = self.split_texts(source.train)
        self.data_size = DataSize(num_examples=len(source.train.texts), num_tokens=len(self.encoded_texts.ids))

    def split_texts(self, texts: TextCorpus) -> EncodedTexts:
        """Texts as parts of at most `longest` tokens; one of a single token has nothing to be taken out of."""
        cut = split_long_texts(self.encode_texts(texts), self.max_tokens)
        kept = cut.select(cut.lengths >= MIN_TEXT_TOKENS)
        if not len(kept.lengths):
            raise TrainError(f"{texts.name}: every text in it is a single token; give longer ones")
        return EncodedTexts.from_sentences(kept, self.data_key)

    def build_corruption(self, texts: EncodedTexts, seed: int, name: str) -> SpanCorruption:
        vocabulary = self.vocabulary
        return SpanCorruption(texts, vocabulary.sentinels, vocabulary.end, vocabulary.pad, seed, name)

    def build_config(self, size: Size) -> Seq2SeqConfig:
        return fit_to_tokenizer(model_presets.span_corruption_config(size, self.vocabulary.size), self.tokenizer)

    def describe_layers(self, config: Any) -> str:
        return f"{config.encoder.layers}+{config.decoder.layers}"

    def build_train_batches(self, run: Run) -> BatchLoader:
        assert run.train.batch_tokens
        assert run.data.layout
        longest = min(self.max_tokens + 1, run.train.batch_tokens)
        config = BatchConfig(
            batch_tokens=run.train.batch_tokens, max_tokens=longest, layout=run.data.layout, too_long="cut"
        )
        drawn = self.build_corruption(self.encoded_texts, run.train.seed, self.splits.train.name)
        return PairBatches(drawn(0), config, seed=run.train.seed, store_for_epoch=drawn)

    def build_eval_batches(self, texts: TextCorpus) -> BatchLoader:
        """The same spans every time, so that validations can be compared."""
        return build_valid_batches(
            self.build_corruption(self.split_texts(texts), 0, texts.name)(0), self.max_tokens + 1
        )

    def score_texts(self, model: Seq2Seq, texts: TextCorpus, split: Any) -> FinalScores:
        total, units = self.compute_loss(model, self.get_eval_batches(texts))
        loss = total / max(1, units)
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 50.0))}
        told = f"loss {loss:.4f}, perplexity {figures['perplexity']:.2f} ({units:,} tokens)"
        more = (("Perplexity", f"{figures['perplexity']:.2f}"),)
        return FinalScores(
            name=texts.name,
            split=split,
            num_examples=len(texts.texts),
            metrics=figures,
            summary=told,
            extra_columns=more,
        )

    def words(self, out: Path) -> model_card.ModelDescription:
        folder = model_card.quote_path(str(out))
        further = f"attent train --from {folder} --data pairs.tsv --out further"
        return model_card.ModelDescription(
            title="A text-to-text model before its task",
            unit=self.unit,
            shell_example=further,
            python_example=PYTHON_EXAMPLE.format(folder=str(out)),
            next_step=f"now teach it a task: {further} (summaries are much shorter than their texts: for them add "
            "--set data.filters.ratio=0)",
            loss_unit="target token",
            note="It has learned to write what was taken out of a text, and no task yet.",
            has_two_sides=True,
        )
