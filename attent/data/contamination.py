"""Test set contamination: which test sentences occur in the training data, exactly or nearly.

Texts are compared by their words, case-folded and without punctuation; scripts without spaces by character bigrams.
Near duplicates share 70% of all their words (Jaccard index). The test set is indexed and the training data streamed in
chunks, at some ten microseconds a line. Equal texts are found by a 64-bit hash, cheaply for test sets of any size. The
rarest words of near duplicates must have one in common (the prefix filter of Chaudhuri, Ganti and Kaushik 2006), so
that few test sentences are compared in full.

Template text ("Open file 17") would still make everything a candidate of everything. So equal lines are compared once
per chunk, a test sentence with many near duplicates is retired, and the comparisons per chunk are limited. Only the
limit can miss a match: the lines that were not compared are counted.
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

from attent.data.arrays import concatenate_ranges, index_in_group, search_sorted
from attent.data.filters import combine_keys
from attent.data.pairs import BadLine, Pair
from attent.text import scripts

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

NEAR_THRESHOLD = 0.7  # Jaccard index of near duplicates
MIN_WORDS = 4  # shorter sentences ("Yes.", "Thank you.") are expected to recur
MIN_NEAR_WORDS = 6  # with fewer, a near duplicate could differ in its only important word
MAX_NEAR_SENTENCES = 20_000  # test sentences with a search for near duplicates; exact ones are found for all
MAX_NEAR_MATCHES = 50  # near duplicates of a test sentence, after which it is retired
CHUNK_SENTENCES = 5_000  # test sentences read together
COMPARISONS_PER_SLICE = 1 << 19  # some 50 MB
MAX_COMPARISONS = 1 << 24  # per chunk of lines, some two seconds; speeches against 20,000 others take a third

MATCH_KINDS = ("pair", "source", "target", "near source", "near target")


@dataclass(frozen=True)
class ContaminationMatch:
    """A test sentence and an equal or near-duplicate training line."""

    kind: str  # one of MATCH_KINDS
    test: Pair
    train: Pair
    overlap: float  # Jaccard index of the words


@dataclass(frozen=True)
class Contamination:
    """Counts of contaminated test sentences, each counted once by its closest match."""

    sentences: int  # of the test set
    near_checked: int  # the first of these, with a search for near duplicates
    same_pair: int = 0
    same_source: int = 0  # with another target
    same_target: int = 0  # with another source
    near_duplicates: int = 0  # on one of the sides
    short_matches: int = 0  # of three words or less: expected, and in none of the counts above
    uncompared_lines: int = 0  # training lines with too many candidates
    matches: tuple[ContaminationMatch, ...] = field(default=(), repr=False)  # examples, the closest first

    @property
    def exact_matches(self) -> int:
        return self.same_pair + self.same_source + self.same_target


# ---- words -----------------------------------------------------------------------------------------------------------

_UNSPACED_LETTERS = "".join(scripts.SCRIPT_LETTERS[code] for code in sorted(scripts.UNSPACED_SCRIPTS))
_UNSPACED_RUN = re.compile(f"[{_UNSPACED_LETTERS}]+")
_FIRST_UNSPACED_CODE = 0x0E00  # Thai, the first script without spaces
_NEWLINE_HASH = hash("\n")


@cache
def _fold_table() -> npt.NDArray[np.uint32]:
    """Return a table from code point to code point that maps punctuation, symbols and separators to a space."""
    table = np.arange(0x110000, dtype="<u4")
    for block in (range(0x3100), range(0xFE10, 0xFFF0), range(0x1F000, 0x1FB00)):
        table[[code for code in block if unicodedata.category(chr(code))[0] in "PSZC" and code != ord("\n")]] = 32
    return table


def fold_texts(texts: Sequence[str]) -> str:
    """Return one line per text: its case-folded words, with spaces instead of punctuation.

    All texts at once with NumPy, in a third of the time of single strings.
    """
    joined = "\n".join(texts)
    if joined.count("\n") >= max(len(texts), 1):  # a text contains newlines
        joined = "\n".join([text.replace("\n", " ") for text in texts])
    codes = np.frombuffer(joined.casefold().encode("utf-32-le", "surrogatepass"), "<u4")
    codes = _fold_table()[codes]
    folded = codes.tobytes().decode("utf-32-le", "surrogatepass")
    return _UNSPACED_RUN.sub(_split_bigrams, folded) if codes.max(initial=0) >= _FIRST_UNSPACED_CODE else folded


class FoldedTexts(NamedTuple):
    """Texts prepared for comparison: a key per text, and for each word its line and hash."""

    keys: IntArray  # equal for texts that are equal except for spaces; 0 for empty ones
    lines: IntArray
    word_hashes: IntArray

    def select_lines(self, lines: IntArray) -> FoldedTexts:
        is_selected = np.zeros(len(self.keys), dtype=bool)
        is_selected[lines] = True
        mask = is_selected[self.lines]
        return FoldedTexts(self.keys, self.lines[mask], self.word_hashes[mask])

    def hash_word_bags(self) -> IntArray:
        """Return a key per line that lines with the same words in any order share: the sum of the word hashes."""
        sums = np.concatenate([[0], np.cumsum(self.word_hashes)])  # modulo 2**64
        return np.diff(sums[np.searchsorted(self.lines, np.arange(len(self.keys) + 1))])


def fold_words(texts: Sequence[str]) -> FoldedTexts:
    folded = fold_texts(texts)
    keys = np.fromiter(map(hash, folded.replace(" ", "").split("\n")), np.int64)[: len(texts)]  # hash("") is 0
    hashes = np.fromiter(map(hash, folded.replace("\n", " \n ").split(" ")), np.int64)
    is_newline = hashes == _NEWLINE_HASH
    is_word = ~is_newline & (hashes != 0)
    return FoldedTexts(keys, np.cumsum(is_newline)[is_word], hashes[is_word])


def fold_pairs(pairs: Sequence[Pair]) -> tuple[FoldedTexts, FoldedTexts]:
    return fold_words([pair.source for pair in pairs]), fold_words([pair.target for pair in pairs])


def _split_bigrams(run: re.Match[str]) -> str:
    """Split text of a script without spaces into overlapping bigrams, in place of words."""
    text = run[0]
    return f" {' '.join(text[i : i + 2] for i in range(max(len(text) - 1, 1)))} "


def number_unique(keys: IntArray) -> tuple[IntArray, IntArray]:
    """Number unique keys in order of occurrence; return the number of each key and the first index of each number."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    numbers = np.empty_like(order)
    numbers[order] = np.arange(len(order))
    return numbers[inverse], first[order]


