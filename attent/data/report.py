"""Corpus reports: one pass over the pairs in constant memory, with exact counts, and the contamination of test sets.

A test sentence is contaminated if it is in the training data, but for case, spaces and punctuation.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attent.data import filters
from attent.data.corpus import Corpus, describe_wrong_languages
from attent.data.filters import FILTER_ORDER, FilterConfig, KeySet, PairFilter
from attent.data.pairs import BadLine, CorpusError, Pair, ReasonTally
from attent.text import scripts
from attent.text import scripts as script_table
from attent.text.scripts import Scripts

MIN_WORDS = 4  # shorter sentences ("Yes.", "Thank you.") are expected to recur
MAX_EXAMPLES = 2  # of each kind of match

MATCH_KINDS = ("pair", "source", "target")
CountArray = npt.NDArray[np.int64]

CHUNK_PAIRS = 8_192  # processed together
LANGUAGE_SAMPLE_SIZE = 2_000  # pairs that are compared with their languages
EXCERPT_CHARS = 200
MAX_COUNTED_LENGTH = 1 << 16  # of the length histogram


@dataclass(frozen=True)
class ContaminationMatch:
    kind: str  # one of MATCH_KINDS
    test: Pair
    train: Pair


@dataclass(frozen=True)
class Contamination:
    """Counts of contaminated sentences of a test set, each counted once by its closest match."""

    name: str  # of the test set
    files: tuple[str, ...]
    bad_lines: int  # of these files, that are no pairs
    sentences: int
    same_pair: int = 0
    same_source: int = 0  # with another target
    same_target: int = 0  # with another source
    short_matches: int = 0  # of three words or less: expected, and in none of the counts above
    matches: tuple[ContaminationMatch, ...] = field(default=(), repr=False)  # examples


# ---- words -----------------------------------------------------------------------------------------------------------

_UNSPACED_LETTER = scripts.compile_letter_pattern(scripts.UNSPACED_SCRIPTS)


@cache
def _fold_table() -> npt.NDArray[np.uint32]:
    """Return a table from code point to code point that maps punctuation, symbols and separators to a space."""
    table = np.arange(0x110000, dtype="<u4")
    for block in (range(0x3100), range(0xFE10, 0xFFF0), range(0x1F000, 0x1FB00)):
        table[[code for code in block if unicodedata.category(chr(code))[0] in "PSZC" and code != ord("\n")]] = 32
    return table


def fold_texts(texts: Sequence[str]) -> list[str]:
    """Return the case-folded words of each text, without punctuation: all at once with NumPy, three times as fast."""
    joined = "\n".join(texts)
    if joined.count("\n") >= max(len(texts), 1):  # a text contains newlines
        joined = "\n".join([text.replace("\n", " ") for text in texts])
    codes = np.frombuffer(joined.casefold().encode("utf-32-le", "surrogatepass"), "<u4")
    folded = _fold_table()[codes].tobytes().decode("utf-32-le", "surrogatepass")
    return folded.split("\n")[: len(texts)]


def fold_pairs(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Return keys of both sides, which equal texts share; "" for empty ones."""
    sources, targets = fold_texts([pair.source for pair in pairs]), fold_texts([pair.target for pair in pairs])
    return [("".join(s.split()), "".join(t.split())) for s, t in zip(sources, targets, strict=True)]


def is_short(text: str) -> bool:
    """True for a text of few different words; a letter of a script without spaces counts as a word."""
    return len(set(_UNSPACED_LETTER.sub(r" \g<0> ", fold_texts([text])[0]).split())) < MIN_WORDS


