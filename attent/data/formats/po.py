"""Gettext catalogues (PO): an entry has an id, which is the source text, and its translation.

An entry with plural forms gives a pair for each form: the singular id with form 0, and the plural id with each other
form. A language with one form only (Japanese) has it for every number, so there it goes with the plural id. Entries
that nobody has translated, fuzzy ones (a guess by similarity) and obsolete ones (`#~`) are counted, not read, unless
asked for. The empty id is the header, which tells the charset and the language.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from attent.data.formats import language_tags, streams
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair

_KEYWORD = re.compile(r"(msgctxt|msgid_plural|msgid|msgstr)\s*(?:\[\s*(\d{1,3})\s*\])?\s*(?=\")")
_STRINGS = re.compile(r'(?:"(?:[^"\\]++|\\.)*+"\s*+)++')
_STRING = re.compile(r'"((?:[^"\\]++|\\.)*+)"')
_ESCAPE = re.compile(r"(?:\\x[0-9A-Fa-f]{1,2}|\\[0-7]{1,3})+|\\.")
_NUMERIC_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]+)|([0-7]+))")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", '"': '"', "\\": "\\"}
_CHARSET = re.compile(rb"charset=\s*([^\s\\\"]+)")
_LEGACY_CHARSETS = re.compile(
    r"iso[-_]?8859[-_]\d+|koi8[-_][rtu]|(cp|windows)[-_]?\d+|gbk|gb2312|gb18030|big5([-_]hkscs)?"
    r"|euc[-_](jp|kr)|shift[-_]jis|johab|tis[-_]?620"
)
_LANGUAGE = re.compile(r"^Language:[ \t]*([A-Za-z]\S*)", re.MULTILINE)
NOT_PO = "not PO"


@dataclass
class _PoEntry:
    """What has been read of an entry."""

    line: int = 0
    fuzzy: bool = False
    obsolete: bool = False
    error: str = ""  # what is wrong with it, in few words
    excerpt: str = ""  # the beginning of the line that is wrong
    strings: dict[str, list[str]] = field(default_factory=dict)  # of msgid, msgid_plural, msgstr, msgstr000, ...
    current_key: str = ""  # the one that a string on a line of its own continues
    char_count: int = 0  # of all pieces

    def set_error(self, reason: str, excerpt: str) -> None:
        """The first fault counts: others follow from it."""
        if not self.error:
            self.error, self.excerpt = reason, excerpt[: streams.EXCERPT_CHARS]

    def get_text(self, key: str) -> str:
        return "".join(self.strings.get(key, ()))

    @property
    def has_forms(self) -> bool:
        return self.current_key.startswith("msgstr")

    @property
    def forms(self) -> list[str]:
        """Its translations by number; a single one for most entries."""
        return [self.get_text(key) for key in sorted(self.strings) if key.startswith("msgstr")]

    @property
    def is_header(self) -> bool:
        return not (self.get_text("msgid") or "msgctxt" in self.strings or self.obsolete or self.error)


def read_pairs(
    content: Iterable[bytes], name: str, requested: LanguagePair, *, fuzzy: bool = False, obsolete: bool = False
) -> Iterator[Pair | BadLine]:
    """Every translation. Read the other way round when the header's language is the source that was asked for."""
    swapped = False
    for entry in _parse_entries(content, name):
        if entry.is_header:
            swapped = _is_reversed(entry, name, requested)
            continue
        left_out = "obsolete" if entry.obsolete and not obsolete else "fuzzy" if entry.fuzzy and not fuzzy else ""
        found = [] if entry.error or left_out else _extract_translations(entry)
        for source, target in found:
            yield Pair(*((target, source) if swapped else (source, target)), name, entry.line)
        if not found:
            why = entry.error or left_out or language_tags.UNTRANSLATED
            yield BadLine(why, name, entry.line, entry.excerpt or entry.get_text("msgid")[: streams.EXCERPT_CHARS])


def read_languages(content: Iterable[bytes], name: str) -> LanguagePair:
    """The language that the header names. That of the ids stands nowhere."""
    entry = next(_parse_entries(content, name), None)
    return LanguagePair(None, _get_language(entry) if entry and entry.is_header else None)


def _get_language(header: _PoEntry) -> str | None:
    found = _LANGUAGE.search("".join(header.forms))
    return found[1] if found else None


def _is_reversed(header: _PoEntry, name: str, requested: LanguagePair) -> bool:
    language = _get_language(header)
    swapped = language_tags.is_reversed(requested, LanguagePair(None, language))
    if swapped is None:
        raise language_tags.make_mismatch_error(name, requested, [language or ""])
    return swapped