# ---- near duplicates -------------------------------------------------------------------------------------------------

# A word in a line as one integer: the line above bit 47, a flag for words not in the test set, and 46 bits of hash.
_LINE_SHIFT, _UNKNOWN_WORD = 47, 1 << 46


class NearMatches(NamedTuple):
    """Training line `lines[i]` is a near duplicate of test text `texts[i]`."""

    lines: IntArray
    texts: IntArray
    overlaps: FloatArray


class _ChunkWords(NamedTuple):
    """The unique words of a chunk, line by line: those of the test set first, from the rarest, then the others."""

    lines: IntArray
    ranks: IntArray  # by rarity in the test set, from 0; _UNKNOWN_WORD or more if not in it
    sizes: IntArray  # per line: unique words
    known_counts: IntArray  # per line: those in the test set
    positions: IntArray  # within the line, counting unknown words first: they are the rarest

    def select_probes(self) -> _ChunkWords:
        """Keep the rarest words of each line: every near duplicate in the test set contains one of them."""
        mask = (self.ranks < _UNKNOWN_WORD) & (self.positions < prefix_length(self.sizes)[self.lines])
        return _ChunkWords(self.lines[mask], self.ranks[mask], self.sizes, self.known_counts, self.positions[mask])


def prefix_length(sizes: IntArray) -> IntArray:
    """Return how many of the rarest words of two near-duplicate sets must have one in common."""
    return sizes - np.ceil(NEAR_THRESHOLD * sizes - 1e-9).astype(np.int64) + 1


