"""`attent data`: what is in a corpus, what is wrong with it, what the filters would drop, how long training would take.

The facts come from `attent.data.report`; here they become a page of 80 columns or more, or JSON.
"""

from __future__ import annotations

import json as json_module
import sys
import unicodedata
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

from attent.data.builtin import NAMES
from attent.data.corpus import Corpus, Reading, corpora
from attent.data.pairs import CorpusError, Languages, Pair

if TYPE_CHECKING:
    from attent.data.estimate import Estimate
    from attent.data.leakage import Twin
    from attent.data.report import Example, Finding, HeldOut, Report, Side, Survey, Test

FAILED = 1
LEAST = 0.001  # seconds: a coarse clock may not have moved yet
WIDTH, WIDEST = 80, 110  # columns: in a pipe, and at a terminal however wide
BARS = 26  # columns of the longest bar of a side
LONG_NAME = 50  # columns: a longer path is cut behind its folder
BINS = 10  # rows of the histogram, and one for what is longer

INVISIBLE = "\u200c\u200d\u00ad"  # joiners and soft hyphens: harmless, and part of how words are written

MARKS = {2: ("look", "bold red"), 1: ("note", "yellow"), 0: ("fine", "green")}
FILTERS = {
    "empty": "an empty side",
    "control": "control characters or wrong encoding",
    "longest": "longer than {longest:,} characters",
    "ratio": "one side over {ratio:g} times longer (short lines: more allowed)",
    "identical": "not translated: both sides the same",
    "script": "in the script of another language",
    "duplicates": "the same pair again",
}
KINDS = {
    "pair": "the same pair",
    "source": "the same source",
    "target": "the same target",
    "near source": "nearly the same source",
    "near target": "nearly the same target",
}


@dataclass(frozen=True, kw_only=True)
class Options:
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
        Parameter(help=f"files, folders, - for stdin, or built in: {', '.join(NAMES)}", allow_leading_hyphen=True),
    ],
    options: Annotated[Options, Parameter(name="*", show_default=False)] = Options(),  # noqa: B008 - frozen
) -> int:
    """Say what is in a corpus before training: sizes, faults with their lines, leaked test sentences, time."""
    _check_names(corpus)
    languages, reading = Languages(options.src, options.tgt), Reading(fuzzy=options.fuzzy, obsolete=options.obsolete)
    found = corpora(corpus, languages, reading)
    asked = corpora(options.against, languages, reading)
    survey, unread, failure = look(found, test_sets(found, asked), keep_all=options.keep_all)
    if failure and not survey.read:
        raise failure
    estimate = None if options.no_estimate else make_estimate(survey)
    report = survey.report(estimate, str(failure) if failure else None, unread)
    show(report, as_json=options.json)
    if failure:
        raise failure
    return 0 if report.pairs else FAILED


def _check_names(names: Sequence[str]) -> None:
    """A name may be "-", so that cyclopts lets everything with a hyphen through."""
    if not names:
        raise CorpusError(f"name a corpus to look at: a file, a folder, - for stdin, or one of {', '.join(NAMES)}")
    wrong = next((name for name in names if name.startswith("-") and name != "-"), None)
    if wrong is not None:
        known = [f"--{option.name.replace('_', '-')}" for option in fields(Options)]
        near = get_close_matches(wrong, known, n=1)
        told = f"Unknown option: {wrong}." + (f" Did you mean {near[0]}?" if near else "")
        raise CycloptsError(msg=told, command_chain=("data",))


# ---- the work --------------------------------------------------------------------------------------------------------


def test_sets(found: Sequence[Corpus], asked: Sequence[Corpus]) -> list[HeldOut]:
    """What to hold the corpora against: the test sets that were named, or those that lie beside them."""
    from attent.data.leakage import Against
    from attent.data.report import HeldOut

    named = [*_asked(asked), *_beside(found)]
    return [HeldOut(name, test.files, Against(test)) for name, test in named]


def _asked(asked: Sequence[Corpus]) -> Iterator[tuple[str, Corpus]]:
    """Of a folder with a test set that test set, and else all that the name means."""
    for corpus in asked:
        test = corpus.beside("test")
        several = len({one.languages for one in asked}) > 1
        yield _test_name(corpus, " test" if test else "", several), test or corpus


def _beside(found: Sequence[Corpus]) -> Iterator[tuple[str, Corpus]]:
    for corpus in found:
        for split in ("test", "valid"):
            if test := corpus.beside(split):
                yield _test_name(corpus, f" {split}", len(found) > 1), test


def _test_name(corpus: Corpus, split: str, one_of_several: bool) -> str:
    tags = f" ({corpus.languages.source}-{corpus.languages.target})" if one_of_several else ""
    return f"{Path(corpus.name).name or corpus.name}{split}{tags}"


