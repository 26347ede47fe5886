"""Preceding sentences as context: a source is `first sentence␞ second sentence␞ the sentence to translate`.

The separator is one symbol of the tokenizer. Training and translation build sources alike.
"""

from collections import deque

from attent.text.vocabulary import Vocabulary

SEPARATOR = "␞"
MAX_CONTEXT_CHARS = 500  # about 100 subwords; longer sentences, and those before them, are left out
_BREAK = f"{SEPARATOR} "  # with the space that begins a sentence's first subword


def has_separator(vocabulary: Vocabulary) -> bool:
    return SEPARATOR in vocabulary.to_pieces(vocabulary.encode([SEPARATOR])[0])


def split_context(source: str) -> tuple[str, str]:
    """Return the context, with its separators, and the sentence."""
    before, separator, sentence = source.rpartition(_BREAK)
    return before + separator, sentence


class ContextWindow:
    """The last sentences of a document that is read in order; an empty sentence ends the document."""

    def __init__(self, size: int) -> None:
        self.sentences = deque[str](maxlen=size)

    @property
    def prefix(self) -> str:
        """The context of the next sentence."""
        prefix = ""
        for sentence in reversed(self.sentences):
            if len(prefix) + len(sentence) > MAX_CONTEXT_CHARS:
                break
            prefix = sentence + _BREAK + prefix
        return prefix

    def append(self, *sentences: str) -> None:
        for sentence in sentences:
            text = " ".join(sentence.replace(SEPARATOR, " ").split())
            if text:
                self.sentences.append(text)
            else:
                self.sentences.clear()
