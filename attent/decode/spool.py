"""Tokens in, text out as soon as it is certain: never half a character, nor what a later token changes; and texts that
stop at given words, which are not part of them and may lie across tokens. What is there at once is read likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

from attent.text.vocabulary import ESCAPE, Vocabulary

CONTEXT = 8  # tokens of a prompt by which those behind it are read: the first of a text loses its space
UNSURE = ("\ufffd", ESCAPE)  # half a character; in our own vocabularies, half of one that is spelled otherwise


def behind(vocabulary: Vocabulary, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of ids as it stands behind a prompt: with the space before its first word, if there is one."""
    context = context_of(vocabulary, prompt)
    return following(vocabulary, context, vocabulary.decode(context), ids)


def context_of(vocabulary: Vocabulary, prompt: Sequence[int]) -> list[int]:
    """The end of a prompt, from where what comes behind it can be read: never inside of bytes that belong together."""
    start = max(0, len(prompt) - CONTEXT)
    while start and prompt[start] in vocabulary.together:
        start -= 1
    return list(prompt[start:])


def following(vocabulary: Vocabulary, context: Sequence[int], known: str, ids: Sequence[int]) -> str:
    """The text of ids behind that of the context, which is known."""
    whole = vocabulary.decode([*context, *ids])
    # Bytes that are no characters can spoil those before them, whose text is given already.
    return whole[len(known) :] if whole.startswith(known) else vocabulary.decode(ids)


class Spool:
    """The text behind one prompt. `add` and `rest` give its pieces; joined, these are the whole."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.vocabulary, self.words = vocabulary, tuple(stop)
        self.context = context_of(vocabulary, prompt)  # tokens whose text is known, and needed to read the next
        self.known = vocabulary.decode(self.context)
        self.waiting: list[int] = []  # tokens whose text is not certain yet
        self.held = ""  # text that may be the beginning of a word to stop at
        self.text = ""  # all that was given
        self.count = 0  # tokens that were added before it stopped
        self.stopped = False

    def add(self, token: int) -> str:
        if self.stopped:
            return ""
        self.count += 1
        self.waiting.append(token)
        if self._in_bytes():
            return ""
        text = self._text()
        if not text or text.endswith(UNSURE):
            return ""
        self._read()
        return self._given(text, last=False)

    def rest(self) -> str:
        """No more tokens come."""
        if self.stopped:
            return ""
        text = self._text()
        self._read()
        return self._given(text, last=True)

    def _in_bytes(self) -> bool:
        """May the next token belong to bytes that are read together? What has no text does not part them."""
        together = self.vocabulary.together
        if not together:
            return False
        heard = (token for token in reversed(self.waiting) if token in together or self.vocabulary.decode([token]))
        return next(heard, None) in together

    def _text(self) -> str:
        return following(self.vocabulary, self.context, self.known, self.waiting)

    def _read(self) -> None:
        self.context, self.waiting = self.waiting or self.context, []
        self.known = self.vocabulary.decode(self.context)

    def _given(self, text: str, *, last: bool) -> str:
        self.held += text
        # The word that is complete first, so that it does not matter how the text was cut into tokens.
        found = [(self.held.find(word) + len(word), self.held.find(word)) for word in self.words if word in self.held]
        if found:
            self.stopped, keep = True, len(self.held) - min(found)[1]
        else:
            keep = 0 if last else beginning(self.held, self.words)
        given, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        self.text += given
        return given


def beginning(text: str, words: Sequence[str]) -> int:
    """How many letters at the end of a text may begin one of the words."""
    longest = min(len(text), max(map(len, words), default=1) - 1)
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(word.startswith(text[-n:]) and len(word) > n for word in words)), 0)
