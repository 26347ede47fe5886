"""Tokenizers and sentence splitting. Independent of corpora and models."""

from attent.text.tokenizer import Tokenizer, TokenizerError, Vocabulary
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer

__all__ = ["Tokenizer", "TokenizerConfig", "TokenizerError", "Vocabulary", "train_tokenizer"]
