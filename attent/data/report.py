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

from attent.data import filters as sieves
from attent.data import scripts
from attent.data.corpus import Corpus
from attent.data.estimate import Estimate
from attent.data.filters import ORDER, Filters, Seen, Sieve
from attent.data.leakage import Against, Leakage, fold_pairs
from attent.data.pairs import Bad, CorpusError, Pair
from attent.data.readers import formats
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
    ignored: tuple[str, ...] = ()  # files of the folder that were not read, as `more.tsv (the reason)`


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
    files: tuple[str, ...]
    no_pairs: int  # lines and units that are none
    leakage: Leakage
    # Of the sentences whose near twins were sought: what is not in the corpus, spaces aside.
    unseen: tuple[str, str]  # characters of each side, the most frequent first
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
    unread: tuple[str, ...] = ()  # the corpora behind that place

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


@dataclass(frozen=True)
class HeldOut:
    """A test set, and where it came from: its sentences should not be in the corpus."""

    name: str
    files: tuple[str, ...]
    against: Against


class Survey:
    """Takes in corpora chunk by chunk, and knows at any time what was in them.

    With `by_target`, for several target languages, a pair comes again only when it does so in the same language.
    """

    def __init__(self, *, keep_all: bool = False, by_target: bool = False, tests: Sequence[HeldOut] = ()) -> None:
        self.keep_all = keep_all
        self.by_target = by_target
        self.tests = tests
        self.sample = _Sample(SAMPLE)
        self.read = 0
        self._origins: list[Origin] = []
        self._no_pairs, self._dropped = _Tally(), _Tally()
        self._source, self._target = _SideTally(), _SideTally()
        self._pairs_seen: defaultdict[str | None, Seen] = defaultdict(Seen)  # by target language, or all under None
        self._sources_seen: defaultdict[str | None, Seen] = defaultdict(Seen)  # by target language
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
            self._origins.append(_origin(corpus, read, unread))

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
        folded = fold_pairs(chunk) if self.tests else None
        for test in self.tests:
            test.against.look(chunk, folded)
        whys = list(map(sieve.why, sources, targets))
        for i, why in enumerate(whys):
            if why is not None:
                self._drop(why, chunk[i])
        good = np.array([why is None for why in whys], dtype=bool)
        source_keys, target_keys = sieves.text_keys(sources), sieves.text_keys(targets)
        keys = sieves.join_keys(source_keys, target_keys)
        new = self._new(chunk, keys, good, into)
        self._same_sides += int((source_keys[new] == target_keys[new]).sum())
        self._retranslated += int((~self._sources_seen[into].add(source_keys[new])).sum())
        self._draw(keys, new, sources, targets)

    def _drop(self, why: str, pair: Pair) -> None:
        self._dropped.add(why, Example(pair.file, pair.line, _excerpt(pair.source), _excerpt(pair.target)))
        if why == "control":
            self._mojibake += sieves.is_mojibake(pair.source) or sieves.is_mojibake(pair.target)

    def _new(
        self, chunk: Sequence[Pair], keys: sieves.Keys, good: npt.NDArray[np.bool_], into: str | None
    ) -> npt.NDArray[np.bool_]:
        """Among the pairs that no other filter drops: which did not come before?"""
        new = np.zeros(len(chunk), dtype=bool)
        new[good] = self._pairs_seen[into if self.by_target else None].add(keys[good])
        for i in np.flatnonzero(good & ~new).tolist():
            self._drop("duplicates", chunk[i])
        return new

    def _draw(
        self, keys: sieves.Keys, new: npt.NDArray[np.bool_], sources: Sequence[str], targets: Sequence[str]
    ) -> None:
        """Offer to the sample what training would see. Repeats that stay are drawn each for itself, by their place."""
        if self.keep_all:
            places = np.arange(self.read - len(keys), self.read, dtype=np.uint64)
            self.sample.add(sieves.join_keys(keys, places), sources, targets)
            return
        taken = np.flatnonzero(new).tolist()
        self.sample.add(keys[taken], [sources[i] for i in taken], [targets[i] for i in taken])

    def report(self, estimate: Estimate | None = None, error: str | None = None, unread: Sequence[str] = ()) -> Report:
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
            tests=tuple(map(self._test, self.tests)),
            estimate=estimate,
            error=error,
            unread=tuple(unread),
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

    def _test(self, test: HeldOut) -> Test:
        against = test.against
        source = _unseen([pair.source for pair in against.pairs], self._source.characters)
        target = _unseen([pair.target for pair in against.pairs], self._target.characters)
        touched = sum(
            any(map(source.__contains__, pair.source)) or any(map(target.__contains__, pair.target))
            for pair in against.pairs
        )
        unseen = "".join(source), "".join(target)
        return Test(test.name, test.files, against.no_pairs, against.found(), unseen, touched)


