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

from attent.data.formats import language_tags, streams
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair, choose_tag

SOURCE_NAMES = ("src", "source")
TARGET_NAMES = ("tgt", "trg", "target")
ONE_COLUMN = "one column only"
BROKEN_CELL = "a quoted cell with a tab or line break in it"
_LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")
_CELL_BODY = re.compile(r'[^"]*+(?:""[^"]*+)*+')  # of a quoted cell; then its beginning, its end, and all of it
_CELL_START = re.compile(f'"{_CELL_BODY.pattern}')
_CELL_END = re.compile(f'{_CELL_BODY.pattern}"')
_QUOTED_CELL = re.compile(f'"({_CELL_BODY.pattern})"')
_CELL_WITH_TABS = re.compile(rf'(?:^|\t)"({_CELL_BODY.pattern})"(?=\t|$)')
_MIN_TEXT_CHARS = 6  # characters in a cell below a header: "A dog." is text, "hola" may stand in a list of words
_MAX_CELL_LINES = 50  # of one cell


@dataclass(frozen=True)
class _ColumnLayout:
    """What the beginning of a file tells about all of it."""

    source_column: int = 0  # its column
    target_column: int = 1
    languages: LanguagePair | None = None  # as the header spells them, open if it names roles; None: there is no header
    column_count: int = 2  # columns that most lines have


def read_pairs(content: Iterable[bytes], name: str, requested: LanguagePair) -> Iterator[Pair | BadLine]:
    head, content = streams.peek_head(content)
    layout = _detect_layout(head, name, requested)
    numbered = enumerate(streams.read_lines(content, name), 1)
    if layout.languages is not None:
        next(numbered)
    cell = _MultilineCellBuffer(layout.column_count)
    try:
        for number, line in numbered:
            if cell.pending or '"' in line:
                yield from cell.push(line, _parse_line(line, layout, name, number))
            else:
                yield _parse_line(line, layout, name, number)
    except CorpusError:
        yield from cell.pending
        raise
    yield from cell.pending


def _parse_line(line: str | BadLine, layout: _ColumnLayout, name: str, line_number: int) -> Pair | BadLine:
    """What a line is by itself."""
    if isinstance(line, BadLine):
        return line
    cells = line.split("\t")
    if '"' in line:
        if len(cells) > 2 and _has_quoted_tab(line, len(cells), layout.column_count):
            return BadLine(BROKEN_CELL, name, line_number, line[: streams.EXCERPT_CHARS])
        cells = [_unquote_cell(cell) for cell in cells]
    try:
        return Pair(cells[layout.source_column], cells[layout.target_column], name, line_number)
    except IndexError:
        return BadLine(_get_bad_line_reason(cells), name, line_number, line[: streams.EXCERPT_CHARS])


def _unquote_cell(cell: str) -> str:
    quoted = _QUOTED_CELL.fullmatch(cell) if len(cell) > 3 and '""' in cell[1:-1] else None
    return quoted[1].replace('""', '"') if quoted else cell


def _get_bad_line_reason(cells: list[str]) -> str:
    if cells == [""]:
        return "empty line"
    return ONE_COLUMN if len(cells) == 1 else "too few columns"


# The first lines.


def read_languages(
    content: Iterable[bytes], name: str, requested: LanguagePair = language_tags.ANY_LANGUAGES
) -> LanguagePair:
    """Those that a header names."""
    head, _ = streams.peek_head(content)
    return _detect_layout(head, name, requested).languages or language_tags.ANY_LANGUAGES


def _detect_layout(head: bytes, name: str, requested: LanguagePair) -> _ColumnLayout:
    rows = [
        line.split("\t") if isinstance(line, str) else []
        for line in streams.read_lines([head[: streams.HEAD_SIZE]], name)
    ]
    widths = Counter(len(cells) for cells in rows if len(cells) > 1)
    width = max(widths, key=lambda width: widths[width], default=2)
    names = [cell.strip().strip('"') for cell in rows[0]] if rows else []
    columns = _find_role_columns(names) or _find_language_columns(
        names, rows[1] if len(rows) > 1 else [], name, requested
    )
    if columns is None:
        return _ColumnLayout(column_count=width)
    source, target = columns
    roles = names[source].lower() in SOURCE_NAMES
    return _ColumnLayout(
        source, target, language_tags.ANY_LANGUAGES if roles else LanguagePair(names[source], names[target]), width
    )


