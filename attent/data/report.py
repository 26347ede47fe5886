"""What a corpus is like, before hours are spent on it: one pass over the pairs, in flat memory, and a `Report`.

Every count is exact. Only the estimate of tokens and time (`estimate`) rests on a sample, and says so. How a report
looks on a screen is left to `attent.cli.data`; `Report.facts` is the same as plain values, for JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from attent.data import filters as sieves
from attent.data import scripts
from attent.data.corpus import Corpus
from attent.data.estimate import Estimate
from attent.data.filters import ORDER, Filters, Seen, Sieve
from attent.data.leakage import Against, Leakage, fold_pairs
from attent.data.pairs import Bad, CorpusError, Pair
from attent.data.scripts import Scripts

Counts = npt.NDArray[np.int64]

CHUNK = 8_192  # pairs that are looked at together
SCRIPT_SAMPLE = 1_000  # pairs that tell the script of a side where its language does not
SAMPLE = 20_000  # pairs for the estimate of tokens
EXAMPLES = 3  # lines shown of each finding
EXCERPT = 200  # characters of a text in an example
RARE = 3  # a character seen fewer times than this is rare
LONGEST = 1 << 16  # lengths are counted one by one up to here


@dataclass(frozen=True)
class Example:
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
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Origin:
    """A corpus as it was named, and what was read from it."""

    name: str
    files: tuple[str, ...]
    source: str | None  # language tags, where they were given or found
    target: str | None
    weight: float
    pairs: int
    no_pairs: int  # lines and units that are none


@dataclass(frozen=True)
class Lengths:
    """How long the texts of a side are, in words or (where words are not told apart by spaces) in characters."""

    unit: str
    mean: float
    median: int
    most: int  # 95% are no longer than this
    longest: int
    counts: tuple[int, ...] = field(repr=False)  # texts of length 0, 1, 2, ...


@dataclass(frozen=True)
class Side:
    """One side of all pairs."""

    languages: tuple[str, ...]
    scripts: tuple[str, ...]  # what it is expected to be written in; empty where that is not known
    words: int
    characters: int
    different: int  # characters
    rare: str  # characters that are seen once or twice
    lengths: Lengths


@dataclass(frozen=True)
class Test:
    """The test set that the corpus was held against."""

    name: str
    leakage: Leakage
    unseen: tuple[str, str]  # characters of each side that the corpus does not have, the most frequent first
    unseen_sentences: int  # test sentences with such a character


@dataclass(frozen=True)
class Verdict:
    """A sentence for people; `weight` 2: look at this before training, 1: good to know, 0: all is well."""

    weight: int
    text: str


@dataclass(frozen=True)
class Report:
    """All that was found."""

    origins: tuple[Origin, ...]
    pairs: int
    no_pairs: tuple[Finding, ...]
    source: Side
    target: Side
    dropped: tuple[Finding, ...]  # by filter, in their order; a pair counts for the first that drops it
    kept: int
    filtered: bool  # False with --keep-all: then `dropped` is what the filters would have dropped
    mojibake: int  # of those that the filter "control" found
    same_sides: int  # pairs with both sides the same that stay: names, codes, labels
    retranslated: int  # pairs whose source came before with another translation
    tests: tuple[Test, ...]
    estimate: Estimate | None
    error: str | None  # why reading stopped before the end

    def facts(self) -> dict[str, Any]:
        """Everything as plain values, under the names that the classes here give them."""
        return {"verdicts": _plain(verdicts(self)), **_plain(self)}

    def count(self, name: str) -> int:
        return next((finding.count for finding in self.dropped if finding.name == name), 0)

    def share(self, count: int) -> float:
        return count / self.pairs if self.pairs else 0.0


def _plain(value: Any) -> Any:
    """For JSON: an object by the names of its fields."""
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Pair):
        return value._asdict()
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


# ---- one pass over the pairs -----------------------------------------------------------------------------------------


class _Tally:
    """Counts by name, with the first few examples of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[Example]] = {}

    def add(self, name: str, example: Example) -> None:
        self.counts[name] += 1
        examples = self.examples.setdefault(name, [])
        if len(examples) < EXAMPLES:
            examples.append(example)

    def findings(self) -> tuple[Finding, ...]:
        ranked = self.counts.most_common()
        return tuple(Finding(name, count, tuple(self.examples[name])) for name, count in ranked)


