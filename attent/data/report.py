"""What a corpus is like, before hours are spent on it: one pass over the pairs, in flat memory, and a `Report`.

Every count is exact. Only the estimate of tokens and time (`estimate`) rests on a sample, and says so. How a report
looks on a screen is left to `attent.cli.data`; `Report.facts` is the same as plain values, for JSON.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attent.data import filters
from attent.data.contamination import Contamination, ContaminationChecker, fold_pairs
from attent.data.corpus import Corpus
from attent.data.estimate import CorpusEstimate
from attent.data.filters import FILTER_ORDER, FilterConfig, KeySet, PairFilter
from attent.data.formats import registry, streams
from attent.data.pairs import BadLine, CorpusError, Pair
from attent.formatting import format_count, format_precise_percent
from attent.text import scripts
from attent.text.scripts import Scripts

CountArray = npt.NDArray[np.int64]

CHUNK_PAIRS = 8_192  # pairs that are looked at together
SCRIPT_SAMPLE_SIZE = 1_000  # pairs that tell the script of a side where its language does not
ESTIMATE_SAMPLE_SIZE = 20_000  # pairs for the estimate of tokens
MAX_EXAMPLES = 3  # lines shown of each finding
EXCERPT_CHARS = 200  # characters of a text in an example
RARE_BELOW = 3  # a character seen fewer times than this is rare
MAX_COUNTED_LENGTH = 1 << 16  # lengths are counted one by one up to here


@dataclass(frozen=True)
class LineExample:
    """A line worth looking at, and where it stands."""

    file: str
    line: int
    source: str
    target: str


@dataclass(frozen=True)
class Finding:
    """Lines that have something in common."""

    name: str  # a filter of ORDER, or why a line is no pair
    count: int
    examples: tuple[LineExample, ...] = ()


@dataclass(frozen=True)
class CorpusSummary:
    """A corpus as it was named, and what was read from it."""

    name: str
    files: tuple[str, ...]
    source: str | None  # language tags, where they were given or found
    target: str | None
    weight: float
    pairs: int
    bad_lines: int  # lines and units that are none
    ignored_files: tuple[str, ...] = ()  # files of the folder that were not read, as `more.tsv (the reason)`


@dataclass(frozen=True)
class LengthStats:
    """How long the texts of a side are, in words or (where words are not told apart by spaces) in characters."""

    unit: str
    mean: float
    median: int
    percentile_95: int  # 95% are no longer than this
    max_length: int
    counts: tuple[int, ...] = field(repr=False)  # texts of length 0, 1, 2, ...


@dataclass(frozen=True)
class SideStats:
    """One side of all pairs."""

    languages: tuple[str, ...]
    scripts: tuple[str, ...]  # what it is expected to be written in; empty where that is not known
    words: int
    characters: int
    distinct_characters: int  # characters
    rare_characters: str  # characters that are seen once or twice
    lengths: LengthStats


@dataclass(frozen=True)
class ContaminationReport:
    """The test set that the corpus was held against."""

    name: str
    files: tuple[str, ...]
    bad_lines: int  # lines and units that are none
    contamination: Contamination
    # Of the sentences whose near twins were sought: what is not in the corpus, spaces aside.
    unseen_characters: tuple[str, str]  # characters of each side, the most frequent first
    unseen_sentences: int  # test sentences with such a character


@dataclass(frozen=True)
class Diagnostic:
    """A sentence for people; `weight` 2: look at this before training, 1: good to know, 0: all is well."""

    severity: int
    text: str


@dataclass(frozen=True)
class CorpusReport:
    """All that was found."""

    corpora: tuple[CorpusSummary, ...]
    pairs: int
    bad_lines: tuple[Finding, ...]
    source: SideStats
    target: SideStats
    dropped: tuple[Finding, ...]  # by filter, in their order; a pair counts for the first that drops it
    kept_pairs: int
    filters_applied: bool  # False with --keep-all: then `dropped` is what the filters would have dropped
    mojibake_pairs: int  # of those that the filter "control" found
    identical_pairs: int  # pairs with both sides the same that stay: names, codes, labels
    retranslated_pairs: int  # pairs whose source came before with another translation
    test_sets: tuple[ContaminationReport, ...]
    estimate: CorpusEstimate | None
    error: str | None  # why reading stopped before the end
    unread_corpora: tuple[str, ...] = ()  # the corpora behind that place

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, under the names that the classes here give them."""
        return {"diagnostics": _to_plain(diagnose(self)), **_to_plain(self)}

    def count_dropped(self, name: str) -> int:
        return next((finding.count for finding in self.dropped if finding.name == name), 0)

    def pair_fraction(self, count: int) -> float:
        return count / self.pairs if self.pairs else 0.0