def unique_words(folded: FoldedTexts, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """Return (line, rank) of every word, sorted, without repetitions in a line."""
    keys = folded.lines << _LINE_SHIFT | ranks
    keys.sort()
    keys = keys[np.diff(keys, prepend=-1) != 0]  # np.unique is three times as slow
    return keys >> _LINE_SHIFT, keys & ((1 << _LINE_SHIFT) - 1)


def iter_slices(counts: IntArray, max_total: int) -> Iterator[slice]:
    """Yield slices whose counts add up to `max_total` at most; a single larger count is a slice of its own."""
    ends, start = np.cumsum(counts), 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + max_total, "right")))
        yield slice(start, stop)
        start = stop


class NearDuplicateIndex:
    """Inverted index of the unique texts of one side of the test set; finds near-duplicate training lines."""

    def __init__(self, folded: FoldedTexts) -> None:
        self.text_ids, first = number_unique(folded.hash_word_bags())  # of each sentence
        self.uncompared_lines = 0
        self.best_overlaps = np.zeros(len(first))  # of the closest line so far
        self.closest_lines: dict[int, Pair] = {}
        self._match_counts = np.zeros(len(first), np.int64)
        folded = folded.select_lines(first)
        words, first_word = number_unique(folded.word_hashes)
        _, word_ids = unique_words(folded, words)
        by_rarity = np.argsort(np.bincount(word_ids, minlength=len(first_word)), kind="stable")
        ranks = np.empty_like(by_rarity)
        ranks[by_rarity] = np.arange(len(by_rarity))
        hashes = folded.word_hashes[first_word][by_rarity]
        self._hash_order = np.argsort(hashes)  # index in `_hashes` -> rank
        self._hashes = hashes[self._hash_order]
        lines, line_ranks = unique_words(folded, ranks[words])
        texts = self.text_ids[lines]
        self._sizes = np.bincount(texts, minlength=len(self.best_overlaps))
        self._memberships = texts * len(self._hashes) + line_ranks
        # For each word the texts that have it among their rarest:
        positions = index_in_group(self._sizes)
        is_prefix = (self._sizes[texts] >= MIN_NEAR_WORDS) & (positions < prefix_length(self._sizes)[texts])
        self._posting_ranks, self._posting_texts, self._posting_positions = line_ranks, texts, positions
        self._select_postings(np.flatnonzero(is_prefix)[np.argsort(line_ranks[is_prefix], kind="stable")])

    def _select_postings(self, selection: IntArray | BoolArray) -> None:
        self._posting_ranks = self._posting_ranks[selection]
        self._posting_texts = self._posting_texts[selection]
        self._posting_positions = self._posting_positions[selection]
        self._posting_starts = np.searchsorted(self._posting_ranks, np.arange(len(self._hashes) + 1))

    def update(self, train: Sequence[Pair], folded: FoldedTexts) -> None:
        """Record the lines that are closer to a test sentence than all before."""
        for near in self.find_near(folded):
            best = np.lexsort((near.lines, -near.overlaps, near.texts))
            best = best[np.diff(near.texts[best], prepend=-1) != 0]  # the first of the closest to each text
            best = best[near.overlaps[best] > self.best_overlaps[near.texts[best]]]
            self.best_overlaps[near.texts[best]] = near.overlaps[best]
            for line, text in zip(near.lines[best].tolist(), near.texts[best].tolist(), strict=True):
                self.closest_lines[text] = train[line]

    def find_near(self, folded: FoldedTexts) -> Iterator[NearMatches]:
        """Yield all near duplicates, some at a time; of equal lines the first."""
        words = self._rank_words(folded.select_lines(number_unique(folded.hash_word_bags())[1]))
        probes = words.select_probes()
        weights = self._count_postings(probes.ranks)
        costs = np.bincount(probes.lines, weights=weights, minlength=len(folded.keys)).astype(np.int64)
        comparisons = 0
        for lines in iter_slices(costs, COMPARISONS_PER_SLICE):
            if comparisons > MAX_COMPARISONS:
                self.uncompared_lines += int(np.count_nonzero(costs[lines.start :]))
                return
            start, stop = np.searchsorted(probes.lines, (lines.start, lines.stop))
            line, text = self._find_candidates(probes, slice(int(start), int(stop)))
            comparisons += int(self._count_postings(probes.ranks[start:stop]).sum() + words.known_counts[line].sum())
            near = self._compare_candidates(words, line, text)
            self._retire_matched(near)
            yield near

    def _count_postings(self, ranks: IntArray) -> IntArray:
        return self._posting_starts[ranks + 1] - self._posting_starts[ranks]

    def _rank_words(self, folded: FoldedTexts) -> _ChunkWords:
        """Return the words of a chunk by rank; words that are not in the test set are distinguished by their hash."""
        word_ranks = folded.word_hashes & (_UNKNOWN_WORD - 1) | _UNKNOWN_WORD
        indices, is_known = search_sorted(self._hashes, folded.word_hashes)
        word_ranks[is_known] = self._hash_order[indices[is_known]]
        lines, ranks = unique_words(folded, word_ranks)
        sizes = np.bincount(lines, minlength=len(folded.keys))
        known_counts = np.bincount(lines[ranks < _UNKNOWN_WORD], minlength=len(folded.keys))
        positions = index_in_group(sizes) + (sizes - known_counts)[lines]
        return _ChunkWords(lines, ranks, sizes, known_counts, positions)

    def matched_sentences(self) -> IntArray:
        return np.flatnonzero(self.best_overlaps[self.text_ids])

    def _find_candidates(self, probes: _ChunkWords, selection: slice) -> tuple[IntArray, IntArray]:
        """Return (line, text) that share a rare word and could share enough, by size and position."""
        ranks, lines, positions = probes.ranks[selection], probes.lines[selection], probes.positions[selection]
        counts = self._count_postings(ranks)
        origins = np.repeat(np.arange(len(counts)), counts)
        postings = concatenate_ranges(self._posting_starts[ranks], counts)
        texts, lines = self._posting_texts[postings], lines[origins]
        # The first shared word bounds what they can share: itself and all words after it on either side. Later shared
        # words give lower bounds, so that a single word above the threshold is enough.
        sizes, text_sizes = probes.sizes[lines], self._sizes[texts]
        bound = np.minimum(sizes - positions[origins], text_sizes - self._posting_positions[postings])
        is_possible = bound >= (sizes + text_sizes) * (NEAR_THRESHOLD / (1 + NEAR_THRESHOLD)) - 1e-6
        pairs = np.unique(lines[is_possible] * len(self.best_overlaps) + texts[is_possible])
        return pairs // len(self.best_overlaps), pairs % len(self.best_overlaps)

    def _compare_candidates(self, words: _ChunkWords, lines: IntArray, texts: IntArray) -> NearMatches:
        """Return the candidates that share enough words."""
        slices = iter_slices(words.known_counts[lines], COMPARISONS_PER_SLICE)
        counts = [self._count_shared(words, lines[part], texts[part]) for part in slices]
        shared = np.concatenate([np.zeros(0, np.int64), *counts])
        overlaps = shared / np.maximum(words.sizes[lines] + self._sizes[texts] - shared, 1)
        is_near = overlaps >= NEAR_THRESHOLD
        return NearMatches(lines[is_near], texts[is_near], overlaps[is_near])

    def _count_shared(self, words: _ChunkWords, lines: IntArray, texts: IntArray) -> IntArray:
        counts = words.known_counts[lines]
        origins = np.repeat(np.arange(len(lines)), counts)
        ranks = words.ranks[concatenate_ranges((np.cumsum(words.sizes) - words.sizes)[lines], counts)]
        is_member = search_sorted(self._memberships, texts[origins] * len(self._hashes) + ranks)[1]
        return np.bincount(origins, weights=is_member, minlength=len(lines)).astype(np.int64)

    def _retire_matched(self, near: NearMatches) -> None:
        """Stop searching for texts with an overlap of 1 or MAX_NEAR_MATCHES near duplicates."""
        was_retired = self._match_counts >= MAX_NEAR_MATCHES
        np.add.at(self._match_counts, near.texts, 1)
        self._match_counts[near.texts[near.overlaps == 1]] = MAX_NEAR_MATCHES
        if ((self._match_counts >= MAX_NEAR_MATCHES) & ~was_retired).any():
            self._select_postings(self._match_counts[self._posting_texts] < MAX_NEAR_MATCHES)


