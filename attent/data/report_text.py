"""Corpus reports as text for a terminal, 80 columns or more, with advice: what to look at before training."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from attent.data.filters import FilterConfig
from attent.data.formats import registry, streams
from attent.data.pairs import Pair
from attent.data.report import Contamination, ContaminationMatch, CorpusReport, CorpusSummary, SideStats
from attent.formatting import escape_invisible, format_count, format_precise_percent

MIN_TRAINING_PAIRS = 10_000  # a model overfits fewer
MAX_CONTAMINATION = 0.005  # fraction of a test set from which on its scores are inflated
MAX_SHORT_CONTAMINATION = 0.1  # for sentences of three words or less, which recur in any corpus
EXPECTED_REASONS = ("no translation", "fuzzy", "obsolete")  # normal in unfinished catalogues and translation memories
PIPE_WIDTH, MAX_WIDTH = 80, 110  # columns
MAX_NAME_WIDTH = 50  # a longer path is split into folder and file

SEVERITY_LABELS = {2: ("check", "bold red"), 1: ("note", "yellow"), 0: ("ok", "green")}
FILTER_LABELS = {
    "empty": "an empty side",
    "control": "control characters or wrong encoding",
    "max_chars": f"longer than {FilterConfig.max_chars:,} characters",
    "length_ratio": f"one side over {FilterConfig.length_ratio:g} times longer than the other (summaries: than usual)",
    "identical": "not translated: both sides equal",
    "script": "in the script of another language",
    "duplicates": "duplicates",
}


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


def render_report(report: CorpusReport) -> str:
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH) if console.is_terminal else PIPE_WIDTH
    with console.capture() as capture:
        for section in _iter_sections(report):
            console.print(section)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def _iter_sections(report: CorpusReport) -> Iterator[RenderableType]:
    """Yield the diagnostics first, then the figures."""
    diagnostics = Table.grid(padding=(0, 2))
    for diagnostic in diagnose(report):
        label, style = SEVERITY_LABELS[diagnostic.severity]
        diagnostics.add_row(Text(label, style), Text(diagnostic.text))
    yield diagnostics
    yield _render_corpora(report)
    if not report.pairs:
        return
    yield _render_sides(report)
    yield _render_filters(report)
    yield from map(_render_test_set, report.test_sets)


def _render_heading(title: str, note: str = "") -> Text:
    return Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))


def _render_corpora(report: CorpusReport) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    several = len({(corpus.source, corpus.target) for corpus in report.corpora}) > 1
    for corpus in report.corpora:
        weight = f", weight {corpus.weight:g}" if corpus.weight != 1 else ""
        tags = f" {corpus.source}-{corpus.target}" if several else ""
        table.add_row(_format_files(corpus.files), f"{format_count(corpus.pairs, 'pair')}{tags}{weight}")
    rows: list[RenderableType] = [_render_heading("Files"), table]
    if report.bad_lines:
        rows.append(_render_heading("Lines that are not pairs"))
    for finding in report.bad_lines:
        rows.append(Text(f"{finding.count:>11,}  {finding.name}"))
        rows += [_render_line(_format_location(example), example.source) for example in finding.examples]
    return Group(*rows)


def _format_files(names: Sequence[str]) -> str:
    """List files, with a common folder once; a long list is shortened in the middle."""
    folders = {str(Path(name).parent) for name in names}
    if len(folders) == 1 and folders != {"."} and (len(names) > 1 or len(names[0]) > MAX_NAME_WIDTH):
        return f"{folders.pop()}: {_format_files([Path(name).name for name in names])}"
    shown = names if len(names) <= 6 else [*names[:3], f"... {len(names) - 6} more ...", *names[-3:]]
    return ", ".join(shown)


def _render_sides(report: CorpusReport) -> RenderableType:
    sides = (("source", report.source), ("target", report.target))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False)
    table.add_column("")
    for name, side in sides:
        title = f"{name} ({', '.join(side.languages)})" if side.languages else name
        table.add_column(title, justify="right", header_style="dim")
    for label, values in _iter_side_rows(report.source, report.target):
        if any(values):
            table.add_row(label, *values)
    return Group(_render_heading(format_count(report.pairs, "pair")), table)


def _iter_side_rows(*sides: SideStats) -> Iterator[tuple[str, list[str]]]:
    lengths = [side.lengths for side in sides]
    yield "words", [f"{side.words:,}" if side.lengths.unit == "words" else "" for side in sides]
    yield "characters", [f"{side.characters:,}" for side in sides]
    yield "distinct characters", [f"{side.distinct_characters:,}" for side in sides]
    yield "mean length", [f"{stats.mean:.1f} {stats.unit}" for stats in lengths]
    for label, name in (
        ("median length", "median"), ("95th percentile", "percentile_95"), ("maximum length", "max_length")
    ):  # fmt: skip
        yield label, [format_count(getattr(stats, name), stats.unit.removesuffix("s")) for stats in lengths]


def _render_filters(report: CorpusReport) -> RenderableType:
    note = "" if report.filters_applied else "not applied: --keep-all"
    rows: list[RenderableType] = [_render_heading("Dropped by the filters", note)]
    for finding in report.dropped:
        rows.append(_render_count(FILTER_LABELS[finding.name], finding.count, report, "" if finding.count else "dim"))
        for example in finding.examples:  # each text ends its line, so that right-to-left text moves nothing else
            source, target = _format_location(example), _format_location(example, "target")
            rows.append(_render_line(source, example.source))
            rows.append(_render_line(" " * cell_len(source) if target == source else target, example.target))
    rows.append(_render_count("pairs to train on", report.kept_pairs, report, "bold"))
    return Group(*rows)


def _render_count(label: str, count: int, report: CorpusReport, style: str = "") -> Text:
    return Text(f"{count:>11,}  {format_precise_percent(report.pair_fraction(count)):>7}  {label}", style)


def _format_location(example: Pair, side: str = "source") -> str:
    file = (side == "target" and example.target_file) or example.file
    return f"{Path(file).name}:{example.line}"


def _render_line(location: str, text: str) -> Text:
    return Text.assemble("    ", (location, "cyan"), "  ", escape_invisible(text), no_wrap=True, overflow="ellipsis")


def _render_test_set(overlap: Contamination) -> RenderableType:
    rows: list[RenderableType] = [
        _render_heading(f"Overlap with {overlap.name}", format_count(overlap.sentences, "sentence")),
        Text(f"from {_format_files(overlap.files)}", "dim", overflow="fold"),
    ]
    counts = [
        (overlap.same_pair, "in the corpus, with the same translation"),
        (overlap.same_source, "in the corpus, with another translation"),
        (overlap.same_target, "with the translation of another line of the corpus"),
        (overlap.short_matches, "of three words or less that recur, as such sentences do"),
        (overlap.bad_lines, "lines that are not pairs"),
    ]
    lines = [Text(f"{count:>11,}  {label}") for count, label in counts if count]
    if overlap.sentences:
        rows += lines or [Text("none of them is in the corpus", "green")]
    else:
        rows += lines or [Text("it has no pairs", "bold red")]
    rows += [line for match in overlap.matches for line in _render_match(match)]
    return Group(*rows)


def _render_match(match: ContaminationMatch) -> list[Text]:
    side = "target" if match.kind == "target" else "source"
    locations = _format_location(match.test, side), _format_location(match.train, side)
    width = max(map(cell_len, locations))
    lines = [
        _render_line(location.ljust(width), str(getattr(pair, side)))
        for location, pair in zip(locations, (match.test, match.train), strict=True)
    ]
    return [Text(f"  same {match.kind}", "dim"), *lines]
