"""SubRip (SRT) and WebVTT subtitles for pre-translation: cues, timing, positions and voices stay.

A sentence that continues in the next cue is translated as a whole, and its translation is divided among the cues in
proportion to the text that they had. Speakers in one cue (lines that begin with a dash) are separate.
"""

import html
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from xml.sax.saxutils import escape

from attent.data.formats import placeholders, units
from attent.data.formats.units import Edit, FileText, InlineCode, InlineContent, ScanResult, decode_plain_text
from attent.data.pairs import LanguagePair
from attent.text.scripts import UNSPACED_SCRIPTS, compile_letter_pattern
from attent.text.sentence_splitter import WIDE_STOPS, split_sentences

_TIME = r"(?:(\d{1,4}):)?(\d{1,2}):(\d\d)[,.](\d{1,3})"
_TIMING = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}", re.ASCII)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>|<[\d:.]+>|\{\\[^{}]*\}")
_SPEAKER = re.compile(r"[ \t]*(?:(?:<[^<>]*>|\{\\[^{}]*\})[ \t]*)*[-\u2010-\u2014](?![\d-])")
_OPENING = re.compile(r"\s*(?:(?:[-\u2010-\u2014](?!\d)|>>+|[♪♫])\s*)*")
_CLOSING = " \t\r\n♪♫"
_LETTER = compile_letter_pattern(UNSPACED_SCRIPTS).pattern
_CUT = re.compile(rf"\s+|(?<={_LETTER})(?={_LETTER})|(?<=[{WIDE_STOPS}、，；：])(?=\S)")
_CLAUSE_END = re.compile(r"[^\w\s'’\"(\[-]\s*\Z")
_STYLE = re.compile(r"</?[ibu]>|[-\u2010-\u2014]")  # tells no speaker
_MAX_GAP = 3.0  # seconds between two cues of a sentence
_MAX_CUES = 6  # of a sentence: captions without punctuation have no end otherwise
_MIN_WIDTH = 42  # characters of a line, as subtitlers recommend


@dataclass(frozen=True)
class _Fragment:
    """The text of a cue, or of one of its speakers, without the markup around it."""

    line: int
    start: int  # byte offsets of the text
    end: int
    content: InlineContent
    line_count: int
    voice: str  # markup before the text
    times: tuple[float, float]
    continues: bool  # not the first speaker of its cue

    @property
    def text(self) -> str:
        return "".join(part for part in self.content if isinstance(part, str))


