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

from attent.data.pairs import Bad, CorpusError, Languages, Pair
from attent.data.readers.files import LONGEST, Damaged

DEEPEST = 256  # elements inside each other; real files have about ten
LONGEST_TAG = 2**22  # bytes of one tag or comment: expat must hold it whole
XML_LANG = "http://www.w3.org/XML/1998/namespace lang"
_CUT_SHORT = {
    expat.errors.codes[message]
    for message in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
        expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
    )
}


class Document(ABC):
    """What a format makes of its elements. `parse` calls it, and collects the words of segments on the way."""

    root: ClassVar[str]
    codes: ClassVar[frozenset[str]]  # inline elements that hold markup of another program: no words

    def __init__(self, name: str, languages: Languages) -> None:
        self.name, self.languages = name, languages
        self.found: list[Pair | Bad] = []
        self.path: list[str] = []  # the open elements, "" for those of another namespace

    @abstractmethod
    def opened(self, tag: str, attributes: Mapping[str, str], line: int) -> bool:
        """An element begins; True if it is a segment whose words are wanted. `path` does not hold it yet."""

    @abstractmethod
    def segment(self, tag: str, text: str | None) -> None:
        """The words of a segment, None if there are too many of them."""

    @abstractmethod
    def closed(self, tag: str) -> None:
        """An element that is no segment ends."""

    @abstractmethod
    def finished(self) -> None:
        """The end of the file: the place to say that nothing in it answered."""

    def inline(self, tag: str, attributes: Mapping[str, str]) -> str:
        """The text that an element inside a segment stands for by itself, whatever its content."""
        return ""


def parse(content: Iterable[bytes], document: Document) -> Iterator[Pair | Bad]:
    """Every unit of the document; when the file turns out to be broken, those before that place and then the error."""
    parser = expat.ParserCreate(namespace_separator=" ")
    _Events(parser, document)
    fed = 0
    try:
        for block in content:
            parser.Parse(block, False)
            fed += len(block)
            if fed - parser.CurrentByteIndex > LONGEST_TAG:
                raise CorpusError(f"{document.name} has a tag or comment of over 4 MiB {_at(parser)}: shorten it")
            yield from _taken(document)
        parser.Parse(b"", True)
        document.finished()
        yield from _taken(document)
    except (expat.ExpatError, ValueError, LookupError) as error:
        yield from _taken(document)
        raise _explained(error, document.name, parser, fed) from None


def languages(content: Iterable[bytes], document: Document) -> Languages:
    """The languages that a document has settled on when its first unit ends."""
    with suppress(CorpusError):
        next(parse(content, document), None)
    return document.languages


def _taken(document: Document) -> list[Pair | Bad]:
    found, document.found = document.found, []
    return found


def _at(parser: expat.XMLParserType) -> str:
    return f"at line {parser.CurrentLineNumber:,}"


def _explained(error: Exception, name: str, parser: expat.XMLParserType, fed: int) -> CorpusError:
    if isinstance(error, Damaged):
        return error.after(parser.CurrentLineNumber)
    if isinstance(error, CorpusError):
        return error
    if not isinstance(error, expat.ExpatError):  # Python's own words about an encoding
        return CorpusError(f"{name} is in an encoding that attent does not read in XML ({error}): save it as UTF-8")
    if error.code in _CUT_SHORT:
        state = f"is cut short after line {error.lineno:,}" if fed else "is empty"
        return CorpusError(f"{name} {state}: fetch or copy it again")
    what, where = expat.ErrorString(error.code), f"line {error.lineno:,}, column {error.offset + 1:,}"
    return CorpusError(f"{name} is not well-formed XML at {where} ({what}): correct it there, or export it again")


class _Events:
    """Takes expat's events, keeps within the limits, and tells a document what it wants to know."""

    def __init__(self, parser: expat.XMLParserType, document: Document) -> None:
        self.parser, self.document = parser, document
        self.namespace: str | None = None  # of the root, with the space behind it
        self.words: list[str] | None = None  # of the segment that is open
        self.size = 0  # of these words
        self.depth = 0  # of the segment
        self.code = 0  # how deep inside of native code
        parser.buffer_text = True
        parser.StartElementHandler = self.start
        parser.EndElementHandler = self.end
        parser.CharacterDataHandler = self.text
        parser.StartDoctypeDeclHandler = self.doctype
        parser.EntityDeclHandler = self.entity
        parser.SkippedEntityHandler = self.skipped

    def start(self, name: str, attributes: dict[str, str]) -> None:
        path = self.document.path
        tag = self._local(name) if path else self._root(name)
        if len(path) >= DEEPEST:
            raise self._refusal(f"has over {DEEPEST} elements inside each other")
        if self.words is not None:
            self._inline(tag, attributes)
        elif self.document.opened(tag, attributes, self.parser.CurrentLineNumber):
            self.words, self.size, self.depth, self.code = [], 0, len(path), 0
        path.append(tag)

    def _inline(self, tag: str, attributes: dict[str, str]) -> None:
        self.text(self.document.inline(tag, attributes))
        if self.code or tag in self.document.codes:
            self.code += 1

    def end(self, _: str) -> None:
        tag = self.document.path.pop()
        if self.words is None:
            self.document.closed(tag)
        elif len(self.document.path) == self.depth:
            words, self.words = self.words, None
            self.document.segment(tag, "".join(words) if self.size <= LONGEST else None)
        elif self.code:
            self.code -= 1

    def text(self, data: str) -> None:
        if self.words is not None and not self.code:
            self.size += len(data)
            if self.size <= LONGEST:
                self.words.append(data)

    def _root(self, name: str) -> str:
        namespace, space, tag = name.rpartition(" ")
        self.namespace = namespace + space
        if tag != self.document.root:
            raise CorpusError(
                f"{self.document.name} must begin with <{self.document.root}>, but begins with <{tag[:40]}>: "
                f"check that it is the file you meant"
            )
        return tag

    def _local(self, name: str) -> str:
        namespace, space, tag = name.rpartition(" ")
        return tag if namespace + space == self.namespace else ""

    def doctype(self, _name: str, _system: str | None, _public: str | None, declares: int) -> None:
        if declares:
            raise self._refusal("declares entities or the like in its DOCTYPE, which can be an attack")

    def entity(self, *_: object) -> None:
        raise self._refusal("declares an entity, which can be an attack")

    def skipped(self, name: str, _is_parameter: int) -> None:
        raise self._refusal(f"uses &{name}; without saying what it is")

    def _refusal(self, problem: str) -> CorpusError:
        return CorpusError(f"{self.document.name} {problem} ({_at(self.parser)}): take that out, or export it again")