class _SideTally:
    """Characters and lengths of one side."""

    def __init__(self) -> None:
        self.characters = np.zeros(0x110000, np.int64)  # how often each is seen
        self.in_words = np.zeros(LONGEST, np.int64)
        self.in_characters = np.zeros(LONGEST, np.int64)
        self.words = 0
        self.scripts: set[Scripts | None] = set()

    def add(self, texts: Sequence[str]) -> None:
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
        seen = np.bincount(codes) if len(codes) else np.zeros(0, np.int64)
        self.characters[: len(seen)] += seen
        words = np.fromiter((len(text.split()) for text in texts), np.int64, len(texts))
        self.words += int(words.sum())
        self.in_words += _histogram(words)
        self.in_characters += _histogram(np.fromiter(map(len, texts), np.int64, len(texts)))

    def side(self, languages: Iterable[str | None]) -> Side:
        spaced = all(scripts.spaced(found) for found in self.scripts)
        seen = np.flatnonzero(self.characters)
        rare = [chr(code) for code in seen if self.characters[code] < RARE and chr(code) != " "]
        expected = frozenset().union(*(found or frozenset() for found in self.scripts))
        return Side(
            languages=tuple(dict.fromkeys(tag for tag in languages if tag)),
            scripts=tuple(sorted(expected)),
            words=self.words,
            characters=int(self.characters.sum()),
            different=len(seen),
            rare="".join(rare),
            lengths=lengths("words", self.in_words) if spaced else lengths("characters", self.in_characters),
        )


def _histogram(values: Counts) -> Counts:
    return np.bincount(np.minimum(values, LONGEST - 1), minlength=LONGEST)


def lengths(unit: str, counts: Counts) -> Lengths:
    """The shape of a distribution that is given as how often each length occurs."""
    total = max(int(counts.sum()), 1)
    below = np.cumsum(counts)
    longest = int(np.flatnonzero(counts).max(initial=0))
    return Lengths(
        unit=unit,
        mean=float((counts * np.arange(len(counts))).sum() / total),
        median=int(np.searchsorted(below, total * 0.5)),
        most=int(np.searchsorted(below, total * 0.95)),
        longest=longest,
        counts=tuple(counts[: longest + 1].tolist()),
    )


