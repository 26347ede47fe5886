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

from attent.data.filters import combine_keys
from attent.data.pairs import BadLine, Pair
from attent.text import scripts

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

NEAR_THRESHOLD = 0.7  # of the words of both together are shared
MIN_WORDS = 4  # a sentence of fewer words ("Yes.", "Thank you.") is expected to come again
MIN_NEAR_WORDS = 6  # below this, "near" would mean a single common word more or less
MAX_NEAR_SENTENCES = 20_000  # test sentences whose near twins are looked for; twins word for word are found for all
MAX_NEAR_MATCHES = 50  # lines near to a test sentence, after which no closer one is looked for
CHUNK_SENTENCES = 5_000  # test sentences that are read together
COMPARISONS_PER_SLICE = 1 << 19  # comparisons that are made at once: some 50 MB
MAX_COMPARISONS = (
    1 << 24
)  # comparisons for a chunk of lines: some two seconds; speeches against 20,000 others take a third

MATCH_KINDS = ("pair", "source", "target", "near source", "near target")


@dataclass(frozen=True)
class ContaminationMatch:
    """A test sentence and a line of the training data that equals it, or one of the closest to it."""

    kind: str  # one of KINDS
    test: Pair
    train: Pair
    overlap: float  # share of the words that both have, 1 where they are the same


@dataclass(frozen=True)
class Contamination:
    """How many test sentences have a twin in the training data; each is counted once, by its closest."""

    sentences: int  # of the test set
    near_checked: int  # of these, from the first on: those whose near twins were looked for
    same_pair: int = 0  # the same on both sides
    same_source: int = 0  # the same source, with another translation
    same_target: int = 0  # the same target, of another source
    near_duplicates: int = 0  # nearly the same on one of the sides
    short_matches: int = (
        0  # sentences of three words or less that came again: expected, and in none of the counts above
    )
    uncompared_lines: int = (
        0  # lines of the training data that met too many test sentences to seek near twins among them
    )
    matches: tuple[ContaminationMatch, ...] = field(default=(), repr=False)  # examples, the closest first

    @property
    def exact_matches(self) -> int:
        return self.same_pair + self.same_source + self.same_target


# ---- words -----------------------------------------------------------------------------------------------------------

_UNSPACED_RUN = re.compile(
    "[" + "".join(scripts.SCRIPT_LETTERS[code] for code in sorted(scripts.UNSPACED_SCRIPTS)) + "]+"
)
_FIRST_UNSPACED_CODE = 0x0E00  # Thai; no script without spaces stands before it
_NEWLINE_HASH = hash("\n")


@cache
def _fold_table() -> npt.NDArray[np.uint32]:
    """What each character becomes: a space, where it is punctuation, a symbol or a space; else itself."""
    table = np.arange(0x110000, dtype="<u4")
    for place in (range(0x3100), range(0xFE10, 0xFFF0), range(0x1F000, 0x1FB00)):
        table[[code for code in place if unicodedata.category(chr(code))[0] in "PSZC" and code != ord("\n")]] = 32
    return table


def fold_texts(texts: Sequence[str]) -> str:
    """A line for each text: its words in small letters, with spaces in the place of punctuation.

    All texts in one go and by way of numpy, since that costs a third of working on each string.
    """
    whole = "\n".join(texts)
    if whole.count("\n") >= max(len(texts), 1):  # a text has line ends of its own
        whole = "\n".join([text.replace("\n", " ") for text in texts])
    codes = np.frombuffer(whole.casefold().encode("utf-32-le", "surrogatepass"), "<u4")
    codes = _fold_table()[codes]
    whole = codes.tobytes().decode("utf-32-le", "surrogatepass")
    return _UNSPACED_RUN.sub(_split_bigrams, whole) if codes.max(initial=0) >= _FIRST_UNSPACED_CODE else whole


