"""Word documents (DOCX) for pre-translation: paragraphs of the body, tables, headers, footers, notes and text boxes.

Adjacent runs of the same formatting are one text; the formatting that most of a paragraph has needs no code, other
formatting and links are paired codes. Images, notes, breaks and fields (page numbers, dates) stay. All other parts of
the archive are copied.
"""

import io
import re
import shutil
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, dropwhile, groupby
from typing import NamedTuple
from xml.sax.saxutils import escape

from attent.data.formats import placeholders, units, xml
from attent.data.formats.units import Edit, FileText, InlineCode, InlineContent, ScanResult
from attent.data.formats.xml import XmlElement
from attent.data.pairs import CorpusError, LanguagePair

SCHEMA = xml.XmlSchema(root="document", units=frozenset({"p"}))
_PART = re.compile(r"word/(document|header|footer|footnotes|endnotes)\d*\.xml")
_ROOTS = {"header": "hdr", "footer": "ftr"}
_MAX_PART_BYTES = 2**27  # of all parts with text together, unpacked
_MAX_BYTES = 2**30  # of the whole archive, unpacked
_WRAPPERS = frozenset({"hyperlink", "ins", "moveTo", "smartTag", "sdt", "dir", "bdo"})
_DROPPED = frozenset({"proofErr", "lastRenderedPageBreak"})  # notes of the spelling checker and of the last layout
_BREAKS = frozenset({"br", "cr", "tab", "ptab"})
_CHARACTERS = {"noBreakHyphen": "\u2011", "softHyphen": ""}
_INVISIBLE = re.compile(r"<(?:\w+:)?(?:lang|noProof)\b[^<>]*/>")
_EMPTY = re.compile(r"<(?:\w+:)?rPr>\s*</(?:\w+:)?rPr>|<(?:\w+:)?rPr\s*/>")
_SPACE = re.compile(r"[\t\r\n]")
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError, OSError)


@dataclass(frozen=True, kw_only=True)
class _DocxText(FileText):
    """The parts of a document with text, one after the other."""

    content: bytes
    parts: dict[str, tuple[int, FileText]]  # by name: the offset in `utf8`, and the part

    def encode_edited(self, edits: Iterable[Edit], errors: str = "surrogateescape") -> bytes:
        edits = list(edits)
        if not edits:
            return self.content
        changed = {}
        for name, (offset, part) in self.parts.items():
            inside = (edit for edit in edits if offset <= edit.start < offset + len(part.utf8))
            moved = (edit._replace(start=edit.start - offset, end=edit.end - offset) for edit in inside)
            changed[name] = part.encode_edited(moved, errors)
        buffer = io.BytesIO()
        try:
            with zipfile.ZipFile(io.BytesIO(self.content)) as archive, zipfile.ZipFile(buffer, "w") as output:
                for info in archive.infolist():
                    copied = zipfile.ZipInfo(info.filename, info.date_time)
                    copied.compress_type, copied.external_attr = info.compress_type, info.external_attr
                    if info.filename in changed:
                        output.writestr(copied, changed[info.filename])
                    else:
                        with archive.open(info) as source, output.open(copied, "w") as target:
                            shutil.copyfileobj(source, target)
        except _ZIP_ERRORS as error:
            raise _make_damage_error(self.name, error) from None
        return buffer.getvalue()


class _Text(NamedTuple):
    text: str
    format: str  # the `rPr` element
    pair_id: str  # of the link or the like around it, or ""


def scan_units(content: bytes, name: str, _: LanguagePair) -> ScanResult:
    parts = dict[str, tuple[int, FileText]]()
    offset, numbers = 0, count(1)
    for part_name, data in _read_parts(content, name):
        part = xml.decode_xml(data, f"{name}, {part_name}", _make_schema(part_name))
        parts[part_name] = offset, part
        offset += len(part.utf8)
    utf8 = b"".join(part.utf8 for _, part in parts.values())
    text = _DocxText(name=name, utf8=utf8, encoding="utf-8", content=content, parts=parts)
    result = ScanResult(text=text, check_text=xml.check_xml_chars, encoding_errors="xmlcharrefreplace")
    for part_name, (offset, part) in parts.items():
        for paragraph in xml.scan_elements(part, _make_schema(part_name)):
            _add_paragraph(result, part, offset, paragraph, numbers)
    return result


