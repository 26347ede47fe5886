"""Markdown for pre-translation: text is translated, and the layout stays.

Front matter, code, HTML comments, link definitions and the markers of headings, lists, quotes and tables are unchanged.
A paragraph is translated as a whole and wrapped to its former width; it keeps its code, link targets and emphasis.
Blocks are found by markdown-it; formulas, tasks and notes besides.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from attent.data.formats import placeholders, units
from attent.data.formats.units import Edit, InlineCode, InlineContent, ScanResult, decode_plain_text
from attent.data.pairs import LanguagePair

_MARKERS = r"(?:[ \t>]|[-+*][ \t]|\d{1,9}[.)][ \t])*"  # of quotes and lists
_LABEL = re.compile(rf"^({_MARKERS})(?:\[[ xX]\][ \t]+|\[\^[^\]\s]+\]:[ \t]+)")  # of a task or a note
_FORMULA = re.compile(rf"^({_MARKERS})\$\$(?!.*\$)")
_RAW_HTML = re.compile(r"\s*<(?:[!?]|/?(?:script|pre|style|textarea)\b)", re.IGNORECASE)
_DEFINITION = re.compile(r"\[(?!\^)([^\]]+)\]:(?:\s|\Z)")
_TABLE_CELL = re.compile(r"(?:`[^`]*`|\\.|[^|`\\]|`|\\)+")
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
            result.add_unit(block[0].number, [parts], partial(_make_edits, block, newline))
    return result


def _group_blocks(rows: Sequence[tuple[int, str]]) -> Iterator[list[_TextLine]]:
    """Yield the lines of each paragraph, heading and table cell; a hard line break ends a paragraph."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    parser.core.ruler.enableOnly(["normalize", "block"])
    parser.options["maxNesting"] = 100  # 50 lists inside each other
    before = ""  # type of the token before
    for token in parser.parse("\n".join(_hide_extensions([row for _, row in rows]))):
        first, stop = token.map or (0, 0)
        texts = list(zip(range(first, stop), token.content.split("\n"), strict=False))
        is_known = all(text.strip() in rows[number][1] for number, text in texts)
        if token.type == "tr_open":
            yield from _split_cells(first, *rows[first])
        elif token.type == "html_block" and is_known and not _RAW_HTML.match(token.content):
            yield from ([_find_text(number, *rows[number], text)] for number, text in texts)
        elif token.type == "inline" and is_known and before not in ("th_open", "td_open"):
            block: list[_TextLine] = []
            for number, text in texts:
                block.append(_find_text(number, *rows[number], _HARD_BREAK.sub("", text)))
                if _HARD_BREAK.search(text):
                    yield block
                    block = []
            if block:
                yield block
        before = token.type


def _hide_extensions(rows: Sequence[str]) -> Iterator[str]:
    """Yield the rows without what CommonMark lacks: front matter, formulas (as code), and labels of tasks and notes."""
    is_front_matter = bool(rows) and rows[0].rstrip() in ("---", "+++")
    for number, row in enumerate(rows):
        yield "" if is_front_matter else _LABEL.sub(r"\1", _FORMULA.sub(r"\1~~~~~~", row)).replace("\r", " ")
        is_front_matter = is_front_matter and (number == 0 or row.rstrip() not in ("---", "...", "+++"))


def _find_text(number: int, offset: int, row: str, text: str) -> _TextLine:
    prefix = row[: row.rfind(text.strip())]
    return _TextLine(number + 1, prefix, offset + len(units.encode_text(prefix)), text.strip())


def _split_cells(number: int, offset: int, row: str) -> Iterator[list[_TextLine]]:
    markers = re.match(_MARKERS, row)
    for cell in _TABLE_CELL.finditer(row, markers.end() if markers else 0):
        text = cell[0].lstrip()
        start = offset + len(units.encode_text(row[: cell.end() - len(text)]))
        yield [_TextLine(number + 1, "", start, text.rstrip())]


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


def _make_edits(block: Sequence[_TextLine], newline: str, targets: Sequence[InlineContent]) -> list[Edit]:
    text = units.get_raw_text(targets[0])
    if len(block) > 1:
        width = max(len(line.prefix + line.text) for line in block)
        text = (newline + block[1].prefix).join(wrap_text(text, width - len(block[1].prefix)))
    return [Edit(block[0].start, block[-1].end, text)]


def wrap_text(text: str, width: int) -> list[str]:
    """Wrap a text to lines that never begin with a word that looks like markup."""
    lines: list[str] = []
    for word in _WORD.finditer(text):
        if lines and (len(lines[-1]) + 1 + len(word[0]) <= width or _LOOKS_LIKE_MARKUP.match(text, word.start())):
            lines[-1] += f" {word[0]}"
        else:
            lines.append(word[0])
    return lines