class ExactIndex:
    """The unique keys of a test set of any size, and which of them occurred in the training data."""

    def __init__(self, keys: IntArray) -> None:
        self._keys, self._key_ids = np.unique(keys, return_inverse=True)
        self._matched = np.zeros(len(self._keys), dtype=bool)
        self._first_lines: dict[int, Pair] = {}  # where a key occurred first, for examples

    def update(self, train: Sequence[Pair], keys: IntArray) -> None:
        indices, is_match = search_sorted(self._keys, keys)
        matched, lines = np.unique(np.where(is_match & (keys != 0), indices, -1), return_index=True)
        is_new = (matched >= 0) & ~self._matched[matched]
        self._matched[matched[is_new]] = True
        for i, line in zip(matched[is_new].tolist(), lines[is_new].tolist(), strict=True):
            if len(self._first_lines) < MAX_NEAR_SENTENCES:
                self._first_lines[i] = train[line]

    def matched_sentences(self) -> IntArray:
        return np.flatnonzero(self._matched[self._key_ids])

    def first_line(self, sentence: int) -> Pair | None:
        return self._first_lines.get(int(self._key_ids[sentence]))


def combine_pair_keys(source: IntArray, target: IntArray) -> IntArray:
    """Return a key for both sides together, 0 if one of them is empty."""
    keys = combine_keys(source.view(np.uint64), target.view(np.uint64)).view(np.int64)
    return np.where((source == 0) | (target == 0), 0, keys)


