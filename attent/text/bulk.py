"""Many texts at once into one array of ids, for corpora: the same ids as `encode` gives, several times sooner.

In a BPE model whose pieces never reach over a space, what a word becomes does not depend on its neighbours; and in any
language that writes spaces most words come again and again. So each word is encoded once and looked up afterwards, and
arrays do the rest. Other vocabularies take their usual way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from attent.text.sample import SPACE
from attent.text.vocabulary import ESCAPE, Pieces, Vocabulary, valid

Array = np.ndarray[Any, np.dtype[Any]]

REMEMBERED = 2**18  # words; some 60 MB when full
# Words that stand for what is no text. None can occur in one: there, an escape stands before 0 or 1.
END_OF_TEXT, NOTHING, TAG = ESCAPE, ESCAPE + "nothing", ESCAPE + "tag"


@dataclass(frozen=True)
class Sentences:
    """The ids of many sentences end to end, and how many each has."""

    ids: Array
    lengths: Array

    @classmethod
    def of(cls, sentences: list[list[int]], dtype: str) -> Sentences:
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        return cls(np.fromiter(chain.from_iterable(sentences), dtype, int(lengths.sum())), lengths)

    def where(self, kept: Array) -> Sentences:
        return Sentences(self.ids[np.repeat(kept, self.lengths)], self.lengths[kept])


class Bulk:
    """One side's encoder for a corpus. It remembers words, and is for one thread."""

    def __init__(self, vocabulary: Vocabulary, dtype: str) -> None:
        self._vocabulary, self._dtype = vocabulary, dtype
        self._words = Words(vocabulary) if isinstance(vocabulary, Pieces) and vocabulary.word_by_word else None

    def encode(self, texts: Sequence[str], tag: int | None = None) -> Sentences:
        """Each text with its end, and behind a tag where one is given."""
        if self._words is not None:
            return self._words.encode(texts, tag, self._dtype)
        before = [] if tag is None else [tag]
        rows = [[*before, *ids, self._vocabulary.end] for ids in self._vocabulary.encode(texts)]
        return Sentences.of(rows, self._dtype)


class Numbers(dict[str, int]):
    """A number for every word, counted up as words come; `new` are those that nobody has asked about yet."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


class Words:
    """What words become: a number for each, and by number its ids in one long array."""

    def __init__(self, vocabulary: Pieces) -> None:
        self._vocabulary = vocabulary
        self._forget()

    def _forget(self) -> None:
        self._numbers = Numbers()
        self._ids, self._starts, self._lengths = np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, np.int64)
        space = self._vocabulary.processor.piece_to_id(SPACE)
        # "" stands between two spaces. Which tag it is, each call says.
        known = {END_OF_TEXT: [self._vocabulary.end], NOTHING: [], TAG: [0], "": [space]}
        self._end, _, self._tag, _ = (self._numbers[word] for word in known)
        self._learn(list(known.values()))

    def encode(self, texts: Sequence[str], tag: int | None, dtype: str) -> Sentences:
        if not texts:
            return Sentences(np.empty(0, dtype), np.empty(0, np.int64))
        before = "" if tag is None else f"{TAG} "
        texts = [text or NOTHING for text in self._vocabulary.escaped(list(texts))]
        words = f"{before}{f' {END_OF_TEXT} {before}'.join(texts)} {END_OF_TEXT}".split(" ")
        numbers = self._find(words)
        self._ids[self._starts[self._tag]] = tag or 0
        starts, lengths = self._starts[numbers], self._lengths[numbers]
        ends = lengths.cumsum()
        ids = self._ids[np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])]
        return Sentences(ids.astype(dtype), np.diff(ends[numbers == self._end], prepend=0))

    def _find(self, words: list[str]) -> Array:
        """The number of each word; what those not met before become is asked of SentencePiece, all at once."""
        if len(self._numbers) > REMEMBERED:
            self._forget()
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))
        if self._numbers.new:
            self._learn(self._encoded(self._numbers.new))
        return numbers

    def _encoded(self, words: list[str]) -> list[list[int]]:
        processor = self._vocabulary.processor
        try:
            return processor.encode(words, num_threads=1)
        except TypeError:  # half a surrogate pair is refused
            return processor.encode([valid(word) for word in words], num_threads=1)

    def _learn(self, found: list[list[int]]) -> None:
        """The ids of the new words, in their order."""
        sentences = Sentences.of(found, "<u4")
        starts = len(self._ids) + sentences.lengths.cumsum() - sentences.lengths
        self._ids = np.concatenate([self._ids, sentences.ids])
        self._starts = np.concatenate([self._starts, starts])
        self._lengths = np.concatenate([self._lengths, sentences.lengths])
        self._numbers.new.clear()
