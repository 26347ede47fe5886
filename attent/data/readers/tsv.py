"""Tab-separated columns: source and target are the first two, or those that a header line names.

A header names roles (`source`, `target`) or languages. When nobody asked for languages, a first line of languages
(`en`, `de`) is believed to be one only if the line below it is clearly text: `no`, `ja` can be a pair of words too.

A spreadsheet puts a cell that holds quotes, tabs or line breaks into quotes and doubles the quotes inside, as in
`"a ""b"" c"`: such a cell is unquoted. A cell that merely begins or ends with a quote is text and stays as it is. A
quoted cell with a tab or a line break in it is no sentence: it is counted, where it can be told from stray quotes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from attent.data.pairs import Bad, CorpusError, Languages, Pair, choose
from attent.data.readers import files, tags

SOURCE_NAMES = ("src", "source")
TARGET_NAMES = ("tgt", "trg", "target")
ONE_COLUMN = "one column only"
TORN = "a quoted cell with a tab or line break in it"
_TAG = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")
_INSIDE = re.compile(r'[^"]*+(?:""[^"]*+)*+')  # of a quoted cell; then its beginning, its end, and all of it
_OPENED = re.compile(f'"{_INSIDE.pattern}')
_CLOSED = re.compile(f'{_INSIDE.pattern}"')
_QUOTED = re.compile(f'"({_INSIDE.pattern})"')
_WITH_TABS = re.compile(rf'(?:^|\t)"({_INSIDE.pattern})"(?=\t|$)')
_TEXT = 6  # characters in a cell below a header: "A dog." is text, "hola" may stand in a list of words
_MOST_LINES = 50  # of one cell


@dataclass(frozen=True)
class _Layout:
    """What the beginning of a file tells about all of it."""

    source: int = 0  # its column
    target: int = 1
    languages: Languages | None = None  # as the header spells them, open if it names roles; None: there is no header
    width: int = 2  # columns that most lines have


def read(content: Iterable[bytes], name: str, asked: Languages) -> Iterator[Pair | Bad]:
    head, content = files.beginning(content)
    layout = _layout(head, name, asked)
    numbered = enumerate(files.lines(content, name), 1)
    if layout.languages is not None:
        next(numbered)
    cell = _Cell(layout.width)
    try:
        for number, line in numbered:
            if cell.held or '"' in line:
                yield from cell.passed(line, _item(line, layout, name, number))
            else:
                yield _item(line, layout, name, number)
    except CorpusError:
        yield from cell.held
        raise
    yield from cell.held


def _item(line: str | Bad, layout: _Layout, name: str, number: int) -> Pair | Bad:
    """What a line is by itself."""
    if isinstance(line, Bad):
        return line
    cells = line.split("\t")
    if '"' in line:
        if len(cells) > 2 and _has_tab(line, len(cells), layout.width):
            return Bad(TORN, name, number, line[: files.SHOWN])
        cells = [_unquoted(cell) for cell in cells]
    try:
        return Pair(cells[layout.source], cells[layout.target], name, number)
    except IndexError:
        return Bad(_reason(cells), name, number, line[: files.SHOWN])


def _unquoted(cell: str) -> str:
    quoted = _QUOTED.fullmatch(cell) if len(cell) > 3 and '""' in cell[1:-1] else None
    return quoted[1].replace('""', '"') if quoted else cell


def _reason(cells: list[str]) -> str:
    if cells == [""]:
        return "empty line"
    return ONE_COLUMN if len(cells) == 1 else "too few columns"


# The first lines.


def languages(content: Iterable[bytes], name: str, asked: Languages = tags.ANY) -> Languages:
    """Those that a header names."""
    head, _ = files.beginning(content)
    return _layout(head, name, asked).languages or tags.ANY


def _layout(head: bytes, name: str, asked: Languages) -> _Layout:
    rows = [line.split("\t") if isinstance(line, str) else [] for line in files.lines([head[: files.HEAD]], name)]
    widths = Counter(len(cells) for cells in rows if len(cells) > 1)
    width = max(widths, key=lambda width: widths[width], default=2)
    names = [cell.strip().strip('"') for cell in rows[0]] if rows else []
    columns = _by_role(names) or _by_language(names, rows[1] if len(rows) > 1 else [], name, asked)
    if columns is None:
        return _Layout(width=width)
    source, target = columns
    roles = names[source].lower() in SOURCE_NAMES
    return _Layout(source, target, tags.ANY if roles else Languages(names[source], names[target]), width)


def _by_role(names: Sequence[str]) -> tuple[int, int] | None:
    lower = [name.lower() for name in names]
    found = [next((lower.index(n) for n in known if n in lower), None) for known in (SOURCE_NAMES, TARGET_NAMES)]
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


def _by_language(names: Sequence[str], below: Sequence[str], name: str, asked: Languages) -> tuple[int, int] | None:
    """The columns of source and target if this first line names them; None if it is a line like any other."""
    wanted = [tag for tag in (asked.source, asked.target) if tag is not None]
    found = tuple(cell for cell in names if _TAG.fullmatch(cell))
    certain = _is_header(names, below)
    chosen = tags.sides(asked, found) if wanted or certain else None
    if chosen:
        return names.index(chosen[0]), names.index(chosen[1])
    if certain or (len(found) == len(names) > 1 and any(choose(tag, found) for tag in wanted)):
        raise tags.error(name, asked, found)  # a header, but of other languages, or of more than two
    return None


def _is_header(names: Sequence[str], below: Sequence[str]) -> bool:
    """Can nothing but a header be meant? Different languages, as tags are written, and text below each of them."""
    if not 1 < len(names) <= len(below) or len({name.lower() for name in names}) < len(names):
        return False
    written = all(_TAG.fullmatch(name) and _is_tag(re.split("[-_]", name)[0]) for name in names)
    return written and sum(map(len, below[: len(names)])) >= _TEXT * len(names)


def _is_tag(language: str) -> bool:
    """`en` and `EN`; but `No` begins a sentence, and `src` is a language of Sardinia that no header means."""
    as_tags_are = language.islower() or language.isupper()
    return as_tags_are and language.lower() not in SOURCE_NAMES + TARGET_NAMES and tags.is_language(language)


# Quoted cells that were torn apart.


def _has_tab(line: str, columns: int, width: int) -> bool:
    """Has a quoted cell a tab in it? Raw text may open a quote in one column and close one in another: it is clear
    only if quotes are doubled inside, or if the line has too many columns unless they are taken as a spreadsheet's.
    """
    found = [cell[1] for cell in _WITH_TABS.finditer(line) if "\t" in cell[1]]
    real = columns - sum(cell.count("\t") for cell in found)
    return bool(found) and real > 1 and (real == width or any('""' in cell for cell in found))


class _Cell:
    """Holds back what the lines of a quoted cell with line breaks would be, until it is clear that they are one.

    It is clear when the cell ends as a spreadsheet ends it and its row then has as many columns as others have, so
    that at least one of its lines has too few. Otherwise the quotes are stray ones, and each line is what it is.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.held: list[Pair | Bad] = []
        self.shown = ""  # the beginning of the first line
        self.columns = 0  # of the row so far

    def passed(self, line: str | Bad, item: Pair | Bad) -> list[Pair | Bad]:
        """What is clear now that this line has come."""
        if self.held and isinstance(line, str) and (after := self._continued(line, item)) is not None:
            return after
        released, self.held = self.held, []
        if isinstance(line, Bad) or not self._opens(line):
            return [*released, item]
        self.held, self.shown, self.columns = [item], line[: files.SHOWN], line.count("\t") + 1
        return released

    def _opens(self, line: str) -> bool:
        last = line[line.rfind("\t") + 1 :]
        return last.startswith('"') and line.count("\t") < self.width and _OPENED.fullmatch(last) is not None

    def _continued(self, line: str, item: Pair | Bad) -> list[Pair | Bad] | None:
        """None when this line cannot belong to the cell."""
        cell, tab, _ = line.partition("\t")
        if _CLOSED.fullmatch(cell):
            self.columns += line.count("\t")
            if self.columns == self.width:
                first = self.held[0]
                self.held = []
                return [Bad(TORN, first.file, first.line, self.shown)]
            if not self._opens(line):
                return None
        elif tab or not _INSIDE.fullmatch(cell):
            return None
        if self.columns > self.width or len(self.held) == _MOST_LINES:
            return None
        self.held.append(item)
        return []
