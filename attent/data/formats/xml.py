"""Safe streaming XML parser: yields the units of a document as small element trees.

Nothing is fetched and no entity is expanded: a DOCTYPE with declarations is refused, an external one is ignored, and a
reference to an undeclared entity is an error. Depth, tag length and unit size are limited, so that memory stays flat.
With the document in memory, elements also get their byte spans, so that `Edit`s can change single elements.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, NoReturn
from xml.parsers import expat
from xml.sax.saxutils import escape

from attent.data.formats.streams import MAX_LINE_BYTES, DamagedFileError
from attent.data.formats.units import Edit, FileText, InlineCode, InlineContent, Role, ScanResult, decode_file
from attent.data.pairs import ANY_LANGUAGES, BadLine, CorpusError, LanguagePair, Pair

MAX_DEPTH = 256  # nested elements; real files have about ten
MAX_TAG_BYTES = 2**22  # of a tag or comment, which expat must hold in memory
MAX_UNIT_CHARS = 2**22  # of all texts and tags of a unit
_PARSE_BYTES = 2**14  # parsed at a time: the trees of their units are in memory
XML_LANG = "http://www.w3.org/XML/1998/namespace lang"
_TRUNCATION_ERRORS = {
    expat.errors.codes[getattr(expat.errors, f"XML_ERROR_{name}")]
    for name in ("NO_ELEMENTS", "UNCLOSED_TOKEN", "PARTIAL_CHAR", "UNCLOSED_CDATA_SECTION")
}
_START_TAG = re.compile(rb"<[^\s/>]+(?:\s+[^\s=]+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*\s*/?>")
_ATTRIBUTE = re.compile(r"\s([^\s=]+)\s*=\s*(\"[^\"]*\"|'[^']*')")
_DECLARED_ENCODING = re.compile(rb"<\?xml\s[^>]*?encoding\s*=\s*[\"']([A-Za-z][A-Za-z0-9._-]*)")
_PRECEDING_SPACE = re.compile(rb"(?:\r?\n)?[ \t]*\Z")
_INVALID_XML_CHAR = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MAX_INDENT_BYTES = 200


@dataclass(slots=True, eq=False)
class XmlElement:
    """An element. Its byte spans: `<a b="c">` from `start` to `content_start`, `</a>` from `content_end` to `end`."""

    tag: str  # "" in a foreign namespace
    attributes: Mapping[str, str]
    line: int
    parent: XmlElement | None = None  # None inside a unit
    start: int = 0
    content_start: int = 0
    content_end: int = 0
    end: int = 0
    children: list[XmlElement | str] = field(default_factory=list)
    has_comments: bool = False
    is_truncated: bool = False  # a unit above MAX_UNIT_CHARS

    @property
    def elements(self) -> list[XmlElement]:
        return [child for child in self.children if isinstance(child, XmlElement)]

    def find_children(self, *names: str) -> list[XmlElement]:
        return [child for child in self.elements if child.tag in names]

    def find_child(self, name: str) -> XmlElement | None:
        return next(iter(self.find_children(name)), None)

    def get_text(self) -> str:
        """Return all text, that of native codes too."""
        return "".join(child if isinstance(child, str) else child.get_text() for child in self.children)

    def get_ancestors(self) -> list[XmlElement]:
        """Return the elements around it, from its parent to the root."""
        return [] if self.parent is None else [self.parent, *self.parent.get_ancestors()]


@dataclass(frozen=True, kw_only=True)
class XmlSchema:
    root: str
    heads: frozenset[str] = frozenset()  # reported at their start tag, without children
    units: frozenset[str]  # reported when complete
    spans: frozenset[str] = frozenset()  # inline elements that contain text
    openers: frozenset[str] = frozenset()  # native codes that begin and end a span
    closers: frozenset[str] = frozenset()
    standalone: frozenset[str] = frozenset()
    get_pair_id: Callable[[XmlElement], str] = lambda element: str(element.start)  # common to an opener and its closer
    get_inline_text: Callable[[XmlElement], str] = lambda _: ""  # space or character that an element stands for
    is_protected: Callable[[XmlElement], bool] = lambda _: False  # a span that is not translated
    is_break: Callable[[XmlElement], bool] = lambda _: False  # ends a sentence

    def matches_head(self, text: str) -> bool:
        """True if a file that begins with a text has the root element."""
        return text.startswith("<") and re.search(rf"<(?:[\w.-]+:)?{self.root}[\s>/]", text) is not None

    @cached_property
    def codes(self) -> frozenset[str]:
        return self.openers | self.closers | self.standalone


def parse_xml(content: Iterable[bytes], name: str, schema: XmlSchema, raw: bytes | None = None) -> Iterator[XmlElement]:
    """Yield each head element and each unit. In a malformed file those before the error are yielded first.

    With the whole document in UTF-8 as `raw`, elements get their byte spans, and no unit is too large.
    """
    parser = expat.ParserCreate(encoding="utf-8" if raw is not None else None, namespace_separator=" ")
    builder = _TreeBuilder(parser, name, schema, raw)
    bytes_fed = 0
    try:
        for part in (block[i : i + _PARSE_BYTES] for block in content for i in range(0, len(block), _PARSE_BYTES)):
            parser.Parse(part, False)
            bytes_fed += len(part)
            if bytes_fed - parser.CurrentByteIndex > MAX_TAG_BYTES:
                line = f"{parser.CurrentLineNumber:,}"
                raise CorpusError(f"{name} has a tag or comment of over 4 MiB at line {line}: shorten it")
            yield from builder.pop_elements()
        parser.Parse(b"", True)
        yield from builder.pop_elements()
    except (expat.ExpatError, ValueError, LookupError) as error:
        yield from builder.pop_elements()
        raise _explain_error(error, name, parser, bytes_fed) from None


def _explain_error(error: Exception, name: str, parser: expat.XMLParserType, bytes_fed: int) -> CorpusError:
    if isinstance(error, DamagedFileError):
        return error.at_line(parser.CurrentLineNumber)
    if isinstance(error, CorpusError):
        return error
    if not isinstance(error, expat.ExpatError):  # Python's message about an encoding
        return CorpusError(f"{name} is in an encoding that attent does not read in XML ({error}): save it as UTF-8")
    if error.code in _TRUNCATION_ERRORS:
        state = f"is cut short after line {error.lineno:,}" if bytes_fed else "is empty"
        return CorpusError(f"{name} {state}: fetch or copy it again")
    problem, position = expat.ErrorString(error.code), f"line {error.lineno:,}, column {error.offset + 1:,}"
    return CorpusError(f"{name} is not well-formed XML at {position} ({problem}): correct it there, or export it again")


class _TreeBuilder:
    """Builds the trees of units from expat's events, within the limits."""

    def __init__(self, parser: expat.XMLParserType, name: str, schema: XmlSchema, raw: bytes | None) -> None:
        self.parser, self.name, self.schema, self.raw = parser, name, schema, raw
        self.open_elements: list[XmlElement] = []
        self.namespace = ""  # of the root, with the separating space
        self.unit: XmlElement | None = None
        self.complete: list[XmlElement] = []
        parser.buffer_text = True
        parser.StartElementHandler = self.on_start
        parser.EndElementHandler = self.on_end
        parser.CharacterDataHandler = self.on_text
        parser.CommentHandler = parser.ProcessingInstructionHandler = self.on_comment
        parser.StartDoctypeDeclHandler = self.on_doctype
        parser.EntityDeclHandler = lambda *_: self._fail("declares an entity, which can be an attack")
        parser.SkippedEntityHandler = lambda name, _: self._fail(f"uses &{name}; without declaring it")

    def pop_elements(self) -> list[XmlElement]:
        elements, self.complete = self.complete, []
        return elements

    def on_start(self, name: str, attributes: dict[str, str]) -> None:
        namespace, space, tag = name.rpartition(" ")
        if not self.open_elements:
            self.namespace = namespace + space
            if tag != self.schema.root:
                problem = f"must begin with <{self.schema.root}>, but begins with <{tag[:40]}>"
                raise CorpusError(f"{self.name} {problem}: check the file")
        if len(self.open_elements) >= MAX_DEPTH:
            self._fail(f"has over {MAX_DEPTH} elements inside each other")
        tag = tag if namespace + space == self.namespace else ""
        element = XmlElement(tag, attributes, self.parser.CurrentLineNumber)
        if self.raw is not None:
            element.start = self.parser.CurrentByteIndex
            start_tag = _START_TAG.match(self.raw, element.start)
            assert start_tag is not None, "expat reports only whole tags"
            element.content_start = start_tag.end()
        if self.unit is None or (self.raw is None and tag in self.schema.units):  # an unclosed unit is abandoned
            element.parent = self.open_elements[-1] if self.open_elements else None
            if tag in self.schema.units:
                self.unit, self.unit_chars = element, 0
            elif tag in self.schema.heads:
                self.complete.append(element)
        else:
            self._append(element, 64 + sum(map(len, attributes.values())))
        self.open_elements.append(element)

    def _append(self, child: XmlElement | str, size: int) -> None:
        assert self.unit is not None
        self.unit_chars += size
        if self.raw is None and self.unit_chars > MAX_UNIT_CHARS:
            self.unit.is_truncated = True
        else:
            self.open_elements[-1].children.append(child)

    def on_end(self, _: str) -> None:
        element = self.open_elements.pop()
        if self.raw is not None:
            if self.raw[element.content_start - 2 : element.content_start] == b"/>":
                element.content_end = element.end = element.content_start
            else:
                element.content_end = self.parser.CurrentByteIndex
                element.end = self.raw.index(b">", element.content_end) + 1
        if element is self.unit:
            self.unit = None
            self.complete.append(element)

    def on_text(self, data: str) -> None:
        if self.unit is not None:
            self._append(data, len(data))

    def on_comment(self, *_: str) -> None:
        if self.open_elements:
            self.open_elements[-1].has_comments = True

    def on_doctype(self, _name: str, _system: str | None, _public: str | None, has_declarations: int) -> None:
        if has_declarations:
            self._fail("declares entities or the like in its DOCTYPE, which can be an attack")

    def _fail(self, problem: str) -> NoReturn:
        line = f"{self.parser.CurrentLineNumber:,}"
        raise CorpusError(f"{self.name} {problem} (at line {line}): remove that, or export it again")


