"""Java properties for pre-translation: values are translated; keys, comments and layout stay.

A file in ASCII gets `\\uXXXX` escapes, which every version of Java reads. A value with `{0}` is a pattern of
MessageFormat, in which an apostrophe is doubled.
"""

from __future__ import annotations

import re
from functools import partial

from attent.data.formats import message_format, units
from attent.data.formats.json_strings import is_translatable
from attent.data.formats.units import Edit, FileText, ScanResult
from attent.data.pairs import LanguagePair

_CHARACTER = rb"[^\\\r\n]|\\(?:\r\n|.|\Z)"
_LINE = re.compile(
    rb"[ \t\f]*+(?:[#!][^\r\n]*+|(?:(?![=: \t\f])(?:%b))*+[ \t\f]*+[=:]?[ \t\f]*+(?P<value>(?:%b)*+))(?:\r\n?|\n|\Z)"
    % (_CHARACTER, _CHARACTER),
    re.DOTALL,
)
_ESCAPE = re.compile(r"(?P<code>(?:\\u[0-9A-Fa-f]{4})+)|\\(?:\r?\n|\r)[ \t\f]*|\\(?P<char>.)|\\\Z", re.DOTALL)
_UNESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_ESCAPED = {char: f"\\{letter}" for letter, char in _UNESCAPED.items()} | {"\\": "\\\\"}
_PATTERN = re.compile(r"\{\s*\d+\s*[,}]")


def scan_units(content: bytes, name: str, languages: LanguagePair) -> ScanResult:
    try:
        content.decode()
        encoding = "utf-8"
    except UnicodeDecodeError:
        encoding = "iso-8859-1"
    text = units.decode_file(content, name, encoding)
    result = ScanResult(text=text, check_text=lambda _: "")
    offset, line = 0, 1
    while offset < len(text.utf8):
        entry = _LINE.match(text.utf8, offset)
        assert entry is not None, "a line may be anything"
        if entry["value"]:
            value = _ESCAPE.sub(_unescape, entry["value"].decode("utf-8", "surrogateescape"))
            if is_translatable(value, is_named=False):
                write = partial(_make_edit, text, content.isascii(), entry.span("value"))
                is_pattern = _PATTERN.search(value) is not None
                message_format.add_unit(result, line, value, languages, write, doubled=is_pattern)
        line += max(entry[0].count(b"\n"), entry[0].count(b"\r"))
        offset = entry.end()
    return result


def _unescape(escape: re.Match[str]) -> str:
    if escape["code"]:
        return bytes.fromhex(escape["code"].replace("\\u", "")).decode("utf-16-be", "surrogatepass")
    return _UNESCAPED.get(escape["char"], escape["char"]) if escape["char"] else ""


def _make_edit(text: FileText, is_ascii: bool, span: tuple[int, int], value: str) -> Edit:
    escaped = re.sub(r"\A ", r"\\ ", "".join(_ESCAPED.get(char, char) for char in value))
    last = "\x7f" if is_ascii else "\xff" if text.encoding == "iso8859-1" else "\U0010ffff"
    return Edit(*span, re.sub(f"[^\0-{last}]", _escape_unicode, escaped))


def _escape_unicode(char: re.Match[str]) -> str:
    return re.sub("(....)", r"\\u\1", char[0].encode("utf-16-be").hex())
