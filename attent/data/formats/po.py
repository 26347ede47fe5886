"""Gettext catalogs (PO): an entry has an id, which is the source text, and its translation.

An entry with plural forms pairs the singular id with form 0 and the plural id with the others; in a language with one
form (Japanese) that form goes with the plural id. Fuzzy and obsolete (`#~`) entries are read only on request. The entry
with the empty id is the header. Pre-translation fills all empty `msgstr`s of an entry, or none, and flags it fuzzy.
"""

import codecs
import gettext
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from attent.data import pairs
from attent.data.formats import placeholders, streams, units
from attent.data.formats.placeholders import can_lack_count
from attent.data.formats.units import Edit, FileText, InlineContent, ScanResult
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair, ReadOptions

_KEYWORD = re.compile(r"(msgctxt|msgid_plural|msgid|msgstr)\s*(?:\[\s*(\d{1,3})\s*\])?\s*(?=\")", re.ASCII)
_STRINGS = re.compile(r'(?:"(?:[^"\\]++|\\.)*+"\s*+)++', re.ASCII)
_STRING = re.compile(r'"((?:[^"\\]++|\\.)*+)"')
_ESCAPE = re.compile(r"(?:\\x[0-9A-Fa-f]{1,2}|\\[0-7]{1,3})+|\\.")
_NUMERIC_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]+)|([0-7]+))")
_UNESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", '"': '"', "\\": "\\"}
_ESCAPED = {char: f"\\{letter}" for letter, char in _UNESCAPED.items()}
_CHARSET = re.compile(rb"charset=\s*([^\s\\\"]+)")
_LEGACY_CHARSETS = re.compile(  # those that gettext accepts
    r"iso[-_]?8859[-_]\d+|koi8[-_][rtu]|(cp|windows)[-_]?\d+|gbk|gb2312|gb18030|big5([-_]hkscs)?"
    r"|euc[-_](jp|kr)|shift[-_]jis|johab|tis[-_]?620"
)
_LANGUAGE = re.compile(r"^Language:[ \t]*([A-Za-z]\S*)", re.MULTILINE)
_PLURAL_FORMS = re.compile(  # msgfmt wants no space before the equals signs
    r"^Plural-Forms:.*?nplurals=\s*(\d{1,2})\s*;\s*plural=\s*([^;\n]+)", re.MULTILINE | re.IGNORECASE
)
_MAX_EVALUATED = 1000  # numbers for which a plural rule is evaluated, as msgfmt does
NOT_PO = "not PO"


@dataclass
class _String:
    """A keyword and its text. The byte span of the text goes from its first quote to its last."""

    key: str  # msgid, msgid_plural, msgctxt, msgstr or msgstr[n]
    index: int  # of a plural form
    start: int
    text_start: int
    end: int
    parts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass
class _PoEntry:
    line: int = 0
    strings: dict[str, _String] = field(default_factory=dict)
    current: _String | None = None  # continued by a string on a line of its own
    flags: list[tuple[int, str]] = field(default_factory=list)  # offset behind `#,`, and the flags
    previous_id_offset: int | None = None  # of the first `#|` comment, which a new line of flags must precede
    obsolete: bool = False
    error: str = ""
    error_line: int = 0
    excerpt: str = ""  # of the bad line
    char_count: int = 0

    def set_error(self, reason: str, line_number: int, excerpt: str) -> None:
        """Record the first error; others follow from it."""
        if not self.error:
            self.error, self.error_line, self.excerpt = reason, line_number, excerpt[: streams.EXCERPT_CHARS]

    def get_text(self, key: str) -> str:
        return self.strings[key].text if key in self.strings else ""

    @property
    def forms(self) -> list[_String]:
        """The translations in file order; a single one for most entries."""
        return [string for key, string in self.strings.items() if key.startswith("msgstr")]

    @property
    def ends_with_form(self) -> bool:
        return self.current is not None and self.current.key.startswith("msgstr")

    @property
    def flag_names(self) -> set[str]:
        return {name for _, names in self.flags for name in re.split(r"[\s,]+", names)}

    @property
    def format_names(self) -> tuple[str, ...]:
        """`c` for the flag `c-format`; not for `no-c-format`."""
        names = sorted(name.removesuffix("-format") for name in self.flag_names if name.endswith("-format"))
        return tuple(name for name in names if not name.startswith(("no-", "possible-", "impossible-")))

    @property
    def is_plural(self) -> bool:
        return "msgid_plural" in self.strings

    @property
    def is_header(self) -> bool:
        return not (self.get_text("msgid") or "msgctxt" in self.strings or self.obsolete or self.error)


