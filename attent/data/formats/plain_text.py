"""Plain text for pre-translation: each line is translated; blank lines, indents and line endings stay."""

from collections.abc import Sequence

from attent.data.formats import units
from attent.data.formats.placeholders import has_words
from attent.data.formats.units import Edit, FileText, InlineContent, ScanResult, TranslationUnit
from attent.data.pairs import CorpusError, LanguagePair


def decode_plain_text(content: bytes, name: str) -> FileText:
    """Decode UTF-8, or UTF-16 with a byte order mark."""
    text = units.decode_file(content, name, "utf-8")
    if b"\0" in text.utf8:
        line = text.utf8.count(b"\n", 0, text.utf8.index(0)) + 1
        advice = "" if content.startswith(tuple(units.BOMS)) else ", or as UTF-8 if it is text"
        raise CorpusError(f"{name} is not text at line {line:,}: save it as text{advice}")
    return text


def scan_units(content: bytes, name: str, _: LanguagePair) -> ScanResult:
    """Return every line with words. Text does not declare its language, so that any matches."""
    text = decode_plain_text(content, name)
    result = ScanResult(text=text, check_text=text.check_encodable)
    for number, (start, line) in enumerate(text.split_lines(), 1):
        if has_words(line):
            result.units.append(_make_unit(number, line, start))
    return result


def _make_unit(line_number: int, line: str, start: int) -> TranslationUnit:
    def make_edits(targets: Sequence[InlineContent]) -> list[Edit]:
        return [Edit(start, start + len(units.encode_text(line)), units.get_raw_text(targets[0]))]

    return TranslationUnit(line=line_number, contents=((line,),), make_edits=make_edits)
