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

from attent.data.formats import language_tags, po
from attent.data.formats.units import (
    BOMS,
    Edit,
    FileText,
    InlineContent,
    PretranslateError,
    ScanResult,
    SkippedUnit,
    TranslationUnit,
    decode_file,
    make_encoding_check,
    to_display_text,
)
from attent.data.pairs import LanguagePair

_KEYWORD = re.compile(rb"(msgctxt|msgid_plural|msgid|msgstr)\s*(?:\[\s*(\d{1,3})\s*\])?\s*(?=\")")
_CHARSET = re.compile(rb"charset=\s*([^\s\\\"]+)")
_PLURAL_COUNT = re.compile(r"^Plural-Forms:.*?nplurals\s*=\s*(\d{1,2})\b", re.MULTILINE | re.IGNORECASE)
_LANGUAGE = re.compile(r"^Language:[ \t]*([A-Za-z]\S*)", re.MULTILINE)
_FORMAT_FLAGS = {
    "c-format": "%",
    "python-format": "%",
    "python-brace-format": "{}",
    "objc-format": "%",
    "php-format": "%",
}
_ESCAPES = {
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
_ESCAPED_CHARS = re.compile(r'[\\"\n\t\r\a\b\f\v]')


@dataclass
class _SpannedString:
    """A keyword and its text, and where the text stands: from its first quote to its last."""

    key: str  # msgid, msgid_plural, msgctxt, or msgstr with its number
    start: int  # of the keyword
    text_start: int
    end: int
    text: str


@dataclass
class _SpannedEntry:
    line: int = 0
    strings: dict[str, _SpannedString] = field(default_factory=dict)
    flags: list[tuple[int, str]] = field(default_factory=list)  # where `#,` ends, and what follows it
    flags_offset: int | None = None  # where the comments begin that must follow a new line of flags (`#|`)
    obsolete: bool = False

    @property
    def forms(self) -> list[_SpannedString]:
        return [string for key, string in self.strings.items() if key.startswith("msgstr")]

    @property
    def flag_names(self) -> set[str]:
        return {name for _, names in self.flags for name in re.split(r"[\s,]+", names)}

    def get_text(self, key: str) -> str:
        return self.strings[key].text if key in self.strings else ""


def decode_document(content: bytes, name: str) -> FileText:
    """The text of a catalogue, in the charset that its header names."""
    if content.startswith(tuple(BOMS)):
        return decode_file(content, name, "utf-8")
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
        raise PretranslateError(
            f"{name} says that it is in charset {charset[:40]}, but is not: correct it, or save it as UTF-8"
        )
    return decode_file(content, name, known)


def scan_units(text: FileText, requested: LanguagePair) -> ScanResult:
    found = ScanResult(check_text=make_encoding_check(text.encoding))
    plurals: int | None = None
    for number, entry in enumerate(_parse_entries(text)):
        if entry.obsolete:
            continue
        if not entry.get_text("msgid"):
            if number == 0 and "msgctxt" not in entry.strings:
                plurals = _read_header(entry, text.name, requested)
            continue
        if all(form.text for form in entry.forms):
            found.existing_count += 1
            continue
        contents, reason = _choose_sources(entry, plurals)
        if reason:
            found.skipped.append(SkippedUnit(line=entry.line, source=entry.get_text("msgid"), reason=reason))
        else:
            found.units.append(_make_unit(text, entry, contents))
    return found


def _read_header(entry: _SpannedEntry, name: str, requested: LanguagePair) -> int | None:
    """How many plural forms there are; the languages are checked on the way."""
    said = entry.get_text("msgstr")
    language = _LANGUAGE.search(said)
    turned = language_tags.is_reversed(requested, LanguagePair(None, language[1] if language else None))
    if language and turned is None:
        raise PretranslateError(str(language_tags.make_mismatch_error(name, requested, [language[1]])))
    if language and turned:
        way = f"holds translations into {language[1]}, but {requested.target} was asked for"
        raise PretranslateError(f"{name} {way}: take the catalogue of that language")
    forms = _PLURAL_COUNT.search(said)
    return int(forms[1]) if forms else None


def _choose_sources(entry: _SpannedEntry, plural_count: int | None) -> tuple[list[InlineContent], str]:
    """What is translated for each form, or why nothing is."""
    if "msgid_plural" not in entry.strings:
        return [(entry.get_text("msgid"),)], ""
    forms = entry.forms
    if any(form.text for form in forms):
        return [], "some of its plural forms are translated"
    count = plural_count or len(forms)
    if len(forms) > count:
        return [], f"it has {len(forms)} plural forms, but the header says {count}"
    if [form.key for form in forms] != [f"msgstr[{number}]" for number in range(len(forms))]:
        return [], "its plural forms are not numbered from 0"
    one: InlineContent = (entry.get_text("msgid"),)
    many: InlineContent = (entry.get_text("msgid_plural"),)
    return ([one] if count > 1 else []) + [many] * (count - 1 or 1), ""


def _make_unit(text: FileText, entry: _SpannedEntry, contents: Sequence[InlineContent]) -> TranslationUnit:
    def edits(targets: Sequence[InlineContent]) -> list[Edit]:
        return [
            *_make_fuzzy_edits(text, entry),
            *_make_target_edits(text, entry, [to_display_text(target) for target in targets]),
        ]

    forbidden = "".join({sign for flag, signs in _FORMAT_FLAGS.items() if flag in entry.flag_names for sign in signs})
    return TranslationUnit(
        line=entry.line, contents=tuple(contents), make_edits=edits, reserved_chars="".join(sorted(forbidden))
    )


# What is written.


def _get_newline(text: FileText) -> str:
    first = text.utf8.find(b"\n")
    return "\r" if first < 0 and b"\r" in text.utf8 else "\r\n" if text.utf8[first - 1 : first] == b"\r" else "\n"


def _make_fuzzy_edits(text: FileText, entry: _SpannedEntry) -> list[Edit]:
    if "fuzzy" in entry.flag_names:
        return []
    if entry.flags:
        at, others = entry.flags[0]
        return [Edit(at, at, " fuzzy," if others.strip() else " fuzzy")]
    first = min(string.start for string in entry.strings.values())
    at = first if entry.flags_offset is None else entry.flags_offset
    return [Edit(at, at, "#, fuzzy" + _get_newline(text))]


def _make_target_edits(text: FileText, entry: _SpannedEntry, targets: Sequence[str]) -> list[Edit]:
    newline, forms = _get_newline(text), entry.forms
    edits = [
        Edit(form.text_start, form.end, _quote_string(target, newline))
        for form, target in zip(forms, targets, strict=False)
    ]
    added = [
        f"{newline}msgstr[{number}] {_quote_string(targets[number], newline)}"
        for number in range(len(forms), len(targets))
    ]
    return [*edits, Edit(forms[-1].end, forms[-1].end, "".join(added))] if added else edits


def _quote_string(target: str, newline: str) -> str:
    """A string, on several lines if its text has several."""
    lines = [f'"{_ESCAPED_CHARS.sub(_escape_char, line)}"' for line in re.findall(r"[^\n]*\n|[^\n]+", target) or [""]]
    return lines[0] if len(lines) == 1 else newline.join(['""', *lines])


def _escape_char(match: re.Match[str]) -> str:
    return _ESCAPES[match[0]]


# Lines to entries.


def _parse_entries(text: FileText) -> Iterator[_SpannedEntry]:
    entry = _SpannedEntry()
    last: _SpannedString | None = None
    for number, (at, raw) in enumerate(_split_lines(text.utf8), 1):
        body = raw.strip()
        skipped = len(raw) - len(raw.lstrip())
        obsolete = body.startswith(b"#~")
        if _starts_new_entry(entry, body):
            if entry.strings:
                yield _check_complete(entry, text.name)
            entry, last = _SpannedEntry(), None
        if obsolete:
            entry.obsolete = True
            if not body.startswith(b"#~|") and body[2:].strip().startswith((b"msgstr", b"msgid", b"msgctxt")):
                last = _add_keyword(entry, body[2:].lstrip(), at, number, text.name)
        elif body.startswith(b"#"):
            _add_comment(entry, body, at + skipped)
        elif _KEYWORD.match(body):
            last = _add_keyword(entry, body, at + skipped, number, text.name)
        elif body.startswith(b'"') and last is not None:
            last.text, last.end = last.text + _parse_text(body, text.name, number), at + skipped + len(body)
        elif body and not body.startswith(b"domain"):
            raise _make_syntax_error(text.name, number)
    if entry.strings:
        yield _check_complete(entry, text.name)


def _split_lines(utf8: bytes) -> Iterator[tuple[int, bytes]]:
    """Each line with its place. Where there is no newline at all, a carriage return ends a line."""
    at = 0
    mark = b"\n" if b"\n" in utf8 else b"\r"
    for line in utf8.split(mark):
        yield at, line
        at += len(line) + 1


def _starts_new_entry(entry: _SpannedEntry, body: bytes) -> bool:
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


def _add_comment(entry: _SpannedEntry, body: bytes, offset: int) -> None:
    if body.startswith((b"#,", b"#=")):
        entry.flags.append((offset + 2, body[2:].decode("utf-8", "surrogateescape")))
    elif body.startswith(b"#|") and entry.flags_offset is None:
        entry.flags_offset = offset


def _add_keyword(entry: _SpannedEntry, body: bytes, offset: int, line_number: int, name: str) -> _SpannedString:
    found = _KEYWORD.match(body)
    if found is None:
        raise _make_syntax_error(name, line_number)
    key = found[1].decode() + (f"[{int(found[2])}]" if found[2] else "")
    if key in entry.strings or (found[2] and found[1] != b"msgstr"):
        raise _make_syntax_error(name, line_number)
    said = _parse_text(body[found.end() :], name, line_number)
    entry.strings[key] = _SpannedString(key, offset, offset + found.end(), offset + len(body), said)
    entry.line = entry.line or line_number
    return entry.strings[key]


def _parse_text(quoted: bytes, name: str, line_number: int) -> str:
    said = po.parse_strings(quoted.decode("utf-8", "surrogateescape"))
    if said is None:
        raise _make_syntax_error(name, line_number)
    return said


def _check_complete(entry: _SpannedEntry, name: str) -> _SpannedEntry:
    plural = "msgid_plural" in entry.strings
    numbered = any(form.key != "msgstr" for form in entry.forms)
    if not entry.obsolete and ("msgid" not in entry.strings or not entry.forms or plural != numbered):
        raise PretranslateError(
            f"{name} has an entry at line {entry.line:,} that is not whole: give it its msgid and msgstr"
        )
    return entry


def _make_syntax_error(name: str, line_number: int) -> PretranslateError:
    return PretranslateError(f"{name} is not PO at line {line_number:,}: correct it there, or export it again")
