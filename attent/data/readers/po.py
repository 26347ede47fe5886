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

from attent.data.pairs import Bad, CorpusError, Languages, Pair
from attent.data.readers import files, tags

_KEYWORD = re.compile(r"(msgctxt|msgid_plural|msgid|msgstr)\s*(?:\[\s*(\d{1,3})\s*\])?\s*(?=\")")
_STRINGS = re.compile(r'(?:"(?:[^"\\]++|\\.)*+"\s*+)++')
_STRING = re.compile(r'"((?:[^"\\]++|\\.)*+)"')
_ESCAPE = re.compile(r"(?:\\x[0-9A-Fa-f]{1,2}|\\[0-7]{1,3})+|\\.")
_NUMBER = re.compile(r"\\(?:x([0-9A-Fa-f]+)|([0-7]+))")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", '"': '"', "\\": "\\"}
_CHARSET = re.compile(rb"charset=\s*([^\s\\\"]+)")
_OTHER_CHARSETS = re.compile(
    r"iso[-_]?8859[-_]\d+|koi8[-_][rtu]|(cp|windows)[-_]?\d+|gbk|gb2312|gb18030|big5([-_]hkscs)?"
    r"|euc[-_](jp|kr)|shift[-_]jis|johab|tis[-_]?620"
)
_LANGUAGE = re.compile(r"^Language:[ \t]*([A-Za-z]\S*)", re.MULTILINE)
NOT_PO = "not PO"


@dataclass
class _Entry:
    """What has been read of an entry."""

    line: int = 0
    fuzzy: bool = False
    obsolete: bool = False
    fault: str = ""  # what is wrong with it, in few words
    shown: str = ""  # the beginning of the line that is wrong
    pieces: dict[str, list[str]] = field(default_factory=dict)  # of msgid, msgid_plural, msgstr, msgstr000, ...
    last: str = ""  # the one that a string on a line of its own continues
    size: int = 0  # of all pieces

    def blame(self, why: str, shown: str) -> None:
        """The first fault counts: others follow from it."""
        if not self.fault:
            self.fault, self.shown = why, shown[: files.SHOWN]

    def text(self, key: str) -> str:
        return "".join(self.pieces.get(key, ()))

    @property
    def has_forms(self) -> bool:
        return self.last.startswith("msgstr")

    @property
    def forms(self) -> list[str]:
        """Its translations by number; a single one for most entries."""
        return [self.text(key) for key in sorted(self.pieces) if key.startswith("msgstr")]

    @property
    def is_header(self) -> bool:
        return not (self.text("msgid") or "msgctxt" in self.pieces or self.obsolete or self.fault)


def read(
    content: Iterable[bytes], name: str, asked: Languages, *, fuzzy: bool = False, obsolete: bool = False
) -> Iterator[Pair | Bad]:
    """Every translation. Read the other way round when the header's language is the source that was asked for."""
    swapped = False
    for entry in _entries(content, name):
        if entry.is_header:
            swapped = _swapped(entry, name, asked)
            continue
        left_out = "obsolete" if entry.obsolete and not obsolete else "fuzzy" if entry.fuzzy and not fuzzy else ""
        found = [] if entry.fault or left_out else _translations(entry)
        for source, target in found:
            yield Pair(*((target, source) if swapped else (source, target)), name, entry.line)
        if not found:
            why = entry.fault or left_out or tags.UNTRANSLATED
            yield Bad(why, name, entry.line, entry.shown or entry.text("msgid")[: files.SHOWN])


def languages(content: Iterable[bytes], name: str) -> Languages:
    """The language that the header names. That of the ids stands nowhere."""
    entry = next(_entries(content, name), None)
    return Languages(None, _language(entry) if entry and entry.is_header else None)


def _language(header: _Entry) -> str | None:
    found = _LANGUAGE.search("".join(header.forms))
    return found[1] if found else None


def _swapped(header: _Entry, name: str, asked: Languages) -> bool:
    language = _language(header)
    swapped = tags.swapped(asked, Languages(None, language))
    if swapped is None:
        raise tags.error(name, asked, [language or ""])
    return swapped


def _translations(entry: _Entry) -> list[tuple[str, str]]:
    forms = entry.forms
    ids = [entry.text("msgid")]
    if "msgid_plural" in entry.pieces:
        plural = entry.text("msgid_plural")
        ids = [*ids, *[plural] * (len(forms) - 1)] if len(forms) > 1 else [plural]
    return [(one, form) for one, form in zip(ids, forms, strict=False) if form]


