"""`attent data`: what is in a corpus, what is wrong with it, what the filters would drop, how long training would take.

The facts come from `attent.data.report`; here they become a page of 80 columns or more, or JSON.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import CycloptsError, Parameter
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from attent.data.builtin import BUILTIN_CORPORA
from attent.data.corpus import Corpus, ReadOptions, open_corpora
from attent.data.pairs import CorpusError, LanguagePair, Pair
from attent.formatting import escape_invisible, format_count, format_precise_percent

if TYPE_CHECKING:
    from attent.data.contamination import ContaminationMatch
    from attent.data.estimate import CorpusEstimate
    from attent.data.report import (
        ContaminationReport,
        CorpusReport,
        CorpusSurvey,
        Finding,
        HeldOutSet,
        LineExample,
        SideStats,
    )

EXIT_FAILED = 1
MIN_SECONDS = 0.001  # seconds: a coarse clock may not have moved yet
PIPE_WIDTH, MAX_WIDTH = 80, 110  # columns: in a pipe, and at a terminal however wide
MAX_BAR_WIDTH = 26  # columns of the longest bar of a side
MAX_NAME_WIDTH = 50  # columns: a longer path is cut behind its folder
NUM_BINS = 10  # rows of the histogram, and one for what is longer


SEVERITY_LABELS = {2: ("look", "bold red"), 1: ("note", "yellow"), 0: ("fine", "green")}
FILTER_LABELS = {
    "empty": "an empty side",
    "control": "control characters or wrong encoding",
    "max_chars": "longer than {longest:,} characters",
    "length_ratio": "one side over {ratio:g} times longer (short lines: more allowed)",
    "identical": "not translated: both sides the same",
    "script": "in the script of another language",
    "duplicates": "the same pair again",
}
MATCH_LABELS = {
    "pair": "the same pair",
    "source": "the same source",
    "target": "the same target",
    "near source": "nearly the same source",
    "near target": "nearly the same target",
}


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """What may be asked for; each field is an option of the command."""

    src: Annotated[str | None, Parameter(help="language to translate from, as a tag: en")] = None
    tgt: Annotated[str | None, Parameter(help="language to translate to: de, or pt-BR")] = None
    against: Annotated[
        tuple[str, ...],
        Parameter(
            help="a test set that should not be in it, besides those in its folder; give it again for more", negative=""
        ),
    ] = ()
    json: Annotated[bool, Parameter(help="print everything as one JSON object", negative="")] = False
    keep_all: Annotated[bool, Parameter(help="leave the filters out of account", negative="")] = False
    fuzzy: Annotated[bool, Parameter(help="read PO and XLIFF entries marked fuzzy too", negative="")] = False
    obsolete: Annotated[bool, Parameter(help="read obsolete PO entries too", negative="")] = False
    no_estimate: Annotated[bool, Parameter(help="do not estimate tokens and training time", negative="")] = False


def data(
    *corpus: Annotated[
        str,
        Parameter(
            help=f"files, folders, - for stdin, or built in: {', '.join(BUILTIN_CORPORA)}", allow_leading_hyphen=True
        ),
    ],
    flags: Annotated[DataFlags, Parameter(name="*", show_default=False)] = DataFlags(),  # noqa: B008 - frozen
) -> int:
    """Say what is in a corpus before training: sizes, faults with their lines, leaked test sentences, time."""
    _check_names(corpus)
    languages, reading = LanguagePair(flags.src, flags.tgt), ReadOptions(fuzzy=flags.fuzzy, obsolete=flags.obsolete)
    found = open_corpora(corpus, languages, reading)
    asked = open_corpora(flags.against, languages, reading)
    survey, unread, failure = survey_corpora(found, find_test_sets(found, asked), keep_all=flags.keep_all)
    if failure and not survey.pairs_read:
        raise failure
    estimate = None if flags.no_estimate else estimate_training(survey)
    report = survey.build_report(estimate, str(failure) if failure else None, unread)
    print_report(report, as_json=flags.json)
    if failure:
        raise failure
    return 0 if report.pairs else EXIT_FAILED


def _check_names(names: Sequence[str]) -> None:
    """A name may be "-", so that cyclopts lets everything with a hyphen through."""
    if not names:
        raise CorpusError(
            f"name a corpus to look at: a file, a folder, - for stdin, or one of {', '.join(BUILTIN_CORPORA)}"
        )
    wrong = next((name for name in names if name.startswith("-") and name != "-"), None)
    if wrong is not None:
        known = [f"--{option.name.replace('_', '-')}" for option in fields(DataFlags)]
        near = get_close_matches(wrong, known, n=1)
        told = f"Unknown option: {wrong}." + (f" Did you mean {near[0]}?" if near else "")
        raise CycloptsError(msg=told, command_chain=("data",))


# ---- the work --------------------------------------------------------------------------------------------------------


def find_test_sets(train_corpora: Sequence[Corpus], test_corpora: Sequence[Corpus]) -> list[HeldOutSet]:
    """What to hold the corpora against: the test sets that were named, or those that lie beside them."""
    from attent.data.contamination import ContaminationChecker
    from attent.data.report import HeldOutSet

    named = [*_iter_requested(test_corpora), *_iter_adjacent(train_corpora)]
    return [HeldOutSet(name, test.file_names, ContaminationChecker(test)) for name, test in named]


def _iter_requested(test_corpora: Sequence[Corpus]) -> Iterator[tuple[str, Corpus]]:
    """Of a folder with a test set that test set, and else all that the name means."""
    for corpus in test_corpora:
        test = corpus.get_sibling_split("test")
        several = len({one.languages for one in test_corpora}) > 1
        yield _format_test_name(corpus, " test" if test else "", several), test or corpus


def _iter_adjacent(train_corpora: Sequence[Corpus]) -> Iterator[tuple[str, Corpus]]:
    for corpus in train_corpora:
        for split in ("test", "valid"):
            if test := corpus.get_sibling_split(split):
                yield _format_test_name(corpus, f" {split}", len(train_corpora) > 1), test


def _format_test_name(corpus: Corpus, split: str, one_of_several: bool) -> str:
    tags = f" ({corpus.languages.source}-{corpus.languages.target})" if one_of_several else ""
    return f"{Path(corpus.name).name or corpus.name}{split}{tags}"


def survey_corpora(
    train_corpora: Sequence[Corpus], test_sets: Sequence[HeldOutSet], *, keep_all: bool
) -> tuple[CorpusSurvey, list[str], CorpusError | OSError | None]:
    """Read everything, or up to where it breaks, and then also what was left unread, and why."""
    from attent.data.report import CorpusSurvey

    targets = {corpus.languages.target for corpus in train_corpora} - {None}
    survey = CorpusSurvey(keep_all=keep_all, per_target=len(targets) > 1, test_sets=test_sets)
    with show_progress() as tell:
        for i, corpus in enumerate(train_corpora, start=1):
            try:
                survey.read_corpus(corpus, tell)
            except (CorpusError, OSError) as error:
                return survey, [later.name for later in train_corpora[i:]], error
    return survey, [], None


def estimate_training(survey: CorpusSurvey) -> CorpusEstimate | None:
    from attent.training.autoconfig import estimate_corpus

    with _show_status("estimating tokens and time ..."):
        return estimate_corpus(survey.sample.pairs(), survey.kept_pairs, survey.characters)


@contextmanager
def show_progress() -> Iterator[Callable[[int], None]]:
    """Pairs read up to now, on stderr, where a person is looking."""
    import time

    began = time.monotonic()
    with _show_status("reading ...") as tell:
        yield lambda read: tell(f"{read:,} pairs, {read / max(time.monotonic() - began, MIN_SECONDS):,.0f} a second")


@contextmanager
def _show_status(text: str) -> Iterator[Callable[[str], None]]:
    """A line that comes and goes."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as status:
        yield status.update


