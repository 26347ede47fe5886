"""Words to numbers: tokenizers that give any text back as it was. They know nothing of files of pairs or of models."""

from attent.text.tokenizer import SubwordSampling, Tokenizer, TokenizerError, Vocabulary
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer

__all__ = ["SubwordSampling", "Tokenizer", "TokenizerConfig", "TokenizerError", "Vocabulary", "train_tokenizer"]