def _origin(corpus: Corpus, pairs: int, no_pairs: int) -> Origin:
    return Origin(
        name=corpus.name,
        files=corpus.files,
        source=corpus.languages.source,
        target=corpus.languages.target,
        weight=corpus.weight,
        pairs=pairs,
        no_pairs=no_pairs,
        ignored=corpus.ignored,
    )


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
SHORT_LEAKED = 0.1  # the same for sentences of three words or less, which come again in any corpus
EXPECTED = ("no translation", "fuzzy", "obsolete")  # of a catalogue or memory in the making; nothing is wrong with it


def verdicts(report: Report) -> tuple[Verdict, ...]:
    """What a person should know, in plain words, the most important first."""
    found = [*_of_reading(report), *_of_tests(report), *_of_pairs(report), *_of_amount(report)]
    if not any(verdict.weight == 2 for verdict in found):
        found.append(Verdict(0, "Nothing serious found."))
    return tuple(sorted(found, key=lambda verdict: -verdict.weight))


def _of_reading(report: Report) -> Iterator[Verdict]:
    if report.error:
        told = "Reading stopped before the end: this report is about what was read up to there."
        yield Verdict(2, f"{told} Not read: {named(report.unread)}." if report.unread else told)
    if not report.pairs:
        yield Verdict(2, "There is not one pair in it.")
    expected = sum(finding.count for finding in report.no_pairs if finding.name in EXPECTED)
    broken = sum(finding.count for finding in report.no_pairs) - expected
    if broken:
        weight = 2 if broken > 0.01 * (report.pairs + broken) else 1
        yield Verdict(weight, f"{counted(broken)} could not be read as a pair and {_is(broken)} left out.")
    if expected:
        yield Verdict(
            1, f"{counted(expected, 'entry', 'entries')} without a finished translation: normal in such files."
        )
    yield from _of_ignored(report)


def _of_ignored(report: Report) -> Iterator[Verdict]:
    """Files that lie there unread. A format that can be read, or both files of a pair, may have been meant."""
    names = ignored(report.origins)
    stems = Counter(_stem(name) for name in names)
    readable = [name for name in names if formats.by_name(_file(name)) or stems[_stem(name)] > 1]
    others = [name for name in names if name not in readable]
    if readable:
        yield Verdict(2, f"Not read: {named(readable)}. What is meant for training, name as a corpus too.")
    if others:
        yield Verdict(1, f"Not read: {named(others)}.")


def ignored(origins: Sequence[Origin]) -> list[str]:
    """Files of the folders that none of these read; for another pair of languages a folder may be read again."""
    read = {(origin.name, Path(file).name) for origin in origins for file in origin.files}
    names = [(origin.name, name) for origin in origins for name in origin.ignored]
    return list(dict.fromkeys(name for folder, name in names if (folder, _file(name)) not in read))


def _file(name: str) -> str:
    """Of `more.tsv (the reason)` the file."""
    return name.partition(" (")[0]


