"""Is the test set in the training data? Exactly, or nearly word for word: then scores on it would be too good.

Texts are compared by their words, in small letters and without punctuation; a script without spaces is compared by
pairs of neighbouring characters. Near means that two sentences share 70% of all the words they have together (the
Jaccard index). The test set is indexed; the training data streams past in chunks, at some ten microseconds a line.
Equal texts meet by a hash of 64 bits, which costs little for test sets of any size. Of a line and a test sentence that
are near, the rarest words must meet (the prefix filter of Chaudhuri, Ganti and Kaushik 2006), so that few test
sentences are ever compared in full.

Text that is made from a template ("Open file 17") would still make everything meet everything. So equal lines are
looked at once a chunk, a test sentence that many lines came near to is looked for no longer, and what a chunk may cost
has a limit. Only this last can miss something: the lines that were not compared are counted.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attent.data import scripts
from attent.data.filters import join_keys
from attent.data.pairs import Bad, Pair

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

NEAR = 0.7  # of the words of both together are shared
SHORT = 4  # a sentence of fewer words ("Yes.", "Thank you.") is expected to come again
NEAR_WORDS = 6  # below this, "near" would mean a single common word more or less
MOST = 20_000  # test sentences whose near twins are looked for; twins word for word are found for all
ENOUGH = 50  # lines near to a test sentence, after which no closer one is looked for
CHUNK = 5_000  # test sentences that are read together
SLICE = 1 << 19  # comparisons that are made at once: some 50 MB
WORK = 1 << 24  # comparisons for a chunk of lines: some two seconds; speeches against 20,000 others take a third

KINDS = ("pair", "source", "target", "near source", "near target")


@dataclass(frozen=True)
class Twin:
    """A test sentence and a line of the training data that equals it, or one of the closest to it."""

    kind: str  # one of KINDS
    test: Pair
    train: Pair
    overlap: float  # share of the words that both have, 1 where they are the same


@dataclass(frozen=True)
class Leakage:
    """How many test sentences have a twin in the training data; each is counted once, by its closest."""

    sentences: int  # of the test set
    near_sought: int  # of these, from the first on: those whose near twins were looked for
    pair: int = 0  # the same on both sides
    source: int = 0  # the same source, with another translation
    target: int = 0  # the same target, of another source
    near: int = 0  # nearly the same on one of the sides
    short: int = 0  # sentences of three words or less that came again: expected, and in none of the counts above
    uncompared: int = 0  # lines of the training data that met too many test sentences to seek near twins among them
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
    """Texts as they are compared: a key for each, and their words, each as its line and its hash."""

    key: Ints  # equal texts have equal keys, spaces aside; 0 where nothing is left to compare
    line: Ints
    word: Ints

    def only(self, lines: Ints) -> Folded:
        """With words of these lines alone."""
        kept = np.zeros(len(self.key), dtype=bool)
        kept[lines] = True
        inside = kept[self.line]
        return Folded(self.key, self.line[inside], self.word[inside])

    def bags(self) -> Ints:
        """A key for each line that those with the same words share, in whatever order: the sum of their hashes."""
        sums = np.concatenate([[0], np.cumsum(self.word)])  # wraps around, as it should
        return np.diff(sums[np.searchsorted(self.line, np.arange(len(self.key) + 1))])


def fold_words(texts: Sequence[str]) -> Folded:
    text = fold(texts)
    key = np.fromiter(map(hash, text.replace(" ", "").split("\n")), np.int64)[: len(texts)]  # hash("") is 0
    hashes = np.fromiter(map(hash, text.replace("\n", " \n ").split(" ")), np.int64)
    ends = hashes == _BETWEEN_LINES
    real = ~ends & (hashes != 0)
    return Folded(key, np.cumsum(ends)[real], hashes[real])


def fold_pairs(pairs: Sequence[Pair]) -> tuple[Folded, Folded]:
    return fold_words([pair.source for pair in pairs]), fold_words([pair.target for pair in pairs])


def _neighbours(run: re.Match[str]) -> str:
    """Words of a script without spaces are not known: pairs of neighbours stand for them."""
    text = run[0]
    return f" {' '.join(text[i : i + 2] for i in range(max(len(text) - 1, 1)))} "


def numbered(keys: Ints) -> tuple[Ints, Ints]:
    """Numbers for the different keys, as they come up: the number at each place, and the first place of each number."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], first[order]


