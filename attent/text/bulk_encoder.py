"""Encoding of corpora into arrays: the same ids as `encode`, several times faster.

In BPE models whose pieces do not cross spaces, each word is encoded once and looked up afterwards, with NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np

from attent.text.vocabulary import ESCAPE, SPACE, SentencePieceVocabulary, Vocabulary

Array = np.ndarray[Any, np.dtype[Any]]

MAX_CACHED_WORDS = 2**18  # about 60 MB when full
# Pseudo-words. They cannot occur in escaped text, where 0 or 1 follows an escape.
END_OF_TEXT, EMPTY_TEXT, TAG_WORD = ESCAPE, ESCAPE + "nothing", ESCAPE + "tag"


@dataclass(frozen=True)
class EncodedSentences:
    ids: Array
    lengths: Array

    @classmethod
    def from_lists(cls, sentences: list[list[int]], dtype: str) -> Self:
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        return cls(np.fromiter(chain.from_iterable(sentences), dtype, int(lengths.sum())), lengths)

    def select(self, mask: Array) -> "EncodedSentences":
        return EncodedSentences(self.ids[np.repeat(mask, self.lengths)], self.lengths[mask])


class BulkEncoder:
    """Encoder of one side, with a word cache; not thread-safe."""

    def __init__(self, vocabulary: Vocabulary, dtype: str) -> None:
        self._vocabulary, self._dtype = vocabulary, dtype
        by_word = isinstance(vocabulary, SentencePieceVocabulary) and vocabulary.can_encode_by_word
        self._word_cache = WordCache(vocabulary) if by_word else None  # type: ignore[arg-type]

    def encode(self, texts: Sequence[str], tag: int | None = None) -> EncodedSentences:
        """Encode texts with the end token and, if given, a tag before them."""
        if self._word_cache is not None:
            return self._word_cache.encode(texts, tag, self._dtype)
        prefix = [] if tag is None else [tag]
        rows = [[*prefix, *ids, self._vocabulary.end] for ids in self._vocabulary.encode(texts)]
        return EncodedSentences.from_lists(rows, self._dtype)


class WordIndex(dict[str, int]):
    """Word -> index, assigned at the first lookup; `new_words` are not encoded yet."""

    def __init__(self) -> None:
        super().__init__()
        self.new_words: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new_words.append(word)
        return number


class WordCache:
    def __init__(self, vocabulary: SentencePieceVocabulary) -> None:
        self._vocabulary = vocabulary
        self._reset()

    def _reset(self) -> None:
        self._index = WordIndex()
        self._ids, self._starts, self._lengths = np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, np.int64)
        space = self._vocabulary.processor.piece_to_id(SPACE)
        # "" is the word between two spaces. `encode` sets the id of the tag.
        known = {END_OF_TEXT: [self._vocabulary.end], EMPTY_TEXT: [], TAG_WORD: [0], "": [space]}
        self._end, _, self._tag, _ = (self._index[word] for word in known)
        self._add_words(list(known.values()))

    def encode(self, texts: Sequence[str], tag: int | None, dtype: str) -> EncodedSentences:
        if not texts:
            return EncodedSentences(np.empty(0, dtype), np.empty(0, np.int64))
        prefix = "" if tag is None else f"{TAG_WORD} "
        texts = [text or EMPTY_TEXT for text in self._vocabulary.escape_texts(list(texts))]
        words = f"{prefix}{f' {END_OF_TEXT} {prefix}'.join(texts)} {END_OF_TEXT}".split(" ")
        if len(self._index) > MAX_CACHED_WORDS:
            self._reset()
        numbers = np.fromiter(map(self._index.__getitem__, words), np.int32, len(words))
        if self._index.new_words:
            self._add_words(self._vocabulary.encode_escaped(self._index.new_words))
        self._ids[self._starts[self._tag]] = tag or 0
        starts, lengths = self._starts[numbers], self._lengths[numbers]
        ends = lengths.cumsum()
        ids = self._ids[np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])]
        return EncodedSentences(ids.astype(dtype), np.diff(ends[numbers == self._end], prepend=0))

    def _add_words(self, encoded_words: list[list[int]]) -> None:
        sentences = EncodedSentences.from_lists(encoded_words, "<u4")
        starts = len(self._ids) + sentences.lengths.cumsum() - sentences.lengths
        self._ids = np.concatenate([self._ids, sentences.ids])
        self._starts = np.concatenate([self._starts, starts])
        self._lengths = np.concatenate([self._lengths, sentences.lengths])
        self._index.new_words.clear()
