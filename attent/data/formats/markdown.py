"""Markdown: what a reader reads is translated, and its layout stays: front matter, code, HTML comments, definitions of
links and the marks of headings, lists, quotes and tables are not touched.

A paragraph is translated as a whole, since its line ends are only spaces, and laid out again in lines of the width it
had. In it code, link targets and emphasis are kept. It is read as people write it, not by every rule of CommonMark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attent.data.formats import placeholders, plain_text
from attent.data.formats.units import (
    Edit,
    FileText,
    InlineCode,
    InlineContent,
    ScanResult,
    TranslationUnit,
    make_encoding_check,
)
from attent.data.pairs import LanguagePair
from attent.data.pretranslate import text_runs

_PREFIX = re.compile(
    r"(?P<quote>(?: {0,3}>)*)(?P<indent>[ \t]*)"
    r"(?P<marker>(?:(?:[-+*]|\d{1,9}[.)])[ \t]+)*)(?P<label>(?:\[[ xX]\][ \t]+)?(?:\[\^[^\]\s]+\]:[ \t]+)?)"
    r"(?P<heading>\#{1,6}[ \t]+)?"
)
_FENCE = re.compile(r"(`{3,}|~{3,}|\$\$)")
_RAW_HTML = re.compile(r"<(script|pre|style|textarea)\b", re.IGNORECASE)
_BLOCK_TAG = re.compile(text_runs.HTML_BLOCK_TAG, re.IGNORECASE)
_DEFINITION = re.compile(r"\[(?!\^)([^\]]+)\]:(?:\s|\Z)")
_RULE = re.compile(r"(=+|-+|(?:[-*_][ \t]*){3,})[ \t]*\Z")
_TABLE_DELIMITER = re.compile(r"[ \t>]*\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*\Z")
_TABLE_CELL = re.compile(r"(?:`[^`]*`|\\.|[^|`\\]|`|\\)+")
_HEADING_END = re.compile(r"(?:[ \t]+\#+)?[ \t]*\Z")
_HARD_BREAK = re.compile(r"(?:[ \t]{2,}|\\)\Z")
_LOOKS_LIKE_MARKUP = re.compile(
    r"[-+*](?:\s|\Z)|\d{1,9}[.)](?:\s|\Z)|#{1,6}\s|[>|]|[-=]+(?:\s|\Z)|```|~~~|<|\[[^\]]*\]:"
)
_WORD = re.compile(r"(?:`[^`]*`|[^ \t\n])+")  # spaces inside of code do not part words
_MAX_OPEN_MARKERS = 100  # marks that wait for their other half: no person has so many
_INLINE = re.compile(
    r"""
    (?P<escape>\\[!-/:-@\[-`{-~])
    | (?P<code>(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))
    | (?P<note>\[\^[^\]\s]+\])
    | (?P<open>!?\[)
    | (?P<close>\](?:\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+"[^"]*"|\s+'[^']*')?\s*\)|\[[^\[\]]*\])?)
    | (?P<emphasis>~~|\*++(?=\S)|(?<=\S)\*++|(?<!\w)_++(?=\S)|(?<=[^\s_])_++(?!\w))
    | (?P<math>\$[^\s$](?:[^$\n]*[^\s$])?\$(?!\d))
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class _TextLine:
    number: int
    prefix: str  # what stands before the text: quotes, indent, marker
    start: int  # of the text, in bytes
    text: str
    starts_block: bool  # something of its own: an item, a heading

    @property
    def end(self) -> int:
        return self.start + len(_encode(self.text))


decode_document = plain_text.decode_document


def scan_units(text: FileText, requested: LanguagePair) -> ScanResult:
    found = ScanResult(check_text=make_encoding_check(text.encoding))
    rows = [
        (number, at, raw.decode("utf-8", "surrogateescape"))
        for number, (at, raw) in enumerate(plain_text.split_lines(text.utf8), 1)
    ]
    labels = frozenset(label[1].casefold() for _, _, row in rows if (label := _DEFINITION.match(row.strip())))
    newline = "\r\n" if b"\r\n" in text.utf8 else "\n"
    for block in _group_blocks(rows):
        content = parse_inline(" ".join(line.text for line in block), labels)
        if placeholders.has_words("".join(part for part in content if isinstance(part, str))):
            found.units.append(_make_unit(block, content, newline))
    return found


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# Lines to paragraphs.


def _group_blocks(rows: Sequence[tuple[int, int, str]]) -> Iterator[list[_TextLine]]:
    """The lines of each paragraph, heading and cell."""
    block: list[_TextLine] = []
    for line in _find_text_lines(rows):
        if block and (line is None or line.starts_block or _count_quotes(line) != _count_quotes(block[-1])):
            yield block
            block = []
        if line is not None:
            cut = _HARD_BREAK.search(line.text)
            block.append(replace(line, text=line.text[: cut.start()].rstrip() if cut else line.text.rstrip()))
            if cut:
                yield block
                block = []
    if block:
        yield block


def _count_quotes(line: _TextLine) -> int:
    return line.prefix.count(">")


def _find_text_lines(rows: Sequence[tuple[int, int, str]]) -> Iterator[_TextLine | None]:
    """The lines that hold text, and None wherever a paragraph ends."""
    skipping = _NonTextFilter()
    table = html = False
    for place, (number, at, row) in enumerate(rows):
        prefix = _PREFIX.match(row)
        assert prefix is not None, "it may be empty"
        rest = row[prefix.end() :]
        following = rows[place + 1][2] if place + 1 < len(rows) else ""
        table = "|" in rest and (table or rest.startswith("|") or ("|" in following and _is_table_delimiter(following)))
        html = bool(rest.strip()) and (html or _BLOCK_TAG.match(rest) is not None)
        if skipping.is_skipped(number, row, prefix) or not rest.strip() or _is_structural(row, prefix):
            yield None
        elif table:
            yield None
            yield from _parse_cells(number, at, row, prefix)
        elif html:
            yield from (None, *_parse_line(number, at, row, prefix), None)
        else:
            yield from _parse_line(number, at, row, prefix)


def _is_structural(row: str, prefix: re.Match[str]) -> bool:
    """A definition, a rule, or the line under a heading, for which `* * *` is no list."""
    rest = row[prefix.end() :]
    return any(
        map(bool, (_DEFINITION.match(rest), _RULE.match(rest), _RULE.match(row[prefix.end("quote") :].lstrip())))
    )


def _is_table_delimiter(row: str) -> bool:
    return _TABLE_DELIMITER.match(row) is not None


def _parse_line(number: int, offset: int, row: str, prefix: re.Match[str]) -> Iterator[_TextLine | None]:
    body = row[prefix.end() :]
    if prefix["heading"]:
        end = _HEADING_END.search(body)
        body = body[: end.start()] if end else body
        yield None
    start = offset + len(_encode(prefix[0]))
    yield _TextLine(number, prefix[0], start, body, any(prefix.group("marker", "label", "heading")))
    if prefix["heading"]:
        yield None


def _parse_cells(number: int, offset: int, row: str, prefix: re.Match[str]) -> Iterator[_TextLine | None]:
    if _is_table_delimiter(row):
        return
    for cell in _TABLE_CELL.finditer(row, prefix.end()):
        inside = cell[0].lstrip()
        start = offset + len(_encode(row[: cell.end() - len(inside)]))
        yield _TextLine(number, "", start, inside.rstrip(), True)
        yield None


class _NonTextFilter:
    """What is not text: front matter, code, comments. Each line is shown to it in order."""

    def __init__(self) -> None:
        self.end_pattern: re.Pattern[str] | None = None  # ends what is being skipped
        self.after_blank = True  # was the line before blank?
        self.in_code = False  # are we in indented code?
        self.item_indent = 0  # how far the text of the list's item is indented; 0 outside of lists

    def is_skipped(self, number: int, row: str, prefix: re.Match[str]) -> bool:
        if self.end_pattern is not None:
            if self.end_pattern.search(row):
                self.end_pattern = None
            return True
        rest = row[prefix.end() :]
        self.end_pattern = self._find_end_pattern(number, row, rest)
        if self.end_pattern is not None:
            return True
        return self._is_indented_code(row, prefix, rest)

    def _find_end_pattern(self, number: int, row: str, rest: str) -> re.Pattern[str] | None:
        """The end of what begins on this line, if it is something to skip."""
        if number == 1 and row.rstrip() in ("---", "+++"):
            return re.compile(r"\A(?:---|\.\.\.|\+\+\+)[ \t]*\Z")
        fence = _FENCE.match(rest)
        if fence and not (fence[1][0] in "`$" and fence[1][0] in rest[fence.end() :]):
            sign = re.escape(fence[1][0])
            return re.compile(rf"\A[ \t>]*{sign}{{{len(fence[1])},}}[ \t]*\Z")
        if rest.startswith("<!--"):
            return None if "-->" in rest else re.compile("-->")
        raw = _RAW_HTML.match(rest)
        if raw and f"</{raw[1].lower()}" not in rest.lower():
            return re.compile(rf"</{raw[1]}", re.IGNORECASE)
        return None

    def _is_indented_code(self, row: str, prefix: re.Match[str], rest: str) -> bool:
        """Code by its indent, which only follows a blank line; in a list it is further in than the item's text."""
        if not row.strip(" \t>"):
            self.after_blank = True
            return False
        depth = len(prefix["indent"].expandtabs(4))
        was_blank, self.after_blank = self.after_blank, False
        inside_item = self.item_indent and depth >= 2
        if not prefix["marker"] and was_blank and not inside_item:
            self.item_indent = 0
        self.in_code = depth >= 4 + self.item_indent and (was_blank or self.in_code)
        if not self.in_code and prefix["marker"]:
            self.item_indent = depth + len(prefix["marker"])
        return self.in_code or rest.startswith("<!--") or bool(_RAW_HTML.match(rest))


# A paragraph's text to a content, and back.


def parse_inline(text: str, labels: frozenset[str] = frozenset()) -> InlineContent:
    """Text and markup. What opens without closing, or closes without having been opened, is text."""
    parts: list[str | InlineCode] = []
    waiting: list[tuple[str, int]] = []  # what is open, and which of the parts it is
    at = 0
    for found in _INLINE.finditer(text):
        parts.append(text[at : found.start()])
        at = found.end()
        del waiting[:-_MAX_OPEN_MARKERS]
        if found["open"]:
            waiting.append(("[", len(parts)))
            parts.append(found[0])
        elif found["close"]:
            _close_link(parts, waiting, found[0], labels)
        elif found["emphasis"]:
            after_space = found.start() == 0 or text[found.start() - 1].isspace()
            _add_emphasis(parts, waiting, found[0], after_space)
        else:
            parts.append(InlineCode(found[0], found[0], is_word=True))
    return tuple(part for part in (*parts, text[at:]) if part)


def _close_link(
    parts: list[str | InlineCode], open_markers: list[tuple[str, int]], raw: str, labels: frozenset[str]
) -> None:
    opened = next((place for place in reversed(range(len(open_markers))) if open_markers[place][0] == "["), None)
    if opened is None:
        parts.append(raw)
        return
    first = open_markers[opened][1]
    del open_markers[opened:]
    open_raw = parts[first]
    assert isinstance(open_raw, str)
    inside = "".join(part if isinstance(part, str) else part.raw for part in parts[first + 1 :])
    if raw not in ("]", "][]"):
        parts[first] = InlineCode("", open_raw, "open", f"link {first}")
        parts.append(InlineCode("", raw, "close", f"link {first}"))
    elif inside.casefold() in labels:  # the words are the link's name
        parts[first:] = [InlineCode(f"{open_raw}{inside}{raw}", f"{open_raw}{inside}{raw}", is_word=True)]
    else:
        parts.append(raw)


def _add_emphasis(
    parts: list[str | InlineCode], open_markers: list[tuple[str, int]], raw: str, after_space: bool
) -> None:
    opened = next((place for place in reversed(range(len(open_markers))) if open_markers[place][0] == raw), None)
    if opened is None or after_space:
        open_markers.append((raw, len(parts)))
        parts.append(raw)
        return
    first = open_markers[opened][1]
    del open_markers[opened:]
    parts[first] = InlineCode(raw, raw, "open", f"emphasis {first}")
    parts.append(InlineCode(raw, raw, "close", f"emphasis {first}"))


def _make_unit(block: Sequence[_TextLine], content: InlineContent, newline: str) -> TranslationUnit:
    first, last = block[0], block[-1]

    def edits(targets: Sequence[InlineContent]) -> list[Edit]:
        written = plain_text.serialize_content(targets[0])
        if len(block) > 1:
            width = max(len(line.prefix + line.text) for line in block)
            written = (newline + block[1].prefix).join(wrap_text(written, width - len(block[1].prefix)))
        return [Edit(first.start, last.end, written)]

    return TranslationUnit(line=first.number, contents=(content,), make_edits=edits)


def wrap_text(text: str, width: int) -> list[str]:
    """The text in lines of this width; a word that would be taken for markup at the beginning of a line never is."""
    lines: list[str] = []
    for word in _WORD.finditer(text):
        if lines and (len(lines[-1]) + 1 + len(word[0]) <= width or _LOOKS_LIKE_MARKUP.match(text, word.start())):
            lines[-1] += f" {word[0]}"
        else:
            lines.append(word[0])
    return lines