# ---- near twins ------------------------------------------------------------------------------------------------------

_LINE_BITS, _UNKNOWN = 47, 1 << 46  # of a word in a line: the line above, "not in the test set", and 46 bits of hash


class Near(NamedTuple):
    """Line i of a chunk is near to test sentence j: three columns of the same length."""

    line: Ints
    test: Ints
    overlap: Floats


class _Words(NamedTuple):
    """The different words of a chunk, line by line: those of the test set first, from the rarest, then the others."""

    line: Ints
    rank: Ints  # how rare in the test set, from 0; _UNKNOWN or more where it is not there
    size: Ints  # of each line: different words
    known: Ints  # of each line: those among them that the test set has
    place: Ints  # where the word stands in its line, unknown words counted first: they are the rarest of all

    def probes(self) -> _Words:
        """The rarest of each line alone: in one of them every test sentence near to it must meet it."""
        rare = (self.rank < _UNKNOWN) & (self.place < prefix(self.size)[self.line])
        return _Words(self.line[rare], self.rank[rare], self.size, self.known, self.place[rare])


def prefix(size: Ints) -> Ints:
    """So many of the rarest words of a set must hold one that a set near it has among its own rarest."""
    return size - np.ceil(NEAR * size - 1e-9).astype(np.int64) + 1


def different_words(folded: Folded, ranks: Ints) -> tuple[Ints, Ints]:
    """(line, rank) of every word, without repeats in a line, sorted."""
    keys = folded.line << _LINE_BITS | ranks
    keys.sort()
    keys = keys[np.diff(keys, prepend=-1) != 0]  # np.unique would do the same, three times as slowly
    return keys >> _LINE_BITS, keys & ((1 << _LINE_BITS) - 1)


def places(sizes: Ints, line: Ints) -> Ints:
    """Where each of the sorted words stands in its line."""
    return np.arange(len(line)) - (np.cumsum(sizes) - sizes)[line]


def expanded(counts: Ints) -> tuple[Ints, Ints]:
    """`counts[i]` entries for each i: the i of every entry, and its place among those of the same i."""
    origin = np.repeat(np.arange(len(counts)), counts)
    return origin, places(counts, origin)


def cuts(counts: Ints, most: int) -> Iterator[slice]:
    """Neighbours whose counts together are `most` or less; but one by itself may be more."""
    ends, start = np.cumsum(counts), 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, "right")))
        yield slice(start, stop)
        start = stop


