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

from attent.data.fill.parts import BOMS, Code, Content, Edit, FillError, Text, opened
from attent.data.pairs import CorpusError
from attent.data.readers import safe_xml, tags

_OPEN = re.compile(rb"<[^\s/>]+(?:\s+[^\s=]+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*\s*/?>")
_ATTRIBUTE = re.compile(r"\s([^\s=]+)\s*=\s*(\"[^\"]*\"|'[^']*')")
_DECLARED = re.compile(rb"<\?xml\s[^>]*?encoding\s*=\s*[\"']([A-Za-z][A-Za-z0-9._-]*)")
_SPACE_BEFORE = re.compile(rb"(?:\r?\n)?[ \t]*\Z")
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONGEST_INDENT = 200


@dataclass
class Element:
    """An element: `<a b="c">` from start to inner, what is in it up to outer, `</a>` up to end."""

    tag: str  # "" for one of another namespace
    attributes: Mapping[str, str]
    line: int
    start: int
    inner: int
    outer: int = 0
    end: int = 0
    children: list[Element | str] = field(default_factory=list)
    has_notes: bool = False  # comments and the like in it

    def all(self, *names: str) -> list[Element]:
        """Its direct children of these names."""
        return [child for child in self.children if isinstance(child, Element) and child.tag in names]

    def first(self, name: str) -> Element | None:
        return next(iter(self.all(name)), None)

    def words(self) -> str:
        """All text in it."""
        return "".join(child if isinstance(child, str) else child.words() for child in self.children)


Found = Callable[[Element, Sequence[Element]], None]


class _Vetted(safe_xml.Document):
    """A document of which only the safety and the root matter."""

    codes = frozenset()

    def __init__(self, name: str, root: str) -> None:
        super().__init__(name, tags.ANY)
        self.root = root  # type: ignore[misc]  # one class for both formats

    def opened(self, tag: str, attributes: Mapping[str, str], line: int) -> bool:
        return False

    def segment(self, tag: str, text: str | None) -> None: ...

    def closed(self, tag: str) -> None: ...

    def finished(self) -> None: ...


def text_of(content: bytes, name: str, root: str) -> Text:
    """The text of a safe XML file, in whatever encoding it says."""
    try:
        for _ in safe_xml.parse([content], _Vetted(name, root)):
            pass
    except CorpusError as error:
        raise FillError(str(error)) from None
    return opened(content, name, _encoding(content))


def _encoding(content: bytes) -> str:
    if content.startswith(tuple(BOMS)):
        return "utf-8"
    if content[:2] in (b"<\0", b"\0<"):
        return "utf-16-le" if content[:1] == b"<" else "utf-16-be"
    declared = _DECLARED.match(content)
    return codecs.lookup(declared[1].decode()).name if declared else "utf-8"


def read(text: Text, wanted: frozenset[str], found: Found) -> None:
    """Every element of the wanted names, once it is whole, with those that it stands in."""
    parser = expat.ParserCreate(encoding="utf-8", namespace_separator=" ")
    parser.buffer_text = True
    reading = _Reading(parser, text.utf8, wanted, found)
    parser.StartElementHandler = reading.start
    parser.EndElementHandler = reading.end
    parser.CharacterDataHandler = reading.text
    parser.CommentHandler = reading.note
    parser.ProcessingInstructionHandler = reading.note
    try:
        parser.Parse(text.utf8, True)
    except expat.ExpatError as error:  # a name that is one in another encoding only
        what, where = expat.ErrorString(error.code), f"line {error.lineno:,}"
        raise FillError(f"{text.name} is not well-formed XML at {where} ({what}): correct it there") from None


class _Reading:
    def __init__(self, parser: expat.XMLParserType, raw: bytes, wanted: frozenset[str], found: Found) -> None:
        self.parser, self.raw, self.wanted, self.found = parser, raw, wanted, found
        self.path: list[Element] = []
        self.namespace = ""  # of the root, with the space behind it
        self.inside = 0  # how many open elements are in a wanted one, itself included

    def start(self, name: str, attributes: dict[str, str]) -> None:
        namespace, space, tag = name.rpartition(" ")
        if not self.path:
            self.namespace = namespace + space
        at = self.parser.CurrentByteIndex
        tag_text = _OPEN.match(self.raw, at)
        assert tag_text is not None, "expat finds only whole tags"
        local = tag if namespace + space == self.namespace else ""
        element = Element(local, attributes, self.parser.CurrentLineNumber, at, tag_text.end())
        if self.inside:
            self.path[-1].children.append(element)
        self.inside += bool(self.inside) or local in self.wanted
        self.path.append(element)

    def end(self, _: str) -> None:
        element = self.path.pop()
        if self.raw[element.inner - 2 : element.inner] == b"/>":
            element.outer = element.end = element.inner
        else:
            element.outer = self.parser.CurrentByteIndex
            element.end = self.raw.index(b">", element.outer) + 1
        self.inside -= bool(self.inside)
        if element.tag in self.wanted and not self.inside:
            self.found(element, self.path)

    def text(self, data: str) -> None:
        if self.inside:
            self.path[-1].children.append(data)

    def note(self, *_: str) -> None:
        if self.path:
            self.path[-1].has_notes = True