class ContaminationChecker:
    """Compares training data with a test set: `update` with chunks of it, then `compute` the result."""

    def __init__(self, test: Iterable[Pair | BadLine], name: str = "", files: tuple[str, ...] = ()) -> None:
        self.name, self.files = name, files
        entries = list(test)
        self.pairs = [entry for entry in entries if isinstance(entry, Pair)]
        self.bad_lines = len(entries) - len(self.pairs)
        self._folded = fold_pairs(self.pairs)
        # The first training line with each key of a test sentence, by the kind of the match; None: not yet found.
        self._lines: dict[str, dict[str, Pair | None]] = {kind: {} for kind in MATCH_KINDS}
        for keys in self._folded:
            for kind, key in iter_keys(*keys):
                self._lines[kind][key] = None

    def __len__(self) -> int:
        return len(self.pairs)

    def update(self, train: Sequence[Pair], folded: Sequence[tuple[str, str]] | None = None) -> None:
        """Compare the next training lines with the test set; `folded` is `fold_pairs` of them, if available."""
        folded = fold_pairs(train) if folded is None else folded
        sources, targets = self._lines["source"], self._lines["target"]
        for line, (source, target) in zip(train, folded, strict=True):
            if source in sources or target in targets:
                for kind, key in iter_keys(source, target):
                    if key in self._lines[kind] and self._lines[kind][key] is None:
                        self._lines[kind][key] = line

    def compute(self) -> Contamination:
        matches: dict[str, list[ContaminationMatch]] = {kind: [] for kind in MATCH_KINDS}
        short_matches = 0
        for pair, keys in zip(self.pairs, self._folded, strict=True):
            lines = ((kind, self._lines[kind][key]) for kind, key in iter_keys(*keys))
            match = next((ContaminationMatch(kind, pair, line) for kind, line in lines if line), None)
            if match is not None and (is_short(pair.source) or is_short(pair.target)):
                short_matches += 1
            elif match is not None:
                matches[match.kind].append(match)
        return Contamination(
            name=self.name,
            files=self.files,
            bad_lines=self.bad_lines,
            sentences=len(self),
            same_pair=len(matches["pair"]),
            same_source=len(matches["source"]),
            same_target=len(matches["target"]),
            short_matches=short_matches,
            matches=tuple(match for group in matches.values() for match in group[:MAX_EXAMPLES]),
        )


def iter_keys(source: str, target: str) -> Iterator[tuple[str, str]]:
    """Yield the kinds of matches, the closest first, each with the key that equal texts share."""
    if source and target:
        yield "pair", f"{source}\n{target}"
    if source:
        yield "source", source
    if target:
        yield "target", target


@dataclass(frozen=True)
class Finding:
    name: str  # a filter of FILTER_ORDER, or the reason why a line is no pair
    count: int
    examples: tuple[Pair, ...] = ()  # with excerpts of their texts; of a line that is no pair, as the source


@dataclass(frozen=True)
class CorpusSummary:
    name: str
    files: tuple[str, ...]
    source: str | None  # language tags, if known
    target: str | None
    weight: float
    pairs: int
    bad_lines: int  # lines and units that are no pairs
    ignored_files: tuple[str, ...] = ()  # of the folder, as `more.tsv (the reason)`


@dataclass(frozen=True)
class LengthStats:
    """Distribution of text lengths in words, or in characters for scripts without spaces."""

    unit: str
    mean: float
    median: int
    percentile_95: int
    max_length: int


@dataclass(frozen=True)
class SideStats:
    languages: tuple[str, ...]
    scripts: tuple[str, ...]  # expected by language or sample; empty if unknown
    words: int
    characters: int
    distinct_characters: int
    lengths: LengthStats


@dataclass(frozen=True)
class CorpusReport:
    corpora: tuple[CorpusSummary, ...]
    pairs: int
    bad_lines: tuple[Finding, ...]
    source: SideStats
    target: SideStats
    dropped: tuple[Finding, ...]  # by filter, in order; a pair counts for the first filter that drops it
    kept_pairs: int
    filters_applied: bool  # False with --keep-all: `dropped` is then what the filters would drop
    test_sets: tuple[Contamination, ...]
    error: str | None  # why reading stopped early
    language_problems: tuple[str, ...] = ()  # a sentence for each corpus whose sides look swapped
    unread_corpora: tuple[str, ...] = ()  # after that error

    def count_dropped(self, name: str) -> int:
        return next((finding.count for finding in self.dropped if finding.name == name), 0)

    def pair_fraction(self, count: int) -> float:
        return count / self.pairs if self.pairs else 0.0


