"""Tab-separated columns: source and target are the first two, or those that a header line names.

A spreadsheet puts a cell that holds quotes into quotes and doubles those inside, as in `"a ""b"" c"`: such a cell is
unquoted. A cell that merely begins or ends with a quote is text and stays as it is. A cell with a line break inside
is not understood: its lines are read as lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from attent.data.pairs import Bad, Languages, Pair, choose
from attent.data.readers import files, tags

SOURCE_NAMES = ("src", "source")
TARGET_NAMES = ("tgt", "trg", "target")
ONE_COLUMN = "one column only"
_TAG = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')


def read(content: Iterable[bytes], name: str, languages: Languages) -> Iterator[Pair | Bad]:
    left, right = 0, 1
    for number, line in enumerate(files.lines(content, name), 1):
        if isinstance(line, Bad):
            yield line
            continue
        cells = line.split("\t")
        if number == 1 and (columns := header(cells, name, languages)):
            left, right = columns
            continue
        if '"' in line:
            cells = [_unquoted(cell) for cell in cells]
        try:
            yield Pair(cells[left], cells[right], name, number)
        except IndexError:
            yield Bad(_reason(cells), name, number, line[: files.SHOWN])


def header(cells: list[str], name: str, languages: Languages) -> tuple[int, int] | None:
    """The columns of source and target if this first line names them; None if it is a line like any other."""
    names = [cell.strip().strip('"').lower() for cell in cells]
    by_role = [next((names.index(n) for n in known if n in names), None) for known in (SOURCE_NAMES, TARGET_NAMES)]
    if by_role[0] is not None and by_role[1] is not None:
        return by_role[0], by_role[1]
    asked = [tag for tag in (languages.source, languages.target) if tag is not None]
    found = tuple(cell for cell in names if _TAG.fullmatch(cell))
    chosen = tags.sides(languages, found) if asked else None
    if chosen:
        return names.index(chosen[0]), names.index(chosen[1])
    if len(found) == len(names) > 1 and any(choose(tag, found) for tag in asked):
        raise tags.error(name, languages, found)  # a header, but of other languages
    return None


def _unquoted(cell: str) -> str:
    quoted = _QUOTED.fullmatch(cell) if len(cell) > 3 and '""' in cell[1:-1] else None
    return quoted[1].replace('""', '"') if quoted else cell


def _reason(cells: list[str]) -> str:
    if cells == [""]:
        return "empty line"
    return ONE_COLUMN if len(cells) == 1 else "too few columns"