def _find_role_columns(names: Sequence[str]) -> tuple[int, int] | None:
    lower = [name.lower() for name in names]
    found = [next((lower.index(n) for n in known if n in lower), None) for known in (SOURCE_NAMES, TARGET_NAMES)]
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


def _find_language_columns(
    names: Sequence[str], next_row: Sequence[str], name: str, requested: LanguagePair
) -> tuple[int, int] | None:
    """The columns of source and target if this first line names them; None if it is a line like any other."""
    wanted = [tag for tag in (requested.source, requested.target) if tag is not None]
    found = tuple(cell for cell in names if _LANGUAGE_TAG.fullmatch(cell))
    certain = _is_header(names, next_row)
    chosen = language_tags.choose_sides(requested, found) if wanted or certain else None
    if chosen:
        return names.index(chosen[0]), names.index(chosen[1])
    if certain or (len(found) == len(names) > 1 and any(choose_tag(tag, found) for tag in wanted)):
        raise language_tags.make_mismatch_error(
            name, requested, found
        )  # a header, but of other languages, or of more than two
    return None


def _is_header(names: Sequence[str], next_row: Sequence[str]) -> bool:
    """Can nothing but a header be meant? Different languages, as tags are written, and text below each of them."""
    if not 1 < len(names) <= len(next_row) or len({name.lower() for name in names}) < len(names):
        return False
    written = all(_LANGUAGE_TAG.fullmatch(name) and _is_language_tag(re.split("[-_]", name)[0]) for name in names)
    return written and sum(map(len, next_row[: len(names)])) >= _MIN_TEXT_CHARS * len(names)


def _is_language_tag(language: str) -> bool:
    """`en` and `EN`; but `No` begins a sentence, and `src` is a language of Sardinia that no header means."""
    as_tags_are = language.islower() or language.isupper()
    return (
        as_tags_are
        and language.lower() not in SOURCE_NAMES + TARGET_NAMES
        and language_tags.is_known_language(language)
    )


# Quoted cells that were torn apart.


def _has_quoted_tab(line: str, column_count: int, expected_count: int) -> bool:
    """Has a quoted cell a tab in it? Raw text may open a quote in one column and close one in another: it is clear
    only if quotes are doubled inside, or if the line has too many columns unless they are taken as a spreadsheet's.
    """
    found = [cell[1] for cell in _CELL_WITH_TABS.finditer(line) if "\t" in cell[1]]
    real = column_count - sum(cell.count("\t") for cell in found)
    return bool(found) and real > 1 and (real == expected_count or any('""' in cell for cell in found))


class _MultilineCellBuffer:
    """Holds back what the lines of a quoted cell with line breaks would be, until it is clear that they are one.

    It is clear when the cell ends as a spreadsheet ends it and its row then has as many columns as others have, so
    that at least one of its lines has too few. Otherwise the quotes are stray ones, and each line is what it is.
    """

    def __init__(self, expected_columns: int) -> None:
        self.expected_columns = expected_columns
        self.pending: list[Pair | BadLine] = []
        self.excerpt = ""  # the beginning of the first line
        self.column_count = 0  # of the row so far

    def push(self, line: str | BadLine, item: Pair | BadLine) -> list[Pair | BadLine]:
        """What is clear now that this line has come."""
        if self.pending and isinstance(line, str) and (after := self._continue_cell(line, item)) is not None:
            return after
        released, self.pending = self.pending, []
        if isinstance(line, BadLine) or not self._is_cell_start(line):
            return [*released, item]
        self.pending, self.excerpt, self.column_count = [item], line[: streams.EXCERPT_CHARS], line.count("\t") + 1
        return released

    def _is_cell_start(self, line: str) -> bool:
        last = line[line.rfind("\t") + 1 :]
        return (
            last.startswith('"')
            and line.count("\t") < self.expected_columns
            and _CELL_START.fullmatch(last) is not None
        )

    def _continue_cell(self, line: str, item: Pair | BadLine) -> list[Pair | BadLine] | None:
        """None when this line cannot belong to the cell."""
        cell, tab, _ = line.partition("\t")
        if _CELL_END.fullmatch(cell):
            self.column_count += line.count("\t")
            if self.column_count == self.expected_columns:
                first = self.pending[0]
                self.pending = []
                return [BadLine(BROKEN_CELL, first.file, first.line, self.excerpt)]
            if not self._is_cell_start(line):
                return None
        elif tab or not _CELL_BODY.fullmatch(cell):
            return None
        if self.column_count > self.expected_columns or len(self.pending) == _MAX_CELL_LINES:
            return None
        self.pending.append(item)
        return []