class _SideCounter:
    def __init__(self) -> None:
        self.characters = 0
        self.distinct_characters: set[str] = set()
        self.word_lengths = np.zeros(MAX_COUNTED_LENGTH, np.int64)
        self.character_lengths = np.zeros(MAX_COUNTED_LENGTH, np.int64)
        self.words = 0
        self.scripts: set[Scripts | None] = set()

    def add(self, texts: Sequence[str]) -> None:
        joined = "".join(texts)
        self.characters += len(joined)
        self.distinct_characters.update(joined)
        words = np.fromiter((len(text.split()) for text in texts), np.int64, len(texts))
        self.words += int(words.sum())
        self.word_lengths += _histogram(words)
        self.character_lengths += _histogram(np.fromiter(map(len, texts), np.int64, len(texts)))

    def to_stats(self, languages: Iterable[str | None]) -> SideStats:
        by_words = all(script_table.has_word_spaces(expected) for expected in self.scripts)
        lengths = ("words", self.word_lengths) if by_words else ("characters", self.character_lengths)
        return SideStats(
            languages=tuple(dict.fromkeys(tag for tag in languages if tag)),
            scripts=tuple(sorted(frozenset().union(*(expected or frozenset() for expected in self.scripts)))),
            words=self.words,
            characters=self.characters,
            distinct_characters=len(self.distinct_characters),
            lengths=summarize_lengths(*lengths),
        )


def _histogram(values: CountArray) -> CountArray:
    return np.bincount(np.minimum(values, MAX_COUNTED_LENGTH - 1), minlength=MAX_COUNTED_LENGTH)


def summarize_lengths(unit: str, counts: CountArray) -> LengthStats:
    total = max(int(counts.sum()), 1)
    cumulative = np.cumsum(counts)
    return LengthStats(
        unit=unit,
        mean=float((counts * np.arange(len(counts))).sum() / total),
        median=int(np.searchsorted(cumulative, total * 0.5)),
        percentile_95=int(np.searchsorted(cumulative, total * 0.95)),
        max_length=int(np.flatnonzero(counts).max(initial=0)),
    )