def _parse_entries(lines: Iterable[tuple[int, str | BadLine]]) -> Iterator[_PoEntry]:
    """Yield the entries of numbered lines: (byte offset, line). A malformed entry has an `error`."""
    entry = _PoEntry()
    for number, (offset, line) in enumerate(lines, 1):
        if isinstance(line, BadLine):
            if not line.excerpt.startswith("#"):  # a comment in another charset is harmless
                entry.line = entry.line or number
                entry.set_error(line.reason, number, line.excerpt)
            continue
        body = line.strip()
        obsolete = body.startswith("#~")
        if obsolete:
            body = body[2:].lstrip()
        if _starts_new_entry(entry, body):
            yield _finish_entry(entry)
            entry = _PoEntry()
        start = offset + len(units.encode_text(line[: line.find(body)]))
        if body.startswith(("#,", "#=")):
            entry.flags.append((start + 2, body[2:]))
        elif body.startswith("#"):
            if body.startswith("#|") and entry.previous_id_offset is None:
                entry.previous_id_offset = start
        elif body and not body.startswith(("|", "domain")):  # `#~|` is the previous id of an obsolete entry
            entry.obsolete |= obsolete and not entry.error
            _add_line(entry, body, start, number)
    if entry.strings or entry.error:
        yield _finish_entry(entry)


def _starts_new_entry(entry: _PoEntry, body: str) -> bool:
    """True if the line is not part of the entry: after a translation or an error anything new begins another one."""
    if not entry.strings and not entry.error:
        return False
    if body.startswith(("msgctxt", "domain")):
        return True
    is_complete = bool(entry.error) or entry.ends_with_form
    if body.startswith("msgid") and not body.startswith("msgid_plural"):
        return "msgid" in entry.strings or is_complete
    return (not body or body.startswith("#")) and is_complete


def _finish_entry(entry: _PoEntry) -> _PoEntry:
    if "msgid" not in entry.strings:
        entry.set_error("no msgid", 0, "")
    elif not entry.ends_with_form:
        entry.set_error("no msgstr", 0, "")
    return entry


def _add_line(entry: _PoEntry, body: str, start: int, line_number: int) -> None:
    """Add a keyword with its string, or a string that continues the one before."""
    keyword = _KEYWORD.match(body)
    end = start + len(units.encode_text(body))
    if keyword:
        key = keyword[1] + (f"[{int(keyword[2])}]" if keyword[2] else "")
        if key in entry.strings or (keyword[2] and keyword[1] != "msgstr"):
            entry.set_error(NOT_PO, line_number, body)
        entry.current = _String(key, int(keyword[2] or 0), start, start + keyword.end(), end, [])
    entry.line = entry.line or line_number
    text = _parse_strings(body[keyword.end() :] if keyword else body)
    if text is None or entry.current is None:
        entry.set_error(NOT_PO, line_number, body)
    elif entry.char_count + len(text) > streams.MAX_LINE_BYTES:
        entry.set_error(streams.TOO_LONG, line_number, body)
    else:
        entry.char_count += len(text) + 1  # plus 1, so that a million empty strings count too
        entry.current.parts.append(text)
        entry.current.end = end
        entry.strings.setdefault(entry.current.key, entry.current)


def _parse_strings(quoted: str) -> str | None:
    """Return the text of one or more quoted strings; None if they are malformed."""
    if "\\" not in quoted and len(quoted) > 1 and quoted[0] == quoted[-1] == '"' and '"' not in quoted[1:-1]:
        return quoted[1:-1]
    if not _STRINGS.fullmatch(quoted):
        return None
    try:
        return "".join(_ESCAPE.sub(_unescape, part) for part in _STRING.findall(quoted))
    except (KeyError, UnicodeDecodeError):
        return None


def _unescape(escape: re.Match[str]) -> str:
    """Return the escaped character, or that of a sequence of numeric bytes."""
    numbers = [int(match[1], 16) if match[1] else int(match[2], 8) for match in _NUMERIC_ESCAPE.finditer(escape[0])]
    return bytes(number & 255 for number in numbers).decode() if numbers else _UNESCAPED[escape[0][1]]