# ---- the page --------------------------------------------------------------------------------------------------------


def print_report(report: CorpusReport, *, as_json: bool) -> None:
    if as_json:
        print(json_module.dumps(report.to_dict(), indent=2))
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console that cannot show a letter shows its number
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH) if console.is_terminal else PIPE_WIDTH
    with console.capture() as printed:
        for section in build_sections(report, console.width):
            console.print(section)
    print("\n".join(line.rstrip() for line in printed.get().rstrip().split("\n")))


def build_sections(report: CorpusReport, width: int) -> Iterator[RenderableType]:
    """The sections, in the order in which a person wants them: the verdict first, then what it rests on."""
    yield _render_diagnostics(report)
    yield _render_corpora(report)
    if not report.pairs:
        return
    yield _render_sides(report)
    yield render_histogram(report, width)
    yield _render_filters(report)
    yield from map(_render_test_set, report.test_sets)
    if report.estimate:
        yield _render_estimate(report)


def _render_heading(title: str, note: str = "") -> Text:
    return Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))


def _render_diagnostics(report: CorpusReport) -> RenderableType:
    from attent.data.report import diagnose

    table = Table.grid(padding=(0, 2))
    for verdict in diagnose(report):
        word, style = SEVERITY_LABELS[verdict.severity]
        table.add_row(Text(word, style), Text(verdict.text))
    return table