class Index:
    """The different texts of one side of the test set, numbered as they come up: finds the lines near to each."""

    def __init__(self, folded: Folded) -> None:
        self.of, first = numbered(folded.bags())  # sentence -> its text
        self.uncompared = 0  # lines that there was too much to compare with
        self.overlap = np.zeros(len(first))  # of the closest line up to now
        self.closest: dict[int, Pair] = {}
        self._met = np.zeros(len(first), np.int64)  # lines that came near to it
        folded = folded.only(first)
        word, first_word = numbered(folded.word)
        _, rank = different_words(folded, word)
        by_rarity = np.argsort(np.bincount(rank, minlength=len(first_word)), kind="stable")
        ranks = np.empty_like(by_rarity)
        ranks[by_rarity] = np.arange(len(by_rarity))
        hashes = folded.word[first_word][by_rarity]
        self._by_hash = np.argsort(hashes)  # place in `_hashes` -> rank
        self._hashes = hashes[self._by_hash]
        line, rank = different_words(folded, ranks[word])
        self._post(self.of[line], rank)

    def _post(self, test: Ints, rank: Ints) -> None:
        """For each word the texts that have it among their rarest, and where; and all (text, word) that there are."""
        self._sizes = np.bincount(test, minlength=len(self.overlap))
        self._members = test * len(self._hashes) + rank
        place = places(self._sizes, test)
        rare = (self._sizes[test] >= NEAR_WORDS) & (place < prefix(self._sizes)[test])
        order = np.argsort(rank[rare], kind="stable")
        self._ranks, self._tests, self._places = rank[rare][order], test[rare][order], place[rare][order]
        self._starts = np.searchsorted(self._ranks, np.arange(len(self._hashes) + 1))

    def look(self, train: Sequence[Pair], folded: Folded) -> None:
        """Note the lines that are closer to a test sentence than any before."""
        for near in self.near(folded):
            best = np.lexsort((near.line, -near.overlap, near.test))
            best = best[np.diff(near.test[best], prepend=-1) != 0]  # the closest to each test sentence, and the first
            best = best[near.overlap[best] > self.overlap[near.test[best]]]
            self.overlap[near.test[best]] = near.overlap[best]
            for line, test in zip(near.line[best].tolist(), near.test[best].tolist(), strict=True):
                self.closest[test] = train[line]

    def near(self, folded: Folded) -> Iterator[Near]:
        """Every line that shares enough of its words with a test sentence, some at a time; of equal lines the first."""
        words = self._words(folded.only(numbered(folded.bags())[1]))
        probes = words.probes()
        costs = np.bincount(probes.line, weights=self._counts(probes.rank), minlength=len(folded.key)).astype(np.int64)
        work = 0
        for cut in cuts(costs, SLICE):
            if work > WORK:
                self.uncompared += int(np.count_nonzero(costs[cut.start :]))
                return
            start, stop = np.searchsorted(probes.line, (cut.start, cut.stop))
            line, test = self._candidates(probes, slice(int(start), int(stop)))
            work += int(self._counts(probes.rank[start:stop]).sum() + words.known[line].sum())
            near = self._compared(words, line, test)
            self._retire(near)
            yield near

    def _counts(self, rank: Ints) -> Ints:
        return self._starts[rank + 1] - self._starts[rank]

    def _words(self, folded: Folded) -> _Words:
        line, rank = different_words(folded, self._known(folded.word))
        size = np.bincount(line, minlength=len(folded.key))
        known = np.bincount(line[rank < _UNKNOWN], minlength=len(folded.key))
        return _Words(line, rank, size, known, places(size, line) + (size - known)[line])

    def _known(self, hashes: Ints) -> Ints:
        """The rank of each word; one that the test set does not have is told apart from others by its hash."""
        unknown = hashes & (_UNKNOWN - 1) | _UNKNOWN
        if not len(self._hashes):
            return unknown
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return np.where(self._hashes[at] == hashes, self._by_hash[at], unknown)

    def _candidates(self, probes: _Words, part: slice) -> tuple[Ints, Ints]:
        """(line, test sentence) that meet in their rarest words and could share enough, by size and place."""
        rank, line, place = probes.rank[part], probes.line[part], probes.place[part]
        origin, inside = expanded(self._counts(rank))
        posting = self._starts[rank][origin] + inside
        test, line = self._tests[posting], line[origin]
        # The first word in which they meet tells the most that they can share: itself, and all behind it on a side.
        # Later ones tell less, so that one word that leaves it possible is enough.
        size, other = probes.size[line], self._sizes[test]
        left = np.minimum(size - place[origin], other - self._places[posting])
        possible = left >= (size + other) * (NEAR / (1 + NEAR)) - 1e-6
        pairs = np.unique(line[possible] * len(self.overlap) + test[possible])
        return pairs // len(self.overlap), pairs % len(self.overlap)

    def _compared(self, words: _Words, line: Ints, test: Ints) -> Near:
        """Those candidates that do share enough."""
        shared = [self._shared(words, line[cut], test[cut]) for cut in cuts(words.known[line], SLICE)]
        both = np.concatenate(shared) if shared else np.zeros(0, np.int64)
        overlap = both / np.maximum(words.size[line] + self._sizes[test] - both, 1)
        enough = overlap >= NEAR
        return Near(line[enough], test[enough], overlap[enough])

    def _shared(self, words: _Words, line: Ints, test: Ints) -> Ints:
        """How many words each candidate has in common."""
        origin, inside = expanded(words.known[line])
        rank = words.rank[(np.cumsum(words.size) - words.size)[line][origin] + inside]
        sought = test[origin] * len(self._hashes) + rank
        at = np.minimum(np.searchsorted(self._members, sought), len(self._members) - 1)
        return np.bincount(origin, weights=self._members[at] == sought, minlength=len(line)).astype(np.int64)

    def _retire(self, near: Near) -> None:
        """Look no longer for a test sentence that was found whole, or often enough."""
        before = self._met >= ENOUGH
        np.add.at(self._met, near.test, 1)
        self._met[near.test[near.overlap == 1]] = ENOUGH
        if ((self._met >= ENOUGH) & ~before).any():
            kept = self._met[self._tests] < ENOUGH
            self._ranks, self._tests, self._places = self._ranks[kept], self._tests[kept], self._places[kept]
            self._starts = np.searchsorted(self._ranks, np.arange(len(self._starts)))


