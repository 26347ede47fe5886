"""Tokenizers and sentence splitting. Independent of corpora and models."""

from attent.text.tokenizer import SubwordSampling, Tokenizer, TokenizerError, Vocabulary
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer

__all__ = ["SubwordSampling", "Tokenizer", "TokenizerConfig", "TokenizerError", "Vocabulary", "train_tokenizer"]
