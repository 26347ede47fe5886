"""Common parts of the tasks that train an encoder on texts in packed rows or buckets: masked tokens and labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attent.data.batch_plan import BatchConfig
from attent.data.encode import add_special_tokens
from attent.data.text_batches import Labeler, TextLoader
from attent.data.text_corpus import TextCorpus
from attent.data.token_store import EncodedTexts
from attent.models import EncoderConfig, TextEncoder, presets
from attent.nn import LearnedConfig
from attent.text.bulk_encoder import EncodedSentences
from attent.training.config import RunConfig, Size, TrainError
from attent.training.tasks.base import VALID_BATCH_TOKENS, BatchLoader, build_batch_config
from attent.training.tasks.text_task import STACK_BY_SIZE, TextTask


class EncoderTask(TextTask):
    model_class = TextEncoder
    config_class = EncoderConfig

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> EncoderConfig:
        return encoder_config("tiny", vocab)

    @abstractmethod
    def fit_length(self, texts: TextCorpus, sentences: EncodedSentences, max_tokens: int) -> EncodedSentences:
        """Split or truncate texts of more than `max_tokens` tokens."""

    @abstractmethod
    def build_labeler(self, texts: TextCorpus) -> Labeler:
        """Return the function that adds the labels of these texts to a batch."""

    def prepare_texts(self, texts: TextCorpus) -> EncodedTexts:
        """Encode texts, with the tokenizer's special tokens around each."""
        prefix, suffix = self.vocabulary.prefix_ids, self.vocabulary.suffix_ids
        room = self.max_tokens - len(prefix) - len(suffix)
        if room < 1:
            minimum = len(prefix) + len(suffix) + 1
            raise TrainError(f"`data.max_tokens` must be {minimum} or more, but is {self.max_tokens}")
        sentences = self.fit_length(texts, self.encode_texts(texts), room)
        return EncodedTexts.from_sentences(add_special_tokens(sentences, prefix, suffix), self.data_key)

    def build_train_batches(self, run: RunConfig) -> BatchLoader:
        config = build_batch_config(run.data, run.train, self.max_tokens)
        labeler = self.build_labeler(self.splits.train)
        return TextLoader(self.encoded_texts, config, labeler, pad=self.vocabulary.pad, seed=run.train.seed)

    def build_eval_batches(self, texts: TextCorpus) -> BatchLoader:
        tokens = max(VALID_BATCH_TOKENS, self.max_tokens)
        config = BatchConfig(batch_tokens=tokens, max_tokens=self.max_tokens, layout="bucketed", too_long="truncate")
        labeler = self.build_labeler(texts)
        return TextLoader(self.prepare_texts(texts), config, labeler, pad=self.vocabulary.pad, fixed=True)


def encoder_config(size: Size, vocab: int, max_tokens: int = 512) -> EncoderConfig:
    """BERT without segment embeddings."""
    positions = LearnedConfig(max_length=max(512, max_tokens))
    return EncoderConfig(vocab=vocab, stack=replace(presets.BERT, positions=positions, **STACK_BY_SIZE[size]))
