r"""Java's .properties and Apple's .strings for pre-translation: values are translated; keys, comments and layout stay.

Properties in ASCII get `\uXXXX` escapes, which every version of Java reads. A value with `{0}` is a pattern of
MessageFormat, in which an apostrophe is doubled.
"""

import re
from functools import partial

from attent.data.formats import message_format, units
from attent.data.formats.json_strings import is_translatable
from attent.data.formats.plain_text import decode_plain_text
from attent.data.formats.units import Edit, FileText, ScanResult
from attent.data.pairs import CorpusError, LanguagePair

_CHARACTER = rb"[^\\\r\n]|\\(?:\r\n|.|\Z)"
_PROPERTY = re.compile(
    rb"[ \t\f]*+(?:[#!][^\r\n]*+|(?:(?![=: \t\f])(?:%b))*+[ \t\f]*+[=:]?[ \t\f]*+(?P<value>(?:%b)*+))(?:\r\n?|\n|\Z)"
    % (_CHARACTER, _CHARACTER),
    re.DOTALL,
)
_CONTINUATION = re.compile(r"\\(?:\r?\n|\r)[ \t\f]*")
_QUOTED = rb'"(?:[^"\\]|\\.)*+"'
_STRING = re.compile(
    rb"(?:\s++|/\*(?:[^*]|\*(?!/))*+\*/|//[^\n]*+)*+"
    rb"(?:(?:%b|[\w.$:/-]++)\s*+(?:=\s*+(?P<value>%b)\s*+)?;|\Z)" % (_QUOTED, _QUOTED),
    re.DOTALL,
)
_ESCAPE = re.compile(r"((?:\\[Uu][0-9A-Fa-f]{4})+)|\\(.|\Z)", re.DOTALL)
_UNESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_ESCAPED = {char: f"\\{letter}" for letter, char in _UNESCAPED.items()} | {"\\": "\\\\"}
_PATTERN = re.compile(r"\{\s*\d+\s*[,}]")


def scan_properties(content: bytes, name: str, languages: LanguagePair) -> ScanResult:
    try:
        content.decode()
        encoding = "utf-8"
    except UnicodeDecodeError:
        encoding = "iso-8859-1"
    text = units.decode_file(content, name, encoding)
    last = "\x7f" if content.isascii() else "\xff" if text.encoding == "iso8859-1" else "\U0010ffff"
    return _scan(text, _PROPERTY, languages, last)


def scan_strings(content: bytes, name: str, languages: LanguagePair) -> ScanResult:
    return _scan(decode_plain_text(content, name), _STRING, languages, "")


def _scan(text: FileText, pattern: re.Pattern[bytes], languages: LanguagePair, last: str) -> ScanResult:
    """Return the values of all entries; `last` is the last character that needs no escape, or "" for quotes."""
    result = ScanResult(text=text, check_text=(lambda _: "") if last else text.check_encodable)
    offset, line = 0, 1
    while offset < len(text.utf8):
        entry = pattern.match(text.utf8, offset)
        if entry is None:
            line += text.utf8[offset:].removesuffix(text.utf8[offset:].lstrip()).count(b"\n")
            raise CorpusError(f'{text.name} has no `"key" = "value";` at line {line:,}: correct it there')
        lines = max(entry[0].count(b"\n"), entry[0].count(b"\r"))
        raw = (entry["value"] or b"").decode("utf-8", "surrogateescape")
        value = _ESCAPE.sub(_unescape, _CONTINUATION.sub("", raw) if last else raw[1:-1])
        if is_translatable(value, is_named=False):
            is_pattern = bool(last) and _PATTERN.search(value) is not None
            write = partial(_make_edit, entry.span("value"), last)
            message_format.add_unit(result, line + lines * (not last), value, languages, write, doubled=is_pattern)
        line, offset = line + lines, entry.end()
    return result


def _unescape(escape: re.Match[str]) -> str:
    return decode_unicode_escapes(escape[1]) if escape[1] else _UNESCAPED.get(escape[2], escape[2])


def decode_unicode_escapes(escapes: str) -> str:
    """Return the characters of `\\uXXXX\\uXXXX`, in which two can be one character."""
    return bytes.fromhex(re.sub(r"\\[Uu]", "", escapes)).decode("utf-16-be", "surrogatepass")


def _make_edit(span: tuple[int, int], last: str, value: str) -> Edit:
    escaped = "".join(_ESCAPED.get(char, char) for char in value)
    if not last:
        return Edit(*span, '"{}"'.format(escaped.replace('"', '\\"')))
    escaped = re.sub(r"\A ", r"\\ ", escaped)
    hex_codes = partial(re.sub, "(....)", r"\\u\1")
    return Edit(*span, re.sub(f"[^\0-{last}]", lambda char: hex_codes(char[0].encode("utf-16-be").hex()), escaped))