# ---- equal texts -----------------------------------------------------------------------------------------------------


class Equals:
    """The different keys of a test set of any size: which of them came in the training data."""

    def __init__(self, keys: Ints) -> None:
        self._keys, self._of = np.unique(keys, return_inverse=True)
        self._met = np.zeros(len(self._keys), dtype=bool)
        self._first: dict[int, Pair] = {}  # the line in which a key came first: of so many keys as are ever shown

    def look(self, train: Sequence[Pair], keys: Ints) -> None:
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        met, line = np.unique(np.where((self._keys[at] == keys) & (keys != 0), at, -1), return_index=True)
        new = (met >= 0) & ~self._met[met]
        self._met[met[new]] = True
        for i, place in zip(met[new].tolist(), line[new].tolist(), strict=True):
            if len(self._first) < MOST:
                self._first[i] = train[place]

    def met(self) -> Flags:
        """Of each test sentence: did it come?"""
        return self._met[self._of]

    def first(self, sentence: int) -> Pair | None:
        return self._first.get(int(self._of[sentence]))


def joined(source: Ints, target: Ints) -> Ints:
    """A key for both sides together, 0 where one of them is empty."""
    both = join_keys(source.view(np.uint64), target.view(np.uint64)).view(np.int64)
    return np.where((source == 0) | (target == 0), 0, both)


# ---- the whole test set ----------------------------------------------------------------------------------------------


class _Entries(NamedTuple):
    """All test sentences as columns."""

    source: Ints  # keys
    target: Ints
    short: Flags
    line: Ints

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> _Entries:
        source, target = fold_pairs(pairs)
        fewest = np.minimum(_sizes(source), _sizes(target))
        lines = np.fromiter((pair.line for pair in pairs), np.int64, len(pairs))
        return cls(source.key, target.key, fewest < SHORT, lines)


def _sizes(folded: Folded) -> Ints:
    line, _ = different_words(folded, folded.word & (_UNKNOWN - 1))
    return np.bincount(line, minlength=len(folded.key))