def _render_corpora(report: CorpusReport) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    several = len({(origin.source, origin.target) for origin in report.corpora}) > 1
    for origin in report.corpora:
        weight = f", weight {origin.weight:g}" if origin.weight != 1 else ""
        tags = f" {origin.source}-{origin.target}" if several else ""
        table.add_row(_format_files(origin.files), f"{format_count(origin.pairs, 'pair')}{tags}{weight}")
    rows: list[RenderableType] = [_render_heading("Where it came from"), table]
    if report.bad_lines:
        rows += [
            _render_heading("Lines that are no pairs"),
            *(_render_bad_lines(finding) for finding in report.bad_lines),
        ]
    return Group(*rows)


def _format_files(names: Sequence[str]) -> str:
    """The folder once, where all lie in one; a long list is cut in the middle."""
    folders = {str(Path(name).parent) for name in names}
    if len(folders) == 1 and folders != {"."} and (len(names) > 1 or len(names[0]) > MAX_NAME_WIDTH):
        return f"{folders.pop()}: {_format_files([Path(name).name for name in names])}"
    shown = names if len(names) <= 6 else [*names[:3], f"... {len(names) - 6} more ...", *names[-3:]]
    return ", ".join(shown)


def _render_bad_lines(finding: Finding) -> RenderableType:
    rows = [Text(f"{finding.count:>11,}  {finding.name}")]
    rows += [_render_example_line(_format_location(example), example.source) for example in finding.examples]
    return Group(*rows)


# ---- sizes and lengths -----------------------------------------------------------------------------------------------


def _render_sides(report: CorpusReport) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False)
    table.add_column("")
    for name, side in (("source", report.source), ("target", report.target)):
        table.add_column(_format_side_name(name, side), justify="right", header_style="dim")
    for row in build_side_rows(report.source, report.target):
        table.add_row(*row)
    rows: list[RenderableType] = [_render_heading(format_count(report.pairs, "pair")), table]
    rows += [
        Text(f"Seen once or twice in the {name}: {_format_characters(side.rare_characters)}", "dim", overflow="fold")
        for name, side in (("source", report.source), ("target", report.target))
        if side.rare_characters
    ]
    return Group(*rows)


def _format_side_name(name: str, side: SideStats) -> str:
    return f"{name} ({', '.join(side.languages)})" if side.languages else name


def build_side_rows(source: SideStats, target: SideStats) -> list[tuple[str, ...]]:
    sides = source, target
    rows = [
        ("words", [f"{side.words:,}" if side.lengths.unit == "words" else "" for side in sides]),
        ("characters", [f"{side.characters:,}" for side in sides]),
        ("different characters", [f"{side.distinct_characters:,}" for side in sides]),
        ("length: mean", [f"{side.lengths.mean:.1f} {side.lengths.unit}" for side in sides]),
        ("half are up to", [format_count(side.lengths.median, side.lengths.unit.removesuffix("s")) for side in sides]),
        (
            "95% are up to",
            [format_count(side.lengths.percentile_95, side.lengths.unit.removesuffix("s")) for side in sides],
        ),
        (
            "the longest has",
            [format_count(side.lengths.max_length, side.lengths.unit.removesuffix("s")) for side in sides],
        ),
    ]
    return [(label, *values) for label, values in rows if any(values)]


def _format_characters(text: str, max_characters: int = 30) -> str:
    """Some characters by themselves; what cannot be seen by its number."""
    more = f" and {len(text) - max_characters:,} more" if len(text) > max_characters else ""
    shown = (
        char if char.isprintable() and not char.isspace() else f"U+{ord(char):04X}" for char in text[:max_characters]
    )
    return " ".join(shown) + more