def _to_plain(value: Any) -> Any:
    """For JSON: an object by the names of its fields."""
    if is_dataclass(value):
        return {entry.name: _to_plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Pair):
        return value._asdict()
    return [_to_plain(entry) for entry in value] if isinstance(value, tuple) else value


# ---- one pass over the pairs -----------------------------------------------------------------------------------------


class _FindingTally:
    """Counts by name, with the first few examples of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[LineExample]] = {}

    def add(self, name: str, example: LineExample) -> None:
        self.counts[name] += 1
        examples = self.examples.setdefault(name, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(example)

    def to_findings(self) -> tuple[Finding, ...]:
        ranked = self.counts.most_common()
        return tuple(Finding(name, count, tuple(self.examples[name])) for name, count in ranked)


class _SideCounter:
    """Characters and lengths of one side."""

    def __init__(self) -> None:
        self.characters = np.zeros(0x110000, np.int64)  # how often each is seen
        self.word_lengths = np.zeros(MAX_COUNTED_LENGTH, np.int64)
        self.character_lengths = np.zeros(MAX_COUNTED_LENGTH, np.int64)
        self.words = 0
        self.scripts: set[Scripts | None] = set()

    def add(self, texts: Sequence[str]) -> None:
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
        seen = np.bincount(codes) if len(codes) else np.zeros(0, np.int64)
        self.characters[: len(seen)] += seen
        words = np.fromiter((len(text.split()) for text in texts), np.int64, len(texts))
        self.words += int(words.sum())
        self.word_lengths += _histogram(words)
        self.character_lengths += _histogram(np.fromiter(map(len, texts), np.int64, len(texts)))

    def to_stats(self, languages: Iterable[str | None]) -> SideStats:
        spaced = all(scripts.has_word_spaces(found) for found in self.scripts)
        seen = np.flatnonzero(self.characters)
        rare = [chr(code) for code in seen if self.characters[code] < RARE_BELOW and chr(code) != " "]
        expected = frozenset().union(*(found or frozenset() for found in self.scripts))
        return SideStats(
            languages=tuple(dict.fromkeys(tag for tag in languages if tag)),
            scripts=tuple(sorted(expected)),
            words=self.words,
            characters=int(self.characters.sum()),
            distinct_characters=len(seen),
            rare_characters="".join(rare),
            lengths=summarize_lengths("words", self.word_lengths)
            if spaced
            else summarize_lengths("characters", self.character_lengths),
        )


def _histogram(values: CountArray) -> CountArray:
    return np.bincount(np.minimum(values, MAX_COUNTED_LENGTH - 1), minlength=MAX_COUNTED_LENGTH)


def summarize_lengths(unit: str, counts: CountArray) -> LengthStats:
    """The shape of a distribution that is given as how often each length occurs."""
    total = max(int(counts.sum()), 1)
    below = np.cumsum(counts)
    longest = int(np.flatnonzero(counts).max(initial=0))
    return LengthStats(
        unit=unit,
        mean=float((counts * np.arange(len(counts))).sum() / total),
        median=int(np.searchsorted(below, total * 0.5)),
        percentile_95=int(np.searchsorted(below, total * 0.95)),
        max_length=longest,
        counts=tuple(counts[: longest + 1].tolist()),
    )


class _PairSample:
    """The pairs with the smallest keys: a fair sample, the same whatever the order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._max_key = np.uint64(2**64 - 1)
        self._entries: list[tuple[int, str, str]] = []

    def add(self, keys: filters.KeyArray, sources: Sequence[str], targets: Sequence[str]) -> None:
        for i in np.flatnonzero(keys <= self._max_key).tolist():
            self._entries.append((int(keys[i]), sources[i], targets[i]))
        if len(self._entries) > 2 * self.size:
            self._entries = sorted(self._entries)[: self.size]
            self._max_key = np.uint64(self._entries[-1][0])

    def pairs(self) -> list[tuple[str, str]]:
        return [(source, target) for _, source, target in sorted(self._entries)[: self.size]]


@dataclass(frozen=True)
class HeldOutSet:
    """A test set, and where it came from: its sentences should not be in the corpus."""

    name: str
    files: tuple[str, ...]
    checker: ContaminationChecker