# Lines to entries.


def _entries(content: Iterable[bytes], name: str) -> Iterator[_Entry]:
    entry = _Entry()
    for number, line in enumerate(files.lines(_utf8(content, name), name), 1):
        if isinstance(line, Bad):
            if not line.text.startswith("#"):  # a comment in another charset harms nobody
                entry.line = entry.line or number
                entry.blame(line.why, line.text)
            continue
        body = line.strip()
        obsolete = body.startswith("#~")
        if obsolete:
            body = body[2:].lstrip()
        if _begins_another(entry, body):
            yield _finished(entry)
            entry = _Entry()
        if body.startswith("#"):
            entry.fuzzy |= body[1:2] in (",", "=") and "fuzzy" in re.split(r"[\s,]+", body[2:])
        elif body and not body.startswith(("|", "domain")):  # `#~|` is what the id of an obsolete entry was before
            _take(entry, body, number)
            entry.obsolete |= obsolete
    if entry.pieces or entry.fault:
        yield _finished(entry)


def _begins_another(entry: _Entry, body: str) -> bool:
    """Is this line no longer part of the entry? A translation or a fault ends an entry that anything new follows."""
    if not entry.pieces and not entry.fault:
        return False
    if body.startswith(("msgctxt", "domain")):
        return True
    if body.startswith("msgid") and not body.startswith("msgid_plural"):
        return "msgid" in entry.pieces or entry.has_forms or bool(entry.fault)
    return (not body or body.startswith("#")) and (entry.has_forms or bool(entry.fault))


def _finished(entry: _Entry) -> _Entry:
    if not entry.fault:
        entry.fault = "no msgid" if "msgid" not in entry.pieces else "" if entry.has_forms else "no msgstr"
    return entry


def _take(entry: _Entry, body: str, number: int) -> None:
    """One line of an entry: a keyword and a string, or a string that continues the one before."""
    keyword = _KEYWORD.match(body)
    if keyword:
        form = f"{int(keyword[2]):03}" if keyword[2] else ""
        entry.last = keyword[1] + form
        if entry.last in entry.pieces or (form and keyword[1] != "msgstr"):
            entry.blame(NOT_PO, body)
    entry.line = entry.line or number
    text = _text(body[keyword.end() :] if keyword else body)
    if text is None or not entry.last:
        entry.blame(NOT_PO, body)
    elif entry.size + len(text) > files.LONGEST:
        entry.blame(files.TOO_LONG, body)
    else:
        entry.size += len(text) + 1  # and 1, so that a million empty pieces count too
        entry.pieces.setdefault(entry.last, []).append(text)


def _text(strings: str) -> str | None:
    """What one or more strings in quotes say; None if they are not well formed."""
    if "\\" not in strings and len(strings) > 1 and strings[0] == strings[-1] == '"' and '"' not in strings[1:-1]:
        return strings[1:-1]
    if not _STRINGS.fullmatch(strings):
        return None
    try:
        return "".join(_ESCAPE.sub(_unescaped, piece) for piece in _STRING.findall(strings))
    except (KeyError, UnicodeDecodeError):
        return None


def _unescaped(escape: re.Match[str]) -> str:
    """A character, or the bytes of one by their numbers."""
    numbers = [int(found[1], 16) if found[1] else int(found[2], 8) for found in _NUMBER.finditer(escape[0])]
    return bytes(number & 255 for number in numbers).decode() if numbers else _ESCAPES[escape[0][1]]


def _utf8(content: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The catalogue in UTF-8, whatever charset its header names."""
    head, whole = files.beginning(content)
    found = _CHARSET.search(b"msgid".join(head.split(b"\nmsgid", 2)[:2]))
    charset = found[1].decode("ascii", "replace").lower() if found else "utf-8"
    if charset in ("utf-8", "utf8", "us-ascii", "ascii", "charset"):  # CHARSET stands in templates
        return whole
    try:
        known = _OTHER_CHARSETS.fullmatch(charset) and codecs.lookup(charset)
    except LookupError:
        known = None
    if not known:
        raise CorpusError(f"{name} is in charset {charset[:40]}, which attent does not know: convert it to UTF-8")
    return files.recoded(whole, charset)