# What is written.


def slice_of(text: Text, start: int, end: int) -> str:
    return text.utf8[start:end].decode()


def named(text: Text, like: Element, name: str) -> str:
    """A name with the prefix that another element has in the file: `xlf:target` beside `xlf:source`."""
    prefix, colon, _ = _name(text, like).rpartition(":")
    return prefix + colon + name


def _name(text: Text, element: Element) -> str:
    """The name of an element as the file writes it."""
    return slice_of(text, element.start + 1, element.inner).split(None, 1)[0].rstrip("/>")


def with_attributes(tag: str, values: Mapping[str, str]) -> str:
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


def indent(text: Text, element: Element) -> str:
    """The line break and space before an element, for one that comes to stand beside it."""
    found = _SPACE_BEFORE.search(text.utf8, max(0, element.start - _LONGEST_INDENT), element.start)
    return found[0].decode() if found and b"\n" in found[0] else ""


def refilled(text: Text, element: Element, inside: str, values: Mapping[str, str]) -> Edit:
    """An element with other content and attributes."""
    tag = with_attributes(slice_of(text, element.start, element.inner), values)
    if tag.endswith("/>"):
        return Edit(element.start, element.end, f"{tag[:-2].rstrip()}>{inside}</{_name(text, element)}>")
    return Edit(element.start, element.outer, tag + inside)


def written(content: Content, newline: str) -> str:
    """A content as XML: words escaped, codes as they stand in the file."""
    return "".join(part.raw if isinstance(part, Code) else _escaped(part, newline) for part in content)


def _escaped(text: str, newline: str) -> str:
    return escape(text, {"\r": "&#13;"}).replace("\n", newline)


def newline_of(text: Text, element: Element) -> str:
    """How lines end inside an element, which the parser does not tell."""
    return "\r\n" if b"\r\n" in text.utf8[element.inner : element.outer] else "\n"


def objection(text: str) -> str:
    found = _NOT_XML.search(text)
    return f"its translation has {found[0]!r}, which XML cannot hold" if found else ""


# Markup inside of a text.


@dataclass(frozen=True, kw_only=True)
class Inline:
    """What the inline elements of a format are."""

    spans: frozenset[str]  # that text stands in
    opens: frozenset[str]  # native code that begins something, and what ends it
    closes: frozenset[str]
    alone: frozenset[str]
    pair: Callable[[Element], str]  # what a beginning and its end have in common
    protected: Callable[[Element], bool]  # a span whose text must not be translated
    breaks: Callable[[Element], bool]  # ends a sentence


def content_of(text: Text, element: Element, inline: Inline) -> tuple[Content, str]:
    """The content of a segment, and what makes it unfit to be translated, in few words."""
    try:
        return tuple(_parts(text, element, inline)), ""
    except _Unfit as unfit:
        return (element.words(),), str(unfit)


class _Unfit(Exception):
    """Markup that cannot be carried over."""


def _parts(text: Text, element: Element, inline: Inline) -> Iterator[str | Code]:
    for child in element.children:
        if isinstance(child, str):
            yield child
        elif child.tag in inline.spans and not inline.protected(child):
            breaks, pair = inline.breaks(child), f"span {child.start}"
            yield Code("", slice_of(text, child.start, child.inner), "open", pair, breaks)
            yield from _parts(text, child, inline)
            yield Code("", slice_of(text, child.outer, child.end), "close", pair, breaks)
        else:
            yield _code(text, child, inline)


def _code(text: Text, child: Element, inline: Inline) -> Code:
    if child.tag not in inline.spans | inline.opens | inline.closes | inline.alone:
        raise _Unfit(f"it holds <{_name(text, child)}>")
    if _has_text(child):
        raise _Unfit("it holds text inside of markup (<sub>)")
    role = "open" if child.tag in inline.opens else "close" if child.tag in inline.closes else "alone"
    raw = slice_of(text, child.start, child.end)
    return Code("", raw, role, inline.pair(child) if role != "alone" else "", inline.breaks(child))  # type: ignore[arg-type]


def _has_text(element: Element) -> bool:
    return any(isinstance(child, Element) and child.tag == "sub" for child in element.children)
