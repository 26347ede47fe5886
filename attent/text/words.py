"""Encoding word by word, each word only once: the ids that SentencePiece gives for the whole text, but sooner.

In a BPE model whose pieces never reach over a space, what a word becomes does not depend on its neighbours, and in any
language that writes spaces most words come again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from sentencepiece import SentencePieceProcessor

SPACE = "▁"
REMEMBERED = 2**18  # words; some 60 MB when full
LONG = 32  # letters: what is longer, such as a line without spaces, does not come again and is not remembered


class Words:
    """What words become; fills as texts come, and many threads may use it at once."""

    def __init__(self, processor: SentencePieceProcessor) -> None:
        self._processor = processor
        self._known: dict[str, list[int]] = {"": [processor.piece_to_id(SPACE)]}  # between two spaces

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without start or end."""
        rows, missing = [], []
        find = self._known.__getitem__
        for number, text in enumerate(texts):
            try:
                rows.append(list(chain.from_iterable(map(find, text.split(" ")))) if text else [])
            except KeyError:
                missing.append(number)
                rows.append([])
        if missing:
            self._complete(texts, rows, missing)
        return rows

    def _complete(self, texts: Sequence[str], rows: list[list[int]], missing: list[int]) -> None:
        """The texts with a word that is not known yet: SentencePiece is asked for all such words together."""
        known = self._known
        new = list(set(chain.from_iterable(texts[number].split(" ") for number in missing)) - known.keys())
        found = dict(zip(new, self._processor.encode(new, num_threads=1), strict=True))
        if len(known) < REMEMBERED:
            known.update((word, ids) for word, ids in found.items() if len(word) <= LONG)
        for number in missing:
            rows[number] = list(
                chain.from_iterable(known.get(word) or found[word] for word in texts[number].split(" "))
            )


def can_go_word_by_word(processor: SentencePieceProcessor) -> bool:
    """Is it a BPE model (their scores count the merges) in which only the first letter of a piece is a space?"""
    pieces = range(processor.get_piece_size())
    return not any(SPACE in processor.id_to_piece(i)[1:] for i in pieces) and all(
        processor.get_score(i).is_integer() for i in pieces
    )