class CorpusSurvey:
    """Takes in corpora chunk by chunk, and knows at any time what was in them.

    With `by_target`, for several target languages, a pair comes again only when it does so in the same language.
    """

    def __init__(
        self, *, keep_all: bool = False, per_target: bool = False, test_sets: Sequence[HeldOutSet] = ()
    ) -> None:
        self.keep_all = keep_all
        self.per_target = per_target
        self.test_sets = test_sets
        self.sample = _PairSample(ESTIMATE_SAMPLE_SIZE)
        self.pairs_read = 0
        self._corpora: list[CorpusSummary] = []
        self._bad_lines, self._dropped = _FindingTally(), _FindingTally()
        self._source, self._target = _SideCounter(), _SideCounter()
        self._pairs_seen: defaultdict[str | None, KeySet] = defaultdict(KeySet)  # by target language, or all under None
        self._sources_seen: defaultdict[str | None, KeySet] = defaultdict(KeySet)  # by target language
        self._mojibake_pairs = self._identical_pairs = self._retranslated_pairs = 0

    def read_corpus(self, corpus: Corpus, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read a corpus to its end, or to where it breaks: what came before is counted, then the error goes on."""
        began, bad = self.pairs_read, self._bad_lines.counts.total()
        sieve: PairFilter | None = None
        try:
            for chunk in _iter_chunks(corpus, self._add_bad_line):
                if chunk:
                    sieve = sieve or self._make_filter(corpus, chunk)
                    self._process_chunk(chunk, sieve, corpus.languages.target)
                progress(self.pairs_read)
        finally:
            read, unread = self.pairs_read - began, self._bad_lines.counts.total() - bad
            self._corpora.append(_summarize_corpus(corpus, read, unread))

    def _add_bad_line(self, bad: BadLine) -> None:
        self._bad_lines.add(bad.reason, LineExample(bad.file, bad.line, _make_excerpt(bad.excerpt), ""))

    def _make_filter(self, corpus: Corpus, chunk: Sequence[Pair]) -> PairFilter:
        expected = filters.infer_scripts(corpus.languages, chunk[:SCRIPT_SAMPLE_SIZE])
        self._source.scripts.add(expected[0])
        self._target.scripts.add(expected[1])
        return PairFilter(FilterConfig(), expected)

    def _process_chunk(self, chunk: Sequence[Pair], pair_filter: PairFilter, target_language: str | None) -> None:
        self.pairs_read += len(chunk)
        sources, targets = [pair.source.strip() for pair in chunk], [pair.target.strip() for pair in chunk]
        self._source.add(sources)
        self._target.add(targets)
        folded = fold_pairs(chunk) if self.test_sets else None
        for test in self.test_sets:
            test.checker.update(chunk, folded)
        whys = list(map(pair_filter.drop_reason, sources, targets))
        for i, why in enumerate(whys):
            if why is not None:
                self._count_dropped(why, chunk[i])
        good = np.array([why is None for why in whys], dtype=bool)
        source_keys, target_keys = filters.hash_texts(sources), filters.hash_texts(targets)
        keys = filters.combine_keys(source_keys, target_keys)
        new = self._find_new(chunk, keys, good, target_language)
        self._identical_pairs += int((source_keys[new] == target_keys[new]).sum())
        self._retranslated_pairs += int((~self._sources_seen[target_language].add(source_keys[new])).sum())
        self._add_to_sample(keys, new, sources, targets)

    def _count_dropped(self, reason: str, pair: Pair) -> None:
        self._dropped.add(
            reason, LineExample(pair.file, pair.line, _make_excerpt(pair.source), _make_excerpt(pair.target))
        )
        if reason == "control":
            self._mojibake_pairs += filters.is_mojibake(pair.source) or filters.is_mojibake(pair.target)

    def _find_new(
        self, chunk: Sequence[Pair], keys: filters.KeyArray, is_good: npt.NDArray[np.bool_], target_language: str | None
    ) -> npt.NDArray[np.bool_]:
        """Among the pairs that no other filter drops: which did not come before?"""
        new = np.zeros(len(chunk), dtype=bool)
        new[is_good] = self._pairs_seen[target_language if self.per_target else None].add(keys[is_good])
        for i in np.flatnonzero(is_good & ~new).tolist():
            self._count_dropped("duplicates", chunk[i])
        return new

    def _add_to_sample(
        self, keys: filters.KeyArray, is_new: npt.NDArray[np.bool_], sources: Sequence[str], targets: Sequence[str]
    ) -> None:
        """Offer to the sample what training would see. Repeats that stay are drawn each for itself, by their place."""
        if self.keep_all:
            places = np.arange(self.pairs_read - len(keys), self.pairs_read, dtype=np.uint64)
            self.sample.add(filters.combine_keys(keys, places), sources, targets)
            return
        taken = np.flatnonzero(is_new).tolist()
        self.sample.add(keys[taken], [sources[i] for i in taken], [targets[i] for i in taken])

    def build_report(
        self, estimate: CorpusEstimate | None = None, error: str | None = None, unread_corpora: Sequence[str] = ()
    ) -> CorpusReport:
        by_name = {finding.name: finding for finding in self._dropped.to_findings()}
        return CorpusReport(
            corpora=tuple(self._corpora),
            pairs=self.pairs_read,
            bad_lines=self._bad_lines.to_findings(),
            source=self._source.to_stats(origin.source for origin in self._corpora),
            target=self._target.to_stats(origin.target for origin in self._corpora),
            dropped=tuple(by_name.get(name, Finding(name, 0)) for name in FILTER_ORDER),
            kept_pairs=self.kept_pairs,
            filters_applied=not self.keep_all,
            mojibake_pairs=self._mojibake_pairs,
            identical_pairs=self._identical_pairs,
            retranslated_pairs=self._retranslated_pairs,
            test_sets=tuple(map(self._report_test_set, self.test_sets)),
            estimate=estimate,
            error=error,
            unread_corpora=tuple(unread_corpora),
        )

    @property
    def kept_pairs(self) -> int:
        """Pairs that training would see."""
        return self.pairs_read if self.keep_all else self.pairs_read - self._dropped.counts.total()

    @property
    def characters(self) -> int:
        """Of both sides of the pairs that training would see."""
        whole = int(self._source.characters.sum() + self._target.characters.sum())
        return round(whole * self.kept_pairs / self.pairs_read) if self.pairs_read else 0

    def _report_test_set(self, test: HeldOutSet) -> ContaminationReport:
        against = test.checker
        source = _count_unseen([pair.source for pair in against.pairs], self._source.characters)
        target = _count_unseen([pair.target for pair in against.pairs], self._target.characters)
        touched = sum(
            any(map(source.__contains__, pair.source)) or any(map(target.__contains__, pair.target))
            for pair in against.pairs
        )
        unseen = "".join(source), "".join(target)
        return ContaminationReport(test.name, test.files, against.bad_lines, against.compute(), unseen, touched)


def _summarize_corpus(corpus: Corpus, pairs: int, bad_lines: int) -> CorpusSummary:
    return CorpusSummary(
        name=corpus.name,
        files=corpus.file_names,
        source=corpus.languages.source,
        target=corpus.languages.target,
        weight=corpus.weight,
        pairs=pairs,
        bad_lines=bad_lines,
        ignored_files=corpus.ignored_files,
    )


def _iter_chunks(corpus: Iterable[Pair | BadLine], add_bad_line: Callable[[BadLine], None]) -> Iterator[list[Pair]]:
    """Pairs by the thousand; where reading breaks, first the pairs before it, then the error."""
    entries, ended = iter(corpus), False
    while not ended:
        chunk: list[Pair] = []
        ended = True
        try:
            for entry in islice(entries, CHUNK_PAIRS):
                ended = False
                if isinstance(entry, Pair):
                    chunk.append(entry)
                else:
                    add_bad_line(entry)
        except (CorpusError, OSError):
            yield chunk
            raise
        yield chunk


def _make_excerpt(text: str) -> str:
    """The beginning of a long text, or the place in it where it is damaged."""
    text = text.strip()
    damage = filters.find_damage(text)
    start = max(damage - 20, 0) if damage is not None and damage > 40 else 0
    return (
        ("…" if start else "")
        + text[start : start + EXCERPT_CHARS]
        + ("…" if len(text) > start + EXCERPT_CHARS else "")
    )


def _count_unseen(texts: Iterable[str], char_counts: CountArray) -> dict[str, int]:
    counts = Counter("".join(texts))
    return {char: n for char, n in counts.most_common() if not char_counts[ord(char)] and not char.isspace()}


# ---- in words --------------------------------------------------------------------------------------------------------

MIN_TRAINING_PAIRS = 10_000  # below this a model learns the sentences by heart rather than the language
MAX_CONTAMINATION = 0.005  # of a test set, from which on its scores mean less
MAX_SHORT_CONTAMINATION = 0.1  # the same for sentences of three words or less, which come again in any corpus
EXPECTED_REASONS = (
    "no translation",
    "fuzzy",
    "obsolete",
)  # of a catalogue or memory in the making; nothing is wrong with it


def diagnose(report: CorpusReport) -> tuple[Diagnostic, ...]:
    """What a person should know, in plain words, the most important first."""
    found = [
        *_diagnose_reading(report),
        *_diagnose_test_sets(report),
        *_diagnose_pairs(report),
        *_diagnose_size(report),
    ]
    if not any(verdict.severity == 2 for verdict in found):
        found.append(Diagnostic(0, "Nothing serious found."))
    return tuple(sorted(found, key=lambda verdict: -verdict.severity))


def _diagnose_reading(report: CorpusReport) -> Iterator[Diagnostic]:
    if report.error:
        told = "Reading stopped before the end: this report is about what was read up to there."
        yield Diagnostic(
            2, f"{told} Not read: {format_names(report.unread_corpora)}." if report.unread_corpora else told
        )
    if not report.pairs:
        yield Diagnostic(2, "There is not one pair in it.")
    expected = sum(finding.count for finding in report.bad_lines if finding.name in EXPECTED_REASONS)
    broken = sum(finding.count for finding in report.bad_lines) - expected
    if broken:
        weight = 2 if broken > 0.01 * (report.pairs + broken) else 1
        yield Diagnostic(
            weight, f"{format_count(broken, 'line')} could not be read as a pair and {_is_or_are(broken)} left out."
        )
    if expected:
        yield Diagnostic(
            1, f"{format_count(expected, 'entry', 'entries')} without a finished translation: normal in such files."
        )
    yield from _diagnose_ignored(report)


def _diagnose_ignored(report: CorpusReport) -> Iterator[Diagnostic]:
    """Files that lie there unread. A format that can be read, or both files of a pair, may have been meant."""
    names = list_ignored_files(report.corpora)
    stems = Counter(_file_stem(name) for name in names)
    readable = [name for name in names if registry.detect_format(_file_name(name)) or stems[_file_stem(name)] > 1]
    others = [name for name in names if name not in readable]
    if readable:
        yield Diagnostic(2, f"Not read: {format_names(readable)}. What is meant for training, name as a corpus too.")
    if others:
        yield Diagnostic(1, f"Not read: {format_names(others)}.")


def list_ignored_files(corpora: Sequence[CorpusSummary]) -> list[str]:
    """Files of the folders that none of these read; for another pair of languages a folder may be read again."""
    read = {(origin.name, Path(file).name) for origin in corpora for file in origin.files}
    names = [(origin.name, name) for origin in corpora for name in origin.ignored_files]
    return list(dict.fromkeys(name for folder, name in names if (folder, _file_name(name)) not in read))


def _file_name(name: str) -> str:
    """Of `more.tsv (the reason)` the file."""
    return name.partition(" (")[0]


def _file_stem(name: str) -> str:
    return streams.strip_compression_suffix(_file_name(name)).rpartition(".")[0]


def format_names(names: Sequence[str], max_names: int = 3) -> str:
    """The first few of a list, and how many more there are."""
    more = len(names) - max_names
    return _join_names([*names[:max_names], f"{more:,} more"] if more > 0 else list(names))


def _diagnose_test_sets(report: CorpusReport) -> Iterator[Diagnostic]:
    for test in report.test_sets:
        yield _diagnose_contamination(test)
        if test.bad_lines:
            yield Diagnostic(1, f"{format_count(test.bad_lines, 'line')} of {test.name} could not be read as a pair.")
        if test.unseen_sentences:
            count, touched = len(set("".join(test.unseen_characters))), test.unseen_sentences
            never = format_count(count, "character")
            verbs = "never occurs" if count == 1 else "never occur"
            of_it = f"{touched:,} of its sentences {_has_or_have(touched)} one"
            yield Diagnostic(1, f"{never} of {test.name} {verbs} here; {of_it}.")


def _diagnose_contamination(test: ContaminationReport) -> Diagnostic:
    leak = test.contamination
    if not leak.sentences:
        return Diagnostic(2, f"There is not one pair in {test.name}: nothing could be checked.")
    same = leak.same_pair + leak.same_source
    parts = [
        f"{same:,} {_is_or_are(same)} in this corpus" if same else "",
        f"{leak.same_target:,} {_has_or_have(leak.same_target)} the same translation as another line here"
        if leak.same_target
        else "",
        f"{leak.near_duplicates:,} {_is_or_are(leak.near_duplicates)} nearly the same as a line here"
        if leak.near_duplicates
        else "",
    ]
    told = _join_names([part for part in parts if part])
    if not told:
        return _diagnose_clean(test)
    told = f"Of {format_count(leak.sentences, 'sentence')} of {test.name} {told}"
    if same > MAX_CONTAMINATION * leak.sentences:
        return Diagnostic(2, f"{told}: scores on it would be too good.")
    few = leak.exact_matches + leak.near_duplicates < 0.1 * leak.sentences
    return Diagnostic(1, f"{told}: {'so few are normal' if few else 'look at the examples below'}.")


def _diagnose_clean(test: ContaminationReport) -> Diagnostic:
    leak = test.contamination
    told = f"No sentence of {test.name} is in this corpus, nor nearly"
    if leak.short_matches:
        told += f", but for {leak.short_matches:,} of three words or less"
    if limit := describe_limits(leak):
        told += f"; {limit}"
    return Diagnostic(1 if leak.short_matches > MAX_SHORT_CONTAMINATION * leak.sentences else 0, f"{told}.")


def describe_limits(contamination: Contamination) -> str:
    """How far near twins were looked for, where that was not everywhere."""
    parts = []
    if contamination.near_checked < contamination.sentences:
        parts.append(
            f"near twins were sought of the first {contamination.near_checked:,} of {contamination.sentences:,} sentences only"
        )
    if contamination.uncompared_lines:
        lines = format_count(contamination.uncompared_lines, "line", "different lines")
        parts.append(f"{lines} of the corpus met too many sentences to be compared with each")
    return "; ".join(parts)


def _diagnose_pairs(report: CorpusReport) -> Iterator[Diagnostic]:
    verb = "are dropped" if report.filters_applied else "stay"
    script, control, ratio = (
        report.count_dropped("script"),
        report.count_dropped("control"),
        report.count_dropped("length_ratio"),
    )
    if report.pair_fraction(script) > 0.5:
        yield Diagnostic(2, "Most lines are in another script than their language: are --src and --tgt the right way?")
    elif script:
        yield Diagnostic(
            _grade_severity(report, script),
            f"{format_count(script, 'line')} in a script of another language: {_format_share(report, script)}.",
        )
    if control:
        what = "text in a wrong encoding or control characters"
        if report.mojibake_pairs:
            what = (
                f"text in a wrong encoding ({report.mojibake_pairs:,} such as \u201cfÃ¼r\u201d) or control characters"
            )
        yield Diagnostic(
            _grade_severity(report, control),
            f"{format_count(control, 'line')} with {what}: {_format_share(report, control)}.",
        )
    if report.pair_fraction(ratio) > 0.02:
        yield Diagnostic(
            2, f"{_format_share(report, ratio)} of the pairs differ far in length: the sides may be out of step."
        )
    same = report.count_dropped("identical")
    if report.pair_fraction(same) > 0.01:
        yield Diagnostic(2, f"{_format_share(report, same)} of the pairs are sentences left untranslated.")
    again = report.count_dropped("duplicates")
    if report.pair_fraction(again) > 0.001:
        tone = "normal for a translation memory" if report.pair_fraction(again) < 0.3 else "more than most corpora have"
        yield Diagnostic(
            1, f"{_format_share(report, again)} of the pairs came before, word for word: {tone}; the repeats {verb}."
        )


def _diagnose_size(report: CorpusReport) -> Iterator[Diagnostic]:
    if 0 < report.kept_pairs < MIN_TRAINING_PAIRS:
        few, them = format_count(report.kept_pairs, "pair"), "it" if report.kept_pairs == 1 else "them"
        yield Diagnostic(2, f"Only {few}: a model would learn {them} by heart. Add more, or fine-tune one.")
    if report.pairs and not (report.source.languages and report.target.languages):
        yield Diagnostic(1, "The languages are not known; with --src and --tgt more can be checked.")
    if report.pair_fraction(report.retranslated_pairs) > 0.05:
        share = _format_share(report, report.retranslated_pairs)
        yield Diagnostic(
            1, f"{share} of the pairs translate a source that came before in other words: normal, they stay."
        )


def _grade_severity(report: CorpusReport, count: int) -> int:
    return 2 if report.pair_fraction(count) > 0.01 else 1


def _format_share(report: CorpusReport, count: int) -> str:
    return format_precise_percent(report.pair_fraction(count))


def _join_names(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


def _has_or_have(count: int) -> str:
    return "has" if count == 1 else "have"
