"""Markdown for pre-translation: text is translated, and the layout stays.

Front matter, code, HTML comments, link definitions and the markers of headings, lists, quotes and tables are unchanged.
A paragraph is translated as a whole and wrapped to its former width; it keeps its code, link targets and emphasis.
The parser covers Markdown as people write it, not every rule of CommonMark.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attent.data.formats import placeholders, units
from attent.data.formats.plain_text import decode_plain_text
from attent.data.formats.units import Edit, InlineCode, InlineContent, ScanResult, TranslationUnit
from attent.data.pairs import LanguagePair

_PREFIX = re.compile(
    r"(?P<quote>(?: {0,3}>)*)(?P<indent>[ \t]*)"
    r"(?P<marker>(?:(?:[-+*]|\d{1,9}[.)])[ \t]+)*)(?P<label>(?:\[[ xX]\][ \t]+)?(?:\[\^[^\]\s]+\]:[ \t]+)?)"
    r"(?P<heading>\#{1,6}[ \t]+)?"
)
_FENCE = re.compile(r"(`{3,}|~{3,}|\$\$)")
_RAW_HTML = re.compile(r"<(script|pre|style|textarea)\b", re.IGNORECASE)
_BLOCK_TAG = re.compile(placeholders.HTML_BLOCK_TAG, re.IGNORECASE)
_DEFINITION = re.compile(r"\[(?!\^)([^\]]+)\]:(?:\s|\Z)")
_RULE = re.compile(r"(=+|-+|(?:[-*_][ \t]*){3,})[ \t]*\Z")
_TABLE_DELIMITER = re.compile(r"[ \t>]*\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*\Z")
_TABLE_CELL = re.compile(r"(?:`[^`]*`|\\.|[^|`\\]|`|\\)+")
_HEADING_END = re.compile(r"(?:[ \t]+\#+)?[ \t]*\Z")
_HARD_BREAK = re.compile(r"(?:[ \t]{2,}|\\)\Z")
_LOOKS_LIKE_MARKUP = re.compile(
    r"[-+*](?:\s|\Z)|\d{1,9}[.)](?:\s|\Z)|#{1,6}\s|[>|]|[-=]+(?:\s|\Z)|```|~~~|<|\[[^\]]*\]:"
)
_WORD = re.compile(r"(?:`[^`]*`|[^ \t\n])+")  # spaces inside code do not separate words
_MAX_OPEN_MARKERS = 100  # markers without their other half
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

OpenMarkers = list[tuple[str, int]]  # marker and index of its part


@dataclass(frozen=True)
class _TextLine:
    number: int
    prefix: str  # quotes, indent, list marker
    start: int  # byte offset of the text
    text: str
    starts_block: bool  # a list item or heading

    @property
    def end(self) -> int:
        return self.start + len(units.encode_text(self.text))


def scan_units(content: bytes, name: str, _: LanguagePair) -> ScanResult:
    text = decode_plain_text(content, name)
    result = ScanResult(text=text, check_text=text.check_encodable)
    rows = list(text.split_lines())
    labels = frozenset(label[1].casefold() for _, row in rows if (label := _DEFINITION.match(row.strip())))
    newline = "\r\n" if b"\r\n" in text.utf8 else "\n"
    for block in _group_blocks(rows):
        parts = parse_inline(" ".join(line.text for line in block), labels)
        if placeholders.has_words("".join(part for part in parts if isinstance(part, str))):
            result.units.append(_make_unit(block, parts, newline))
    return result


def _group_blocks(rows: Sequence[tuple[int, str]]) -> Iterator[list[_TextLine]]:
    """Yield the lines of each paragraph, heading and table cell."""
    block: list[_TextLine] = []
    for line in _find_text_lines(rows):
        if block and (line is None or line.starts_block or line.prefix.count(">") != block[-1].prefix.count(">")):
            yield block
            block = []
        if line is not None:
            block.append(replace(line, text=_HARD_BREAK.sub("", line.text).rstrip()))
            if _HARD_BREAK.search(line.text):
                yield block
                block = []
    if block:
        yield block


def _find_text_lines(rows: Sequence[tuple[int, str]]) -> Iterator[_TextLine | None]:
    """Yield the lines with text, and None at the end of each paragraph."""
    non_text = _NonTextFilter()
    in_table = in_html = False
    for index, (offset, row) in enumerate(rows):
        prefix = _PREFIX.match(row)
        assert prefix is not None, "it may be empty"
        rest = row[prefix.end() :]
        next_row = rows[index + 1][1] if index + 1 < len(rows) else ""
        has_header = "|" in next_row and _TABLE_DELIMITER.match(next_row) is not None
        in_table = "|" in rest and (in_table or rest.startswith("|") or has_header)
        in_html = bool(rest.strip()) and (in_html or _BLOCK_TAG.match(rest) is not None)
        # A link definition, a rule or a heading's underline; `* * *` is a rule and not a list.
        unquoted = row[prefix.end("quote") :].lstrip()
        is_structural = _DEFINITION.match(rest) or _RULE.match(rest) or _RULE.match(unquoted)
        if non_text.is_skipped(index == 0, row, prefix) or not rest.strip() or is_structural:
            yield None
        elif in_table:
            yield None
            yield from _parse_cells(index + 1, offset, row, prefix)
        elif in_html:
            yield from (None, *_parse_line(index + 1, offset, row, prefix), None)
        else:
            yield from _parse_line(index + 1, offset, row, prefix)


def _parse_line(line_number: int, offset: int, row: str, prefix: re.Match[str]) -> Iterator[_TextLine | None]:
    body = row[prefix.end() :]
    if prefix["heading"]:
        body = _HEADING_END.sub("", body, count=1)
        yield None
    start = offset + len(units.encode_text(prefix[0]))
    yield _TextLine(line_number, prefix[0], start, body, any(prefix.group("marker", "label", "heading")))
    if prefix["heading"]:
        yield None


def _parse_cells(line_number: int, offset: int, row: str, prefix: re.Match[str]) -> Iterator[_TextLine | None]:
    if _TABLE_DELIMITER.match(row):
        return
    for cell in _TABLE_CELL.finditer(row, prefix.end()):
        text = cell[0].lstrip()
        start = offset + len(units.encode_text(row[: cell.end() - len(text)]))
        yield _TextLine(line_number, "", start, text.rstrip(), True)
        yield None


class _NonTextFilter:
    """Recognizes front matter, code and comments. It must see each line in order."""

    def __init__(self) -> None:
        self.end_pattern: re.Pattern[str] | None = None  # of the block that is skipped
        self.after_blank = True
        self.in_code = False  # indented code
        self.item_indent = 0  # of a list item's text; 0 outside lists

    def is_skipped(self, is_first: bool, row: str, prefix: re.Match[str]) -> bool:
        if self.end_pattern is not None:
            if self.end_pattern.search(row):
                self.end_pattern = None
            return True
        rest = row[prefix.end() :]
        self.end_pattern = self._find_end_pattern(is_first, row, rest)
        return self.end_pattern is not None or self._is_indented_code(row, prefix, rest)

    def _find_end_pattern(self, is_first: bool, row: str, rest: str) -> re.Pattern[str] | None:
        """Return the pattern that ends a skipped block that starts on this line."""
        if is_first and row.rstrip() in ("---", "+++"):
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
        """True for code by its indent, which follows a blank line; in a list it is deeper than the item's text."""
        if not row.strip(" \t>"):
            self.after_blank = True
            return False
        depth = len(prefix["indent"].expandtabs(4))
        after_blank, self.after_blank = self.after_blank, False
        inside_item = self.item_indent and depth >= 2
        if not prefix["marker"] and after_blank and not inside_item:
            self.item_indent = 0
        self.in_code = depth >= 4 + self.item_indent and (after_blank or self.in_code)
        if not self.in_code and prefix["marker"]:
            self.item_indent = depth + len(prefix["marker"])
        return self.in_code or rest.startswith("<!--") or bool(_RAW_HTML.match(rest))