def _make_schema(part_name: str) -> xml.XmlSchema:
    kind = _PART.fullmatch(part_name)
    assert kind is not None
    return replace(SCHEMA, root=_ROOTS.get(kind[1], kind[1]))


def _read_parts(content: bytes, name: str) -> list[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            infos = archive.infolist()
            chosen = [info for info in infos if _PART.fullmatch(info.filename)]
            if not any(info.filename.startswith("word/document") for info in chosen):
                raise CorpusError(f"{name} is not a Word document: save it as DOCX")
            if len({info.filename for info in infos}) < len(infos):
                raise CorpusError(f"{name} has two parts of the same name: save it again")
            sizes = [sum(info.file_size for info in part) for part in (chosen, infos)]
            if sizes[0] > _MAX_PART_BYTES or sizes[1] > _MAX_BYTES:
                raise CorpusError(f"{name} has over {_MAX_PART_BYTES >> 20} MiB of text or 1 GiB unpacked: split it")
            return [(info.filename, archive.read(info)) for info in chosen]
    except CorpusError:
        raise
    except _ZIP_ERRORS as error:
        raise _make_damage_error(name, error) from None


def _make_damage_error(name: str, error: Exception) -> CorpusError:
    return CorpusError(f"{name} is damaged or protected by a password ({error}): save it again without one")


def _add_paragraph(
    result: ScanResult, part: FileText, offset: int, paragraph: XmlElement, numbers: Iterator[int]
) -> None:
    """Add the units of a paragraph and of those in its text boxes, at which it is cut."""
    number = next(numbers)
    children = [child for child in paragraph.elements if child.tag != "pPr"]
    for has_boxes, group in groupby(children, lambda child: bool(_find_paragraphs(child))):
        if not has_boxes:
            _add_unit(result, number, part, offset, paragraph, list(group))
            continue
        for child in group:
            for inner in _find_paragraphs(child):
                _add_paragraph(result, part, offset, inner, numbers)


def _find_paragraphs(element: XmlElement) -> list[XmlElement]:
    """Return the outermost paragraphs inside of an element."""
    return [inner for child in element.elements for inner in ([child] if child.tag == "p" else _find_paragraphs(child))]


def _add_unit(
    result: ScanResult,
    number: int,
    part: FileText,
    offset: int,
    paragraph: XmlElement,
    elements: Sequence[XmlElement],
) -> None:
    run, text = (xml.make_qualified_name(part, paragraph, name) for name in ("r", "t"))
    pieces = list(_read_pieces(part, elements, run, ""))
    formats = _find_main_formats(pieces)
    content = tuple(_build_content(pieces, formats))
    if not placeholders.has_words("".join(part for part in content if isinstance(part, str))):
        return
    start, end = offset + elements[0].start, offset + elements[-1].end

    def make_edits(targets: Sequence[InlineContent]) -> list[Edit]:
        if units.is_unchanged((content,), targets):
            return []
        return [Edit(start, end, _serialize(targets[0], formats, run, text))]

    result.add_unit(number, (content,), make_edits)


def _read_pieces(
    part: FileText, elements: Sequence[XmlElement], run: str, pair_id: str
) -> Iterator[_Text | InlineCode]:
    marks = [_get_field_mark(element) for element in elements]
    ends = _match_fields(marks)
    index = 0
    while index < len(elements):
        element, last = elements[index], ends.get(index, index)
        inner = list[XmlElement]()
        if last > index:  # a field: the text of a link is translated, other results stay
            separator = marks.index("separate", index, last) if "separate" in marks[index:last] else index
            codes = (code for each in elements[index:separator] for code in each.find_children("instrText"))
            is_link = "".join(code.get_text() for code in codes).split()[:1] == ["HYPERLINK"]
            inner = list(elements[separator + 1 : last]) if is_link else inner
        elif element.tag in _WRAPPERS:
            wrapped = (element.find_child("sdtContent") or element).elements
            inner = list(dropwhile(lambda child: child.tag.endswith("Pr"), wrapped))  # the properties of a smart tag
        if element.tag == "r" and not marks[index]:
            yield from _read_run(part, element, run, pair_id)
        elif inner:
            inner_id = f"link {element.start}"
            yield InlineCode("", xml.get_slice(part, element.start, inner[0].start), "open", inner_id)
            yield from _read_pieces(part, inner, run, inner_id)
            yield InlineCode("", xml.get_slice(part, inner[-1].end, elements[last].end), "close", inner_id)
        elif element.tag not in _DROPPED:
            yield InlineCode("", xml.get_slice(part, element.start, elements[last].end))
        index = last + 1


def _read_run(part: FileText, element: XmlElement, run: str, pair_id: str) -> Iterator[_Text | InlineCode]:
    properties = element.find_child("rPr")
    rpr = xml.get_slice(part, properties.start, properties.end) if properties else ""
    for child in element.elements:
        if child.tag == "t" or child.tag in _CHARACTERS:
            text = _CHARACTERS.get(child.tag, _SPACE.sub(" ", child.get_text()))
            yield from [_Text(text, rpr, pair_id)] if text else []
        elif child.tag != "rPr" and child.tag not in _DROPPED:
            raw = f"<{run}>{rpr}{xml.get_slice(part, child.start, child.end)}</{run}>"
            yield InlineCode("", raw, is_break=child.tag in _BREAKS and not pair_id)


def _get_field_mark(element: XmlElement) -> str:
    """Return `begin`, `separate` or `end` for the run with this mark of a field, else ""."""
    mark = element.find_child("fldChar") if element.tag == "r" else None
    names = mark.attributes if mark else {}
    return next((value for name, value in names.items() if name.endswith("fldCharType")), "")


def _match_fields(marks: Sequence[str]) -> dict[int, int]:
    """Return the index of the last run of each field by that of its first."""
    opened, ends = list[int](), dict[int, int]()
    for index, mark in enumerate(marks):
        if mark == "begin":
            opened.append(index)
        elif mark == "end" and opened:
            ends[opened.pop()] = index
    return ends


def _get_format_key(rpr: str) -> str:
    return _EMPTY.sub("", _INVISIBLE.sub("", rpr))


def _find_main_formats(pieces: Iterable[_Text | InlineCode]) -> dict[str, str]:
    """Return the formatting of most characters inside of each link by its pair, and by "" of those outside."""
    lengths: dict[str, Counter[str]] = {"": Counter()}
    formats: dict[str, str] = {}
    for piece in pieces:
        if isinstance(piece, _Text):
            key = _get_format_key(piece.format)
            lengths.setdefault(piece.pair_id, Counter())[key] += len(piece.text)
            formats.setdefault(key, piece.format)
    return {pair_id: formats.get(next(iter(keys.most_common(1)), ("",))[0], "") for pair_id, keys in lengths.items()}


def _build_content(pieces: Sequence[_Text | InlineCode], formats: dict[str, str]) -> Iterator[str | InlineCode]:
    """Yield texts of the main formatting without codes, others as pairs, of which `formats` gets the formatting."""
    main = {pair_id: _get_format_key(rpr) for pair_id, rpr in formats.items()}
    previous = dict(main)
    keys: list[tuple[str, str] | None] = []
    for piece in pieces:  # white space has the formatting of the text before
        if isinstance(piece, _Text) and piece.text.strip():
            previous[piece.pair_id] = _get_format_key(piece.format)
        keys.append((piece.pair_id, previous[piece.pair_id]) if isinstance(piece, _Text) else None)
    for key, group in groupby(zip(keys, pieces, strict=True), lambda item: item[0]):
        same = [piece for _, piece in group]
        texts = [piece for piece in same if isinstance(piece, _Text)]
        text = "".join(piece.text for piece in texts)
        if key is None:
            yield from (piece for piece in same if isinstance(piece, InlineCode))
        elif key[1] == main[key[0]]:
            yield text
        else:
            pair_id = f"format {len(formats)}"
            formats[pair_id] = texts[0].format
            yield from (InlineCode("", "", "open", pair_id), text, InlineCode("", "", "close", pair_id))


def _serialize(content: InlineContent, formats: Mapping[str, str], run: str, text: str) -> str:
    """Return runs, links and codes as XML. A code does not depend on the formatting around it."""
    stack, parts = [""], list[str]()
    for part in content:
        if isinstance(part, str):
            rpr = formats.get(stack[-1], "")
            parts.append(f'<{run}>{rpr}<{text} xml:space="preserve">{escape(part)}</{text}></{run}>')
            continue
        parts.append(part.raw)
        if part.role == "open":
            stack.append(part.pair_id)
        elif part.role == "close":
            stack = [pair_id for pair_id in stack if pair_id != part.pair_id]
    return "".join(parts)