class _SentenceColumns(NamedTuple):
    """All test sentences, column by column."""

    source_keys: IntArray
    target_keys: IntArray
    is_short: BoolArray
    lines: IntArray

    @classmethod
    def from_pairs(cls, pairs: Sequence[Pair]) -> _SentenceColumns:
        source, target = fold_pairs(pairs)
        sizes = np.minimum(_count_unique_words(source), _count_unique_words(target))
        lines = np.fromiter((pair.line for pair in pairs), np.int64, len(pairs))
        return cls(source.keys, target.keys, sizes < MIN_WORDS, lines)


def _count_unique_words(folded: FoldedTexts) -> IntArray:
    lines, _ = unique_words(folded, folded.word_hashes & (_UNKNOWN_WORD - 1))
    return np.bincount(lines, minlength=len(folded.keys))


class ContaminationChecker:
    """Compares training data with a test set: `update` with chunks of it, then `compute` the result."""

    def __init__(self, test: Iterable[Pair | BadLine]) -> None:
        self.pairs: list[Pair] = []  # the first MAX_NEAR_SENTENCES
        self.bad_lines = 0
        self._file_starts: list[tuple[int, Pair]] = []  # (index, pair) of the first sentence of each file
        columns = [_SentenceColumns.from_pairs([]), *self._read_chunks(test)]
        self._sentences = _SentenceColumns(*(np.concatenate(column) for column in zip(*columns, strict=True)))
        source_keys, target_keys = self._sentences.source_keys, self._sentences.target_keys
        keys = combine_pair_keys(source_keys, target_keys), source_keys, target_keys
        near = map(NearDuplicateIndex, fold_pairs(self.pairs))
        indices: list[ExactIndex | NearDuplicateIndex] = [*map(ExactIndex, keys), *near]
        self._indices = dict(zip(MATCH_KINDS, indices, strict=True))

    def _read_chunks(self, test: Iterable[Pair | BadLine]) -> Iterator[_SentenceColumns]:
        entries, index = iter(test), 0
        while batch := list(islice(entries, CHUNK_SENTENCES)):
            chunk = [entry for entry in batch if isinstance(entry, Pair)]
            self.bad_lines += len(batch) - len(chunk)
            self.pairs += chunk[: MAX_NEAR_SENTENCES - len(self.pairs)]
            for i, pair in enumerate(chunk, start=index):
                if not self._file_starts or self._file_starts[-1][1].file != pair.file:
                    self._file_starts.append((i, pair))
            index += len(chunk)
            yield _SentenceColumns.from_pairs(chunk)

    def __len__(self) -> int:
        return len(self._sentences.lines)

    def update(self, train: Sequence[Pair], folded: tuple[FoldedTexts, FoldedTexts] | None = None) -> None:
        """Compare the next training lines with the test set; `folded` is `fold_pairs` of them, if available."""
        if not train or not len(self):
            return
        source, target = folded or fold_pairs(train)
        texts = combine_pair_keys(source.keys, target.keys), source.keys, target.keys, source, target
        for index, side in zip(self._indices.values(), texts, strict=True):
            index.update(train, side)  # type: ignore[arg-type]

    def compute(self, examples: int = 2) -> Contamination:
        """Return the counts so far, with some examples of each kind."""
        kinds, is_short = np.full(len(self), len(MATCH_KINDS)), self._sentences.is_short
        for i, kind in reversed(list(enumerate(MATCH_KINDS))):  # the closest kind of each sentence
            kinds[self._indices[kind].matched_sentences()] = i
        counts = {kind: int((kinds[~is_short] == i).sum()) for i, kind in enumerate(MATCH_KINDS)}
        return Contamination(
            sentences=len(self),
            near_checked=len(self.pairs),
            same_pair=counts["pair"],
            same_source=counts["source"],
            same_target=counts["target"],
            near_duplicates=counts["near source"] + counts["near target"],
            short_matches=int((kinds[is_short] < len(MATCH_KINDS)).sum()),
            uncompared_lines=max(
                index.uncompared_lines for index in self._indices.values() if isinstance(index, NearDuplicateIndex)
            ),
            matches=tuple(match for kind in MATCH_KINDS for match in islice(self._iter_matches(kind, kinds), examples)),
        )

    def _iter_matches(self, kind: str, kinds: IntArray) -> Iterator[ContaminationMatch]:
        """Yield examples of a kind, the closest first."""
        sentences = np.flatnonzero((kinds == MATCH_KINDS.index(kind)) & ~self._sentences.is_short)
        index = self._indices[kind]
        if isinstance(index, ExactIndex):
            lines = ((i, index.first_line(i)) for i in sentences.tolist())
            yield from (ContaminationMatch(kind, self._get_sentence(i, line), line, 1.0) for i, line in lines if line)
            return
        closest_first = np.argsort(-index.best_overlaps[index.text_ids[sentences]], kind="stable")
        for i in sentences[closest_first].tolist():
            text = int(index.text_ids[i])
            yield ContaminationMatch(kind, self.pairs[i], index.closest_lines[text], float(index.best_overlaps[text]))

    def _get_sentence(self, i: int, train: Pair) -> Pair:
        """Return test sentence i. After the first MAX_NEAR_SENTENCES only the location is stored: the text is equal."""
        if i < len(self.pairs):
            return self.pairs[i]
        first = next(pair for start, pair in reversed(self._file_starts) if start <= i)
        return first._replace(source=train.source, target=train.target, line=int(self._sentences.lines[i]))