def _find_charset(head: bytes, name: str) -> str:
    match = _CHARSET.search(b"msgid".join(head.split(b"\nmsgid", 2)[:2]))
    charset = match[1].decode("ascii", "replace").lower() if match else "utf-8"
    if charset in ("utf-8", "utf8", "us-ascii", "ascii", "charset"):  # templates have the word CHARSET
        return "utf-8"
    if _LEGACY_CHARSETS.fullmatch(charset):
        with suppress(LookupError):
            return codecs.lookup(charset).name
    raise CorpusError(f"{name} is in charset {charset[:40]}, which attent does not know: convert it to UTF-8")


def _get_language(header: _PoEntry) -> str | None:
    match = _LANGUAGE.search(header.get_text("msgstr"))
    return match[1] if match else None


def matches_head(text: str) -> bool:
    """True if a file that begins with a text is a catalog."""
    starts_entry = text.startswith(("#", "msgid", "msgctxt", "domain"))
    return starts_entry and re.search(r'^msgid\s*"', text, re.MULTILINE) is not None


def read_pairs(
    content: Iterable[bytes], name: str, requested: LanguagePair, options: ReadOptions = pairs.DEFAULT_READ_OPTIONS
) -> Iterator[Pair | BadLine]:
    """Yield every translation; backwards if the header's language is the requested source."""
    is_reversed = False
    for entry in _read_entries(content, name):
        if entry.is_header:
            is_reversed = _check_direction(entry, name, requested)
            continue
        is_obsolete = entry.obsolete and not options.obsolete
        is_fuzzy = "fuzzy" in entry.flag_names and not options.fuzzy
        reason = entry.error or ("obsolete" if is_obsolete else "fuzzy" if is_fuzzy else "")
        translations = [] if reason else _extract_translations(entry)
        for source, target in translations:
            yield Pair(*((target, source) if is_reversed else (source, target)), name, entry.line)
        if not translations:
            excerpt = entry.excerpt or entry.get_text("msgid")[: streams.EXCERPT_CHARS]
            yield BadLine(reason or streams.UNTRANSLATED, name, entry.line, excerpt)


def _read_entries(content: Iterable[bytes], name: str) -> Iterator[_PoEntry]:
    head, content = streams.peek_head(content)
    charset = _find_charset(head, name)
    blocks = content if charset == "utf-8" else streams.transcode_to_utf8(content, charset)
    return _parse_entries((0, line) for line in streams.read_lines(blocks, name))


def read_languages(content: Iterable[bytes], name: str) -> LanguagePair:
    """Return the language that the header names as target; that of the ids is not given."""
    entry = next(_read_entries(content, name), None)
    return LanguagePair(None, _get_language(entry) if entry and entry.is_header else None)


def _check_direction(header: _PoEntry, name: str, requested: LanguagePair) -> bool:
    """Return True if the header's language is the requested source."""
    language = _get_language(header)
    is_reversed = requested.is_reversed(LanguagePair(None, language))
    if is_reversed is None:
        raise requested.make_mismatch_error(name, [language or ""])
    return is_reversed


def _extract_translations(entry: _PoEntry) -> list[tuple[str, str]]:
    forms = sorted(entry.forms, key=lambda form: form.index)
    ids = [entry.get_text("msgid")]
    if entry.is_plural:
        plural = entry.get_text("msgid_plural")
        ids = [*ids, *[plural] * (len(forms) - 1)] if len(forms) > 1 else [plural]
    return [(msgid, form.text) for msgid, form in zip(ids, forms, strict=False) if form.text]


# ---- pre-translation -------------------------------------------------------------------------------------------------


def scan_units(content: bytes, name: str, requested: LanguagePair) -> ScanResult:
    charset = "utf-8" if content.startswith(tuple(units.BOMS)) else _find_charset(content[: streams.HEAD_SIZE], name)
    text = units.decode_file(content, name, charset)
    result = ScanResult(text=text, check_text=text.check_encodable, has_labels=True)
    plural_numbers: list[set[int]] | str = "the file has no header with Plural-Forms"
    for number, entry in enumerate(_parse_entries(text.split_lines())):
        if entry.obsolete:
            continue
        has_numbers = any(form.key != "msgstr" for form in entry.forms)
        if entry.error_line and entry.error != streams.TOO_LONG:
            raise CorpusError(f"{name} is not PO at line {entry.error_line:,}: correct it there, or export it again")
        if entry.error != streams.TOO_LONG and (entry.error or entry.is_plural != has_numbers):
            raise CorpusError(f"{name} has an incomplete entry at line {entry.line:,}: add its msgid and msgstr")
        if not entry.get_text("msgid").strip():
            if number == 0 and entry.is_header:
                plural_numbers = _read_header(entry, name, requested)
        elif all(form.text for form in entry.forms):
            result.existing_count += 1
        else:
            sources = _choose_sources(entry, plural_numbers)
            if isinstance(sources, str) or entry.error:
                result.skip(entry.line, entry.get_text("msgid"), sources if isinstance(sources, str) else entry.error)
            else:
                contents = ((source,) for source in sources)
                result.add_unit(entry.line, contents, partial(_fill_forms, text, entry), entry.format_names)
    return result