class Against:
    """A test set that training data is held against: `look` at chunks of it, then ask what was `found`."""

    def __init__(self, test: Iterable[Pair | Bad]) -> None:
        self.pairs: list[Pair] = []  # the first MOST
        self.no_pairs = 0  # lines and units that are none
        self._files: list[tuple[int, str]] = []  # from which sentence on they are of which file
        columns = [_Entries.of([]), *self._read(test)]
        self._entries = _Entries(*(np.concatenate(column) for column in zip(*columns, strict=True)))
        self._equals = {
            "pair": Equals(joined(self._entries.source, self._entries.target)),
            "source": Equals(self._entries.source),
            "target": Equals(self._entries.target),
        }
        source, target = fold_pairs(self.pairs)
        self._near = {"near source": Index(source), "near target": Index(target)}

    def _read(self, test: Iterable[Pair | Bad]) -> Iterator[_Entries]:
        pairs, read = self._good(test), 0
        while chunk := list(islice(pairs, CHUNK)):
            self.pairs += chunk[: MOST - len(self.pairs)]
            for i, pair in enumerate(chunk, start=read):
                if not self._files or self._files[-1][1] != pair.file:
                    self._files.append((i, pair.file))
            read += len(chunk)
            yield _Entries.of(chunk)

    def _good(self, test: Iterable[Pair | Bad]) -> Iterator[Pair]:
        for entry in test:
            if isinstance(entry, Pair):
                yield entry
            else:
                self.no_pairs += 1

    def __len__(self) -> int:
        return len(self._entries.line)

    def look(self, train: Sequence[Pair], folded: tuple[Folded, Folded] | None = None) -> None:
        """Hold the next lines of the training data against the test set; `folded` is `fold_pairs` of them, if known."""
        if not train or not len(self):
            return
        source, target = folded or fold_pairs(train)
        self._equals["pair"].look(train, joined(source.key, target.key))
        self._equals["source"].look(train, source.key)
        self._equals["target"].look(train, target.key)
        self._near["near source"].look(train, source)
        self._near["near target"].look(train, target)

    def found(self, examples: int = 2) -> Leakage:
        """What was found up to now, with so many examples of each kind."""
        kinds = self._kinds()
        counted = kinds[~self._entries.short]
        counts = {kind: int((counted == i).sum()) for i, kind in enumerate(KINDS)}
        return Leakage(
            sentences=len(self),
            near_sought=len(self.pairs),
            pair=counts["pair"],
            source=counts["source"],
            target=counts["target"],
            near=counts["near source"] + counts["near target"],
            short=int((kinds[self._entries.short] < len(KINDS)).sum()),
            uncompared=max(index.uncompared for index in self._near.values()),
            twins=tuple(twin for kind in KINDS for twin in islice(self._twins(kind, kinds), examples)),
        )

    def _kinds(self) -> Ints:
        """Of each test sentence: the place of its closest kind in KINDS, or behind them all."""
        kinds = np.full(len(self), len(KINDS))
        for i, kind in reversed(list(enumerate(KINDS))):
            kinds[self._met(kind)] = i
        return kinds

    def _met(self, kind: str) -> Ints:
        if kind in self._equals:
            return np.flatnonzero(self._equals[kind].met())
        index = self._near[kind]
        return np.flatnonzero(index.overlap[index.of])

    def _twins(self, kind: str, kinds: Ints) -> Iterator[Twin]:
        """Examples of a kind, the closest first."""
        mine = np.flatnonzero((kinds == KINDS.index(kind)) & ~self._entries.short)
        if kind in self._equals:
            firsts = ((i, self._equals[kind].first(i)) for i in mine.tolist())
            yield from (Twin(kind, self._sentence(i, train), train, 1.0) for i, train in firsts if train)
            return
        index = self._near[kind]
        for i in mine[np.argsort(-index.overlap[index.of[mine]], kind="stable")].tolist():
            text = int(index.of[i])
            yield Twin(kind, self.pairs[i], index.closest[text], float(index.overlap[text]))

    def _sentence(self, i: int, train: Pair) -> Pair:
        """Test sentence i. Of one behind the first MOST only the place is kept: its words are those of its twin."""
        if i < len(self.pairs):
            return self.pairs[i]
        file = next(name for start, name in reversed(self._files) if start <= i)
        return Pair(train.source, train.target, file, int(self._entries.line[i]))