def scan_units(content: bytes, name: str, languages: LanguagePair) -> ScanResult:
    text = decode_plain_text(content, name)
    is_vtt = text.utf8.startswith(b"WEBVTT")
    result = ScanResult(text=text, check_text=partial(_check_text, text, is_vtt))
    fragments = list(_find_fragments(text, is_vtt))
    widths = (len(fragment.text) * 5 // 4 // fragment.line_count for fragment in fragments)
    width = max([_MIN_WIDTH, *widths])  # a translation may be a little longer
    for group in _group_fragments(fragments, languages.source):
        _add_unit(result, group, languages.source, width, is_vtt)
    return result


def _check_text(text: FileText, is_vtt: bool, translation: str) -> str:
    if "-->" in translation and not is_vtt:
        return "its translation has -->, which separates times"
    return text.check_encodable(translation)


def _find_fragments(text: FileText, is_vtt: bool) -> Iterator[_Fragment]:
    rows = [*text.split_lines(), (len(text.utf8), "")]
    times: tuple[float, float] | None = None
    block: list[tuple[int, str]] = []
    for index, (offset, row) in enumerate(rows):
        timing = _TIMING.match(row)
        is_number = row.strip().isdigit() and index + 1 < len(rows) and _TIMING.match(rows[index + 1][1])
        is_speaker = block and (_SPEAKER.match(row) is not None and _SPEAKER.match(block[0][1]) is not None)
        if block and (timing or is_number or is_speaker or not row.strip()):
            assert times is not None
            fragment = _parse_fragment(index - len(block) + 1, block, times, is_vtt, text)
            if fragment:
                yield fragment
            block = []
        if timing:
            hours, minutes, seconds, fraction, *end = (int(number or 0) for number in timing.groups())
            start = hours * 3600 + minutes * 60 + seconds + fraction / 1000
            times = (start, end[0] * 3600 + end[1] * 60 + end[2] + end[3] / 1000)
        elif is_number or (is_vtt and not row.strip()):
            times = None  # outside of cues
        elif times is not None and row.strip():
            block.append((offset, row))


def _parse_fragment(
    line: int, block: Sequence[tuple[int, str]], times: tuple[float, float], is_vtt: bool, text: FileText
) -> _Fragment | None:
    start, end = block[0][0], block[-1][0] + len(units.encode_text(block[-1][1]))
    raw = text.utf8[start:end].decode("utf-8", "surrogateescape")
    before, content, after = _peel(_parse_tags(raw))
    unescape = html.unescape if is_vtt else str
    content = tuple(unescape(_join_lines(part)) if isinstance(part, str) else part for part in content)
    if not placeholders.has_words("".join(part for part in content if isinstance(part, str))):
        return None
    start += len(units.encode_text(before))
    end -= len(units.encode_text(after))
    line_count = text.utf8.count(b"\n", start, end) + 1
    line += text.utf8.count(b"\n", block[0][0], start)
    voice = _STYLE.sub("", before).strip()
    return _Fragment(line, start, end, content, line_count, voice, times, _SPEAKER.match(block[0][1]) is not None)


def _join_lines(text: str) -> str:
    return re.sub(r"\s+", lambda space: " " if "\n" in space[0] else space[0], text)


def _parse_tags(raw: str) -> InlineContent:
    """Split a text into words and tags. A tag without its other half is standalone."""
    parts: list[str | InlineCode] = []
    opened: dict[str, list[int]] = defaultdict(list)  # the parts of tags by their name
    offset = 0
    for match in _TAG.finditer(raw):
        parts.append(raw[offset : match.start()])
        offset, tag = match.end(), match[0]
        starts = opened[re.split(r"[\s.>]", tag[1:].lstrip("/"))[0].lower()]
        if tag.startswith("</") and starts:
            first = starts.pop()
            parts[first] = InlineCode("", str(parts[first][1]), "open", f"tag {first}")
            parts.append(InlineCode("", tag, "close", f"tag {first}"))
            continue
        if not tag.startswith("</"):
            starts.append(len(parts))
        parts.append(InlineCode("", tag))
    return (*parts, raw[offset:])


def _peel(content: InlineContent) -> tuple[str, InlineContent, str]:
    """Return the markup and signs before the text, the text, and those after it."""
    parts, before, after = [part for part in content if part], "", ""
    first, last = 0, len(parts)
    while first < last:
        head, tail = parts[first], parts[last - 1]
        if isinstance(head, str) and (signs := _OPENING.match(head)) and signs[0]:
            before, parts[first] = before + signs[0], head[signs.end() :]
            first += signs.end() == len(head)
        elif isinstance(tail, str) and (text := tail.rstrip(_CLOSING)) != tail:
            after, parts[last - 1] = tail[len(text) :] + after, text
            last -= not text
        elif isinstance(head, InlineCode) and head.role == "standalone":
            before, first = before + head.raw, first + 1
        elif isinstance(tail, InlineCode) and tail.role == "standalone":
            after, last = tail.raw + after, last - 1
        elif isinstance(head, InlineCode) and isinstance(tail, InlineCode) and head.pair_id == tail.pair_id:
            before, after, first, last = before + head.raw, tail.raw + after, first + 1, last - 1
        else:
            break
    return before, tuple(parts[first:last]), after


def _group_fragments(fragments: Sequence[_Fragment], language: str | None) -> Iterator[list[_Fragment]]:
    """Yield the fragments that share sentences."""
    group: list[_Fragment] = []
    for fragment in fragments:
        if group and not (len(group) < _MAX_CUES and _is_continued(group[-1], fragment, language)):
            yield group
            group = []
        group.append(fragment)
    if group:
        yield group


def _is_continued(first: _Fragment, second: _Fragment, language: str | None) -> bool:
    """True if a sentence does not end with the first fragment."""
    if second.continues or first.voice != second.voice or not 0 <= second.times[0] - first.times[1] <= _MAX_GAP:
        return False
    if first.text.rstrip()[-1:] in "])♪" or second.text.lstrip()[:1] in "[(♪":  # a description of sounds
        return False
    sentences = split_sentences(f"{first.text} {second.text}", language)
    return len(first.text) + 1 not in accumulate(len(part.text + part.gap) for part in sentences)


def _add_unit(result: ScanResult, group: Sequence[_Fragment], language: str | None, width: int, is_vtt: bool) -> None:
    joined = tuple(part for fragment in group for part in (" ", *fragment.content))[1:]
    text = "".join(part for part in joined if isinstance(part, str))
    sentences = split_sentences(text, language)
    ends = list(accumulate(len(part.text + part.gap) for part in sentences))
    fragment_ends = list(accumulate(len(fragment.text) + 1 for fragment in group))
    contents = tuple(cut_content(joined, ends[:-1]))

    def make_edits(targets: Sequence[InlineContent]) -> list[Edit]:
        if units.is_unchanged(contents, targets):
            return []
        texts: list[InlineContent] = [() for _ in group]
        for target, start, end in zip(targets, [0, *ends], ends, strict=False):
            offsets = [start, *(offset for offset in fragment_ends if start < offset < end), end]
            pieces = split_content(target, [right - left for left, right in pairwise(offsets)], keep_pairs=True)
            for index, piece in enumerate(pieces, bisect(fragment_ends, start)):
                # Space separates it from the sentence before.
                before = units.get_raw_text(texts[index])
                needs_space = before and before[-1] not in WIDE_STOPS and not before[-1].isspace()
                texts[index] = (*texts[index], *((" ",) if needs_space else ()), *piece)
        return [
            Edit(fragment.start, fragment.end, _wrap(content, fragment.line_count, width, result.text.newline, is_vtt))
            for fragment, content in zip(group, texts, strict=True)
        ]

    result.add_unit(group[0].line, contents, make_edits)


def split_content(content: InlineContent, weights: Sequence[int], *, keep_pairs: bool = False) -> list[InlineContent]:
    """Split a translation between words in proportion to weights, preferably at the end of a clause.

    With `keep_pairs`, it is not split inside of markup.
    """
    text = "".join(part for part in content if isinstance(part, str))
    inside, depth, position = set[int](), 0, 0
    for part in content if keep_pairs else ():
        if isinstance(part, InlineCode):
            depth += {"open": 1, "close": -1}.get(part.role, 0)
            continue
        inside.update(range(position + 1, position + len(part)) if depth > 0 else ())
        position += len(part)
    candidates = [end for match in _CUT.finditer(text) if 0 < (end := match.end()) < len(text) and end not in inside]
    tolerance = len(text) / len(weights) / 4
    cuts, first, total = list[int](), 0, sum(weights)

    def rate(cut: int) -> float:
        return abs(cut - ideal) - tolerance * bool(_CLAUSE_END.search(text[max(0, cut - 3) : cut]))

    for done, remaining in zip(accumulate(weights[:-1]), range(len(weights) - 2, -1, -1), strict=True):
        ideal = len(text) * done / total
        end = max(first + 1, len(candidates) - remaining)  # leaves a word for each of the others
        low = max(first, min(bisect(candidates, ideal - 3 * tolerance), end) - 1)
        high = max(low + 1, min(bisect(candidates, ideal + 3 * tolerance) + 1, end))
        cuts.append(min(candidates[low:high], key=rate, default=len(text)))
        first = bisect(candidates, cuts[-1])
    return cut_content(content, cuts)


def cut_content(content: InlineContent, offsets: Sequence[int]) -> list[InlineContent]:
    """Cut a content at offsets of its text. Codes at a cut belong to the next piece, closing ones to the one before."""
    pieces: list[list[str | InlineCode]] = [[]]
    position = 0
    for part in content:
        length = len(part) if isinstance(part, str) else int(part.role != "close")  # a code as if it had a character
        start = position
        while len(pieces) <= len(offsets) and offsets[len(pieces) - 1] < start + length:
            cut = offsets[len(pieces) - 1]
            if isinstance(part, str):
                pieces[-1].append(part[position - start : cut - start])
                position = cut
            pieces.append([])
        if isinstance(part, str):
            pieces[-1].append(part[position - start :])
            position = start + length
        else:
            pieces[-1].append(part)
    pieces += [[] for _ in range(len(offsets) + 1 - len(pieces))]
    return [tuple(part for part in piece if part) for piece in pieces]


def _wrap(content: InlineContent, line_count: int, width: int, newline: str, is_vtt: bool) -> str:
    length = sum(len(part) for part in content if isinstance(part, str))
    line_count = max(line_count, -(-length // width))
    lines = split_content(content, [1] * line_count)
    escaped = (
        "".join(part.raw if isinstance(part, InlineCode) else escape(part) if is_vtt else part for part in line)
        for line in lines
    )
    return newline.join(line.strip() for line in escaped if line.strip())
