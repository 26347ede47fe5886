"""XML of any size, read safely: blocks go into expat, and what a format makes of its elements comes out.

Nothing is fetched and no entity is ever expanded: a document type that declares something is refused, one that only
names a file elsewhere is passed over, and a reference that only such a file could explain is an error. Depth, the
length of a tag and the length of a text have limits, so that memory stays flat. Elements and their meaning are left
to `tmx` and `xliff`, each a `Document`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import ClassVar
from xml.parsers import expat

from attent.data.formats.streams import MAX_LINE_BYTES, DamagedFileError
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair

MAX_DEPTH = 256  # elements inside each other; real files have about ten
MAX_TAG_BYTES = 2**22  # bytes of one tag or comment: expat must hold it whole
XML_LANG = "http://www.w3.org/XML/1998/namespace lang"
_TRUNCATION_ERRORS = {
    expat.errors.codes[message]
    for message in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
        expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
    )
}


class XmlHandler(ABC):
    """What a format makes of its elements. `parse` calls it, and collects the words of segments on the way."""

    root_tag: ClassVar[str]
    native_code_tags: ClassVar[frozenset[str]]  # inline elements that hold markup of another program: no words

    def __init__(self, name: str, languages: LanguagePair) -> None:
        self.name, self.languages = name, languages
        self.items: list[Pair | BadLine] = []
        self.open_tags: list[str] = []  # the open elements, "" for those of another namespace

    @abstractmethod
    def start_element(self, tag: str, attributes: Mapping[str, str], line: int) -> bool:
        """An element begins; True if it is a segment whose words are wanted. `path` does not hold it yet."""

    @abstractmethod
    def add_segment(self, tag: str, text: str | None) -> None:
        """The words of a segment, None if there are too many of them."""

    @abstractmethod
    def end_element(self, tag: str) -> None:
        """An element that is no segment ends."""

    @abstractmethod
    def finish(self) -> None:
        """The end of the file: the place to say that nothing in it answered."""

    def get_inline_text(self, tag: str, attributes: Mapping[str, str]) -> str:
        """The text that an element inside a segment stands for by itself, whatever its content."""
        return ""


def parse_xml(content: Iterable[bytes], handler: XmlHandler) -> Iterator[Pair | BadLine]:
    """Every unit of the document; when the file turns out to be broken, those before that place and then the error."""
    parser = expat.ParserCreate(namespace_separator=" ")
    _ExpatAdapter(parser, handler)
    fed = 0
    try:
        for block in content:
            parser.Parse(block, False)
            fed += len(block)
            if fed - parser.CurrentByteIndex > MAX_TAG_BYTES:
                raise CorpusError(
                    f"{handler.name} has a tag or comment of over 4 MiB {_format_position(parser)}: shorten it"
                )
            yield from _pop_items(handler)
        parser.Parse(b"", True)
        handler.finish()
        yield from _pop_items(handler)
    except (expat.ExpatError, ValueError, LookupError) as error:
        yield from _pop_items(handler)
        raise _explain_error(error, handler.name, parser, fed) from None


def read_languages(content: Iterable[bytes], handler: XmlHandler) -> LanguagePair:
    """The languages that a document has settled on when its first unit ends."""
    with suppress(CorpusError):
        next(parse_xml(content, handler), None)
    return handler.languages


def _pop_items(handler: XmlHandler) -> list[Pair | BadLine]:
    found, handler.items = handler.items, []
    return found


def _format_position(parser: expat.XMLParserType) -> str:
    return f"at line {parser.CurrentLineNumber:,}"


def _explain_error(error: Exception, name: str, parser: expat.XMLParserType, bytes_fed: int) -> CorpusError:
    if isinstance(error, DamagedFileError):
        return error.at_line(parser.CurrentLineNumber)
    if isinstance(error, CorpusError):
        return error
    if not isinstance(error, expat.ExpatError):  # Python's own words about an encoding
        return CorpusError(f"{name} is in an encoding that attent does not read in XML ({error}): save it as UTF-8")
    if error.code in _TRUNCATION_ERRORS:
        state = f"is cut short after line {error.lineno:,}" if bytes_fed else "is empty"
        return CorpusError(f"{name} {state}: fetch or copy it again")
    what, where = expat.ErrorString(error.code), f"line {error.lineno:,}, column {error.offset + 1:,}"
    return CorpusError(f"{name} is not well-formed XML at {where} ({what}): correct it there, or export it again")


class _ExpatAdapter:
    """Takes expat's events, keeps within the limits, and tells a document what it wants to know."""

    def __init__(self, parser: expat.XMLParserType, handler: XmlHandler) -> None:
        self.parser, self.handler = parser, handler
        self.namespace: str | None = None  # of the root, with the space behind it
        self.text_parts: list[str] | None = None  # of the segment that is open
        self.text_length = 0  # of these words
        self.segment_depth = 0  # of the segment
        self.code_depth = 0  # how deep inside of native code
        parser.buffer_text = True
        parser.StartElementHandler = self.on_start
        parser.EndElementHandler = self.on_end
        parser.CharacterDataHandler = self.on_text
        parser.StartDoctypeDeclHandler = self.on_doctype
        parser.EntityDeclHandler = self.on_entity
        parser.SkippedEntityHandler = self.on_skipped_entity

    def on_start(self, name: str, attributes: dict[str, str]) -> None:
        path = self.handler.open_tags
        tag = self._get_local_name(name) if path else self._check_root(name)
        if len(path) >= MAX_DEPTH:
            raise self._make_error(f"has over {MAX_DEPTH} elements inside each other")
        if self.text_parts is not None:
            self._add_inline(tag, attributes)
        elif self.handler.start_element(tag, attributes, self.parser.CurrentLineNumber):
            self.text_parts, self.text_length, self.segment_depth, self.code_depth = [], 0, len(path), 0
        path.append(tag)

    def _add_inline(self, tag: str, attributes: dict[str, str]) -> None:
        self.on_text(self.handler.get_inline_text(tag, attributes))
        if self.code_depth or tag in self.handler.native_code_tags:
            self.code_depth += 1

    def on_end(self, _: str) -> None:
        tag = self.handler.open_tags.pop()
        if self.text_parts is None:
            self.handler.end_element(tag)
        elif len(self.handler.open_tags) == self.segment_depth:
            words, self.text_parts = self.text_parts, None
            self.handler.add_segment(tag, "".join(words) if self.text_length <= MAX_LINE_BYTES else None)
        elif self.code_depth:
            self.code_depth -= 1

    def on_text(self, data: str) -> None:
        if self.text_parts is not None and not self.code_depth:
            self.text_length += len(data)
            if self.text_length <= MAX_LINE_BYTES:
                self.text_parts.append(data)

    def _check_root(self, name: str) -> str:
        namespace, space, tag = name.rpartition(" ")
        self.namespace = namespace + space
        if tag != self.handler.root_tag:
            raise CorpusError(
                f"{self.handler.name} must begin with <{self.handler.root_tag}>, but begins with <{tag[:40]}>: "
                f"check that it is the file you meant"
            )
        return tag

    def _get_local_name(self, name: str) -> str:
        namespace, space, tag = name.rpartition(" ")
        return tag if namespace + space == self.namespace else ""

    def on_doctype(self, _name: str, _system: str | None, _public: str | None, has_declarations: int) -> None:
        if has_declarations:
            raise self._make_error("declares entities or the like in its DOCTYPE, which can be an attack")

    def on_entity(self, *_: object) -> None:
        raise self._make_error("declares an entity, which can be an attack")

    def on_skipped_entity(self, name: str, _is_parameter: int) -> None:
        raise self._make_error(f"uses &{name}; without saying what it is")

    def _make_error(self, problem: str) -> CorpusError:
        return CorpusError(
            f"{self.handler.name} {problem} ({_format_position(self.parser)}): take that out, or export it again"
        )
