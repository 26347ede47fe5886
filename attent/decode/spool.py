"""Tokens in, text out as soon as it is certain: never half a character, nor what a later token changes; and texts that
stop at given words, which are not part of them and may lie across tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from attent.text.vocabulary import ESCAPE, Vocabulary

CONTEXT = 8  # tokens of a prompt by which those behind it are read: the first of a text loses its space
UNSURE = ("\ufffd", ESCAPE)  # half a character; in our own vocabularies, half of one that is spelled otherwise


def behind(vocabulary: Vocabulary, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of ids as it stands behind a prompt: with the space before its first word, if there is one."""
    context = list(prompt[-CONTEXT:])
    before, whole = vocabulary.decode(context), vocabulary.decode([*context, *ids])
    return whole[len(before) :]


class Spool:
    """The text behind one prompt. `add` and `rest` give its pieces; joined, these are the whole."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.vocabulary, self.words = vocabulary, tuple(stop)
        self.context = list(prompt[-CONTEXT:])  # tokens whose text is known, and needed to read the next
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

    def _text(self) -> str:
        return self.vocabulary.decode([*self.context, *self.waiting])[len(self.known) :]

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