class _Sample:
    """The pairs with the smallest keys: a fair sample, the same whatever the order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._limit = np.uint64(2**64 - 1)
        self._held: list[tuple[int, str, str]] = []

    def add(self, keys: sieves.Keys, sources: Sequence[str], targets: Sequence[str]) -> None:
        for i in np.flatnonzero(keys <= self._limit).tolist():
            self._held.append((int(keys[i]), sources[i], targets[i]))
        if len(self._held) > 2 * self.size:
            self._held = sorted(self._held)[: self.size]
            self._limit = np.uint64(self._held[-1][0])

    def pairs(self) -> list[tuple[str, str]]:
        return [(source, target) for _, source, target in sorted(self._held)[: self.size]]


class Survey:
    """Takes in corpora chunk by chunk, and knows at any time what was in them."""

    def __init__(self, *, keep_all: bool = False, against: Sequence[tuple[str, Against]] = ()) -> None:
        self.keep_all = keep_all
        self.against = against
        self.sample = _Sample(SAMPLE)
        self.read = 0
        self._origins: list[Origin] = []
        self._no_pairs, self._dropped = _Tally(), _Tally()
        self._source, self._target = _SideTally(), _SideTally()
        self._pairs_seen = Seen()
        self._sources_seen: dict[str | None, Seen] = {}  # by the language that they are translated into
        self._mojibake = self._same_sides = self._retranslated = 0

    def take(self, corpus: Corpus, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read a corpus to its end, or to where it breaks: what came before is counted, then the error goes on."""
        began, bad = self.read, self._no_pairs.counts.total()
        sieve: Sieve | None = None
        try:
            for chunk in _chunks(corpus, self._note_bad):
                if chunk:
                    sieve = sieve or self._sieve(corpus, chunk)
                    self._look(chunk, sieve, corpus.languages.target)
                progress(self.read)
        finally:
            read, unread = self.read - began, self._no_pairs.counts.total() - bad
            tags = corpus.languages
            self._origins.append(
                Origin(corpus.name, corpus.files, tags.source, tags.target, corpus.weight, read, unread)
            )

    def _note_bad(self, bad: Bad) -> None:
        self._no_pairs.add(bad.why, Example(bad.file, bad.line, _excerpt(bad.text), ""))

    def _sieve(self, corpus: Corpus, chunk: Sequence[Pair]) -> Sieve:
        expected = sieves.expected_scripts(corpus.languages, chunk[:SCRIPT_SAMPLE])
        self._source.scripts.add(expected[0])
        self._target.scripts.add(expected[1])
        return Sieve(Filters(), expected)

    def _look(self, chunk: Sequence[Pair], sieve: Sieve, into: str | None) -> None:
        self.read += len(chunk)
        sources, targets = [pair.source.strip() for pair in chunk], [pair.target.strip() for pair in chunk]
        self._source.add(sources)
        self._target.add(targets)
        folded = fold_pairs(chunk) if self.against else None
        for _, test in self.against:
            test.look(chunk, folded)
        whys = list(map(sieve.why, sources, targets))
        for i, why in enumerate(whys):
            if why is not None:
                self._drop(why, chunk[i])
        new, keys = self._repeats(chunk, sources, targets, np.array([why is None for why in whys], dtype=bool))
        seen = self._sources_seen.setdefault(into, Seen())
        self._retranslated += int((~seen.add(keys[new])).sum())

    def _drop(self, why: str, pair: Pair) -> None:
        self._dropped.add(why, Example(pair.file, pair.line, _excerpt(pair.source), _excerpt(pair.target)))
        if why == "control":
            self._mojibake += sieves.is_mojibake(pair.source) or sieves.is_mojibake(pair.target)

    def _repeats(
        self, chunk: Sequence[Pair], sources: list[str], targets: list[str], good: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.bool_], sieves.Keys]:
        """Among the pairs that no other filter drops: which are new? And the keys of all sources."""
        source_keys, target_keys = sieves.text_keys(sources), sieves.text_keys(targets)
        keys = sieves.join_keys(source_keys, target_keys)
        new = np.zeros(len(chunk), dtype=bool)
        new[good] = self._pairs_seen.add(keys[good])
        for i in np.flatnonzero(good & ~new).tolist():
            self._drop("duplicates", chunk[i])
        self._same_sides += int((source_keys[new] == target_keys[new]).sum())
        taken = np.flatnonzero(good if self.keep_all else new)
        self.sample.add(keys[taken], [sources[i] for i in taken], [targets[i] for i in taken])
        return new, source_keys

    def report(self, estimate: Estimate | None = None, error: str | None = None) -> Report:
        by_name = {finding.name: finding for finding in self._dropped.findings()}
        return Report(
            origins=tuple(self._origins),
            pairs=self.read,
            no_pairs=self._no_pairs.findings(),
            source=self._source.side(origin.source for origin in self._origins),
            target=self._target.side(origin.target for origin in self._origins),
            dropped=tuple(by_name.get(name, Finding(name, 0)) for name in ORDER),
            kept=self.kept,
            filtered=not self.keep_all,
            mojibake=self._mojibake,
            same_sides=self._same_sides,
            retranslated=self._retranslated,
            tests=tuple(self._test(name, test) for name, test in self.against),
            estimate=estimate,
            error=error,
        )

    @property
    def kept(self) -> int:
        """Pairs that training would see."""
        return self.read if self.keep_all else self.read - self._dropped.counts.total()

    @property
    def characters(self) -> int:
        """Of both sides of the pairs that training would see."""
        whole = int(self._source.characters.sum() + self._target.characters.sum())
        return round(whole * self.kept / self.read) if self.read else 0

    def _test(self, name: str, test: Against) -> Test:
        source = _unseen([pair.source for pair in test.pairs], self._source.characters)
        target = _unseen([pair.target for pair in test.pairs], self._target.characters)
        touched = sum(
            any(map(source.__contains__, pair.source)) or any(map(target.__contains__, pair.target))
            for pair in test.pairs
        )
        return Test(name, test.found(), ("".join(source), "".join(target)), touched)


