"""Tokens in, text out as soon as it is certain: never half a character, nor what a later token changes; and texts that
stop at given words, which are not part of them and may lie across tokens. What is there at once is read likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

from attent.text.vocabulary import ESCAPE, Vocabulary

CONTEXT_TOKENS = 8  # tokens of a prompt by which those behind it are read: the first of a text loses its space
INCOMPLETE_ENDINGS = (
    "\ufffd",
    ESCAPE,
)  # half a character; in our own vocabularies, half of one that is spelled otherwise


def decode_continuation(vocabulary: Vocabulary, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of ids as it stands behind a prompt: with the space before its first word, if there is one."""
    context = get_context(vocabulary, prompt)
    return decode_after_context(vocabulary, context, vocabulary.decode(context), token_ids)


def get_context(vocabulary: Vocabulary, prompt: Sequence[int]) -> list[int]:
    """The end of a prompt, from where what comes behind it can be read: never inside of bytes that belong together."""
    start = max(0, len(prompt) - CONTEXT_TOKENS)
    while start and prompt[start] in vocabulary.byte_ids:
        start -= 1
    return list(prompt[start:])


def decode_after_context(
    vocabulary: Vocabulary, context: Sequence[int], context_text: str, token_ids: Sequence[int]
) -> str:
    """The text of ids behind that of the context, which is known."""
    whole = vocabulary.decode([*context, *token_ids])
    # Bytes that are no characters can spoil those before them, whose text is given already.
    return whole[len(context_text) :] if whole.startswith(context_text) else vocabulary.decode(token_ids)


class IncrementalDetokenizer:
    """The text behind one prompt. `add` and `rest` give its pieces; joined, these are the whole."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.vocabulary, self.stop_words = vocabulary, tuple(stop)
        self.context = get_context(vocabulary, prompt)  # tokens whose text is known, and needed to read the next
        self.context_text = vocabulary.decode(self.context)
        self.pending_tokens: list[int] = []  # tokens whose text is not certain yet
        self.held_text = ""  # text that may be the beginning of a word to stop at
        self.text = ""  # all that was given
        self.token_count = 0  # tokens that were added before it stopped
        self.is_stopped = False

    def add_token(self, token: int) -> str:
        if self.is_stopped:
            return ""
        self.token_count += 1
        self.pending_tokens.append(token)
        if self._is_inside_bytes():
            return ""
        text = self._decode_pending()
        if not text or text.endswith(INCOMPLETE_ENDINGS):
            return ""
        self._commit_pending()
        return self._release_text(text, last=False)

    def flush(self) -> str:
        """No more tokens come."""
        if self.is_stopped:
            return ""
        text = self._decode_pending()
        self._commit_pending()
        return self._release_text(text, last=True)

    def _is_inside_bytes(self) -> bool:
        """May the next token belong to bytes that are read together? What has no text does not part them."""
        together = self.vocabulary.byte_ids
        if not together:
            return False
        heard = (
            token for token in reversed(self.pending_tokens) if token in together or self.vocabulary.decode([token])
        )
        return next(heard, None) in together

    def _decode_pending(self) -> str:
        return decode_after_context(self.vocabulary, self.context, self.context_text, self.pending_tokens)

    def _commit_pending(self) -> None:
        self.context, self.pending_tokens = self.pending_tokens or self.context, []
        self.context_text = self.vocabulary.decode(self.context)

    def _release_text(self, text: str, *, last: bool) -> str:
        self.held_text += text
        # The word that is complete first, so that it does not matter how the text was cut into tokens.
        found = [
            (self.held_text.find(word) + len(word), self.held_text.find(word))
            for word in self.stop_words
            if word in self.held_text
        ]
        if found:
            self.is_stopped, keep = True, len(self.held_text) - min(found)[1]
        else:
            keep = 0 if last else count_partial_match(self.held_text, self.stop_words)
        given, self.held_text = (
            self.held_text[: len(self.held_text) - keep],
            self.held_text[len(self.held_text) - keep :],
        )
        self.text += given
        return given


def count_partial_match(text: str, words: Sequence[str]) -> int:
    """How many letters at the end of a text may begin one of the words."""
    longest = min(len(text), max(map(len, words), default=1) - 1)
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(word.startswith(text[-n:]) and len(word) > n for word in words)), 0)