def _stem(name: str) -> str:
    return formats.plain(_file(name)).rpartition(".")[0]


def named(names: Sequence[str], most: int = 3) -> str:
    """The first few of a list, and how many more there are."""
    more = len(names) - most
    return _listed([*names[:most], f"{more:,} more"] if more > 0 else list(names))


def _of_tests(report: Report) -> Iterator[Verdict]:
    for test in report.tests:
        yield _of_leakage(test)
        if test.no_pairs:
            yield Verdict(1, f"{counted(test.no_pairs)} of {test.name} could not be read as a pair.")
        if test.unseen_sentences:
            count, touched = len(set("".join(test.unseen))), test.unseen_sentences
            never = counted(count, "character", "characters")
            verbs = "never occurs" if count == 1 else "never occur"
            of_it = f"{touched:,} of its sentences {_have(touched)} one"
            yield Verdict(1, f"{never} of {test.name} {verbs} here; {of_it}.")


def _of_leakage(test: Test) -> Verdict:
    leak = test.leakage
    if not leak.sentences:
        return Verdict(2, f"There is not one pair in {test.name}: nothing could be checked.")
    same = leak.pair + leak.source
    parts = [
        f"{same:,} {_is(same)} in this corpus" if same else "",
        f"{leak.target:,} {_have(leak.target)} the same translation as another line here" if leak.target else "",
        f"{leak.near:,} {_is(leak.near)} nearly the same as a line here" if leak.near else "",
    ]
    told = _listed([part for part in parts if part])
    if not told:
        return _of_no_twin(test)
    told = f"Of {counted(leak.sentences, 'sentence', 'sentences')} of {test.name} {told}"
    if same > SOME_LEAKED * leak.sentences:
        return Verdict(2, f"{told}: scores on it would be too good.")
    few = leak.exact + leak.near < 0.1 * leak.sentences
    return Verdict(1, f"{told}: {'so few are normal' if few else 'look at the examples below'}.")


def _of_no_twin(test: Test) -> Verdict:
    leak = test.leakage
    told = f"No sentence of {test.name} is in this corpus, nor nearly"
    if leak.short:
        told += f", but for {leak.short:,} of three words or less"
    if limit := limits(leak):
        told += f"; {limit}"
    return Verdict(1 if leak.short > SHORT_LEAKED * leak.sentences else 0, f"{told}.")


def limits(leak: Leakage) -> str:
    """How far near twins were looked for, where that was not everywhere."""
    parts = []
    if leak.near_sought < leak.sentences:
        parts.append(f"near twins were sought of the first {leak.near_sought:,} of {leak.sentences:,} sentences only")
    if leak.uncompared:
        lines = counted(leak.uncompared, "line", "different lines")
        parts.append(f"{lines} of the corpus met too many sentences to be compared with each")
    return "; ".join(parts)


def _of_pairs(report: Report) -> Iterator[Verdict]:
    verb = "are dropped" if report.filtered else "stay"
    script, control, ratio = report.count("script"), report.count("control"), report.count("ratio")
    if report.share(script) > 0.5:
        yield Verdict(2, "Most lines are in another script than their language: are --src and --tgt the right way?")
    elif script:
        yield Verdict(
            _grave(report, script), f"{counted(script)} in a script of another language: {_share(report, script)}."
        )
    if control:
        what = "text in a wrong encoding or control characters"
        if report.mojibake:
            what = f"text in a wrong encoding ({report.mojibake:,} such as \u201cfÃ¼r\u201d) or control characters"
        yield Verdict(_grave(report, control), f"{counted(control)} with {what}: {_share(report, control)}.")
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
        few, them = counted(report.kept, "pair", "pairs"), "it" if report.kept == 1 else "them"
        yield Verdict(2, f"Only {few}: a model would learn {them} by heart. Add more, or fine-tune one.")
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


def counted(count: int, one: str = "line", many: str = "lines") -> str:
    return f"{count:,} {one if count == 1 else many}"


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"
