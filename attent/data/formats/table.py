"""Columns of CSV and TSV files for pre-translation: named columns are translated in place.

Without names, the header must name a source and a target, by role or language: empty cells of the target are filled.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from attent.data import pairs
from attent.data.formats import units
from attent.data.formats.placeholders import has_words
from attent.data.formats.tsv import find_role_columns
from attent.data.formats.units import Edit, FileText, InlineContent, ScanResult, decode_plain_text
from attent.data.pairs import MAX_LISTED, CorpusError, LanguagePair
from attent.formatting import escape_invisible
from attent.text.language_tags import LANGUAGE_TAG

_DELIMITERS = b",;\t|"


class _Cell(NamedTuple):
    start: int
    end: int
    raw: bytes

    @property
    def text(self) -> str:
        text = self.raw.decode("utf-8", "surrogateescape")
        return text[1:-1].replace('""', '"') if self.is_quoted else text

    @property
    def is_quoted(self) -> bool:
        return self.raw[:1] == b'"' and self.raw[-1:] == b'"' and len(self.raw) > 1


def scan_fields(content: bytes, name: str, languages: LanguagePair, fields: Sequence[str] = ()) -> ScanResult:
    """Return the cells of the columns named by `fields`, or the empty cells of the target column."""
    text = decode_plain_text(content, name)
    result = ScanResult(text=text, check_text=text.check_encodable)
    head = re.sub(rb'"[^"]*"', b"", text.utf8.partition(b"\n")[0])
    delimiter = b"\t" if name.lower().endswith((".tsv", ".tab")) else max(_DELIMITERS, key=head.count).to_bytes()
    rows = _split_rows(text, delimiter)
    _, header = next(rows, (1, []))
    columns = _choose_columns([cell.text.strip() for cell in header], name, languages, fields)
    for line, cells in rows:
        for source, target in columns:
            if max(source, target) >= len(cells):
                if any(cell.raw for cell in cells):
                    result.skip(line, " ".join(cell.text for cell in cells), "its row has too few columns")
                break
            if source != target and cells[target].text.strip():
                result.existing_count += 1
            elif has_words(cells[source].text):
                make_edits = partial(_make_edits, cells[source], cells[target], delimiter)
                result.add_unit(line, [(cells[source].text,)], make_edits)
    return result


def _split_rows(text: FileText, delimiter: bytes) -> Iterator[tuple[int, list[_Cell]]]:
    sign = re.escape(delimiter)
    cell = re.compile(
        rb'(?P<cell>"(?:[^"]|"")*+"(?=%b|[\r\n]|\Z)|[^%b\r\n]*+)(?P<end>%b|\r?\n|\r|\Z)' % (sign, sign, sign)
    )
    cells, line, offset = list[_Cell](), 1, 0
    while offset < len(text.utf8) or cells:
        match = cell.match(text.utf8, offset)
        assert match is not None, "a cell may be anything"
        cells.append(_Cell(*match.span("cell"), match["cell"]))
        offset = match.end()
        if match["end"] != delimiter:
            yield line, cells
            line, cells = line + sum(cell.raw.count(b"\n") for cell in cells) + 1, []


def _choose_columns(
    names: Sequence[str], name: str, languages: LanguagePair, fields: Sequence[str]
) -> list[tuple[int, int]]:
    listed = ", ".join(map(escape_invisible, names[:MAX_LISTED]))
    if missing := [field for field in fields if field not in names]:
        raise CorpusError(f"{name} has no column {missing[0]}: its first line names {listed}")
    if fields:
        return [(names.index(field), names.index(field)) for field in fields]
    tags = tuple(cell for cell in names if LANGUAGE_TAG.fullmatch(cell))
    sides = pairs.choose_sides(languages, tags)
    columns = find_role_columns(names) or (sides and (names.index(sides[0]), names.index(sides[1])))
    if columns is None:
        raise CorpusError(f"{name} has no columns of source and target: name the fields to translate, of {listed}")
    return [columns]


def _make_edits(source: _Cell, cell: _Cell, delimiter: bytes, targets: Sequence[InlineContent]) -> list[Edit]:
    value = units.get_raw_text(targets[0])
    if source == cell and value == source.text:
        return []
    if cell.is_quoted or re.search(rf'[{re.escape(delimiter.decode())}\r\n]|\A"', value):
        value = '"{}"'.format(value.replace('"', '""'))
    return [Edit(cell.start, cell.end, value)]
