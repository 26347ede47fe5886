"""Words to numbers: tokenizers that give any text back as it was. They know nothing of files of pairs or of models."""
