"""HTML for pre-translation: the text of blocks, with inline tags as codes, and attributes that a person reads.

Scripts, styles, code, `translate="no"` and elements in other languages are unchanged. A tokenizer with the rules of the
HTML standard gives byte offsets, so that everything but the translated text stays as it is. Blocks need no tree: each
of their tags ends a run of text.
"""

import codecs
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from attent.data.formats import placeholders, units
from attent.data.formats.units import Edit, FileText, InlineCode, InlineContent, Role, ScanResult
from attent.data.pairs import CorpusError, LanguagePair
from attent.text.language_tags import is_same_language

_BLOCKS = frozenset(
    "address article aside audio base blockquote body br button canvas caption center col colgroup dd details "
    "dialog dir div dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header "
    "hgroup hr html iframe input label legend li link main menu meta nav noscript object ol optgroup option p param "
    "pre script search section select source style summary table tbody td template textarea tfoot th thead title tr "
    "track ul video".split()
)
_RAW_TEXT = frozenset("script style xmp iframe noembed noframes textarea title plaintext".split())  # contain no tags
_UNTRANSLATED = frozenset("code kbd math pre ruby samp svg tt var".split())
_NOT_FOREIGN = frozenset(  # end SVG and MathML
    "b big blockquote body br center code dd div dl dt em embed h1 h2 h3 h4 h5 h6 head hr i img li listing menu "
    "meta nobr ol p pre ruby s small span strong strike sub sup table tt u ul var".split()
)
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_CLOSED_BY_SIBLING = frozenset("li dt dd td th tr option optgroup tbody thead tfoot".split())  # end tags are optional
_ATTRIBUTES = frozenset(("alt", "title", "placeholder", "aria-label"))
_META_NAMES = frozenset(("description", "og:title", "og:description", "twitter:title", "twitter:description"))
_MAX_DEPTH = 200  # of elements whose end tags are looked for
_SPACE_CHARS = "\t\n\f\r "
_SPACE = rb"\t\n\f\r "
_TOKEN = re.compile(rb"<(?:(!--)|(!\[CDATA\[)|(/?)([A-Za-z][^%b/>]*+)|[!?/])" % _SPACE)
_COMMENT_END = re.compile(rb"(?:(?<=<!--)-?|--!?)>")
_ATTRIBUTE = re.compile(
    rb"""[%b/]*+(=?[^%b/>=]*+)(?:[%b]*+=[%b]*+("[^"]*+"|'[^']*+'|(?!["'])[^%b>]*+))?+"""
    % (_SPACE, _SPACE, _SPACE, _SPACE, _SPACE)
)
_UNCLOSED_QUOTE = re.compile(rb"""[%b]*+=[%b]*+["']""" % (_SPACE, _SPACE))
_HEAD = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*(?:<!doctype html|<html[\s>]|<(?:body|div|p)(?:\s[^<>]*)?>.*?</)",
    re.IGNORECASE | re.DOTALL,
)
_DECLARED_CHARSET = re.compile(rb"<meta\s[^>]*?charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_CHAR_REFERENCE = re.compile(r"&(?:#\d+|#[xX][0-9A-Fa-f]+|[A-Za-z][A-Za-z0-9]*);?")
_COLLAPSIBLE = re.compile(r"[\t\n\f\r ]+")


def matches_head(text: str) -> bool:
    """True if a file that begins with a text is a page, or a part of one."""
    return _HEAD.match(text) is not None


class Attribute(NamedTuple):
    """A value and its byte span, with its quotes."""

    value: str
    start: int
    end: int
    raw: str


@dataclass(frozen=True, kw_only=True)
class Token:
    """A text, a start or end tag, or other markup, with its byte span."""

    start: int
    end: int
    name: str = ""  # of a tag
    is_text: bool = False
    is_end: bool = False
    attributes: dict[str, Attribute] = field(default_factory=dict)
    is_empty: bool = False  # a void element, or `/>` in SVG and MathML

    @property
    def is_start(self) -> bool:
        return bool(self.name) and not self.is_end


def tokenize(data: bytes) -> Iterator[Token]:
    """Yield the tokens of a document in order, without gaps. What the end of the document cuts is other markup."""
    offset, text_start, foreign = 0, 0, list[str]()  # open elements of SVG and MathML
    while match := _TOKEN.search(data, offset):
        if match[0] == b"</" and match.end() == len(data):
            break
        if match[1]:
            closed = _COMMENT_END.search(data, match.end())
            end = closed.end() if closed else len(data)
        elif not match[4]:
            mark = b"]]>" if match[2] and foreign else b">"
            index = data.find(mark, match.end())
            end = len(data) if index < 0 else index + len(mark)
        else:
            end = -1
        if match.start() > text_start:
            yield Token(start=text_start, end=match.start(), is_text=True)
        if end >= 0:
            yield Token(start=match.start(), end=end)
        else:
            token = _parse_tag(data, match, bool(foreign))
            yield token
            end = token.end
            _track_foreign(token, foreign)
            if token.is_start and token.name in _RAW_TEXT and not foreign:
                closing = re.compile(rb"</%b(?=[%b/>])" % (token.name.encode(), _SPACE), re.IGNORECASE)
                closed = None if token.name == "plaintext" else closing.search(data, end)
                stop = closed.start() if closed else len(data)
                if stop > end:
                    yield Token(start=end, end=stop, is_text=token.name == "title" and closed is not None)
                end = stop
        offset = text_start = end
    if text_start < len(data):
        yield Token(start=text_start, end=len(data), is_text=True)


def _parse_tag(data: bytes, match: re.Match[bytes], is_foreign: bool) -> Token:
    attributes: dict[str, Attribute] = {}
    offset = match.end()
    while data[offset : offset + 1] != b">":
        matched = _ATTRIBUTE.match(data, offset)
        assert matched is not None, "it may be empty"
        offset = matched.end()
        if offset == len(data) or (matched[2] is None and _UNCLOSED_QUOTE.match(data, offset)):
            return Token(start=match.start(), end=len(data))
        if matched[1]:
            raw = (matched[2] or b"").decode("utf-8", "surrogateescape")
            name = matched[1].decode("utf-8", "surrogateescape").lower()
            value = html.unescape(raw[1:-1] if raw[:1] in ("'", '"') else raw)
            attributes.setdefault(name, Attribute(value, matched.start(2), matched.end(2), raw))
    name = match[4].decode("utf-8", "surrogateescape").lower()
    is_empty = name in _VOID or (data[offset - 1 : offset] == b"/" and (is_foreign or name in ("svg", "math")))
    return Token(
        start=match.start(),
        end=offset + 1,
        name=name,
        is_end=bool(match[3]),
        attributes={} if match[3] else attributes,
        is_empty=is_empty,
    )


def _track_foreign(token: Token, foreign: list[str]) -> None:
    """Update the open elements of SVG and MathML; a block of HTML ends them."""
    if token.is_end and token.name in foreign:
        del foreign[len(foreign) - 1 - foreign[::-1].index(token.name) :]
    elif token.is_start and not token.is_empty and (foreign or token.name in ("svg", "math")):
        if token.name in _NOT_FOREIGN and "foreignobject" not in foreign:
            foreign.clear()
        elif token.name in ("svg", "math", "foreignobject") and len(foreign) < _MAX_DEPTH:
            foreign.append(token.name)


# ---- pre-translation -------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Run:
    """The parts of a text between two blocks, and their byte spans."""

    parts: list[str | InlineCode] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    # To translate, by id of the code:
    attributes: dict[str, tuple[Token, list[Attribute]]] = field(default_factory=dict)
    open_tags: list[tuple[str, int]] = field(default_factory=list)  # names, and the index of the code


def scan_units(content: bytes, name: str, requested: LanguagePair) -> ScanResult:
    text = units.decode_file(content, name, _find_encoding(content, name))
    scanner = _HtmlScanner(text, requested)
    for token in tokenize(text.utf8):
        if not scanner.is_opaque(token):
            scanner.add_token(token)
    scanner.finish_run()
    return scanner.result


def _find_encoding(content: bytes, name: str) -> str:
    """Return the declared charset as browsers read it: Latin-1 is Windows-1252; a byte order mark overrides it."""
    match = None if content.startswith(tuple(units.BOMS)) else _DECLARED_CHARSET.search(content[:1024])
    label = match[1].decode("ascii", "replace") if match else "utf-8"
    try:
        encoding = codecs.lookup(label).name
    except LookupError:
        problem = f"is in charset {label[:40]}, which attent does not know"
        raise CorpusError(f"{name} {problem}: convert it to UTF-8") from None
    if encoding.startswith("utf-16"):
        return "utf-8"  # what declares it in ASCII is not UTF-16
    return "cp1252" if encoding in ("iso8859-1", "ascii") else encoding


class _HtmlScanner:
    def __init__(self, text: FileText, requested: LanguagePair) -> None:
        self.text, self.requested = text, requested
        self.result = ScanResult(
            text=text, check_text=lambda text: "its translation has a NUL character" if "\0" in text else ""
        )
        self.run = _Run()
        self.opaque: Token | None = None  # element that is not translated
        self.inside: list[str] = []  # elements that are open in it
        self.open_blocks: Counter[str] = Counter()  # around it
        self.line, self.line_offset = 1, 0

    # --- elements that are not translated ----------------------------------------------------------------------------

    def is_opaque(self, token: Token) -> bool:
        """True if a token is in an element that is not translated, whose end this may be."""
        if self.opaque is None:
            return self._start_opaque(token)
        name = self.opaque.name
        if token.is_start and not token.is_empty:
            is_sibling = name in _CLOSED_BY_SIBLING and token.name in _CLOSED_BY_SIBLING
            if _BLOCKS.isdisjoint(self.inside) and (is_sibling or (name == "p" and token.name in _BLOCKS)):
                self._end_opaque(token.start)
                return self._start_opaque(token)
            if len(self.inside) < _MAX_DEPTH:
                self.inside.append(token.name)
        elif token.is_end and token.name in self.inside:
            del self.inside[len(self.inside) - 1 - self.inside[::-1].index(token.name) :]
        elif token.is_end and token.name == name:
            self._end_opaque(token.end)
        elif token.is_end and self.open_blocks[token.name]:  # its end tag is missing
            self._end_opaque(token.start)
            return False
        return True

    def _start_opaque(self, token: Token) -> bool:
        if not token.is_start or token.is_empty:
            return False
        values = {name: attribute.value for name, attribute in token.attributes.items()}
        is_marked = _is_protected(values.get("translate", ""), values.get("class", ""))
        lang = values.get("lang") or values.get("xml:lang", "")
        if token.name in _UNTRANSLATED or is_marked or (lang and self._is_other_language(token, lang)):
            self.opaque, self.inside = token, []
            return True
        return False

    def _is_other_language(self, token: Token, lang: str) -> bool:
        """True if an element is not in the source language. The one that a page declares may be a mistake."""
        source, target = self.requested.source, self.requested.target
        is_source = source is not None and is_same_language(lang, source)
        if token.name != "html":
            return source is not None and not is_source
        if target is None:
            return False
        if is_same_language(lang, target) and not is_source:
            self.result.skip(self._count_lines(token.start), "", f"its lang attribute says that it is in {lang[:20]}")
            return True
        declared = [token.attributes[name] for name in ("lang", "xml:lang") if name in token.attributes]
        self.result.final_edits += [Edit(each.start, each.end, f'"{target}"') for each in declared if each.raw]
        return False

    def _end_opaque(self, end: int) -> None:
        assert self.opaque is not None
        start, name = self.opaque.start, self.opaque.name
        self.opaque = None
        if name in _BLOCKS:
            self.finish_run()
            return
        raw = self._decode(start, end)
        shown = _COLLAPSIBLE.sub(" ", html.unescape(re.sub(r"<[^<>]*>", "", raw))).strip()
        is_word = name not in ("svg", "math") and bool(shown)
        code = InlineCode(shown if is_word else "", raw, "standalone", str(start), is_word=is_word)
        self._add_code(code, start, end)

    # --- runs --------------------------------------------------------------------------------------------------------

    def add_token(self, token: Token) -> None:
        if token.is_text:
            text = _COLLAPSIBLE.sub(" ", html.unescape(self._decode(token.start, token.end)))
            self.run.parts.append(text)
            self.run.spans.append((token.start, token.end))
        elif token.name in _BLOCKS or not (token.name or self.text.utf8.startswith((b"<!--", b"<?"), token.start)):
            self.finish_run()  # at a block, the content of a script or the like, and a DOCTYPE, but not a comment
            self.open_blocks[token.name] += token.is_start and not token.is_empty
            self.open_blocks[token.name] -= token.is_end and self.open_blocks[token.name] > 0
            for attribute in _list_attributes(token):
                self._add_attribute(attribute)
        else:
            self._add_tag(token)

    def _add_tag(self, token: Token) -> None:
        run, pair_id = self.run, str(token.start)
        role: Role = "standalone"
        if token.is_end:
            matches = [number for number, (name, _) in enumerate(run.open_tags) if name == token.name]
            if matches:
                _, index = run.open_tags.pop(matches[-1])
                opening = run.parts[index]
                assert isinstance(opening, InlineCode)
                run.parts[index] = opening._replace(role="open")
                role, pair_id = "close", opening.pair_id
        elif token.name and not token.is_empty:
            run.open_tags.append((token.name, len(run.parts)))
            del run.open_tags[:-_MAX_DEPTH]
        if attributes := _list_attributes(token):
            run.attributes[pair_id] = token, attributes
        raw = self._decode(token.start, token.end)
        self._add_code(InlineCode("", raw, role, pair_id, token.name == "br"), token.start, token.end)

    def _add_code(self, code: InlineCode, start: int, end: int) -> None:
        self.run.parts.append(code)
        self.run.spans.append((start, end))

    def _decode(self, start: int, end: int) -> str:
        return self.text.utf8[start:end].decode("utf-8", "surrogateescape")

    def _count_lines(self, offset: int) -> int:
        """Return the line of an offset; called with ascending ones."""
        self.line += self.text.utf8.count(b"\n", self.line_offset, offset)
        self.line_offset = max(offset, self.line_offset)
        return self.line

    def finish_run(self) -> None:
        run, self.run = self.run, _Run()
        if placeholders.has_words("".join(part for part in run.parts if isinstance(part, str))):
            self._add_run(run)
        else:
            for attribute in chain.from_iterable(attributes for _, attributes in run.attributes.values()):
                self._add_attribute(attribute)

    def _add_run(self, run: _Run) -> None:
        content = _separate_links(self._protect_space(run))
        encoding = self.text.encoding
        raw_text = "".join(
            self._decode(*span) for part, span in zip(run.parts, run.spans, strict=True) if isinstance(part, str)
        )
        start, end = run.spans[0][0], run.spans[-1][1]
        attributes = list(chain.from_iterable(attributes for _, attributes in run.attributes.values()))

        def make_edits(targets: Sequence[InlineContent]) -> list[Edit]:
            values = zip(attributes, targets[1:], strict=True)
            edits = {attribute: _edit_value(attribute, target, encoding) for attribute, target in values}
            if units.is_unchanged([content], targets[:1]) and not any(edits.values()):
                return []
            tags = {
                pair_id: self._apply_edits(tag, [edit for attribute in own for edit in edits[attribute]])
                for pair_id, (tag, own) in run.attributes.items()
            }
            parts = (
                (part.raw if part.role == "close" else tags.get(part.pair_id, part.raw))
                if isinstance(part, InlineCode)
                else _escape(part, raw_text, encoding)
                for part in targets[0]
            )
            return [Edit(start, end, "".join(parts))]

        contents = (content, *((attribute.value,) for attribute in attributes))
        self.result.add_unit(self._count_lines(start), contents, make_edits)

    def _apply_edits(self, token: Token, edits: Sequence[Edit]) -> str:
        parts, offset = list[str](), token.start
        for edit in edits:
            parts += [self._decode(offset, edit.start), edit.text]
            offset = edit.end
        return "".join([*parts, self._decode(offset, token.end)])

    def _add_attribute(self, attribute: Attribute) -> None:
        def make_edits(targets: Sequence[InlineContent]) -> list[Edit]:
            return _edit_value(attribute, targets[0], self.text.encoding)

        self.result.add_unit(self._count_lines(attribute.start), [(attribute.value,)], make_edits)

    def _protect_space(self, run: _Run) -> InlineContent:
        """Make codes of the space at the ends of the run and next to line breaks, which may contain line ends."""
        parts: list[str | InlineCode] = []
        follow = list(_follow_text(run.parts))
        precede = list(_follow_text(run.parts[::-1]))[::-1]
        for part, (start, end), has_before, has_after in zip(run.parts, run.spans, follow, precede, strict=True):
            if not isinstance(part, str):
                parts.append(part)
                continue
            raw = self._decode(start, end)
            text = raw if has_before else raw.lstrip(_SPACE_CHARS)
            before, text = raw[: len(raw) - len(text)], text if has_after else text.rstrip(_SPACE_CHARS)
            after = raw[len(before) + len(text) :]
            text = _COLLAPSIBLE.sub(" ", html.unescape(text))
            spaces = (InlineCode("", space, "standalone", f"{start} space") for space in (before, after))
            parts += [
                each for each in (next(spaces), text, next(spaces)) if (each if isinstance(each, str) else each.raw)
            ]
        return tuple(parts)


def _follow_text(parts: Iterable[str | InlineCode]) -> Iterator[bool]:
    """Yield for each part whether a text or word is between it and the line break before it."""
    has_text = False
    for part in parts:
        yield has_text
        if isinstance(part, InlineCode):
            has_text = not part.is_break and (has_text or part.is_word)
        else:
            has_text |= bool(part.strip())


def _is_protected(translate: str, classes: str) -> bool:
    return translate.lower() == "no" or "notranslate" in classes.split()


def _list_attributes(token: Token) -> list[Attribute]:
    """Return the attributes with text, in file order."""
    values = {name: attribute.value.lower() for name, attribute in token.attributes.items()}
    names = set(_ATTRIBUTES)
    if token.name == "meta" and {values.get("name"), values.get("property")} & _META_NAMES:
        names.add("content")
    if token.name == "input" and values.get("type") in ("button", "reset", "submit"):
        names.add("value")
    if _is_protected(values.get("translate", ""), values.get("class", "")):
        names.clear()
    attributes = [attribute for name, attribute in token.attributes.items() if name in names]
    return [attribute for attribute in attributes if placeholders.has_words(attribute.value)]


def _edit_value(attribute: Attribute, target: InlineContent, encoding: str) -> list[Edit]:
    value = units.get_raw_text(target)
    if value == attribute.value:
        return []
    quote = attribute.raw[0] if attribute.raw[0] in "'\"" else '"'
    escaped = _escape(value, attribute.raw[1:-1], encoding).replace(quote, html.escape(quote))
    return [Edit(attribute.start, attribute.end, f"{quote}{escaped}{quote}")]


def _escape(text: str, raw_source: str, encoding: str) -> str:
    """Escape a text. Characters that are references in the source, or not in the encoding, become references."""
    escapes = {"&": "&amp;", "<": "&lt;"}
    for reference in set(_CHAR_REFERENCE.findall(raw_source)):
        char = html.unescape(reference)
        if len(char) == 1 and not (char.isascii() and (char.isalnum() or char.isspace())) and char not in raw_source:
            escapes.setdefault(char, reference)
    escaped = "".join(escapes.get(char, char) for char in text)
    return escaped.encode(encoding, "xmlcharrefreplace").decode(encoding)


def _separate_links(content: InlineContent) -> InlineContent:
    """Make links break the text if all words are in several of them, as in a menu."""
    tags = [part for part in content if isinstance(part, InlineCode) and part.role == "open"]
    links = {tag.pair_id for tag in tags if re.match(r"<a[\s>]", tag.raw, re.IGNORECASE)}
    depth, outside = 0, ""
    for part in content:
        if isinstance(part, str):
            outside += "" if depth else part
        elif part.pair_id in links:
            depth += 1 if part.role == "open" else -1
    if len(links) < 2 or placeholders.has_words(outside):
        return content
    return tuple(
        part._replace(is_break=True) if isinstance(part, InlineCode) and part.pair_id in links else part
        for part in content
    )