def _extract_translations(entry: _PoEntry) -> list[tuple[str, str]]:
    forms = entry.forms
    ids = [entry.get_text("msgid")]
    if "msgid_plural" in entry.strings:
        plural = entry.get_text("msgid_plural")
        ids = [*ids, *[plural] * (len(forms) - 1)] if len(forms) > 1 else [plural]
    return [(one, form) for one, form in zip(ids, forms, strict=False) if form]


# Lines to entries.


def _parse_entries(content: Iterable[bytes], name: str) -> Iterator[_PoEntry]:
    entry = _PoEntry()
    for number, line in enumerate(streams.read_lines(_convert_to_utf8(content, name), name), 1):
        if isinstance(line, BadLine):
            if not line.excerpt.startswith("#"):  # a comment in another charset harms nobody
                entry.line = entry.line or number
                entry.set_error(line.reason, line.excerpt)
            continue
        body = line.strip()
        obsolete = body.startswith("#~")
        if obsolete:
            body = body[2:].lstrip()
        if _starts_new_entry(entry, body):
            yield _finish_entry(entry)
            entry = _PoEntry()
        if body.startswith("#"):
            entry.fuzzy |= body[1:2] in (",", "=") and "fuzzy" in re.split(r"[\s,]+", body[2:])
        elif body and not body.startswith(("|", "domain")):  # `#~|` is what the id of an obsolete entry was before
            _add_line(entry, body, number)
            entry.obsolete |= obsolete
    if entry.strings or entry.error:
        yield _finish_entry(entry)


def _starts_new_entry(entry: _PoEntry, body: str) -> bool:
    """Is this line no longer part of the entry? A translation or a fault ends an entry that anything new follows."""
    if not entry.strings and not entry.error:
        return False
    if body.startswith(("msgctxt", "domain")):
        return True
    if body.startswith("msgid") and not body.startswith("msgid_plural"):
        return "msgid" in entry.strings or entry.has_forms or bool(entry.error)
    return (not body or body.startswith("#")) and (entry.has_forms or bool(entry.error))


def _finish_entry(entry: _PoEntry) -> _PoEntry:
    if not entry.error:
        entry.error = "no msgid" if "msgid" not in entry.strings else "" if entry.has_forms else "no msgstr"
    return entry


def _add_line(entry: _PoEntry, body: str, line_number: int) -> None:
    """One line of an entry: a keyword and a string, or a string that continues the one before."""
    keyword = _KEYWORD.match(body)
    if keyword:
        form = f"{int(keyword[2]):03}" if keyword[2] else ""
        entry.current_key = keyword[1] + form
        if entry.current_key in entry.strings or (form and keyword[1] != "msgstr"):
            entry.set_error(NOT_PO, body)
    entry.line = entry.line or line_number
    text = parse_strings(body[keyword.end() :] if keyword else body)
    if text is None or not entry.current_key:
        entry.set_error(NOT_PO, body)
    elif entry.char_count + len(text) > streams.MAX_LINE_BYTES:
        entry.set_error(streams.TOO_LONG, body)
    else:
        entry.char_count += len(text) + 1  # and 1, so that a million empty pieces count too
        entry.strings.setdefault(entry.current_key, []).append(text)


def parse_strings(quoted: str) -> str | None:
    """What one or more strings in quotes say; None if they are not well formed."""
    if "\\" not in quoted and len(quoted) > 1 and quoted[0] == quoted[-1] == '"' and '"' not in quoted[1:-1]:
        return quoted[1:-1]
    if not _STRINGS.fullmatch(quoted):
        return None
    try:
        return "".join(_ESCAPE.sub(_unescape, piece) for piece in _STRING.findall(quoted))
    except (KeyError, UnicodeDecodeError):
        return None


def _unescape(escape: re.Match[str]) -> str:
    """A character, or the bytes of one by their numbers."""
    numbers = [int(found[1], 16) if found[1] else int(found[2], 8) for found in _NUMERIC_ESCAPE.finditer(escape[0])]
    return bytes(number & 255 for number in numbers).decode() if numbers else _ESCAPES[escape[0][1]]


def _convert_to_utf8(content: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The catalogue in UTF-8, whatever charset its header names."""
    head, whole = streams.peek_head(content)
    found = _CHARSET.search(b"msgid".join(head.split(b"\nmsgid", 2)[:2]))
    charset = found[1].decode("ascii", "replace").lower() if found else "utf-8"
    if charset in ("utf-8", "utf8", "us-ascii", "ascii", "charset"):  # CHARSET stands in templates
        return whole
    try:
        known = _LEGACY_CHARSETS.fullmatch(charset) and codecs.lookup(charset)
    except LookupError:
        known = None
    if not known:
        raise CorpusError(f"{name} is in charset {charset[:40]}, which attent does not know: convert it to UTF-8")
    return streams.transcode_to_utf8(whole, charset)
