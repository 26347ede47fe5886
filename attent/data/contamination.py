"""Test set contamination: which test sentences occur in the training data, exactly or nearly.

Texts are compared by their words, case-folded and without punctuation; scripts without spaces by character bigrams.
Near duplicates share 70% of all their words (Jaccard index). The test set is indexed and the training data streamed in
chunks. The rarest words of near duplicates must have one in common (the prefix filter of Chaudhuri, Ganti and Kaushik
2006), so that few test sentences are compared in full.

Template text ("Open file 17") would still make everything a candidate of everything. So equal lines are compared once
per chunk, a test sentence with many near duplicates is retired, and the comparisons per chunk are limited. Only the
limit can miss a match: the lines that were not compared are counted.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attent.data.pairs import BadLine, Pair
from attent.text import scripts

NEAR_THRESHOLD = 0.7  # Jaccard index of near duplicates
MIN_WORDS = 4  # shorter sentences ("Yes.", "Thank you.") are expected to recur
MIN_NEAR_WORDS = 6  # with fewer, a near duplicate could differ in its only important word
MAX_NEAR_SENTENCES = 20_000  # test sentences with a search for near duplicates; exact ones are found for all
MAX_NEAR_MATCHES = 50  # near duplicates of a test sentence, after which it is retired
MAX_COMPARISONS = 1 << 21  # per chunk of lines, some two seconds
MAX_EXAMPLES = 2  # of each kind of match

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
    """Counts of contaminated sentences of a test set, each counted once by its closest match."""

    name: str  # of the test set
    files: tuple[str, ...]
    bad_lines: int  # of these files, that are no pairs
    sentences: int
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


@cache
def _fold_table() -> npt.NDArray[np.uint32]:
    """Return a table from code point to code point that maps punctuation, symbols and separators to a space."""
    table = np.arange(0x110000, dtype="<u4")
    for block in (range(0x3100), range(0xFE10, 0xFFF0), range(0x1F000, 0x1FB00)):
        table[[code for code in block if unicodedata.category(chr(code))[0] in "PSZC" and code != ord("\n")]] = 32
    return table


def fold_texts(texts: Sequence[str]) -> list[str]:
    """Return the case-folded words of each text, with spaces instead of punctuation.

    All texts at once with NumPy, in a third of the time of single strings.
    """
    joined = "\n".join(texts)
    if joined.count("\n") >= max(len(texts), 1):  # a text contains newlines
        joined = "\n".join([text.replace("\n", " ") for text in texts])
    codes = np.frombuffer(joined.casefold().encode("utf-32-le", "surrogatepass"), "<u4")
    codes = _fold_table()[codes]
    folded = codes.tobytes().decode("utf-32-le", "surrogatepass")
    if codes.max(initial=0) >= _FIRST_UNSPACED_CODE:
        folded = _UNSPACED_RUN.sub(_split_bigrams, folded)
    return folded.split("\n")[: len(texts)]


def _split_bigrams(run: re.Match[str]) -> str:
    """Split text of a script without spaces into overlapping bigrams, in place of words."""
    text = run[0]
    return f" {' '.join(text[i : i + 2] for i in range(max(len(text) - 1, 1)))} "


class FoldedText(NamedTuple):
    """A text prepared for comparison."""

    key: str  # equal for texts that are equal except for spaces; "" for empty ones
    words: frozenset[str]


def fold_words(texts: Sequence[str]) -> list[FoldedText]:
    rows = [line.split() for line in fold_texts(texts)]
    return [FoldedText("".join(words), frozenset(words)) for words in rows]


def fold_pairs(pairs: Sequence[Pair]) -> list[tuple[FoldedText, FoldedText]]:
    sources, targets = fold_words([pair.source for pair in pairs]), fold_words([pair.target for pair in pairs])
    return list(zip(sources, targets, strict=True))


# ---- matches ---------------------------------------------------------------------------------------------------------


class NearDuplicateIndex:
    """Inverted index of the unique texts of one side of the test set; finds near-duplicate training lines."""

    def __init__(self, texts: Iterable[frozenset[str]]) -> None:
        unique = dict.fromkeys(words for words in texts if len(words) >= MIN_NEAR_WORDS)
        by_frequency = Counter(word for words in unique for word in words).most_common()
        self._ranks = {word: -count for count, (word, _) in enumerate(by_frequency)}  # the rarest is the lowest
        # How many of the rarest words of two near-duplicate sets, one of each size, must have one in common.
        sizes = range(1 + max(map(len, unique), default=0) * 2)
        self._prefix_words = [size - int(np.ceil(NEAR_THRESHOLD * size - 1e-9)) + 1 for size in sizes]
        self._postings: defaultdict[int, set[frozenset[str]]] = defaultdict(set)  # texts by their rarest words
        for words in unique:
            for rank in self._select_rarest(words):
                self._postings[rank].add(words)
        self._match_counts: Counter[frozenset[str]] = Counter()
        self.closest: dict[frozenset[str], tuple[float, Pair]] = {}  # overlap and line
        self.uncompared_lines = 0

    def _select_rarest(self, words: frozenset[str]) -> list[int]:
        """Return the ranks of the rarest words: every near duplicate in the test set contains one of them."""
        if len(words) >= len(self._prefix_words):  # too long for any of the texts
            return []
        known = [rank for word in words if (rank := self._ranks.get(word)) is not None]
        count = self._prefix_words[len(words)] - (len(words) - len(known))  # unknown words are the rarest
        return sorted(known)[:count] if count > 0 else []

    def update(self, lines: Iterable[tuple[frozenset[str], Pair]]) -> None:
        """Record the lines that are closer to a test sentence than all before; of equal lines the first."""
        unique: dict[frozenset[str], Pair] = {}
        for words, line in lines:
            unique.setdefault(words, line)
        comparisons = 0
        for words, line in unique.items():
            postings = [texts for rank in self._select_rarest(words) if (texts := self._postings.get(rank))]
            if not postings:
                continue
            if comparisons >= MAX_COMPARISONS:
                self.uncompared_lines += 1
                continue
            comparisons += sum(map(len, postings))
            for text in set[frozenset[str]]().union(*postings):
                shared = len(words & text)
                overlap = shared / (len(words) + len(text) - shared)
                if overlap >= NEAR_THRESHOLD:
                    self._add_match(text, overlap, line)

    def _add_match(self, text: frozenset[str], overlap: float, line: Pair) -> None:
        """Stop searching for a text after an overlap of 1 or MAX_NEAR_MATCHES near duplicates."""
        if overlap > self.closest.get(text, (0.0, line))[0]:
            self.closest[text] = (overlap, line)
        self._match_counts[text] += 1
        if overlap == 1 or self._match_counts[text] >= MAX_NEAR_MATCHES:
            for rank in self._select_rarest(text):
                self._postings[rank].discard(text)


class ContaminationChecker:
    """Compares training data with a test set: `update` with chunks of it, then `compute` the result."""

    def __init__(self, test: Iterable[Pair | BadLine], name: str = "", files: tuple[str, ...] = ()) -> None:
        self.name, self.files = name, files
        self.pairs: list[Pair] = []
        self.bad_lines = 0
        for entry in test:
            if isinstance(entry, Pair):
                self.pairs.append(entry)
            else:
                self.bad_lines += 1
        self._folded = fold_pairs(self.pairs)
        # The first training line with each key of a test sentence, by the kind of the match; None: not yet found.
        self._exact: dict[str, dict[str, Pair | None]] = {kind: {} for kind in MATCH_KINDS[:3]}
        for source, target in self._folded:
            for kind, key in iter_keys(source, target):
                self._exact[kind][key] = None
        near_checked = self._folded[:MAX_NEAR_SENTENCES]
        self._near = tuple(NearDuplicateIndex(pair[side].words for pair in near_checked) for side in (0, 1))

    def __len__(self) -> int:
        return len(self.pairs)

    def update(self, train: Sequence[Pair], folded: Sequence[tuple[FoldedText, FoldedText]] | None = None) -> None:
        """Compare the next training lines with the test set; `folded` is `fold_pairs` of them, if available."""
        folded = fold_pairs(train) if folded is None else folded
        sources, targets = self._exact["source"], self._exact["target"]
        for line, (source, target) in zip(train, folded, strict=True):
            if source.key in sources or target.key in targets:
                for kind, key in iter_keys(source, target):
                    if key in self._exact[kind] and self._exact[kind][key] is None:
                        self._exact[kind][key] = line
        for side, index in enumerate(self._near):
            index.update((texts[side].words, line) for texts, line in zip(folded, train, strict=True))

    def compute(self) -> Contamination:
        """Return the counts so far, with some examples of each kind."""
        matches: dict[str, list[ContaminationMatch]] = {kind: [] for kind in MATCH_KINDS}
        short_matches = 0
        for pair, (source, target) in zip(self.pairs, self._folded, strict=True):
            match = next(self._iter_matches(pair, source, target), None)
            if match is not None and min(len(source.words), len(target.words)) < MIN_WORDS:
                short_matches += 1
            elif match is not None:
                matches[match.kind].append(match)
        counts = {kind: len(found) for kind, found in matches.items()}
        closest_first = (sorted(found, key=lambda match: -match.overlap) for found in matches.values())
        return Contamination(
            name=self.name,
            files=self.files,
            bad_lines=self.bad_lines,
            sentences=len(self),
            near_checked=min(len(self), MAX_NEAR_SENTENCES),
            same_pair=counts["pair"],
            same_source=counts["source"],
            same_target=counts["target"],
            near_duplicates=counts["near source"] + counts["near target"],
            short_matches=short_matches,
            uncompared_lines=max(index.uncompared_lines for index in self._near),
            matches=tuple(match for found in closest_first for match in islice(found, MAX_EXAMPLES)),
        )

    def _iter_matches(self, pair: Pair, source: FoldedText, target: FoldedText) -> Iterator[ContaminationMatch]:
        """Yield the matches of a test sentence, the closest first."""
        for kind, key in iter_keys(source, target):
            if exact_line := self._exact[kind][key]:
                yield ContaminationMatch(kind, pair, exact_line, 1.0)
        for kind, near, text in zip(MATCH_KINDS[3:], self._near, (source, target), strict=True):
            if text.words in near.closest:
                overlap, line = near.closest[text.words]
                yield ContaminationMatch(kind, pair, line, overlap)


def iter_keys(source: FoldedText, target: FoldedText) -> Iterator[tuple[str, str]]:
    """Yield the kinds of exact matches, the closest first, each with the key that equal texts share."""
    if source.key and target.key:
        yield "pair", f"{source.key}\n{target.key}"
    if source.key:
        yield "source", source.key
    if target.key:
        yield "target", target.key
