"""Apple's .strings files (`"key" = "value";`) for pre-translation: values are translated; keys and comments stay."""

from __future__ import annotations

import re
from functools import partial

from attent.data.formats import message_format
from attent.data.formats.json_strings import is_translatable
from attent.data.formats.plain_text import decode_plain_text
from attent.data.formats.units import Edit, ScanResult
from attent.data.pairs import CorpusError, LanguagePair

_QUOTED = rb'"(?:[^"\\]|\\.)*+"'
_ENTRY = re.compile(
    rb"(?:\s++|/\*(?:[^*]|\*(?!/))*+\*/|//[^\n]*+)*+"
    rb"(?:(?:%b|[\w.$:/-]++)\s*+(?:=\s*+(?P<value>%b)\s*+)?;|\Z)" % (_QUOTED, _QUOTED),
    re.DOTALL,
)
_ESCAPE = re.compile(r"((?:\\[Uu][0-9A-Fa-f]{4})+)|\\(.)", re.DOTALL)
_UNESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
_ESCAPED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def scan_units(content: bytes, name: str, languages: LanguagePair) -> ScanResult:
    text = decode_plain_text(content, name)
    result = ScanResult(text=text, check_text=text.check_encodable)
    offset, line = 0, 1
    while offset < len(text.utf8):
        entry = _ENTRY.match(text.utf8, offset)
        if entry is None:
            line += text.utf8[offset:].removesuffix(text.utf8[offset:].lstrip()).count(b"\n")
            raise CorpusError(f'{name} has no `"key" = "value";` at line {line:,}: correct it there')
        line += entry[0].count(b"\n")
        if entry["value"]:
            value = _ESCAPE.sub(_unescape, entry["value"][1:-1].decode("utf-8", "surrogateescape"))
            if is_translatable(value, is_named=False):
                message_format.add_unit(result, line, value, languages, partial(_make_edit, entry.span("value")))
        offset = entry.end()
    return result


def _unescape(escape: re.Match[str]) -> str:
    if escape[1]:
        return bytes.fromhex(re.sub(r"\\[Uu]", "", escape[1])).decode("utf-16-be", "surrogatepass")
    return _UNESCAPED.get(escape[2], escape[2])


def _make_edit(span: tuple[int, int], value: str) -> Edit:
    return Edit(*span, '"' + "".join(_ESCAPED.get(char, char) for char in value) + '"')