class UnitReader:
    """Reads the pairs of a file. Subclasses read its heads, which declare languages, and its units."""

    schema: ClassVar[XmlSchema]

    def __init__(self, name: str, requested: LanguagePair) -> None:
        self.name, self.requested = name, requested
        self.languages = requested  # open sides are filled by the first that the file declares
        self.seen_languages: set[str] = set()
        self.has_match = False

    def read(self, content: Iterable[bytes]) -> Iterator[Pair | BadLine]:
        for element in parse_xml(content, self.name, self.schema):
            if element.tag in self.schema.heads:
                self.read_head(element)
            else:
                yield from self.read_unit(element)
        if self.seen_languages and not self.has_match:
            raise self.requested.make_mismatch_error(self.name, self.seen_languages)

    def read_head(self, head: XmlElement) -> None:
        raise NotImplementedError

    def read_unit(self, unit: XmlElement) -> Iterator[Pair | BadLine]:
        raise NotImplementedError

    @classmethod
    def read_languages(cls, content: Iterable[bytes], name: str) -> LanguagePair:
        """Return the languages of the first unit."""
        reader = cls(name, ANY_LANGUAGES)
        next(reader.read(content), None)
        return reader.languages


def extract_text(segment: XmlElement | None, schema: XmlSchema) -> str | None:
    """Return the text of a segment without native codes; None if it is too long."""
    text = "".join(_extract_parts(segment, schema)) if segment else ""
    return text if len(text) <= MAX_LINE_BYTES else None


