"""Gettext catalogues (PO): an entry whose `msgstr` is empty is filled and flagged fuzzy.

Plural forms are filled as many as the header says: the first from the singular id, the others from the plural one,
or all from the plural where a language has one form. An entry is filled whole or not at all, since the flag is the
whole entry's. The header, obsolete entries (`#~`) and every line of other entries stay as they are.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from attent.data.fill.parts import BOMS, Content, Edit, FillError, Left, Scan, Text, Unit, encodable, opened, plain
from attent.data.pairs import Languages
from attent.data.readers import po, tags

_KEYWORD = re.compile(rb"(msgctxt|msgid_plural|msgid|msgstr)\s*(?:\[\s*(\d{1,3})\s*\])?\s*(?=\")")
_CHARSET = re.compile(rb"charset=\s*([^\s\\\"]+)")
_PLURALS = re.compile(r"^Plural-Forms:.*?nplurals\s*=\s*(\d{1,2})\b", re.MULTILINE | re.IGNORECASE)
_LANGUAGE = re.compile(r"^Language:[ \t]*([A-Za-z]\S*)", re.MULTILINE)
_FORMAT = {"c-format": "%", "python-format": "%", "python-brace-format": "{}", "objc-format": "%", "php-format": "%"}
_ESCAPED = {
    "\\": "\\\\",
    '"': '\\"',
    "\n": "\\n",
    "\t": "\\t",
    "\r": "\\r",
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\v": "\\v",
}
_SPECIAL = re.compile(r'[\\"\n\t\r\a\b\f\v]')


@dataclass
class _String:
    """A keyword and its text, and where the text stands: from its first quote to its last."""

    key: str  # msgid, msgid_plural, msgctxt, or msgstr with its number
    start: int  # of the keyword
    quote: int
    end: int
    text: str


@dataclass
class _Entry:
    line: int = 0
    strings: dict[str, _String] = field(default_factory=dict)
    flags: list[tuple[int, str]] = field(default_factory=list)  # where `#,` ends, and what follows it
    before: int | None = None  # where the comments begin that must follow a new line of flags (`#|`)
    obsolete: bool = False

    @property
    def forms(self) -> list[_String]:
        return [string for key, string in self.strings.items() if key.startswith("msgstr")]

    @property
    def flag_names(self) -> set[str]:
        return {name for _, names in self.flags for name in re.split(r"[\s,]+", names)}

    def text(self, key: str) -> str:
        return self.strings[key].text if key in self.strings else ""


def text_of(content: bytes, name: str) -> Text:
    """The text of a catalogue, in the charset that its header names."""
    if content.startswith(tuple(BOMS)):
        return opened(content, name, "utf-8")
    found = _CHARSET.search(content[: 2**16])
    charset = found[1].decode("ascii", "replace").lower() if found else "utf-8"
    if charset in ("charset", "us-ascii", "ascii"):  # CHARSET stands in templates
        charset = "utf-8"
    try:
        known = codecs.lookup(charset).name if re.fullmatch(r"[a-z0-9_-]+", charset) else ""
        "".encode(known)  # not every codec is one of text
    except LookupError:
        known = ""
    if not known or known.startswith(("utf-16", "utf-32", "utf-7", "idna", "punycode", "unicode", "raw", "rot")):
        raise FillError(
            f"{name} says that it is in charset {charset[:40]}, but is not: correct it, or save it as UTF-8"
        )
    return opened(content, name, known)


def scan(text: Text, asked: Languages) -> Scan:
    found = Scan(objection=encodable(text.encoding))
    plurals: int | None = None
    for number, entry in enumerate(_entries(text)):
        if entry.obsolete:
            continue
        if not entry.text("msgid"):
            if number == 0 and "msgctxt" not in entry.strings:
                plurals = _header(entry, text.name, asked)
            continue
        if all(form.text for form in entry.forms):
            found.kept += 1
            continue
        contents, reason = _wanted(entry, plurals)
        if reason:
            found.left.append(Left(line=entry.line, source=entry.text("msgid"), reason=reason))
        else:
            found.units.append(_unit(text, entry, contents))
    return found


def _header(entry: _Entry, name: str, asked: Languages) -> int | None:
    """How many plural forms there are; the languages are checked on the way."""
    said = entry.text("msgstr")
    language = _LANGUAGE.search(said)
    turned = tags.swapped(asked, Languages(None, language[1] if language else None))
    if language and turned is None:
        raise FillError(str(tags.error(name, asked, [language[1]])))
    if language and turned:
        way = f"holds translations into {language[1]}, but {asked.target} was asked for"
        raise FillError(f"{name} {way}: take the catalogue of that language")
    forms = _PLURALS.search(said)
    return int(forms[1]) if forms else None


def _wanted(entry: _Entry, plurals: int | None) -> tuple[list[Content], str]:
    """What is translated for each form, or why nothing is."""
    if "msgid_plural" not in entry.strings:
        return [(entry.text("msgid"),)], ""
    forms = entry.forms
    if any(form.text for form in forms):
        return [], "some of its plural forms are translated"
    count = plurals or len(forms)
    if len(forms) > count:
        return [], f"it has {len(forms)} plural forms, but the header says {count}"
    if [form.key for form in forms] != [f"msgstr[{number}]" for number in range(len(forms))]:
        return [], "its plural forms are not numbered from 0"
    one: Content = (entry.text("msgid"),)
    many: Content = (entry.text("msgid_plural"),)
    return ([one] if count > 1 else []) + [many] * (count - 1 or 1), ""


def _unit(text: Text, entry: _Entry, contents: Sequence[Content]) -> Unit:
    def edits(targets: Sequence[Content]) -> list[Edit]:
        return [*_fuzzy(text, entry), *_filled(text, entry, [plain(target) for target in targets])]

    forbidden = "".join({sign for flag, signs in _FORMAT.items() if flag in entry.flag_names for sign in signs})
    return Unit(line=entry.line, contents=tuple(contents), edits=edits, forbidden="".join(sorted(forbidden)))


# What is written.


def _newline(text: Text) -> str:
    first = text.utf8.find(b"\n")
    return "\r" if first < 0 and b"\r" in text.utf8 else "\r\n" if text.utf8[first - 1 : first] == b"\r" else "\n"


def _fuzzy(text: Text, entry: _Entry) -> list[Edit]:
    if "fuzzy" in entry.flag_names:
        return []
    if entry.flags:
        at, others = entry.flags[0]
        return [Edit(at, at, " fuzzy," if others.strip() else " fuzzy")]
    first = min(string.start for string in entry.strings.values())
    at = first if entry.before is None else entry.before
    return [Edit(at, at, "#, fuzzy" + _newline(text))]


def _filled(text: Text, entry: _Entry, targets: Sequence[str]) -> list[Edit]:
    newline, forms = _newline(text), entry.forms
    edits = [Edit(form.quote, form.end, _quoted(target, newline)) for form, target in zip(forms, targets, strict=False)]
    added = [
        f"{newline}msgstr[{number}] {_quoted(targets[number], newline)}" for number in range(len(forms), len(targets))
    ]
    return [*edits, Edit(forms[-1].end, forms[-1].end, "".join(added))] if added else edits


def _quoted(target: str, newline: str) -> str:
    """A string, on several lines if its text has several."""
    lines = [f'"{_SPECIAL.sub(_escape, line)}"' for line in re.findall(r"[^\n]*\n|[^\n]+", target) or [""]]
    return lines[0] if len(lines) == 1 else newline.join(['""', *lines])


def _escape(found: re.Match[str]) -> str:
    return _ESCAPED[found[0]]


# Lines to entries.


def _entries(text: Text) -> Iterator[_Entry]:
    entry = _Entry()
    last: _String | None = None
    for number, (at, raw) in enumerate(_lines(text.utf8), 1):
        body = raw.strip()
        skipped = len(raw) - len(raw.lstrip())
        obsolete = body.startswith(b"#~")
        if _begins_another(entry, body):
            if entry.strings:
                yield _whole(entry, text.name)
            entry, last = _Entry(), None
        if obsolete:
            entry.obsolete = True
            if not body.startswith(b"#~|") and body[2:].strip().startswith((b"msgstr", b"msgid", b"msgctxt")):
                last = _keyword(entry, body[2:].lstrip(), at, number, text.name)
        elif body.startswith(b"#"):
            _comment(entry, body, at + skipped)
        elif _KEYWORD.match(body):
            last = _keyword(entry, body, at + skipped, number, text.name)
        elif body.startswith(b'"') and last is not None:
            last.text, last.end = last.text + _said(body, text.name, number), at + skipped + len(body)
        elif body and not body.startswith(b"domain"):
            raise _not_po(text.name, number)
    if entry.strings:
        yield _whole(entry, text.name)


def _lines(utf8: bytes) -> Iterator[tuple[int, bytes]]:
    """Each line with its place. Where there is no newline at all, a carriage return ends a line."""
    at = 0
    mark = b"\n" if b"\n" in utf8 else b"\r"
    for line in utf8.split(mark):
        yield at, line
        at += len(line) + 1


def _begins_another(entry: _Entry, body: bytes) -> bool:
    """Is this line no longer part of the entry? Anything new behind a translation is another entry's."""
    if body.startswith(b"#~"):
        body = body[2:].lstrip()
        if not entry.obsolete and entry.strings:
            return True
    elif entry.obsolete and body:
        return True
    if not entry.forms:
        return False
    return not body or body.startswith((b"#", b"msgctxt", b"msgid", b"domain"))


