"""XML with the places of its elements, so that a file can be changed in a few places and stay as it is in all others.

`safe_xml` sees the file first, with all its refusals (entities, depth, encodings); only what it passes is read here,
as UTF-8. The elements that a format asks for come one by one, each with all that is in it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.parsers import expat
from xml.sax.saxutils import escape

from attent.data.formats import language_tags, safe_xml
from attent.data.formats.units import BOMS, Edit, FileText, InlineCode, InlineContent, PretranslateError, decode_file
from attent.data.pairs import CorpusError

_START_TAG = re.compile(rb"<[^\s/>]+(?:\s+[^\s=]+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*\s*/?>")
_ATTRIBUTE = re.compile(r"\s([^\s=]+)\s*=\s*(\"[^\"]*\"|'[^']*')")
_DECLARED_ENCODING = re.compile(rb"<\?xml\s[^>]*?encoding\s*=\s*[\"']([A-Za-z][A-Za-z0-9._-]*)")
_PRECEDING_SPACE = re.compile(rb"(?:\r?\n)?[ \t]*\Z")
_INVALID_XML_CHAR = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MAX_INDENT_BYTES = 200


@dataclass
class XmlElement:
    """An element: `<a b="c">` from start to inner, what is in it up to outer, `</a>` up to end."""

    tag: str  # "" for one of another namespace
    attributes: Mapping[str, str]
    line: int
    start: int
    content_start: int
    content_end: int = 0
    end: int = 0
    children: list[XmlElement | str] = field(default_factory=list)
    has_comments: bool = False  # comments and the like in it

    def find_children(self, *names: str) -> list[XmlElement]:
        """Its direct children of these names."""
        return [child for child in self.children if isinstance(child, XmlElement) and child.tag in names]

    def find_child(self, name: str) -> XmlElement | None:
        return next(iter(self.find_children(name)), None)

    def get_text(self) -> str:
        """All text in it."""
        return "".join(child if isinstance(child, str) else child.get_text() for child in self.children)


ElementCallback = Callable[[XmlElement, Sequence[XmlElement]], None]


class _SafetyCheck(safe_xml.XmlHandler):
    """A document of which only the safety and the root matter."""

    native_code_tags = frozenset()

    def __init__(self, name: str, root_tag: str) -> None:
        super().__init__(name, language_tags.ANY_LANGUAGES)
        self.root_tag = root_tag  # type: ignore[misc]  # one class for both formats

    def start_element(self, tag: str, attributes: Mapping[str, str], line: int) -> bool:
        return False

    def add_segment(self, tag: str, text: str | None) -> None: ...

    def end_element(self, tag: str) -> None: ...

    def finish(self) -> None: ...


def decode_xml(content: bytes, name: str, root_tag: str) -> FileText:
    """The text of a safe XML file, in whatever encoding it says."""
    try:
        for _ in safe_xml.parse_xml([content], _SafetyCheck(name, root_tag)):
            pass
    except CorpusError as error:
        raise PretranslateError(str(error)) from None
    return decode_file(content, name, _detect_encoding(content))


def _detect_encoding(content: bytes) -> str:
    if content.startswith(tuple(BOMS)):
        return "utf-8"
    if content[:2] in (b"<\0", b"\0<"):
        return "utf-16-le" if content[:1] == b"<" else "utf-16-be"
    declared = _DECLARED_ENCODING.match(content)
    return codecs.lookup(declared[1].decode()).name if declared else "utf-8"


def scan_elements(text: FileText, tags: frozenset[str], callback: ElementCallback) -> None:
    """Every element of the wanted names, once it is whole, with those that it stands in."""
    parser = expat.ParserCreate(encoding="utf-8", namespace_separator=" ")
    parser.buffer_text = True
    reading = _ElementCollector(parser, text.utf8, tags, callback)
    parser.StartElementHandler = reading.on_start
    parser.EndElementHandler = reading.on_end
    parser.CharacterDataHandler = reading.on_text
    parser.CommentHandler = reading.on_comment
    parser.ProcessingInstructionHandler = reading.on_comment
    try:
        parser.Parse(text.utf8, True)
    except expat.ExpatError as error:  # a name that is one in another encoding only
        what, where = expat.ErrorString(error.code), f"line {error.lineno:,}"
        raise PretranslateError(f"{text.name} is not well-formed XML at {where} ({what}): correct it there") from None


class _ElementCollector:
    def __init__(
        self, parser: expat.XMLParserType, raw: bytes, tags: frozenset[str], callback: ElementCallback
    ) -> None:
        self.parser, self.raw, self.tags, self.callback = parser, raw, tags, callback
        self.open_elements: list[XmlElement] = []
        self.namespace = ""  # of the root, with the space behind it
        self.match_depth = 0  # how many open elements are in a wanted one, itself included

    def on_start(self, name: str, attributes: dict[str, str]) -> None:
        namespace, space, tag = name.rpartition(" ")
        if not self.open_elements:
            self.namespace = namespace + space
        at = self.parser.CurrentByteIndex
        tag_text = _START_TAG.match(self.raw, at)
        assert tag_text is not None, "expat finds only whole tags"
        local = tag if namespace + space == self.namespace else ""
        element = XmlElement(local, attributes, self.parser.CurrentLineNumber, at, tag_text.end())
        if self.match_depth:
            self.open_elements[-1].children.append(element)
        self.match_depth += bool(self.match_depth) or local in self.tags
        self.open_elements.append(element)

    def on_end(self, _: str) -> None:
        element = self.open_elements.pop()
        if self.raw[element.content_start - 2 : element.content_start] == b"/>":
            element.content_end = element.end = element.content_start
        else:
            element.content_end = self.parser.CurrentByteIndex
            element.end = self.raw.index(b">", element.content_end) + 1
        self.match_depth -= bool(self.match_depth)
        if element.tag in self.tags and not self.match_depth:
            self.callback(element, self.open_elements)

    def on_text(self, data: str) -> None:
        if self.match_depth:
            self.open_elements[-1].children.append(data)

    def on_comment(self, *_: str) -> None:
        if self.open_elements:
            self.open_elements[-1].has_comments = True


# What is written.


def get_slice(text: FileText, start: int, end: int) -> str:
    return text.utf8[start:end].decode()


def make_qualified_name(text: FileText, sibling: XmlElement, name: str) -> str:
    """A name with the prefix that another element has in the file: `xlf:target` beside `xlf:source`."""
    prefix, colon, _ = _get_qualified_name(text, sibling).rpartition(":")
    return prefix + colon + name


def _get_qualified_name(text: FileText, element: XmlElement) -> str:
    """The name of an element as the file writes it."""
    return get_slice(text, element.start + 1, element.content_start).split(None, 1)[0].rstrip("/>")


def set_attributes(tag: str, values: Mapping[str, str]) -> str:
    """The start tag with these attributes, where it has them already or at its end; all else as it was."""
    for name, value in values.items():
        for found in _ATTRIBUTE.finditer(tag):
            if found[1] == name:
                tag = f'{tag[: found.start(2)]}"{value}"{tag[found.end(2) :]}'
                break
        else:
            close = "/>" if tag.endswith("/>") else ">"
            body = tag.removesuffix(close)
            kept = body.rstrip()
            tag = f'{kept} {name}="{value}"{body[len(kept) :]}{close}'
    return tag


def get_indent(text: FileText, element: XmlElement) -> str:
    """The line break and space before an element, for one that comes to stand beside it."""
    found = _PRECEDING_SPACE.search(text.utf8, max(0, element.start - _MAX_INDENT_BYTES), element.start)
    return found[0].decode() if found and b"\n" in found[0] else ""


def replace_content(text: FileText, element: XmlElement, inner_xml: str, values: Mapping[str, str]) -> Edit:
    """An element with other content and attributes."""
    tag = set_attributes(get_slice(text, element.start, element.content_start), values)
    if tag.endswith("/>"):
        return Edit(
            element.start, element.end, f"{tag[:-2].rstrip()}>{inner_xml}</{_get_qualified_name(text, element)}>"
        )
    return Edit(element.start, element.content_end, tag + inner_xml)


def serialize_content(content: InlineContent, newline: str) -> str:
    """A content as XML: words escaped, codes as they stand in the file."""
    return "".join(part.raw if isinstance(part, InlineCode) else _escape_text(part, newline) for part in content)


def _escape_text(text: str, newline: str) -> str:
    return escape(text, {"\r": "&#13;"}).replace("\n", newline)


def get_newline(text: FileText, element: XmlElement) -> str:
    """How lines end inside an element, which the parser does not tell."""
    return "\r\n" if b"\r\n" in text.utf8[element.content_start : element.content_end] else "\n"


def check_xml_chars(text: str) -> str:
    found = _INVALID_XML_CHAR.search(text)
    return f"its translation has {found[0]!r}, which XML cannot hold" if found else ""


# Markup inside of a text.


@dataclass(frozen=True, kw_only=True)
class InlineTags:
    """What the inline elements of a format are."""

    spans: frozenset[str]  # that text stands in
    openers: frozenset[str]  # native code that begins something, and what ends it
    closers: frozenset[str]
    standalone: frozenset[str]
    get_pair_id: Callable[[XmlElement], str]  # what a beginning and its end have in common
    is_protected: Callable[[XmlElement], bool]  # a span whose text must not be translated
    is_break: Callable[[XmlElement], bool]  # ends a sentence


def parse_content(text: FileText, element: XmlElement, inline: InlineTags) -> tuple[InlineContent, str]:
    """The content of a segment, and what makes it unfit to be translated, in few words."""
    try:
        return tuple(_parse_parts(text, element, inline)), ""
    except _UnsupportedMarkup as unfit:
        return (element.get_text(),), str(unfit)


class _UnsupportedMarkup(Exception):
    """Markup that cannot be carried over."""


def _parse_parts(text: FileText, element: XmlElement, inline: InlineTags) -> Iterator[str | InlineCode]:
    for child in element.children:
        if isinstance(child, str):
            yield child
        elif child.tag in inline.spans and not inline.is_protected(child):
            breaks, pair = inline.is_break(child), f"span {child.start}"
            yield InlineCode("", get_slice(text, child.start, child.content_start), "open", pair, breaks)
            yield from _parse_parts(text, child, inline)
            yield InlineCode("", get_slice(text, child.content_end, child.end), "close", pair, breaks)
        else:
            yield _parse_code(text, child, inline)


def _parse_code(text: FileText, child: XmlElement, inline: InlineTags) -> InlineCode:
    if child.tag not in inline.spans | inline.openers | inline.closers | inline.standalone:
        raise _UnsupportedMarkup(f"it holds <{_get_qualified_name(text, child)}>")
    if _has_subflow(child):
        raise _UnsupportedMarkup("it holds text inside of markup (<sub>)")
    role = "open" if child.tag in inline.openers else "close" if child.tag in inline.closers else "alone"
    raw = get_slice(text, child.start, child.end)
    return InlineCode("", raw, role, inline.get_pair_id(child) if role != "alone" else "", inline.is_break(child))  # type: ignore[arg-type]


def _has_subflow(element: XmlElement) -> bool:
    return any(isinstance(child, XmlElement) and child.tag == "sub" for child in element.children)