def _read_header(entry: _PoEntry, name: str, requested: LanguagePair) -> list[set[int]] | str:
    """Check the languages; return the numbers of each plural form, or why they are not known."""
    language = _get_language(entry)
    if language and _check_direction(entry, name, requested):
        problem = f"is a catalog for {language}, but {requested.target} is requested"
        raise pairs.LanguageMismatchError(f"{name} {problem}", "give the catalog of that language")
    rule = _PLURAL_FORMS.search(entry.get_text("msgstr"))
    if rule is None:
        return "the header has no Plural-Forms"
    numbers: list[set[int]] = [set() for _ in range(int(rule[1]))]
    try:
        choose_form = gettext.c2py(rule[2].strip())
        for number in range(_MAX_EVALUATED + 1):
            form = choose_form(number)
            if not 0 <= form < len(numbers):
                raise ValueError(f"form {form}")
            numbers[form].add(number)
    except (ValueError, ArithmeticError, RecursionError, SyntaxError):  # SyntaxError: `n != !1`, which is valid in C
        return "the rule of the header's Plural-Forms is not valid"
    return numbers


def _choose_sources(entry: _PoEntry, plural_numbers: list[set[int]] | str) -> list[str] | str:
    """Return the source of each form, or the reason why the entry cannot be filled.

    The singular is the source of the form for 1 alone, and of one for 1, 21 and 101 if it shows the number.
    """
    singular, plural, forms = entry.get_text("msgid"), entry.get_text("msgid_plural"), entry.forms
    if not entry.is_plural:
        return [singular]
    if not plural.strip():
        return "its msgid_plural is empty"
    if any(form.text for form in forms):
        return "some of its plural forms are translated"
    if isinstance(plural_numbers, str):
        return plural_numbers
    if len(forms) > len(plural_numbers):
        return f"it has {len(forms)} plural forms, but the header says {len(plural_numbers)}"
    if [form.index for form in forms] != list(range(len(forms))):
        return "its plural forms are not numbered from 0"
    if any(
        singular[side] != plural[side] and "\n" in singular[side] + plural[side] for side in (slice(1), slice(-1, None))
    ):
        return "only one of its singular and plural has a line break at an end"
    syntax = placeholders.get_syntax(entry.format_names)
    is_equal = len(plural_numbers) > 1 and not placeholders.find_problem((plural,), (singular,), syntax)
    is_countless = all(can_lack_count(singular, plural, name) for name in entry.format_names)
    return [
        singular if 1 in numbers and (is_equal or (len(numbers) == 1 and is_countless)) else plural
        for numbers in plural_numbers
    ]


def _flag_fuzzy(text: FileText, entry: _PoEntry) -> list[Edit]:
    if "fuzzy" in entry.flag_names:
        return []
    if entry.flags:
        offset, others = entry.flags[0]
        return [Edit(offset, offset, " fuzzy," if others.strip() else " fuzzy")]
    first = min(string.start for string in entry.strings.values())
    offset = first if entry.previous_id_offset is None else entry.previous_id_offset
    return [Edit(offset, offset, "#, fuzzy" + text.newline)]


def _fill_forms(text: FileText, entry: _PoEntry, targets: Sequence[InlineContent]) -> list[Edit]:
    """Return the edits that fill in all forms, of which the file may have fewer, and flag the entry."""
    forms, quoted = entry.forms, [_quote_string(units.get_display_text(target), text.newline) for target in targets]
    edits = [Edit(form.text_start, form.end, string) for form, string in zip(forms, quoted, strict=False)]
    added = (f"{text.newline}msgstr[{index}] {quoted[index]}" for index in range(len(forms), len(quoted)))
    return [*_flag_fuzzy(text, entry), *edits, Edit(forms[-1].end, forms[-1].end, "".join(added))]


def _quote_string(text: str, newline: str) -> str:
    """Quote a text, on one line per line of the text."""
    lines = [
        '"' + "".join(_ESCAPED.get(char, char) for char in line) + '"'
        for line in re.findall(r"[^\n]*\n|[^\n]+", text) or [""]
    ]
    return lines[0] if len(lines) == 1 else newline.join(['""', *lines])