def _chunks(corpus: Iterable[Pair | Bad], note_bad: Callable[[Bad], None]) -> Iterator[list[Pair]]:
    """Pairs by the thousand; where reading breaks, first the pairs before it, then the error."""
    entries, ended = iter(corpus), False
    while not ended:
        chunk: list[Pair] = []
        ended = True
        try:
            for entry in islice(entries, CHUNK):
                ended = False
                if isinstance(entry, Pair):
                    chunk.append(entry)
                else:
                    note_bad(entry)
        except (CorpusError, OSError):
            yield chunk
            raise
        yield chunk


def _excerpt(text: str) -> str:
    """The beginning of a long text, or the place in it where it is damaged."""
    text = text.strip()
    damage = sieves.find_damage(text)
    start = max(damage - 20, 0) if damage is not None and damage > 40 else 0
    return ("…" if start else "") + text[start : start + EXCERPT] + ("…" if len(text) > start + EXCERPT else "")


def _unseen(texts: Iterable[str], seen: Counts) -> dict[str, int]:
    counts = Counter("".join(texts))
    return {char: n for char, n in counts.most_common() if not seen[ord(char)] and not char.isspace()}


# ---- in words --------------------------------------------------------------------------------------------------------

FEW_PAIRS = 10_000  # below this a model learns the sentences by heart rather than the language
SOME_LEAKED = 0.005  # of a test set, from which on its scores mean less
EXPECTED = ("no translation", "fuzzy", "obsolete")  # of a catalogue or memory in the making; nothing is wrong with it


def verdicts(report: Report) -> tuple[Verdict, ...]:
    """What a person should know, in plain words, the most important first."""
    found = [*_of_reading(report), *_of_tests(report), *_of_pairs(report), *_of_amount(report)]
    if not any(verdict.weight == 2 for verdict in found):
        found.append(Verdict(0, "Nothing serious found."))
    return tuple(sorted(found, key=lambda verdict: -verdict.weight))


def _of_reading(report: Report) -> Iterator[Verdict]:
    if report.error:
        yield Verdict(2, "Reading stopped before the end: this report is about what was read up to there.")
    if not report.pairs:
        yield Verdict(2, "There is not one pair in it.")
    expected = sum(finding.count for finding in report.no_pairs if finding.name in EXPECTED)
    broken = sum(finding.count for finding in report.no_pairs) - expected
    if broken:
        weight = 2 if broken > 0.01 * (report.pairs + broken) else 1
        yield Verdict(weight, f"{_lines(broken)} could not be read as a pair and {_is(broken)} left out.")
    if expected:
        yield Verdict(
            1, f"{_lines(expected, 'entry', 'entries')} without a finished translation: normal in such files."
        )


