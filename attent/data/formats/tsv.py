"""Tab-separated columns: source and target are the first two, or those that a header names by role or language.

Without requested languages, a first line of language tags is a header only if the next line is clearly text: `no`, `ja`
can be a pair of words. Cells that spreadsheets have quoted (`"a ""b"" c"`) are unquoted; those with a tab or line break
inside are bad lines, if they are distinguishable from stray quotes.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice, tee

from attent.data import pairs
from attent.data.formats import streams
from attent.data.pairs import ANY_LANGUAGES, BadLine, CorpusError, LanguagePair, Pair, ReadOptions
from attent.text.language_tags import LANGUAGE_TAG, choose_tag, get_primary_subtag, is_known_language

SOURCE_NAMES = ("src", "source")
TARGET_NAMES = ("tgt", "trg", "target")
ONE_COLUMN = "one column only"
BROKEN_CELL = "a quoted cell with a tab or line break in it"
_CELL_BODY = re.compile(r'[^"]*+(?:""[^"]*+)*+')
_CELL_START = re.compile(f'"{_CELL_BODY.pattern}')
_CELL_END = re.compile(f'{_CELL_BODY.pattern}"')
QUOTED_CELL = re.compile(f'"({_CELL_BODY.pattern})"')
_CELL_WITH_TABS = re.compile(rf'(?:^|\t)"({_CELL_BODY.pattern})"(?=\t|$)')
_MIN_TEXT_CHARS = 6  # of a cell below a header: "A dog." is text, "hola" may be from a word list
_MAX_CELL_LINES = 50


@dataclass(frozen=True)
class _ColumnLayout:
    source: int = 0
    target: int = 1
    languages: LanguagePair | None = None  # of the header, open if it names roles; None: no header
    column_count: int = 2  # of most lines


def read_pairs(
    content: Iterable[bytes], name: str, requested: LanguagePair, _: ReadOptions = pairs.DEFAULT_READ_OPTIONS
) -> Iterator[Pair | BadLine]:
    head, content = streams.peek_head(content)
    layout = _detect_layout(head, name, requested)
    (lines,) = tee(_catch_error(streams.read_lines(content, name)), 1)  # a copy of it can look ahead
    num_skipped = int(layout.languages is not None)  # the header
    for number, line in enumerate(lines, 1):
        if isinstance(line, CorpusError):
            raise line
        if num_skipped:
            num_skipped -= 1
        elif isinstance(line, str) and '"' in line and (more := _count_cell_lines(line, copy(lines), layout)):
            num_skipped = more
            yield BadLine(BROKEN_CELL, name, number, line[: streams.EXCERPT_CHARS])
        else:
            yield _parse_line(line, layout, name, number)


def _catch_error(lines: Iterator[str | BadLine]) -> Iterator[str | BadLine | CorpusError]:
    """Yield an error as the last item, so that the lines before it can be looked at first."""
    try:
        yield from lines
    except CorpusError as error:
        yield error


def _count_cell_lines(first: str, following: Iterator[object], layout: _ColumnLayout) -> int:
    """Return the number of lines after the first in what is a quoted cell with line breaks; 0 if it is not.

    It is one if it is closed as a spreadsheet closes it and its row then has the usual number of columns, so that at
    least one of its lines has too few. Otherwise the quotes are stray, and each line is what it is.
    """
    column_count, can_continue = first.count("\t") + 1, _is_cell_start(first, layout)
    for count, line in enumerate(islice(following, _MAX_CELL_LINES), 1):
        if not can_continue or not isinstance(line, str):
            return 0
        cell, tab, _ = line.partition("\t")
        if _CELL_END.fullmatch(cell):
            column_count += line.count("\t")
            if column_count == layout.column_count:
                return count
            can_continue = _is_cell_start(line, layout) and column_count < layout.column_count
        else:
            can_continue = not tab and _CELL_BODY.fullmatch(cell) is not None
    return 0


def _is_cell_start(line: str, layout: _ColumnLayout) -> bool:
    last = line[line.rfind("\t") + 1 :]
    is_within_row = line.count("\t") < layout.column_count
    return last.startswith('"') and is_within_row and _CELL_START.fullmatch(last) is not None


def _parse_line(line: str | BadLine, layout: _ColumnLayout, name: str, line_number: int) -> Pair | BadLine:
    if isinstance(line, BadLine):
        return line
    cells = line.split("\t")
    if '"' in line:
        if len(cells) > 2 and _has_quoted_tab(line, len(cells), layout.column_count):
            return BadLine(BROKEN_CELL, name, line_number, line[: streams.EXCERPT_CHARS])
        cells = [unquote_cell(cell) for cell in cells]
    try:
        return Pair(cells[layout.source], cells[layout.target], name, line_number)
    except IndexError:
        reason = "empty line" if cells == [""] else ONE_COLUMN if len(cells) == 1 else "too few columns"
        return BadLine(reason, name, line_number, line[: streams.EXCERPT_CHARS])


def unquote_cell(cell: str) -> str:
    quoted = QUOTED_CELL.fullmatch(cell) if len(cell) > 3 and '""' in cell[1:-1] else None
    return quoted[1].replace('""', '"') if quoted else cell


def read_languages(content: Iterable[bytes], name: str, requested: LanguagePair = ANY_LANGUAGES) -> LanguagePair:
    """Return the languages that a header names."""
    head, _ = streams.peek_head(content)
    return _detect_layout(head, name, requested).languages or ANY_LANGUAGES


def is_ambiguous(read_blocks: Callable[[], Iterable[bytes]], name: str, requested: Sequence[LanguagePair]) -> bool:
    return any(read_languages(read_blocks(), name, pair) == ANY_LANGUAGES for pair in requested)


def _detect_layout(head: bytes, name: str, requested: LanguagePair) -> _ColumnLayout:
    lines = streams.read_lines([head[: streams.HEAD_SIZE]], name)
    rows = [line.split("\t") if isinstance(line, str) else [] for line in lines]
    widths = Counter(len(cells) for cells in rows if len(cells) > 1)
    width = max(widths, key=lambda width: widths[width], default=2)
    names = [cell.strip().strip('"') for cell in rows[0]] if rows else []
    columns = find_role_columns(names)
    if columns:
        return _ColumnLayout(*columns, ANY_LANGUAGES, width)
    columns = _find_language_columns(names, rows[1] if len(rows) > 1 else [], name, requested)
    if columns:
        return _ColumnLayout(*columns, LanguagePair(*(names[column] for column in columns)), width)
    return _ColumnLayout(column_count=width)


def find_role_columns(names: Sequence[str]) -> tuple[int, int] | None:
    lower = [name.lower() for name in names]
    source = next((lower.index(role) for role in SOURCE_NAMES if role in lower), None)
    target = next((lower.index(role) for role in TARGET_NAMES if role in lower), None)
    return (source, target) if source is not None and target is not None else None


def _find_language_columns(
    names: Sequence[str], next_row: Sequence[str], name: str, requested: LanguagePair
) -> tuple[int, int] | None:
    """Return the columns of source and target if the first line is a header of languages."""
    tags = tuple(cell for cell in names if LANGUAGE_TAG.fullmatch(cell))
    is_header = _is_header(names, next_row)
    sides = pairs.choose_sides(requested, tags) if requested.tags or is_header else None
    if sides:
        return names.index(sides[0]), names.index(sides[1])
    if is_header or (len(tags) == len(names) > 1 and any(choose_tag(tag, tags) for tag in requested.tags)):
        raise requested.make_mismatch_error(name, tags)  # a header of other languages, or of more than two
    return None


def _is_header(names: Sequence[str], next_row: Sequence[str]) -> bool:
    """True for different language tags with text below each of them."""
    if not 1 < len(names) <= len(next_row) or len({name.lower() for name in names}) < len(names):
        return False
    text_length = sum(map(len, next_row[: len(names)]))
    return all(map(_is_language_tag, names)) and text_length >= _MIN_TEXT_CHARS * len(names)


def _is_language_tag(name: str) -> bool:
    """True for `en` and `EN`; but `No` begins a sentence, and `src` is a language of Sardinia that no header means."""
    language = re.split("[-_]", name)[0]
    if not LANGUAGE_TAG.fullmatch(name) or not (language.islower() or language.isupper()):
        return False
    return language.lower() not in SOURCE_NAMES + TARGET_NAMES and is_known_language(get_primary_subtag(name))


def _has_quoted_tab(line: str, column_count: int, expected_count: int) -> bool:
    """True if a quoted cell contains a tab.

    Raw text may open a quote in one column and close one in another. It is a quoted cell only if quotes are doubled
    inside, or if the line would have too many columns otherwise.
    """
    cells = [match[1] for match in _CELL_WITH_TABS.finditer(line) if "\t" in match[1]]
    real_count = column_count - sum(cell.count("\t") for cell in cells)
    return bool(cells) and real_count > 1 and (real_count == expected_count or any('""' in cell for cell in cells))
