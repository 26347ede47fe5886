"""Words to numbers: tokenizers that give any text back as it was. They know nothing of files of pairs or of models."""

from attent.text.tokenizer import Sampling, Tokenizer, TokenizerError, Vocabulary
from attent.text.train import TokenizerConfig, train

__all__ = ["Sampling", "Tokenizer", "TokenizerConfig", "TokenizerError", "Vocabulary", "train"]