def render_histogram(report: CorpusReport, width: int) -> RenderableType:
    """How long the lines are, both sides beside each other."""
    sides = report.source, report.target
    longest = max(side.lengths.percentile_95 for side in sides)
    step = _choose_bin_width(longest)
    table = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    bars = min(MAX_BAR_WIDTH, (width - 26) // 2)
    table.add_row("", *(cell for side in sides for cell in (Text(_format_unit(side), "dim"), "")))
    rows = [bin_lengths(side.lengths.counts, step) for side in sides]
    peak = max(max(max(row) for row in rows), 1e-9)
    for i in range(1 + max(i for i in range(NUM_BINS + 1) if any(row[i] for row in rows))):
        if any(row[i] for row in rows) or i < NUM_BINS:
            cells = (cell for row in rows for cell in (draw_bar(row[i] / peak, bars), _format_share(row[i])))
            table.add_row(_format_bin(i, step), *cells)
    return Group(_render_heading("How long the lines are"), table)


def _format_unit(side: SideStats) -> str:
    return f"{side.lengths.unit} of {side.languages[0]}" if side.languages else side.lengths.unit


def _choose_bin_width(longest: int) -> int:
    """A round width of bins, so that BINS of them hold most lines."""
    sizes = (size * 10**power for power in range(6) for size in (1, 2, 3, 5))
    return next(size for size in sizes if size * NUM_BINS >= longest * 1.2)


def bin_lengths(counts: Sequence[int], bin_width: int) -> list[float]:
    """Shares of the lengths 1..step, step+1..2*step, ...; the empty are in the first, the last holds the rest."""
    total = max(sum(counts), 1)
    edges = [0, *(1 + bin_width * i for i in range(1, NUM_BINS + 1))]
    shares = [sum(counts[a:b]) / total for a, b in pairwise(edges)]
    return [*shares, sum(counts[edges[-1] :]) / total]


def draw_bar(share: float, width: int) -> str:
    """Eighths of a block, so that small differences show."""
    eighths = round(share * width * 8)
    whole = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return (whole or ("▏" if share > 0 else "")).ljust(width)


def _format_bin(i: int, bin_width: int) -> str:
    if i == NUM_BINS:
        return f"over {bin_width * NUM_BINS:,}"
    return f"{bin_width * i + 1:,}-{bin_width * (i + 1):,}" if bin_width > 1 else f"{i + 1}"


def _format_share(share: float) -> str:
    if not share:
        return ""
    return f"{100 * share:.0f}%" if share >= 0.005 else "<1%"


# ---- filters ---------------------------------------------------------------------------------------------------------


def _render_filters(report: CorpusReport) -> RenderableType:
    note = "" if report.filters_applied else "not applied: --keep-all"
    rows: list[RenderableType] = [_render_heading("What the filters drop", note)]
    for finding in report.dropped:
        style = "" if finding.count else "dim"
        rows.append(_render_count(_describe_filter(finding.name), finding.count, report, style))
        rows += [line for example in finding.examples for line in _render_example(example)]
    rows.append(_render_count("pairs to train on", report.kept_pairs, report, "bold"))
    if report.identical_pairs:
        rows.append(_render_count("of them the same on both sides (names, codes ...)", report.identical_pairs, report))
    if report.retranslated_pairs:
        rows.append(
            _render_count("of them with a source that came before, translated anew", report.retranslated_pairs, report)
        )
    return Group(*rows)


def _describe_filter(name: str) -> str:
    from attent.data.filters import FilterConfig

    defaults = FilterConfig()
    return FILTER_LABELS[name].format(longest=defaults.max_chars, ratio=defaults.length_ratio)


def _render_count(label: str, count: int, report: CorpusReport, style: str = "") -> Text:
    return Text(f"{count:>11,}  {format_precise_percent(report.pair_fraction(count)):>7}  {label}", style)


def _render_example(example: LineExample) -> list[Text]:
    """A pair on two lines behind its place; each text ends its line, so that right-to-left ones disturb nothing."""
    place = _format_location(example)
    return [_render_example_line(place, example.source), _render_example_line(" " * cell_len(place), example.target)]


def _format_location(example: LineExample | Pair) -> str:
    return f"{Path(example.file).name}:{example.line}"


def _render_example_line(location: str, text: str) -> Text:
    return Text.assemble("    ", (location, "cyan"), "  ", escape_invisible(text), no_wrap=True, overflow="ellipsis")


# ---- test sets and time ----------------------------------------------------------------------------------------------


def _render_test_set(test: ContaminationReport) -> RenderableType:
    from attent.data.report import describe_limits

    leak = test.contamination
    rows: list[RenderableType] = [
        _render_heading(f"Held against {test.name}", format_count(leak.sentences, "sentence"))
    ]
    rows.append(Text(f"from {_format_files(test.files)}", "dim", overflow="fold"))
    counts = [
        (leak.same_pair, "in the corpus, with the same translation"),
        (leak.same_source, "in the corpus, with another translation"),
        (leak.same_target, "with the translation of another line of the corpus"),
        (leak.near_duplicates, "near: 70% or more of all words in common with a line of the corpus"),
        (leak.short_matches, "of three words or less that come again, as such sentences do"),
        (test.unseen_sentences, "with characters that the corpus has not: " + _format_unseen(test)),
        (test.bad_lines, "lines besides that are no pairs"),
    ]
    found = [Text(f"{count:>11,}  {label}") for count, label in counts if count]
    if leak.sentences:
        rows += found or [Text("none of them is in the corpus, nor nearly", "green")]
    else:
        rows += found or [Text("there is not one pair in it", "bold red")]
    if limit := describe_limits(leak):
        rows.append(Text(limit, "yellow"))
    rows += [line for twin in leak.matches for line in _render_match(twin)]
    return Group(*rows)


def _format_unseen(test: ContaminationReport) -> str:
    """For each side, since what one side lacks the other may have."""
    sides = zip(("source", "target"), test.unseen_characters, strict=True)
    return "; ".join(f"{side} {_format_characters(unseen, 20)}" for side, unseen in sides if unseen)


def _render_match(match: ContaminationMatch) -> list[Text]:
    """The side on which they meet, of the test set and of the corpus.

    Near ones are compared as sets of words: with another order, or a word twice, they have 100% in common.
    """
    side = "target" if match.kind.endswith("target") else "source"
    share = f" ({100 * match.overlap:.0f}% of the words in common)" if match.kind.startswith("near") else ""
    places = _format_location(match.test), _format_location(match.train)
    column = max(map(cell_len, places))
    lines = [
        _render_example_line(place.ljust(column), str(getattr(pair, side)))
        for place, pair in zip(places, (match.test, match.train), strict=True)
    ]
    return [Text(f"  {MATCH_LABELS[match.kind]}{share}", "dim"), *lines]


def _render_estimate(report: CorpusReport) -> RenderableType:
    if report.estimate is None:
        return Text()
    tokens, training = report.estimate.tokens, report.estimate.training
    sample = (
        "all pairs"
        if tokens.sampled_pairs >= report.kept_pairs
        else f"a sample of {format_count(tokens.sampled_pairs, 'pair')}"
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_row("vocabulary", f"{tokens.vocab_size:,} subwords for both languages")
    table.add_row(
        "tokens",
        f"about {format_rounded(tokens.source_tokens)} source and {format_rounded(tokens.target_tokens)} target",
    )
    if report.source.lengths.unit == report.target.lengths.unit == "words":
        table.add_row(
            "a word is",
            f"{tokens.source_tokens_per_word:.2f} source and {tokens.target_tokens_per_word:.2f} target tokens",
        )
    table.add_row("model", f"{training.size}, {format_rounded(training.parameters)} parameters")
    table.add_row("speed", f"{format_rounded(training.tokens_per_second)} tokens a second ({training.device})")
    table.add_row("training", Text(format_duration_range(*training.seconds), "bold"))
    table.add_row("", f"if {training.epochs} times over the data are enough, as they often are for this amount")
    return Group(_render_heading("Estimate", f"from {sample} and a few seconds of training"), table)


def format_rounded(count: int) -> str:
    """Two digits say all that an estimate knows: 1,234,567 is 1.2 million."""
    for size, name in ((10**9, " billion"), (10**6, " million")):
        if count >= size:
            return f"{count / size:.2g}{name}" if count < 100 * size else f"{count / size:.0f}{name}"
    return f"{float(f'{count:.2g}'):,.0f}"


def format_duration_range(low: int, high: int) -> str:
    """From .. to, in the unit that suits the larger: "2 to 5 hours"."""
    units = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))
    size, name = next(((size, name) for size, name in units if high >= 1.5 * size), units[-1])
    first, last = (
        max(float(f"{value / size:.1g}" if value < 10 * size else f"{value / size:.2g}"), 0) for value in (low, high)
    )
    if first < 1:
        return f"up to {max(last, 1):g} {name}"
    return f"{first:g} to {last:g} {name}" if first < last else f"about {last:g} {name}"