class FoldedTexts(NamedTuple):
    """Texts as they are compared: a key for each, and their words, each as its line and its hash."""

    keys: IntArray  # equal texts have equal keys, spaces aside; 0 where nothing is left to compare
    lines: IntArray
    word_hashes: IntArray

    def select_lines(self, lines: IntArray) -> FoldedTexts:
        """With words of these lines alone."""
        kept = np.zeros(len(self.keys), dtype=bool)
        kept[lines] = True
        inside = kept[self.lines]
        return FoldedTexts(self.keys, self.lines[inside], self.word_hashes[inside])

    def hash_word_bags(self) -> IntArray:
        """A key for each line that those with the same words share, in whatever order: the sum of their hashes."""
        sums = np.concatenate([[0], np.cumsum(self.word_hashes)])  # wraps around, as it should
        return np.diff(sums[np.searchsorted(self.lines, np.arange(len(self.keys) + 1))])


def fold_words(texts: Sequence[str]) -> FoldedTexts:
    text = fold_texts(texts)
    key = np.fromiter(map(hash, text.replace(" ", "").split("\n")), np.int64)[: len(texts)]  # hash("") is 0
    hashes = np.fromiter(map(hash, text.replace("\n", " \n ").split(" ")), np.int64)
    ends = hashes == _NEWLINE_HASH
    real = ~ends & (hashes != 0)
    return FoldedTexts(key, np.cumsum(ends)[real], hashes[real])


def fold_pairs(pairs: Sequence[Pair]) -> tuple[FoldedTexts, FoldedTexts]:
    return fold_words([pair.source for pair in pairs]), fold_words([pair.target for pair in pairs])


def _split_bigrams(run: re.Match[str]) -> str:
    """Words of a script without spaces are not known: pairs of neighbours stand for them."""
    text = run[0]
    return f" {' '.join(text[i : i + 2] for i in range(max(len(text) - 1, 1)))} "