def _extract_parts(element: XmlElement, schema: XmlSchema) -> Iterator[str]:
    for child in element.children:
        if isinstance(child, str):
            yield child
        else:
            yield schema.get_inline_text(child)
            if child.tag != "sub" and child.tag not in schema.codes:
                yield from _extract_parts(child, schema)


# ---- documents in memory ---------------------------------------------------------------------------------------------


def decode_xml(content: bytes, name: str, schema: XmlSchema) -> FileText:
    """Check an XML file for well-formedness and attacks, and decode it."""
    for _ in parse_xml([content], name, replace(schema, heads=frozenset(), units=frozenset())):
        pass
    declared = _DECLARED_ENCODING.match(content)
    encoding = codecs.lookup(declared[1].decode()).name if declared else "utf-8"
    if content[:2] in (b"<\0", b"\0<"):
        encoding = "utf-16-le" if content[:1] == b"<" else "utf-16-be"
    return decode_file(content, name, encoding)


def scan_elements(text: FileText, schema: XmlSchema) -> Iterator[XmlElement]:
    """Yield each head element and each unit, with byte spans into `text.utf8`."""
    return parse_xml([text.utf8], text.name, schema, text.utf8)


def make_scan_result(text: FileText) -> ScanResult:
    return ScanResult(text=text, check_text=check_xml_chars, encoding_errors="xmlcharrefreplace", has_labels=True)


def get_inner_xml(text: FileText, element: XmlElement) -> str:
    return get_slice(text, element.content_start, element.content_end)


