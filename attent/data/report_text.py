"""Corpus reports as text for a terminal, 80 columns or more."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from attent.data.contamination import Contamination, ContaminationMatch
from attent.data.diagnostics import diagnose
from attent.data.filters import FilterConfig
from attent.data.pairs import Pair
from attent.data.report import CorpusReport, SideStats
from attent.formatting import escape_invisible, format_count, format_precise_percent

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
