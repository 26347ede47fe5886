"""Advice from a corpus report: what to look at before training, the most important first."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from attent.data.contamination import Contamination
from attent.data.formats import registry, streams
from attent.data.pairs import Pair
from attent.data.report import CorpusReport, CorpusSummary
from attent.formatting import format_count, format_precise_percent

MIN_TRAINING_PAIRS = 10_000  # a model overfits fewer
MAX_CONTAMINATION = 0.005  # fraction of a test set from which on its scores are inflated
MAX_SHORT_CONTAMINATION = 0.1  # for sentences of three words or less, which recur in any corpus
EXPECTED_REASONS = ("no translation", "fuzzy", "obsolete")  # normal in unfinished catalogues and translation memories


@dataclass(frozen=True)
class Diagnostic:
    """A sentence with severity 2 (check before training), 1 (note) or 0 (fine)."""

    severity: int
    text: str


def diagnose(report: CorpusReport) -> tuple[Diagnostic, ...]:
    checks = (_diagnose_reading, _diagnose_test_sets, _diagnose_pairs)
    diagnostics = [diagnostic for check in checks for diagnostic in check(report)]
    if not any(diagnostic.severity == 2 for diagnostic in diagnostics):
        diagnostics.append(Diagnostic(0, "No serious problems found."))
    return tuple(sorted(diagnostics, key=lambda diagnostic: -diagnostic.severity))


def to_json(report: CorpusReport) -> dict[str, Any]:
    return {"diagnostics": _to_plain(diagnose(report)), **_to_plain(report)}


def _to_plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Pair):
        return value._asdict()
    return [_to_plain(item) for item in value] if isinstance(value, tuple) else value


def _diagnose_reading(report: CorpusReport) -> Iterator[Diagnostic]:
    if report.error:
        unread = f" Not read: {format_names(report.unread_corpora)}." if report.unread_corpora else ""
        yield Diagnostic(2, f"Reading stopped early; this report covers the part that was read.{unread}")
    if not report.pairs:
        yield Diagnostic(2, "The corpus has no pairs.")
    expected = sum(finding.count for finding in report.bad_lines if finding.name in EXPECTED_REASONS)
    broken = sum(finding.count for finding in report.bad_lines) - expected
    if broken:
        severity = 2 if broken > 0.01 * (report.pairs + broken) else 1
        verb = "is" if broken == 1 else "are"
        findings = [finding for finding in report.bad_lines if finding.name not in EXPECTED_REASONS]
        examples = [(finding.name, finding.examples[0]) for finding in findings if finding.examples]
        first = [f"{name}, first in {Path(example.file).name}:{example.line}" for name, example in examples]
        reasons = f": {'; '.join(first[:2])}" if first else ""
        lines = format_count(broken, "line")
        yield Diagnostic(severity, f"{lines} could not be read as a pair and {verb} skipped{reasons}.")
    if expected:
        count = format_count(expected, "entry", "entries")
        yield Diagnostic(1, f"{count} without a finished translation: normal in such files.")
    # Unread files in a known format and both files of a pair may have been meant for training.
    entries = list_ignored_files(report.corpora)
    files = {entry: entry.partition(" (")[0] for entry in entries}  # of an entry such as `more.tsv (the reason)`
    stems = {entry: streams.strip_compression_suffix(file).rpartition(".")[0] for entry, file in files.items()}
    counts = Counter(stems.values())
    readable = [entry for entry in entries if registry.detect_format(files[entry]) or counts[stems[entry]] > 1]
    others = [entry for entry in entries if entry not in readable]
    if readable:
        yield Diagnostic(2, f"Not read: {format_names(readable)}. Name a file as a corpus to train on it too.")
    if others:
        yield Diagnostic(1, f"Not read: {format_names(others)}.")


def list_ignored_files(corpora: Sequence[CorpusSummary]) -> list[str]:
    """Return the files that no corpus read; a folder may be read once per language pair."""
    read = {(corpus.name, Path(file).name) for corpus in corpora for file in corpus.files}
    names = [(corpus.name, name) for corpus in corpora for name in corpus.ignored_files]
    return list(dict.fromkeys(name for folder, name in names if (folder, name.partition(" (")[0]) not in read))


def format_names(names: Sequence[str], max_names: int = 3) -> str:
    more = len(names) - max_names
    return _join_phrases([*names[:max_names], f"{more:,} more"] if more > 0 else list(names))


def _join_phrases(phrases: list[str]) -> str:
    return " and ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)


def _diagnose_test_sets(report: CorpusReport) -> Iterator[Diagnostic]:
    for test_set in report.test_sets:
        yield _diagnose_contamination(test_set)
        if test_set.bad_lines:
            lines = format_count(test_set.bad_lines, "line")
            yield Diagnostic(1, f"{lines} of {test_set.name} could not be read as a pair.")


def _diagnose_contamination(overlap: Contamination) -> Diagnostic:
    if not overlap.sentences:
        return Diagnostic(2, f"{overlap.name} has no pairs: nothing could be checked.")
    same = overlap.same_pair + overlap.same_source
    counts = ((same, "in this corpus"), (overlap.same_target, "with a target that is in this corpus"))
    summary = _join_phrases([f"{count:,} {label}" for count, label in counts if count])
    if not summary:
        text = f"No sentence of {overlap.name} is in this corpus"
        if overlap.short_matches:
            text += f", except {overlap.short_matches:,} of three words or less"
        severity = 1 if overlap.short_matches > MAX_SHORT_CONTAMINATION * overlap.sentences else 0
        return Diagnostic(severity, f"{text}.")
    summary = f"{overlap.name}: of {format_count(overlap.sentences, 'sentence')}, {summary}"
    if same > MAX_CONTAMINATION * overlap.sentences:
        return Diagnostic(2, f"{summary}: scores on it would be inflated.")
    is_low = same + overlap.same_target < 0.1 * overlap.sentences
    return Diagnostic(1, f"{summary}: {'so few are normal' if is_low else 'check the examples below'}.")


def _diagnose_pairs(report: CorpusReport) -> Iterator[Diagnostic]:
    yield from (Diagnostic(2, f"{problem}.") for problem in report.language_problems)
    if report.pair_fraction(report.count_dropped("script")) > 0.5:
        yield Diagnostic(2, "Most lines are not in the script of their language: are --src and --tgt swapped?")
    for name, problem, min_fraction, max_fraction in (
        ("script", "in a script of another language", 0, 0.5),
        ("control", "with a wrong encoding or control characters", 0, 1),
        ("empty", "with an empty side", 0.01, 1),
        ("max_chars", "of more characters than the limit", 0.01, 1),
    ):
        count = report.count_dropped(name)
        if min_fraction < report.pair_fraction(count) <= max_fraction:
            severity = 2 if report.pair_fraction(count) > 0.01 else 1
            yield Diagnostic(severity, f"{format_count(count, 'line')} {problem}: {_format_share(report, count)}.")
    ratio, identical = report.count_dropped("length_ratio"), report.count_dropped("identical")
    if report.pair_fraction(ratio) > 0.02:
        yield Diagnostic(2, f"{_format_share(report, ratio)} of the pairs differ much in length: check the alignment.")
    if report.pair_fraction(identical) > 0.01:
        yield Diagnostic(2, f"{_format_share(report, identical)} of the pairs are untranslated sentences.")
    duplicates = report.count_dropped("duplicates")
    if report.pair_fraction(duplicates) > 0.001:
        is_normal = report.pair_fraction(duplicates) < 0.3
        comparison = "normal for a translation memory" if is_normal else "more than in most corpora"
        action = "they are dropped" if report.filters_applied else "they are kept"
        yield Diagnostic(1, f"{_format_share(report, duplicates)} of the pairs are duplicates: {comparison}; {action}.")
    if 0 < report.kept_pairs < MIN_TRAINING_PAIRS:
        pairs = format_count(report.kept_pairs, "pair")
        yield Diagnostic(2, f"Only {pairs}: a model would overfit. Add more data, or fine-tune a trained model.")
    if report.pairs and not (report.source.languages and report.target.languages):
        yield Diagnostic(1, "The languages are unknown; --src and --tgt enable more checks.")


def _format_share(report: CorpusReport, count: int) -> str:
    return format_precise_percent(report.pair_fraction(count))