def get_slice(text: FileText, start: int, end: int) -> str:
    return text.utf8[start:end].decode()


def make_qualified_name(text: FileText, sibling: XmlElement, name: str) -> str:
    """Return a name with the prefix that a sibling has in the file: `xlf:target` for `xlf:source`."""
    prefix, colon, _ = _get_qualified_name(text, sibling).rpartition(":")
    return prefix + colon + name


def _get_qualified_name(text: FileText, element: XmlElement) -> str:
    return get_slice(text, element.start + 1, element.content_start).split(None, 1)[0].rstrip("/>")


def set_attributes(tag: str, values: Mapping[str, str]) -> str:
    """Return a start tag with these attributes replaced or appended; all else is unchanged."""
    for name, value in values.items():
        match = next((match for match in _ATTRIBUTE.finditer(tag) if match[1] == name), None)
        if match:
            tag = f'{tag[: match.start(2)]}"{value}"{tag[match.end(2) :]}'
        else:
            close = re.search(r"\s*/?>\Z", tag)
            assert close is not None, "it is a tag"
            tag = f'{tag[: close.start()]} {name}="{value}"{close[0]}'
    return tag


def get_indent(text: FileText, element: XmlElement) -> str:
    """Return the line break and space before an element, for a new sibling; "" if it is not on a line of its own."""
    match = _PRECEDING_SPACE.search(text.utf8, max(0, element.start - _MAX_INDENT_BYTES), element.start)
    return match[0].decode() if match and b"\n" in match[0] else ""


def replace_content(text: FileText, element: XmlElement, inner_xml: str, values: Mapping[str, str]) -> Edit:
    """Return the edit that gives an element new content and attributes."""
    tag = set_attributes(get_slice(text, element.start, element.content_start), values)
    if tag.endswith("/>"):
        end_tag = f"</{_get_qualified_name(text, element)}>"
        return Edit(element.start, element.end, f"{tag[:-2].rstrip()}>{inner_xml}{end_tag}")
    return Edit(element.start, element.content_end, tag + inner_xml)


def serialize_content(text: FileText, element: XmlElement, content: InlineContent) -> str:
    """Return content as XML with the line endings of `element`, which the parser does not report."""
    newline = "\r\n" if b"\r\n" in text.utf8[element.content_start : element.content_end] else "\n"
    escaped = (
        part.raw if isinstance(part, InlineCode) else escape(part, {"\r": "&#13;"}).replace("\n", newline)
        for part in content
    )
    return "".join(escaped)


def check_xml_chars(text: str) -> str:
    match = _INVALID_XML_CHAR.search(text)
    return f"its translation has {match[0]!r}, which XML cannot contain" if match else ""


def replace_invalid_chars(text: str) -> str:
    return _INVALID_XML_CHAR.sub("\ufffd", text)


class _UnsupportedMarkup(Exception):
    """Markup that cannot be carried over to the translation."""


def parse_content(text: FileText, element: XmlElement, schema: XmlSchema) -> tuple[InlineContent, str]:
    """Return the content of a segment, and the reason if it cannot be translated."""
    try:
        return tuple(_parse_parts(text, element, schema)), ""
    except _UnsupportedMarkup as error:
        return (element.get_text(),), str(error)


def _parse_parts(text: FileText, element: XmlElement, schema: XmlSchema) -> Iterator[str | InlineCode]:
    for child in element.children:
        if isinstance(child, str):
            yield child
        elif child.tag in schema.spans and not schema.is_protected(child):
            is_break, pair_id = schema.is_break(child), f"span {child.start}"
            yield InlineCode("", get_slice(text, child.start, child.content_start), "open", pair_id, is_break)
            yield from _parse_parts(text, child, schema)
            yield InlineCode("", get_slice(text, child.content_end, child.end), "close", pair_id, is_break)
        else:
            yield _parse_code(text, child, schema)


def _parse_code(text: FileText, child: XmlElement, schema: XmlSchema) -> InlineCode:
    if child.tag not in schema.spans | schema.codes:
        raise _UnsupportedMarkup(f"it contains <{_get_qualified_name(text, child)}>")
    if child.find_children("sub"):
        raise _UnsupportedMarkup("it contains text inside markup (<sub>)")
    role: Role = "open" if child.tag in schema.openers else "close" if child.tag in schema.closers else "standalone"
    pair_id = "" if role == "standalone" else schema.get_pair_id(child)
    return InlineCode("", get_slice(text, child.start, child.end), role, pair_id, schema.is_break(child))