def look(
    found: Sequence[Corpus], tests: Sequence[HeldOut], *, keep_all: bool
) -> tuple[Survey, list[str], CorpusError | OSError | None]:
    """Read everything, or up to where it breaks, and then also what was left unread, and why."""
    from attent.data.report import Survey

    targets = {corpus.languages.target for corpus in found} - {None}
    survey = Survey(keep_all=keep_all, by_target=len(targets) > 1, tests=tests)
    with progress() as tell:
        for i, corpus in enumerate(found, start=1):
            try:
                survey.take(corpus, tell)
            except (CorpusError, OSError) as error:
                return survey, [later.name for later in found[i:]], error
    return survey, [], None


def make_estimate(survey: Survey) -> Estimate | None:
    from attent.data.estimate import estimate

    with _status("estimating tokens and time ..."):
        return estimate(survey.sample.pairs(), survey.kept, survey.characters)


@contextmanager
def progress() -> Iterator[Callable[[int], None]]:
    """Pairs read up to now, on stderr, where a person is looking."""
    import time

    began = time.monotonic()
    with _status("reading ...") as tell:
        yield lambda read: tell(f"{read:,} pairs, {read / max(time.monotonic() - began, LEAST):,.0f} a second")


@contextmanager
def _status(text: str) -> Iterator[Callable[[str], None]]:
    """A line that comes and goes."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as status:
        yield status.update


# ---- the page --------------------------------------------------------------------------------------------------------


def show(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(json_module.dumps(report.facts(), indent=2))
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console that cannot show a letter shows its number
    console = Console(highlight=False)
    console.width = min(console.width, WIDEST) if console.is_terminal else WIDTH
    with console.capture() as printed:
        for section in page(report, console.width):
            console.print(section)
    print("\n".join(line.rstrip() for line in printed.get().rstrip().split("\n")))


def page(report: Report, width: int) -> Iterator[RenderableType]:
    """The sections, in the order in which a person wants them: the verdict first, then what it rests on."""
    yield _verdicts(report)
    yield _origins(report)
    if not report.pairs:
        return
    yield _sides(report)
    yield histogram(report, width)
    yield _filters(report)
    yield from map(_test, report.tests)
    if report.estimate:
        yield _estimate(report)


def _heading(title: str, note: str = "") -> Text:
    return Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))


def _verdicts(report: Report) -> RenderableType:
    from attent.data.report import verdicts

    table = Table.grid(padding=(0, 2))
    for verdict in verdicts(report):
        word, style = MARKS[verdict.weight]
        table.add_row(Text(word, style), Text(verdict.text))
    return table


def _origins(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    several = len({(origin.source, origin.target) for origin in report.origins}) > 1
    for origin in report.origins:
        weight = f", weight {origin.weight:g}" if origin.weight != 1 else ""
        tags = f" {origin.source}-{origin.target}" if several else ""
        table.add_row(_files(origin.files), f"{_many(origin.pairs, 'pairs')}{tags}{weight}")
    rows: list[RenderableType] = [_heading("Where it came from"), table]
    if report.no_pairs:
        rows += [_heading("Lines that are no pairs"), *(_unread(finding) for finding in report.no_pairs)]
    return Group(*rows)


def _files(names: Sequence[str]) -> str:
    """The folder once, where all lie in one; a long list is cut in the middle."""
    folders = {str(Path(name).parent) for name in names}
    if len(folders) == 1 and folders != {"."} and (len(names) > 1 or len(names[0]) > LONG_NAME):
        return f"{folders.pop()}: {_files([Path(name).name for name in names])}"
    shown = names if len(names) <= 6 else [*names[:3], f"... {len(names) - 6} more ...", *names[-3:]]
    return ", ".join(shown)


def _unread(finding: Finding) -> RenderableType:
    rows = [Text(f"{finding.count:>11,}  {finding.name}")]
    rows += [_example_line(_place(example), example.source) for example in finding.examples]
    return Group(*rows)


# ---- sizes and lengths -----------------------------------------------------------------------------------------------


def _sides(report: Report) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False)
    table.add_column("")
    for name, side in (("source", report.source), ("target", report.target)):
        table.add_column(_side_name(name, side), justify="right", header_style="dim")
    for row in side_rows(report.source, report.target):
        table.add_row(*row)
    rows: list[RenderableType] = [_heading(_many(report.pairs, "pairs")), table]
    rows += [
        Text(f"Seen once or twice in the {name}: {_characters(side.rare)}", "dim", overflow="fold")
        for name, side in (("source", report.source), ("target", report.target))
        if side.rare
    ]
    return Group(*rows)


def _side_name(name: str, side: Side) -> str:
    return f"{name} ({', '.join(side.languages)})" if side.languages else name


def side_rows(source: Side, target: Side) -> list[tuple[str, ...]]:
    sides = source, target
    rows = [
        ("words", [f"{side.words:,}" if side.lengths.unit == "words" else "" for side in sides]),
        ("characters", [f"{side.characters:,}" for side in sides]),
        ("different characters", [f"{side.different:,}" for side in sides]),
        ("length: mean", [f"{side.lengths.mean:.1f} {side.lengths.unit}" for side in sides]),
        ("half are up to", [_many(side.lengths.median, side.lengths.unit) for side in sides]),
        ("95% are up to", [_many(side.lengths.most, side.lengths.unit) for side in sides]),
        ("the longest has", [_many(side.lengths.longest, side.lengths.unit) for side in sides]),
    ]
    return [(label, *values) for label, values in rows if any(values)]


def _many(count: int, unit: str) -> str:
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"


def _characters(text: str, most: int = 30) -> str:
    """Some characters by themselves; what cannot be seen by its number."""
    more = f" and {len(text) - most:,} more" if len(text) > most else ""
    shown = (char if char.isprintable() and not char.isspace() else f"U+{ord(char):04X}" for char in text[:most])
    return " ".join(shown) + more


def histogram(report: Report, width: int) -> RenderableType:
    """How long the lines are, both sides beside each other."""
    sides = report.source, report.target
    longest = max(side.lengths.most for side in sides)
    step = _step(longest)
    table = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    bars = min(BARS, (width - 26) // 2)
    table.add_row("", *(cell for side in sides for cell in (Text(_unit(side), "dim"), "")))
    rows = [binned(side.lengths.counts, step) for side in sides]
    peak = max(max(max(row) for row in rows), 1e-9)
    for i in range(1 + max(i for i in range(BINS + 1) if any(row[i] for row in rows))):
        if any(row[i] for row in rows) or i < BINS:
            cells = (cell for row in rows for cell in (bar(row[i] / peak, bars), _rounded(row[i])))
            table.add_row(_bin_name(i, step), *cells)
    return Group(_heading("How long the lines are"), table)


def _unit(side: Side) -> str:
    return f"{side.lengths.unit} of {side.languages[0]}" if side.languages else side.lengths.unit


def _step(longest: int) -> int:
    """A round width of bins, so that BINS of them hold most lines."""
    sizes = (size * 10**power for power in range(6) for size in (1, 2, 3, 5))
    return next(size for size in sizes if size * BINS >= longest * 1.2)


def binned(counts: Sequence[int], step: int) -> list[float]:
    """Shares of the lengths 1..step, step+1..2*step, ...; the empty are in the first, the last holds the rest."""
    total = max(sum(counts), 1)
    edges = [0, *(1 + step * i for i in range(1, BINS + 1))]
    shares = [sum(counts[a:b]) / total for a, b in pairwise(edges)]
    return [*shares, sum(counts[edges[-1] :]) / total]


def bar(share: float, width: int) -> str:
    """Eighths of a block, so that small differences show."""
    eighths = round(share * width * 8)
    whole = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return (whole or ("▏" if share > 0 else "")).ljust(width)


def _bin_name(i: int, step: int) -> str:
    if i == BINS:
        return f"over {step * BINS:,}"
    return f"{step * i + 1:,}-{step * (i + 1):,}" if step > 1 else f"{i + 1}"


def _rounded(share: float) -> str:
    if not share:
        return ""
    return f"{100 * share:.0f}%" if share >= 0.005 else "<1%"


# ---- filters ---------------------------------------------------------------------------------------------------------


def _filters(report: Report) -> RenderableType:
    note = "" if report.filtered else "not applied: --keep-all"
    rows: list[RenderableType] = [_heading("What the filters drop", note)]
    for finding in report.dropped:
        style = "" if finding.count else "dim"
        rows.append(_count_line(_filter_name(finding.name), finding.count, report, style))
        rows += [line for example in finding.examples for line in _example(example)]
    rows.append(_count_line("pairs to train on", report.kept, report, "bold"))
    if report.same_sides:
        rows.append(_count_line("of them the same on both sides (names, codes ...)", report.same_sides, report))
    if report.retranslated:
        rows.append(_count_line("of them with a source that came before, translated anew", report.retranslated, report))
    return Group(*rows)


def _filter_name(name: str) -> str:
    from attent.data.filters import Filters

    defaults = Filters()
    return FILTERS[name].format(longest=defaults.longest, ratio=defaults.ratio)


def _count_line(label: str, count: int, report: Report, style: str = "") -> Text:
    from attent.data.report import percent

    return Text(f"{count:>11,}  {percent(report.share(count)):>7}  {label}", style)


def _example(example: Example) -> list[Text]:
    """A pair on two lines behind its place; each text ends its line, so that right-to-left ones disturb nothing."""
    place = _place(example)
    return [_example_line(place, example.source), _example_line(" " * cell_len(place), example.target)]


def _place(example: Example | Pair) -> str:
    return f"{Path(example.file).name}:{example.line}"


def _example_line(place: str, text: str) -> Text:
    return Text.assemble("    ", (place, "cyan"), "  ", visible(text), no_wrap=True, overflow="ellipsis")


def visible(text: str) -> str:
    """A text on one line; what would not be seen, or would move the cursor or turn the direction, as an escape."""
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char.isprintable() or char in INVISIBLE or unicodedata.category(char) == "Zs":
        return char
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return short.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")


# ---- test sets and time ----------------------------------------------------------------------------------------------


def _test(test: Test) -> RenderableType:
    from attent.data.report import limits

    leak = test.leakage
    rows: list[RenderableType] = [_heading(f"Held against {test.name}", _many(leak.sentences, "sentences"))]
    rows.append(Text(f"from {_files(test.files)}", "dim", overflow="fold"))
    counts = [
        (leak.pair, "in the corpus, with the same translation"),
        (leak.source, "in the corpus, with another translation"),
        (leak.target, "with the translation of another line of the corpus"),
        (leak.near, "near: 70% or more of all words in common with a line of the corpus"),
        (leak.short, "of three words or less that come again, as such sentences do"),
        (test.unseen_sentences, "with characters that the corpus has not: " + _unseen(test)),
        (test.no_pairs, "lines besides that are no pairs"),
    ]
    found = [Text(f"{count:>11,}  {label}") for count, label in counts if count]
    if leak.sentences:
        rows += found or [Text("none of them is in the corpus, nor nearly", "green")]
    else:
        rows += found or [Text("there is not one pair in it", "bold red")]
    if limit := limits(leak):
        rows.append(Text(limit, "yellow"))
    rows += [line for twin in leak.twins for line in _twin(twin)]
    return Group(*rows)


def _unseen(test: Test) -> str:
    """For each side, since what one side lacks the other may have."""
    sides = zip(("source", "target"), test.unseen, strict=True)
    return "; ".join(f"{side} {_characters(unseen, 20)}" for side, unseen in sides if unseen)


def _twin(twin: Twin) -> list[Text]:
    """The side on which they meet, of the test set and of the corpus.

    Near ones are compared as sets of words: with another order, or a word twice, they have 100% in common.
    """
    side = "target" if twin.kind.endswith("target") else "source"
    share = f" ({100 * twin.overlap:.0f}% of the words in common)" if twin.kind.startswith("near") else ""
    places = _place(twin.test), _place(twin.train)
    column = max(map(cell_len, places))
    lines = [
        _example_line(place.ljust(column), str(getattr(pair, side)))
        for place, pair in zip(places, (twin.test, twin.train), strict=True)
    ]
    return [Text(f"  {KINDS[twin.kind]}{share}", "dim"), *lines]


def _estimate(report: Report) -> RenderableType:
    if report.estimate is None:
        return Text()
    tokens, training = report.estimate.tokens, report.estimate.training
    sample = "all pairs" if tokens.sampled >= report.kept else f"a sample of {_many(tokens.sampled, 'pairs')}"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_row("vocabulary", f"{tokens.vocabulary:,} subwords for both languages")
    table.add_row("tokens", f"about {rough(tokens.source)} source and {rough(tokens.target)} target")
    if report.source.lengths.unit == report.target.lengths.unit == "words":
        table.add_row(
            "a word is", f"{tokens.source_per_word:.2f} source and {tokens.target_per_word:.2f} target tokens"
        )
    table.add_row("model", f"{training.model}, {rough(training.parameters)} parameters")
    table.add_row("speed", f"{rough(training.tokens_per_second)} tokens a second ({training.device})")
    table.add_row("training", Text(span(*training.seconds), "bold"))
    table.add_row("", f"if {training.epochs} times over the data are enough, as they often are for this amount")
    return Group(_heading("Estimate", f"from {sample} and a few seconds of training"), table)


def rough(count: int) -> str:
    """Two digits say all that an estimate knows: 1,234,567 is 1.2 million."""
    for size, name in ((10**9, " billion"), (10**6, " million")):
        if count >= size:
            return f"{count / size:.2g}{name}" if count < 100 * size else f"{count / size:.0f}{name}"
    return f"{float(f'{count:.2g}'):,.0f}"


def span(low: int, high: int) -> str:
    """From .. to, in the unit that suits the larger: "2 to 5 hours"."""
    units = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))
    size, name = next(((size, name) for size, name in units if high >= 1.5 * size), units[-1])
    first, last = (
        max(float(f"{value / size:.1g}" if value < 10 * size else f"{value / size:.2g}"), 0) for value in (low, high)
    )
    if first < 1:
        return f"up to {max(last, 1):g} {name}"
    return f"{first:g} to {last:g} {name}" if first < last else f"about {last:g} {name}"