def parse_inline(text: str, labels: frozenset[str] = frozenset()) -> InlineContent:
    """Split a paragraph into text and codes. Unpaired markers are text."""
    parts: list[str | InlineCode] = []
    open_markers: OpenMarkers = []
    offset = 0
    for match in _INLINE.finditer(text):
        parts.append(text[offset : match.start()])
        offset = match.end()
        del open_markers[:-_MAX_OPEN_MARKERS]
        if match["open"]:
            open_markers.append(("[", len(parts)))
            parts.append(match[0])
        elif match["close"]:
            _close_link(parts, open_markers, match[0], labels)
        elif match["emphasis"]:
            after_space = match.start() == 0 or text[match.start() - 1].isspace()
            _add_emphasis(parts, open_markers, match[0], after_space)
        else:
            parts.append(InlineCode(match[0], match[0], is_word=True))
    return tuple(part for part in (*parts, text[offset:]) if part)


def _pop_marker(open_markers: OpenMarkers, marker: str) -> int | None:
    """Remove the last open marker of a kind and those inside it; return the index of its part."""
    while any(known == marker for known, _ in open_markers):
        known, index = open_markers.pop()
        if known == marker:
            return index
    return None


def _close_link(parts: list[str | InlineCode], open_markers: OpenMarkers, raw: str, labels: frozenset[str]) -> None:
    first = _pop_marker(open_markers, "[")
    if first is None:
        parts.append(raw)
        return
    open_raw = parts[first]
    assert isinstance(open_raw, str)
    inside = units.get_raw_text(tuple(parts[first + 1 :]))
    if raw not in ("]", "][]"):
        parts[first] = InlineCode("", open_raw, "open", f"link {first}")
        parts.append(InlineCode("", raw, "close", f"link {first}"))
    elif inside.casefold() in labels:  # the text is the link's label
        link = f"{open_raw}{inside}{raw}"
        parts[first:] = [InlineCode(link, link, is_word=True)]
    else:
        parts.append(raw)


def _add_emphasis(parts: list[str | InlineCode], open_markers: OpenMarkers, raw: str, after_space: bool) -> None:
    first = None if after_space else _pop_marker(open_markers, raw)
    if first is None:
        open_markers.append((raw, len(parts)))
        parts.append(raw)
        return
    parts[first] = InlineCode(raw, raw, "open", f"emphasis {first}")
    parts.append(InlineCode(raw, raw, "close", f"emphasis {first}"))


def _make_unit(block: Sequence[_TextLine], content: InlineContent, newline: str) -> TranslationUnit:
    first, last = block[0], block[-1]

    def make_edits(targets: Sequence[InlineContent]) -> list[Edit]:
        text = units.get_raw_text(targets[0])
        if len(block) > 1:
            width = max(len(line.prefix + line.text) for line in block)
            text = (newline + block[1].prefix).join(wrap_text(text, width - len(block[1].prefix)))
        return [Edit(first.start, last.end, text)]

    return TranslationUnit(line=first.number, contents=(content,), make_edits=make_edits)


def wrap_text(text: str, width: int) -> list[str]:
    """Wrap a text to lines that never begin with a word that looks like markup."""
    lines: list[str] = []
    for word in _WORD.finditer(text):
        if lines and (len(lines[-1]) + 1 + len(word[0]) <= width or _LOOKS_LIKE_MARKUP.match(text, word.start())):
            lines[-1] += f" {word[0]}"
        else:
            lines.append(word[0])
    return lines
