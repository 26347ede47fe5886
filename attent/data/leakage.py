"""Is the test set in the training data? Exactly, or nearly word for word: then scores on it would be too good.

Texts are compared by their words, in small letters and without punctuation; a script without spaces is compared by
pairs of neighbouring characters. Near means that two sentences share 70% of all the words they have together (the
Jaccard index). The test set is small and is indexed; the training data streams past in chunks, at some ten microseconds
a line. Of a line and a test sentence that are near, the rarest words must meet (the prefix filter of Chaudhuri, Ganti
and Kaushik 2006), so that few test sentences are ever compared in full.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attent.data import scripts
from attent.data.pairs import Pair

Ints = npt.NDArray[np.int64]

NEAR = 0.7  # of the words of both together are shared
SHORT = 4  # a sentence of fewer words ("Yes.", "Thank you.") is expected to come again
NEAR_WORDS = 6  # below this, "near" would mean a single common word more or less
MOST = 20_000  # test sentences that are held against: a bit for each of them and each of their words, 125 MB at worst

KINDS = ("pair", "source", "target", "near source", "near target")


@dataclass(frozen=True)
class Twin:
    """A test sentence and the line of the training data that equals or most resembles it."""

    kind: str  # one of KINDS
    test: Pair
    train: Pair
    overlap: float  # share of the words that both have, 1 where they are the same


@dataclass(frozen=True)
class Leakage:
    """How many test sentences have a twin in the training data; each is counted once, by its closest."""

    sentences: int  # of the test set
    pair: int = 0  # the same on both sides
    source: int = 0  # the same source, with another translation
    target: int = 0  # the same target, of another source
    near: int = 0  # nearly the same on one of the sides
    short: int = 0  # sentences of three words or less that came again: expected, and in none of the counts above
    twins: tuple[Twin, ...] = field(default=(), repr=False)  # examples, the closest first

    @property
    def exact(self) -> int:
        return self.pair + self.source + self.target


# ---- words -----------------------------------------------------------------------------------------------------------

_RUN = re.compile("[" + "".join(scripts.LETTERS[code] for code in sorted(scripts.UNSPACED)) + "]+")
_FIRST_UNSPACED = 0x0E00  # Thai; no script without spaces stands before it
_BETWEEN_LINES = hash("\n")


@cache
def _table() -> npt.NDArray[np.uint32]:
    """What each character becomes: a space, where it is punctuation, a symbol or a space; else itself."""
    table = np.arange(0x110000, dtype="<u4")
    for place in (range(0x3100), range(0xFE10, 0xFFF0), range(0x1F000, 0x1FB00)):
        table[[code for code in place if unicodedata.category(chr(code))[0] in "PSZC" and code != ord("\n")]] = 32
    return table


def fold(texts: Sequence[str]) -> str:
    """A line for each text: its words in small letters, with spaces in the place of punctuation.

    All texts in one go and by way of numpy, since that costs a third of working on each string.
    """
    whole = "\n".join(texts)
    if whole.count("\n") >= max(len(texts), 1):  # a text has line ends of its own
        whole = "\n".join([text.replace("\n", " ") for text in texts])
    codes = np.frombuffer(whole.casefold().encode("utf-32-le", "surrogatepass"), "<u4")
    codes = _table()[codes]
    whole = codes.tobytes().decode("utf-32-le", "surrogatepass")
    return _RUN.sub(_neighbours, whole) if codes.max(initial=0) >= _FIRST_UNSPACED else whole


class Folded(NamedTuple):
    """Texts as they are compared, and their words: for each the line that it stands in, and its hash."""

    text: str
    lines: int
    line: Ints
    word: Ints


def fold_words(texts: Sequence[str]) -> Folded:
    text = fold(texts)
    hashes = np.fromiter(map(hash, text.replace("\n", " \n ").split(" ")), np.int64)
    ends = hashes == _BETWEEN_LINES
    real = ~ends & (hashes != 0)  # hash("") is 0
    return Folded(text, len(texts), np.cumsum(ends)[real], hashes[real])


def fold_pairs(pairs: Sequence[Pair]) -> tuple[Folded, Folded]:
    return fold_words([pair.source for pair in pairs]), fold_words([pair.target for pair in pairs])


def _neighbours(run: re.Match[str]) -> str:
    """Words of a script without spaces are not known: pairs of neighbours stand for them."""
    text = run[0]
    return f" {' '.join(text[i : i + 2] for i in range(max(len(text) - 1, 1)))} "


# ---- one side of the test set ----------------------------------------------------------------------------------------

_LINE_BITS, _UNKNOWN = 47, 1 << 46  # of a word in a line: the line above, "not in the test set", and 46 bits of hash


class Near(NamedTuple):
    """Line i of a chunk is near to test sentence j: three columns of the same length."""

    line: Ints
    test: Ints
    overlap: npt.NDArray[np.float64]


class _Words(NamedTuple):
    """The different words of a chunk, line by line: those of the test set first, from the rarest, then the others."""

    line: Ints
    rank: Ints  # how rare in the test set, from 0; _UNKNOWN or more where it is not there
    size: Ints  # of each line: different words
    known: Ints  # of each line: those among them that the test set has
    place: Ints  # where the word stands in its line, unknown words counted first: they are the rarest of all


def prefix(size: Ints) -> Ints:
    """So many of the rarest words of a set must hold one that a set near it has among its own rarest."""
    return size - np.ceil(NEAR * size - 1e-9).astype(np.int64) + 1


class Index:
    """One side of the test set: finds the sentences that a line equals, and those that it is near to."""

    def __init__(self, texts: Sequence[str]) -> None:
        lines = fold(texts).split("\n") if texts else []
        self.sets = [frozenset(line.split()) for line in lines]
        self.same: dict[str, list[int]] = defaultdict(list)
        for i, line in enumerate(lines):
            self.same[line.replace(" ", "")].append(i)
        self.same.pop("", None)
        frequency = Counter(word for words in self.sets for word in words)
        ranks = {word: r for r, word in enumerate(sorted(frequency, key=lambda word: (frequency[word], word)))}
        hashes = np.fromiter(map(hash, ranks), np.int64, len(ranks))
        self._by_hash = np.argsort(hashes)  # place in `_hashes` -> rank
        self._hashes = hashes[self._by_hash]
        self._sizes = np.array([len(words) for words in self.sets], np.int64)
        self._index([sorted(ranks[word] for word in words) for words in self.sets], len(ranks))

    def _index(self, rows: list[list[int]], words: int) -> None:
        """For each word the sentences that have it among their rarest, and where; for each sentence a bit a word."""
        lengths = prefix(self._sizes)
        first = [
            (rank, i, place)
            for i, row in enumerate(rows)
            if len(row) >= NEAR_WORDS
            for place, rank in enumerate(row[: lengths[i]])
        ]
        table = np.array(sorted(first), np.int64).reshape(-1, 3)
        self._starts = np.searchsorted(table[:, 0], np.arange(words + 1))
        self._tests, self._places = table[:, 1].copy(), table[:, 2].copy()
        self._bits = np.zeros((len(rows), words // 8 + 1), np.uint8)
        for i, row in enumerate(rows):
            ranks = np.array(row, np.int64)
            np.bitwise_or.at(self._bits[i], ranks >> 3, (1 << (ranks & 7)).astype(np.uint8))

    def near(self, folded: Folded) -> Near:
        """Every line that shares enough of its words with a test sentence."""
        words = self._words(folded)
        line, test = self._candidates(words)
        shared = self._shared(words, line, test)
        overlap = shared / np.maximum(words.size[line] + self._sizes[test] - shared, 1)
        enough = overlap >= NEAR
        return Near(line[enough], test[enough], overlap[enough])

    def _words(self, folded: Folded) -> _Words:
        keys = folded.line << _LINE_BITS | self._ranks(folded.word)
        keys.sort()  # by line; in a line the known words by rank, then the others
        keys = keys[np.diff(keys, prepend=-1) != 0]  # np.unique would do the same, three times as slowly
        line, rank = keys >> _LINE_BITS, keys & ((1 << _LINE_BITS) - 1)
        size = np.bincount(line, minlength=folded.lines)
        known = np.bincount(line[rank < _UNKNOWN], minlength=folded.lines)
        starts = np.cumsum(size) - size
        place = np.arange(len(line)) - starts[line] + (size - known)[line]
        return _Words(line, rank, size, known, place)

    def _ranks(self, hashes: Ints) -> Ints:
        unknown = hashes & (_UNKNOWN - 1) | _UNKNOWN
        if not len(self._hashes):
            return unknown
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return np.where(self._hashes[at] == hashes, self._by_hash[at], unknown)

    def _candidates(self, words: _Words) -> tuple[Ints, Ints]:
        """(line, test sentence) that meet in their rarest words and could share enough, by size and place."""
        probe = (words.rank < _UNKNOWN) & (words.place < prefix(words.size)[words.line])
        rank, line, place = words.rank[probe], words.line[probe], words.place[probe]
        counts = self._starts[rank + 1] - self._starts[rank]
        origin = np.repeat(np.arange(len(rank)), counts)
        inside = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
        posting = self._starts[rank][origin] + inside
        test, line = self._tests[posting], line[origin]
        # The first word in which they meet tells the most that they can share: itself, and all behind it on a side.
        _, first = np.unique(line * len(self.sets) + test, return_index=True)
        line, test = line[first], test[first]
        size, other = words.size[line], self._sizes[test]
        left = np.minimum(size - place[origin][first], other - self._places[posting][first])
        possible = left >= (size + other) * (NEAR / (1 + NEAR)) - 1e-6
        return line[possible], test[possible]

    def _shared(self, words: _Words, line: Ints, test: Ints) -> Ints:
        """How many words each candidate has in common."""
        starts = (np.cumsum(words.size) - words.size)[line]
        counts = words.known[line]
        origin = np.repeat(np.arange(len(line)), counts)
        inside = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
        rank = words.rank[starts[origin] + inside]
        bit = self._bits[test[origin], rank >> 3] >> (rank & 7).astype(np.uint8) & 1
        return np.bincount(origin, weights=bit, minlength=len(line)).astype(np.int64)


# ---- the whole test set ----------------------------------------------------------------------------------------------


class Against:
    """A test set that training data is held against: `look` at chunks of it, then ask what was `found`."""

    def __init__(self, test: Iterable[Pair]) -> None:
        self.pairs = list(islice(test, MOST))
        self._source = Index([pair.source for pair in self.pairs])
        self._target = Index([pair.target for pair in self.pairs])
        self._twins: dict[tuple[int, str], Twin] = {}

    def look(self, train: Sequence[Pair], folded: tuple[Folded, Folded] | None = None) -> None:
        """Hold the next lines of the training data against the test set; `folded` is `fold_pairs` of them, if known."""
        if not train or not self.pairs:
            return
        source, target = folded or fold_pairs(train)
        self._same(train, source.text.replace(" ", "").split("\n"), target.text.replace(" ", "").split("\n"))
        for kind, near in (("near source", self._source.near(source)), ("near target", self._target.near(target))):
            for line, test, overlap in zip(*(column.tolist() for column in near), strict=True):
                self._note(test, kind, train[line], overlap)

    def _same(self, train: Sequence[Pair], sources: list[str], targets: list[str]) -> None:
        of_source, of_target = self._source.same, self._target.same
        for pair, source, target in zip(train, sources, targets, strict=True):
            if source not in of_source and target not in of_target:
                continue
            tests = of_source.get(source, []), of_target.get(target, [])
            for i in tests[0]:
                self._note(i, "pair" if i in tests[1] else "source", pair, 1.0)
            for i in tests[1]:
                self._note(i, "target", pair, 1.0)

    def _note(self, i: int, kind: str, pair: Pair, overlap: float) -> None:
        before = self._twins.get((i, kind))
        if before is None or before.overlap < overlap:
            self._twins[i, kind] = Twin(kind, self.pairs[i], pair, overlap)

    def found(self, examples: int = 2) -> Leakage:
        """What was found up to now, with so many examples of each kind."""
        closest = [self._closest(i) for i in range(len(self.pairs))]
        twins = [twin for i, twin in enumerate(closest) if twin and not self._is_short(i)]
        counts = Counter(twin.kind for twin in twins)
        order = sorted(twins, key=lambda twin: -twin.overlap)
        shown = (twin for kind in KINDS for twin in islice((twin for twin in order if twin.kind == kind), examples))
        return Leakage(
            sentences=len(self.pairs),
            pair=counts["pair"],
            source=counts["source"],
            target=counts["target"],
            near=counts["near source"] + counts["near target"],
            short=sum(twin is not None for twin in closest) - len(twins),
            twins=tuple(shown),
        )

    def _closest(self, i: int) -> Twin | None:
        return next((self._twins[i, kind] for kind in KINDS if (i, kind) in self._twins), None)

    def _is_short(self, i: int) -> bool:
        return min(len(self._source.sets[i]), len(self._target.sets[i])) < SHORT
