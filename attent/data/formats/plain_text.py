"""Plain text: each line is translated where it stands; blank lines, indents and the ends of lines stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attent.data.formats import placeholders
from attent.data.formats.units import (
    BOMS,
    Edit,
    FileText,
    InlineContent,
    PretranslateError,
    ScanResult,
    TranslationUnit,
    decode_file,
    make_encoding_check,
)
from attent.data.pairs import LanguagePair


def decode_document(content: bytes, name: str) -> FileText:
    """The text of a file in UTF-8, or in UTF-16 if its first bytes say so."""
    text = decode_file(content, name, "utf-8")
    if b"\0" in text.utf8:
        unmarked = "" if content.startswith(tuple(BOMS)) else ", or as UTF-8 if it is text"
        raise PretranslateError(
            f"{name} is not text at line {text.get_line_number(text.utf8.index(0)):,}: save it as text{unmarked}"
        )
    return text


def scan_units(text: FileText, requested: LanguagePair) -> ScanResult:
    """Every line with words. A text does not say its language, so any fits."""
    found = ScanResult(check_text=make_encoding_check(text.encoding))
    for number, (start, line) in enumerate(split_lines(text.utf8), 1):
        said = line.decode("utf-8", "surrogateescape")
        if placeholders.has_words(said):
            found.units.append(make_unit(number, (said,), start, start + len(line)))
    return found


def split_lines(utf8: bytes) -> Iterator[tuple[int, bytes]]:
    """Each line with its place, without its end; where there is no newline at all, a carriage return is one."""
    at = 0
    for line in utf8.split(b"\n" if b"\n" in utf8 else b"\r"):
        yield at, line.removesuffix(b"\r")
        at += len(line) + 1


def make_unit(line: int, content: InlineContent, start: int, end: int) -> TranslationUnit:
    """A text that its translation takes the place of."""

    def edits(targets: Sequence[InlineContent]) -> list[Edit]:
        return [Edit(start, end, serialize_content(targets[0]))]

    return TranslationUnit(line=line, contents=(content,), make_edits=edits)


def serialize_content(content: InlineContent) -> str:
    return "".join(part if isinstance(part, str) else part.raw for part in content)
