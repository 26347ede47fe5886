"""JSON for pre-translation: string values are translated; keys, numbers and layout stay.

Without fields, all values are translated but identifiers and paths, the metadata of ARB files (Flutter) and that of
`messages.json` (browser extensions). Values may be ICU messages.
"""

import json
import re
from collections.abc import Sequence
from functools import partial

from attent.data.formats import message_format, placeholders
from attent.data.formats.plain_text import decode_plain_text
from attent.data.formats.units import Edit, FileText, ScanResult
from attent.data.pairs import CorpusError, LanguagePair

_TOKEN = re.compile(rb'(?P<string>"(?:[^"\\]++|\\.)*+")(?P<key>\s*:)?|[][{}\n]', re.DOTALL)
_UNICODE_ESCAPE = re.compile(rb"\\u00[8-f]|\\u0[1-9a-f]|\\u[1-9a-f]", re.IGNORECASE)
_IDENTIFIER = re.compile(r"\S*[^\W_][_@#=.\\]\S*\w|[#@./$_]\S*|[a-z]+[A-Z]\w*|[a-z\d]+(?:[/:][a-z\d.+-]+)+", re.ASCII)
_EXTENSION_CODE = re.compile(r"\$\w+\$|\$\d")
_MAX_IDENTIFIER = 200


def scan_fields(content: bytes, name: str, languages: LanguagePair, fields: Sequence[str] = ()) -> ScanResult:
    """Return the values of the keys named by `fields` and everything inside, or of all keys."""
    text = decode_plain_text(content, name)
    result = ScanResult(text=text, check_text=text.check_encodable)
    document = _parse(text, name)
    code = None
    if not fields and isinstance(document, dict):
        entries = list(document.values())
        if entries and all(isinstance(entry, dict) and "message" in entry for entry in entries):
            fields, code = ("message",), _EXTENSION_CODE
    ensure_ascii = text.utf8.isascii() and _UNICODE_ESCAPE.search(text.utf8) is not None
    line = 1
    selected, current = [not fields], not fields  # of the values of each container that is open; of the next value
    for match in _TOKEN.finditer(text.utf8):
        line += match[0].count(b"\n")
        string = (match["string"] or b"").decode("utf-8", "surrogateescape")
        if match["key"]:
            key = json.loads(string)
            current = key in fields or (selected[-1] and not key.startswith("@"))
        elif match[0] in (b"{", b"["):
            selected.append(current)
        elif match[0] in (b"}", b"]"):
            current = selected.pop()
        elif current and string:
            value = json.loads(string)
            write = partial(_make_edit, match.span("string"), ensure_ascii)
            if is_translatable(value, is_named=bool(fields)):
                message_format.add_unit(result, line, value, languages, write, code=code)
    return result


def _parse(text: FileText, name: str) -> object:
    try:
        return json.loads(text.utf8.decode("utf-8", "surrogateescape"))
    except json.JSONDecodeError as error:
        raise CorpusError(f"{name} is not JSON at line {error.lineno:,} ({error.msg}): correct it there") from None
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        raise CorpusError(f"{name} is nested too deeply or has a number that is too long: check the file") from None


def is_translatable(text: str, *, is_named: bool) -> bool:
    """True for words. Identifiers and paths count only where a field `is_named`."""
    is_identifier = not is_named and len(text) <= _MAX_IDENTIFIER and _IDENTIFIER.fullmatch(text) is not None
    return placeholders.has_words(text) and not is_identifier


def _make_edit(span: tuple[int, int], ensure_ascii: bool, text: str) -> Edit:
    return Edit(*span, json.dumps(text, ensure_ascii=ensure_ascii))