def _of_tests(report: Report) -> Iterator[Verdict]:
    for test in report.tests:
        yield _of_leakage(test)
        if test.unseen_sentences:
            count, touched = len(set("".join(test.unseen))), test.unseen_sentences
            never = _lines(count, "character", "characters")
            verbs = "never occurs" if count == 1 else "never occur"
            of_it = f"{touched:,} of its sentences {_have(touched)} one"
            yield Verdict(1, f"{never} of {test.name} {verbs} here; {of_it}.")


def _of_leakage(test: Test) -> Verdict:
    leak = test.leakage
    same = leak.pair + leak.source
    parts = [
        f"{same:,} {_is(same)} in this corpus" if same else "",
        f"{leak.target:,} {_have(leak.target)} the same translation as another line here" if leak.target else "",
        f"{leak.near:,} {_is(leak.near)} nearly the same as a line here" if leak.near else "",
    ]
    told = _listed([part for part in parts if part])
    if not told:
        return Verdict(0, f"No sentence of {test.name} is in this corpus, nor nearly.")
    told = f"Of {leak.sentences:,} sentences of {test.name} {told}"
    if same > SOME_LEAKED * leak.sentences:
        return Verdict(2, f"{told}: scores on it would be too good.")
    few = leak.exact + leak.near < 0.1 * leak.sentences
    return Verdict(1, f"{told}: {'so few are normal' if few else 'look at the examples below'}.")


def _of_pairs(report: Report) -> Iterator[Verdict]:
    verb = "are dropped" if report.filtered else "stay"
    script, control, ratio = report.count("script"), report.count("control"), report.count("ratio")
    if report.share(script) > 0.5:
        yield Verdict(2, "Most lines are in another script than their language: are --src and --tgt the right way?")
    elif script:
        yield Verdict(
            _grave(report, script), f"{_lines(script)} in a script of another language: {_share(report, script)}."
        )
    if control:
        what = "text in a wrong encoding or control characters"
        if report.mojibake:
            what = f"text in a wrong encoding ({report.mojibake:,} such as \u201cfÃ¼r\u201d) or control characters"
        yield Verdict(_grave(report, control), f"{_lines(control)} with {what}: {_share(report, control)}.")
    if report.share(ratio) > 0.02:
        yield Verdict(2, f"{_share(report, ratio)} of the pairs differ far in length: the sides may be out of step.")
    same = report.count("identical")
    if report.share(same) > 0.01:
        yield Verdict(2, f"{_share(report, same)} of the pairs are sentences left untranslated.")
    again = report.count("duplicates")
    if report.share(again) > 0.001:
        tone = "normal for a translation memory" if report.share(again) < 0.3 else "more than most corpora have"
        yield Verdict(
            1, f"{_share(report, again)} of the pairs came before, word for word: {tone}; the repeats {verb}."
        )


def _of_amount(report: Report) -> Iterator[Verdict]:
    if 0 < report.kept < FEW_PAIRS:
        yield Verdict(
            2, f"{report.kept:,} pairs are few: a model would learn them by heart. Add more, or fine-tune one."
        )
    if report.pairs and not (report.source.languages and report.target.languages):
        yield Verdict(1, "The languages are not known; with --src and --tgt more can be checked.")
    if report.share(report.retranslated) > 0.05:
        share = _share(report, report.retranslated)
        yield Verdict(1, f"{share} of the pairs translate a source that came before in other words: normal, they stay.")


def _grave(report: Report, count: int) -> int:
    return 2 if report.share(count) > 0.01 else 1


def _share(report: Report, count: int) -> str:
    return percent(report.share(count))


def percent(share: float) -> str:
    """As many digits as it deserves: 12%, 3.1%, 0.02%."""
    if 0.995 <= share < 1:
        return f"{min(100 * share, 99.99):.2f}%"
    for least, digits in ((0.1, 0), (0.001, 1), (0.00001, 3)):
        if share >= least:
            return f"{100 * share:.{digits}f}%"
    return "<0.001%" if share else "0%"


def _lines(count: int, one: str = "line", many: str = "lines") -> str:
    return f"{count:,} {one if count == 1 else many}"


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"