class CorpusSurvey:
    """Statistics of corpora, chunk by chunk; `per_target`: a pair is a duplicate only within one target language."""

    def __init__(
        self, *, keep_all: bool = False, per_target: bool = False, test_sets: Sequence[ContaminationChecker] = ()
    ) -> None:
        self.keep_all = keep_all
        self.per_target = per_target
        self.test_sets = test_sets
        self.pairs_read = 0
        self._corpora: list[CorpusSummary] = []
        self._language_problems: list[str] = []
        self._bad_lines, self._dropped = ReasonTally[Pair](), ReasonTally[Pair]()
        self._source, self._target = _SideCounter(), _SideCounter()
        self._pairs_seen: defaultdict[str | None, KeySet] = defaultdict(KeySet)  # by target language; None: all

    def read_corpus(self, corpus: Corpus, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read a corpus to its end. On an error, the pairs before it are counted and the error is raised."""
        pairs_before, bad_before = self.pairs_read, self._bad_lines.counts.total()
        pair_filter: PairFilter | None = None
        try:
            for entries in _iter_chunks(corpus):
                for bad in entries:
                    if isinstance(bad, BadLine):
                        self._bad_lines.add(bad.reason, Pair(_make_excerpt(bad.excerpt), "", bad.file, bad.line))
                if chunk := [entry for entry in entries if isinstance(entry, Pair)]:
                    if pair_filter is None:
                        pair_filter = PairFilter.from_sample(FilterConfig(), corpus.languages, chunk)
                        self._source.scripts.add(pair_filter.scripts[0])
                        self._target.scripts.add(pair_filter.scripts[1])
                        if problem := describe_wrong_languages(corpus, chunk[:LANGUAGE_SAMPLE_SIZE], "data"):
                            self._language_problems.append(problem)
                    self._process_chunk(chunk, pair_filter, corpus.languages.target)
                progress(self.pairs_read)
        finally:
            self._corpora.append(
                CorpusSummary(
                    name=corpus.name,
                    files=corpus.file_names,
                    source=corpus.languages.source,
                    target=corpus.languages.target,
                    weight=corpus.weight,
                    pairs=self.pairs_read - pairs_before,
                    bad_lines=self._bad_lines.counts.total() - bad_before,
                    ignored_files=corpus.ignored_files,
                )
            )

    def _process_chunk(self, chunk: Sequence[Pair], pair_filter: PairFilter, target_language: str | None) -> None:
        self.pairs_read += len(chunk)
        sources, targets = [pair.source.strip() for pair in chunk], [pair.target.strip() for pair in chunk]
        self._source.add(sources)
        self._target.add(targets)
        folded = fold_pairs(chunk) if self.test_sets else None
        for test_set in self.test_sets:
            test_set.update(chunk, folded)
        reasons = list(map(pair_filter.drop_reason, sources, targets))
        for i, reason in enumerate(reasons):
            if reason is not None:
                self._count_dropped(reason, chunk[i])
        is_good = np.array([reason is None for reason in reasons], dtype=bool)
        keys = filters.hash_pairs(sources, targets)
        is_new = np.zeros(len(chunk), dtype=bool)
        is_new[is_good] = self._pairs_seen[target_language if self.per_target else None].add(keys[is_good])
        for i in np.flatnonzero(is_good & ~is_new).tolist():
            self._count_dropped("duplicates", chunk[i])

    def _count_dropped(self, reason: str, pair: Pair) -> None:
        source, target = _make_excerpt(pair.source), _make_excerpt(pair.target)
        self._dropped.add(reason, pair._replace(source=source, target=target))

    def build_report(self, error: str | None = None, unread_corpora: Sequence[str] = ()) -> CorpusReport:
        by_name = {finding.name: finding for finding in _to_findings(self._dropped)}
        return CorpusReport(
            corpora=tuple(self._corpora),
            pairs=self.pairs_read,
            bad_lines=_to_findings(self._bad_lines),
            source=self._source.to_stats(corpus.source for corpus in self._corpora),
            target=self._target.to_stats(corpus.target for corpus in self._corpora),
            dropped=tuple(by_name.get(name, Finding(name, 0)) for name in FILTER_ORDER),
            kept_pairs=self.kept_pairs,
            filters_applied=not self.keep_all,
            test_sets=tuple(test_set.compute() for test_set in self.test_sets),
            error=error,
            language_problems=tuple(self._language_problems),
            unread_corpora=tuple(unread_corpora),
        )

    @property
    def kept_pairs(self) -> int:
        return self.pairs_read if self.keep_all else self.pairs_read - self._dropped.counts.total()


def _iter_chunks(entries: Iterable[Pair | BadLine]) -> Iterator[list[Pair | BadLine]]:
    chunk: list[Pair | BadLine] = []
    try:
        for entry in entries:
            chunk.append(entry)
            if len(chunk) == CHUNK_PAIRS:
                yield chunk
                chunk = []
    except (CorpusError, OSError):
        yield chunk
        raise
    yield chunk


def _to_findings(tally: ReasonTally[Pair]) -> tuple[Finding, ...]:
    ranked = tally.counts.most_common()
    return tuple(Finding(name, count, tuple(tally.examples[name])) for name, count in ranked)


def _make_excerpt(text: str) -> str:
    """Return the beginning of a long text, or the part around damaged characters."""
    text = text.strip()
    damage = filters.find_damage(text)
    start = max(damage - 20, 0) if damage is not None and damage > 40 else 0
    stop = start + EXCERPT_CHARS
    return ("…" if start else "") + text[start:stop] + ("…" if len(text) > stop else "")


def survey_corpora(
    corpora: Sequence[Corpus],
    test_sets: Sequence[ContaminationChecker] = (),
    *,
    keep_all: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[CorpusSurvey, list[str], CorpusError | OSError | None]:
    targets = {corpus.languages.target for corpus in corpora} - {None}
    survey = CorpusSurvey(keep_all=keep_all, per_target=len(targets) > 1, test_sets=test_sets)
    for i, corpus in enumerate(corpora, start=1):
        try:
            survey.read_corpus(corpus, progress)
        except (CorpusError, OSError) as error:
            return survey, [unread.name for unread in corpora[i:]], error
    return survey, [], None


def find_test_sets(corpora: Sequence[Corpus], test_corpora: Sequence[Corpus] = ()) -> list[ContaminationChecker]:
    test_sets = []

    def add(test: Corpus, split: str, with_languages: bool) -> None:
        tags = f" ({test.languages.source}-{test.languages.target})" if with_languages else ""
        name = f"{Path(test.name).name or test.name}{split}{tags}"
        test_sets.append(ContaminationChecker(test, name, test.file_names))

    several = len({corpus.languages for corpus in test_corpora}) > 1
    for corpus in test_corpora:  # the test set of a folder that has one, else the whole corpus
        test = corpus.get_sibling_split("test")
        add(test or corpus, " test" if test else "", several)
    for corpus in corpora:
        for split in ("test", "valid"):
            if test := corpus.get_sibling_split(split):
                add(test, f" {split}", len(corpora) > 1)
    return test_sets