def number_unique(keys: IntArray) -> tuple[IntArray, IntArray]:
    """Numbers for the different keys, as they come up: the number at each place, and the first place of each number."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], first[order]


# ---- near twins ------------------------------------------------------------------------------------------------------

_LINE_SHIFT, _UNKNOWN_WORD = (
    47,
    1 << 46,
)  # of a word in a line: the line above, "not in the test set", and 46 bits of hash


class NearMatches(NamedTuple):
    """Line i of a chunk is near to test sentence j: three columns of the same length."""

    lines: IntArray
    texts: IntArray
    overlaps: FloatArray


class _ChunkWords(NamedTuple):
    """The different words of a chunk, line by line: those of the test set first, from the rarest, then the others."""

    lines: IntArray
    ranks: IntArray  # how rare in the test set, from 0; _UNKNOWN or more where it is not there
    sizes: IntArray  # of each line: different words
    known_counts: IntArray  # of each line: those among them that the test set has
    positions: IntArray  # where the word stands in its line, unknown words counted first: they are the rarest of all

    def select_probes(self) -> _ChunkWords:
        """The rarest of each line alone: in one of them every test sentence near to it must meet it."""
        rare = (self.ranks < _UNKNOWN_WORD) & (self.positions < prefix_length(self.sizes)[self.lines])
        return _ChunkWords(self.lines[rare], self.ranks[rare], self.sizes, self.known_counts, self.positions[rare])


def prefix_length(sizes: IntArray) -> IntArray:
    """So many of the rarest words of a set must hold one that a set near it has among its own rarest."""
    return sizes - np.ceil(NEAR_THRESHOLD * sizes - 1e-9).astype(np.int64) + 1


def unique_words(folded: FoldedTexts, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """(line, rank) of every word, without repeats in a line, sorted."""
    keys = folded.lines << _LINE_SHIFT | ranks
    keys.sort()
    keys = keys[np.diff(keys, prepend=-1) != 0]  # np.unique would do the same, three times as slowly
    return keys >> _LINE_SHIFT, keys & ((1 << _LINE_SHIFT) - 1)


def positions_in_line(sizes: IntArray, lines: IntArray) -> IntArray:
    """Where each of the sorted words stands in its line."""
    return np.arange(len(lines)) - (np.cumsum(sizes) - sizes)[lines]


def expand_counts(counts: IntArray) -> tuple[IntArray, IntArray]:
    """`counts[i]` entries for each i: the i of every entry, and its place among those of the same i."""
    origin = np.repeat(np.arange(len(counts)), counts)
    return origin, positions_in_line(counts, origin)


def iter_slices(counts: IntArray, max_total: int) -> Iterator[slice]:
    """Neighbours whose counts together are `most` or less; but one by itself may be more."""
    ends, start = np.cumsum(counts), 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + max_total, "right")))
        yield slice(start, stop)
        start = stop


class NearDuplicateIndex:
    """The different texts of one side of the test set, numbered as they come up: finds the lines near to each."""

    def __init__(self, folded: FoldedTexts) -> None:
        self.text_ids, first = number_unique(folded.hash_word_bags())  # sentence -> its text
        self.uncompared_lines = 0  # lines that there was too much to compare with
        self.best_overlaps = np.zeros(len(first))  # of the closest line up to now
        self.closest_lines: dict[int, Pair] = {}
        self._match_counts = np.zeros(len(first), np.int64)  # lines that came near to it
        folded = folded.select_lines(first)
        word, first_word = number_unique(folded.word_hashes)
        _, rank = unique_words(folded, word)
        by_rarity = np.argsort(np.bincount(rank, minlength=len(first_word)), kind="stable")
        ranks = np.empty_like(by_rarity)
        ranks[by_rarity] = np.arange(len(by_rarity))
        hashes = folded.word_hashes[first_word][by_rarity]
        self._hash_order = np.argsort(hashes)  # place in `_hashes` -> rank
        self._hashes = hashes[self._hash_order]
        line, rank = unique_words(folded, ranks[word])
        self._build_postings(self.text_ids[line], rank)

    def _build_postings(self, test: IntArray, rank: IntArray) -> None:
        """For each word the texts that have it among their rarest, and where; and all (text, word) that there are."""
        self._sizes = np.bincount(test, minlength=len(self.best_overlaps))
        self._memberships = test * len(self._hashes) + rank
        place = positions_in_line(self._sizes, test)
        rare = (self._sizes[test] >= MIN_NEAR_WORDS) & (place < prefix_length(self._sizes)[test])
        order = np.argsort(rank[rare], kind="stable")
        self._posting_ranks, self._posting_texts, self._posting_positions = (
            rank[rare][order],
            test[rare][order],
            place[rare][order],
        )
        self._posting_starts = np.searchsorted(self._posting_ranks, np.arange(len(self._hashes) + 1))

    def update(self, train: Sequence[Pair], folded: FoldedTexts) -> None:
        """Note the lines that are closer to a test sentence than any before."""
        for near in self.find_near(folded):
            best = np.lexsort((near.lines, -near.overlaps, near.texts))
            best = best[np.diff(near.texts[best], prepend=-1) != 0]  # the closest to each test sentence, and the first
            best = best[near.overlaps[best] > self.best_overlaps[near.texts[best]]]
            self.best_overlaps[near.texts[best]] = near.overlaps[best]
            for line, test in zip(near.lines[best].tolist(), near.texts[best].tolist(), strict=True):
                self.closest_lines[test] = train[line]

    def find_near(self, folded: FoldedTexts) -> Iterator[NearMatches]:
        """Every line that shares enough of its words with a test sentence, some at a time; of equal lines the first."""
        words = self._rank_words(folded.select_lines(number_unique(folded.hash_word_bags())[1]))
        probes = words.select_probes()
        costs = np.bincount(
            probes.lines, weights=self._count_postings(probes.ranks), minlength=len(folded.keys)
        ).astype(np.int64)
        work = 0
        for cut in iter_slices(costs, COMPARISONS_PER_SLICE):
            if work > MAX_COMPARISONS:
                self.uncompared_lines += int(np.count_nonzero(costs[cut.start :]))
                return
            start, stop = np.searchsorted(probes.lines, (cut.start, cut.stop))
            line, test = self._find_candidates(probes, slice(int(start), int(stop)))
            work += int(self._count_postings(probes.ranks[start:stop]).sum() + words.known_counts[line].sum())
            near = self._compare_candidates(words, line, test)
            self._retire_matched(near)
            yield near

    def _count_postings(self, rank: IntArray) -> IntArray:
        return self._posting_starts[rank + 1] - self._posting_starts[rank]

    def _rank_words(self, folded: FoldedTexts) -> _ChunkWords:
        line, rank = unique_words(folded, self._look_up_ranks(folded.word_hashes))
        size = np.bincount(line, minlength=len(folded.keys))
        known = np.bincount(line[rank < _UNKNOWN_WORD], minlength=len(folded.keys))
        return _ChunkWords(line, rank, size, known, positions_in_line(size, line) + (size - known)[line])

    def _look_up_ranks(self, hashes: IntArray) -> IntArray:
        """The rank of each word; one that the test set does not have is told apart from others by its hash."""
        unknown = hashes & (_UNKNOWN_WORD - 1) | _UNKNOWN_WORD
        if not len(self._hashes):
            return unknown
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return np.where(self._hashes[at] == hashes, self._hash_order[at], unknown)

    def _find_candidates(self, probes: _ChunkWords, part: slice) -> tuple[IntArray, IntArray]:
        """(line, test sentence) that meet in their rarest words and could share enough, by size and place."""
        rank, line, place = probes.ranks[part], probes.lines[part], probes.positions[part]
        origin, inside = expand_counts(self._count_postings(rank))
        posting = self._posting_starts[rank][origin] + inside
        test, line = self._posting_texts[posting], line[origin]
        # The first word in which they meet tells the most that they can share: itself, and all behind it on a side.
        # Later ones tell less, so that one word that leaves it possible is enough.
        size, other = probes.sizes[line], self._sizes[test]
        left = np.minimum(size - place[origin], other - self._posting_positions[posting])
        possible = left >= (size + other) * (NEAR_THRESHOLD / (1 + NEAR_THRESHOLD)) - 1e-6
        pairs = np.unique(line[possible] * len(self.best_overlaps) + test[possible])
        return pairs // len(self.best_overlaps), pairs % len(self.best_overlaps)

    def _compare_candidates(self, words: _ChunkWords, line: IntArray, test: IntArray) -> NearMatches:
        """Those candidates that do share enough."""
        shared = [
            self._count_shared(words, line[cut], test[cut])
            for cut in iter_slices(words.known_counts[line], COMPARISONS_PER_SLICE)
        ]
        both = np.concatenate(shared) if shared else np.zeros(0, np.int64)
        overlap = both / np.maximum(words.sizes[line] + self._sizes[test] - both, 1)
        enough = overlap >= NEAR_THRESHOLD
        return NearMatches(line[enough], test[enough], overlap[enough])

    def _count_shared(self, words: _ChunkWords, line: IntArray, test: IntArray) -> IntArray:
        """How many words each candidate has in common."""
        origin, inside = expand_counts(words.known_counts[line])
        rank = words.ranks[(np.cumsum(words.sizes) - words.sizes)[line][origin] + inside]
        sought = test[origin] * len(self._hashes) + rank
        at = np.minimum(np.searchsorted(self._memberships, sought), len(self._memberships) - 1)
        return np.bincount(origin, weights=self._memberships[at] == sought, minlength=len(line)).astype(np.int64)

    def _retire_matched(self, near: NearMatches) -> None:
        """Look no longer for a test sentence that was found whole, or often enough."""
        before = self._match_counts >= MAX_NEAR_MATCHES
        np.add.at(self._match_counts, near.texts, 1)
        self._match_counts[near.texts[near.overlaps == 1]] = MAX_NEAR_MATCHES
        if ((self._match_counts >= MAX_NEAR_MATCHES) & ~before).any():
            kept = self._match_counts[self._posting_texts] < MAX_NEAR_MATCHES
            self._posting_ranks, self._posting_texts, self._posting_positions = (
                self._posting_ranks[kept],
                self._posting_texts[kept],
                self._posting_positions[kept],
            )
            self._posting_starts = np.searchsorted(self._posting_ranks, np.arange(len(self._posting_starts)))


# ---- equal texts -----------------------------------------------------------------------------------------------------


class ExactIndex:
    """The different keys of a test set of any size: which of them came in the training data."""

    def __init__(self, keys: IntArray) -> None:
        self._keys, self._key_ids = np.unique(keys, return_inverse=True)
        self._matched = np.zeros(len(self._keys), dtype=bool)
        self._first_lines: dict[int, Pair] = {}  # the line in which a key came first: of so many keys as are ever shown

    def update(self, train: Sequence[Pair], keys: IntArray) -> None:
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        met, line = np.unique(np.where((self._keys[at] == keys) & (keys != 0), at, -1), return_index=True)
        new = (met >= 0) & ~self._matched[met]
        self._matched[met[new]] = True
        for i, place in zip(met[new].tolist(), line[new].tolist(), strict=True):
            if len(self._first_lines) < MAX_NEAR_SENTENCES:
                self._first_lines[i] = train[place]

    def matched_mask(self) -> BoolArray:
        """Of each test sentence: did it come?"""
        return self._matched[self._key_ids]

    def first_line(self, sentence: int) -> Pair | None:
        return self._first_lines.get(int(self._key_ids[sentence]))


def combine_pair_keys(source: IntArray, target: IntArray) -> IntArray:
    """A key for both sides together, 0 where one of them is empty."""
    both = combine_keys(source.view(np.uint64), target.view(np.uint64)).view(np.int64)
    return np.where((source == 0) | (target == 0), 0, both)


# ---- the whole test set ----------------------------------------------------------------------------------------------


class _SentenceColumns(NamedTuple):
    """All test sentences as columns."""

    source_keys: IntArray  # keys
    target_keys: IntArray
    is_short: BoolArray
    lines: IntArray

    @classmethod
    def from_pairs(cls, pairs: Sequence[Pair]) -> _SentenceColumns:
        source, target = fold_pairs(pairs)
        fewest = np.minimum(_count_unique_words(source), _count_unique_words(target))
        lines = np.fromiter((pair.line for pair in pairs), np.int64, len(pairs))
        return cls(source.keys, target.keys, fewest < MIN_WORDS, lines)


def _count_unique_words(folded: FoldedTexts) -> IntArray:
    line, _ = unique_words(folded, folded.word_hashes & (_UNKNOWN_WORD - 1))
    return np.bincount(line, minlength=len(folded.keys))


class ContaminationChecker:
    """A test set that training data is held against: `look` at chunks of it, then ask what was `found`."""

    def __init__(self, test: Iterable[Pair | BadLine]) -> None:
        self.pairs: list[Pair] = []  # the first MOST
        self.bad_lines = 0  # lines and units that are none
        self._file_starts: list[tuple[int, str]] = []  # from which sentence on they are of which file
        columns = [_SentenceColumns.from_pairs([]), *self._read_chunks(test)]
        self._sentences = _SentenceColumns(*(np.concatenate(column) for column in zip(*columns, strict=True)))
        self._exact = {
            "pair": ExactIndex(combine_pair_keys(self._sentences.source_keys, self._sentences.target_keys)),
            "source": ExactIndex(self._sentences.source_keys),
            "target": ExactIndex(self._sentences.target_keys),
        }
        source, target = fold_pairs(self.pairs)
        self._near = {"near source": NearDuplicateIndex(source), "near target": NearDuplicateIndex(target)}

    def _read_chunks(self, test: Iterable[Pair | BadLine]) -> Iterator[_SentenceColumns]:
        pairs, read = self._iter_pairs(test), 0
        while chunk := list(islice(pairs, CHUNK_SENTENCES)):
            self.pairs += chunk[: MAX_NEAR_SENTENCES - len(self.pairs)]
            for i, pair in enumerate(chunk, start=read):
                if not self._file_starts or self._file_starts[-1][1] != pair.file:
                    self._file_starts.append((i, pair.file))
            read += len(chunk)
            yield _SentenceColumns.from_pairs(chunk)

    def _iter_pairs(self, test: Iterable[Pair | BadLine]) -> Iterator[Pair]:
        for entry in test:
            if isinstance(entry, Pair):
                yield entry
            else:
                self.bad_lines += 1

    def __len__(self) -> int:
        return len(self._sentences.lines)

    def update(self, train: Sequence[Pair], folded: tuple[FoldedTexts, FoldedTexts] | None = None) -> None:
        """Hold the next lines of the training data against the test set; `folded` is `fold_pairs` of them, if known."""
        if not train or not len(self):
            return
        source, target = folded or fold_pairs(train)
        self._exact["pair"].update(train, combine_pair_keys(source.keys, target.keys))
        self._exact["source"].update(train, source.keys)
        self._exact["target"].update(train, target.keys)
        self._near["near source"].update(train, source)
        self._near["near target"].update(train, target)

    def compute(self, examples: int = 2) -> Contamination:
        """What was found up to now, with so many examples of each kind."""
        kinds = self._closest_kinds()
        counted = kinds[~self._sentences.is_short]
        counts = {kind: int((counted == i).sum()) for i, kind in enumerate(MATCH_KINDS)}
        return Contamination(
            sentences=len(self),
            near_checked=len(self.pairs),
            same_pair=counts["pair"],
            same_source=counts["source"],
            same_target=counts["target"],
            near_duplicates=counts["near source"] + counts["near target"],
            short_matches=int((kinds[self._sentences.is_short] < len(MATCH_KINDS)).sum()),
            uncompared_lines=max(index.uncompared_lines for index in self._near.values()),
            matches=tuple(twin for kind in MATCH_KINDS for twin in islice(self._iter_matches(kind, kinds), examples)),
        )

    def _closest_kinds(self) -> IntArray:
        """Of each test sentence: the place of its closest kind in KINDS, or behind them all."""
        kinds = np.full(len(self), len(MATCH_KINDS))
        for i, kind in reversed(list(enumerate(MATCH_KINDS))):
            kinds[self._matched_sentences(kind)] = i
        return kinds

    def _matched_sentences(self, kind: str) -> IntArray:
        if kind in self._exact:
            return np.flatnonzero(self._exact[kind].matched_mask())
        index = self._near[kind]
        return np.flatnonzero(index.best_overlaps[index.text_ids])

    def _iter_matches(self, kind: str, kinds: IntArray) -> Iterator[ContaminationMatch]:
        """Examples of a kind, the closest first."""
        mine = np.flatnonzero((kinds == MATCH_KINDS.index(kind)) & ~self._sentences.is_short)
        if kind in self._exact:
            firsts = ((i, self._exact[kind].first_line(i)) for i in mine.tolist())
            yield from (
                ContaminationMatch(kind, self._get_sentence(i, train), train, 1.0) for i, train in firsts if train
            )
            return
        index = self._near[kind]
        for i in mine[np.argsort(-index.best_overlaps[index.text_ids[mine]], kind="stable")].tolist():
            text = int(index.text_ids[i])
            yield ContaminationMatch(kind, self.pairs[i], index.closest_lines[text], float(index.best_overlaps[text]))

    def _get_sentence(self, i: int, train: Pair) -> Pair:
        """Test sentence i. Of one behind the first MOST only the place is kept: its words are those of its twin."""
        if i < len(self.pairs):
            return self.pairs[i]
        file = next(name for start, name in reversed(self._file_starts) if start <= i)
        return Pair(train.source, train.target, file, int(self._sentences.lines[i]))