def _comment(entry: _Entry, body: bytes, at: int) -> None:
    if body.startswith((b"#,", b"#=")):
        entry.flags.append((at + 2, body[2:].decode("utf-8", "surrogateescape")))
    elif body.startswith(b"#|") and entry.before is None:
        entry.before = at


def _keyword(entry: _Entry, body: bytes, at: int, number: int, name: str) -> _String:
    found = _KEYWORD.match(body)
    if found is None:
        raise _not_po(name, number)
    key = found[1].decode() + (f"[{int(found[2])}]" if found[2] else "")
    if key in entry.strings or (found[2] and found[1] != b"msgstr"):
        raise _not_po(name, number)
    said = _said(body[found.end() :], name, number)
    entry.strings[key] = _String(key, at, at + found.end(), at + len(body), said)
    entry.line = entry.line or number
    return entry.strings[key]


def _said(strings: bytes, name: str, number: int) -> str:
    said = po._text(strings.decode("utf-8", "surrogateescape"))
    if said is None:
        raise _not_po(name, number)
    return said


def _whole(entry: _Entry, name: str) -> _Entry:
    plural = "msgid_plural" in entry.strings
    numbered = any(form.key != "msgstr" for form in entry.forms)
    if not entry.obsolete and ("msgid" not in entry.strings or not entry.forms or plural != numbered):
        raise FillError(f"{name} has an entry at line {entry.line:,} that is not whole: give it its msgid and msgstr")
    return entry


def _not_po(name: str, number: int) -> FillError:
    return FillError(f"{name} is not PO at line {number:,}: correct it there, or export it again")
