"""Translation memories (TMX): a unit without a variant in the target language gets one, an empty one is filled.

The variant says that it needs a review, by a `prop` of ours; the time is not written, so that the same file always
gives the same result. The source is the language asked for or the header's; the target the one asked for or the only
other one in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import quoteattr

from attent.data.fill import spans
from attent.data.fill.parts import Content, Edit, FillError, Left, Scan, Text, Unit
from attent.data.fill.spans import Element
from attent.data.pairs import Languages, choose, matches, normal_tag
from attent.data.readers import safe_xml, tags, tmx

MARK = ("x-attent-state", "needs-review")
EVERY = "*all*"  # as `srclang`: any variant can be the source
INLINE = spans.Inline(
    spans=frozenset({"hi"}),
    opens=frozenset({"bpt"}),
    closes=frozenset({"ept"}),
    alone=frozenset({"it", "ph", "ut"}),
    pair=lambda element: element.attributes.get("i", str(element.start)),
    protected=lambda element: False,
    breaks=lambda element: element.attributes.get("type") in tmx.LINE_BREAKS,
)


def text_of(content: bytes, name: str) -> Text:
    return spans.text_of(content, name, "tmx")


def scan(text: Text, asked: Languages) -> Scan:
    languages, spelled = _languages(text, asked)
    found = Scan(objection=spans.objection)

    def unit(element: Element, above: Sequence[Element]) -> None:
        _unit(text, element, languages, spelled, found)

    spans.read(text, frozenset({"tu"}), unit)
    return found


# Which languages.


def _languages(text: Text, asked: Languages) -> tuple[Languages, str]:
    """Source and target, and how the file spells the target."""
    seen: dict[str, None] = {}  # in order of appearance
    header: list[str] = []

    def look(element: Element, above: Sequence[Element]) -> None:
        if element.tag == "header":
            header.append(element.attributes.get("srclang", ""))
        else:
            seen.update(dict.fromkeys(filter(None, map(_language, element.all("tuv")))))

    spans.read(text, frozenset({"header", "tu"}), look)
    named = header[0] if header and header[0].lower() != EVERY else ""
    source = asked.source or _only(seen, asked.target, named) or ""
    others = [tag for tag in seen if not _is_source(tag, source, asked.target)]
    target = asked.target or (tags.primary(others[0]) if len(set(map(tags.primary, others))) == 1 else "")
    if seen and (not source or not target or not any(_is_source(tag, source, target) for tag in seen)):
        raise FillError(_unclear(text.name, asked, seen))
    return Languages(source, target), choose(target, others) or target


def _only(seen: Iterable[str], target: str | None, named: str) -> str | None:
    """The source that a file leaves open: the header's, or the only language that is not the target."""
    others = [tag for tag in seen if target is None or not matches(target, tag)]
    if named and choose(named, others):
        return named
    primaries = set(map(tags.primary, others))
    return primaries.pop() if target is not None and len(primaries) == 1 else None


def _is_source(tag: str, source: str, target: str | None) -> bool:
    """`pt-BR` is not the source when it is to be filled, though it is a kind of `pt`."""
    exact = normal_tag(tag) == normal_tag(source)
    return exact or (matches(source, tag) and (target is None or not matches(target, tag)))


def _unclear(name: str, asked: Languages, seen: Iterable[str]) -> str:
    found = list(seen)
    if asked.target is None or len(found) > 1 or asked.source is None:
        return str(tags.error(name, asked, found))
    return f"{name} does not hold {asked.source}: it has {', '.join(found[: tags.MOST_NAMED])}; change --src"


def _language(variant: Element) -> str:
    return variant.attributes.get(safe_xml.XML_LANG) or variant.attributes.get("lang", "")


# Units.


def _unit(text: Text, unit: Element, languages: Languages, spelled: str, found: Scan) -> None:
    wanted_source, wanted_target = languages.source or "", languages.target or ""
    variants = unit.all("tuv")
    sources = [one for one in variants if _is_source(_language(one), wanted_source, wanted_target)]
    chosen = choose(wanted_source, [_language(one) for one in sources])
    source = next((one for one in sources if _language(one) == chosen), None)
    targets = [one for one in variants if one not in sources and matches(wanted_target, _language(one))]
    words = _words(source)
    if any(_words(one).strip() for one in targets):
        found.kept += 1
    elif source is None:
        shown = next(filter(None, map(_words, variants)), "")
        found.left.append(Left(line=unit.line, source=shown, reason=f"no {wanted_source} side"))
    elif words.strip():
        _wanting(text, unit, source, targets, spelled, found)


def _wanting(text: Text, unit: Element, source: Element, targets: Sequence[Element], spelled: str, found: Scan) -> None:
    segment = source.first("seg")
    assert segment is not None, "it has words"
    empty = targets[0].first("seg") if targets else None
    content, reason = spans.content_of(text, segment, INLINE)
    if targets and (empty is None or empty.has_notes or empty.all(*_CODES)):
        reason = reason or "its target is empty, but holds markup or a comment"
    if reason:
        found.left.append(Left(line=unit.line, source=segment.words(), reason=reason))
        return

    def edits(contents: Sequence[Content]) -> list[Edit]:
        inside = spans.written(contents[0], spans.newline_of(text, segment))
        return _refilled(text, empty, inside) if empty else [_added(text, unit, source, spelled, inside)]

    found.units.append(Unit(line=unit.line, contents=(content,), edits=edits))


_CODES = tuple(INLINE.spans | INLINE.opens | INLINE.closes | INLINE.alone)


def _words(variant: Element | None) -> str:
    """The text of a variant; what native codes hold is not text, but makes no empty segment full either."""
    segment = variant.first("seg") if variant else None
    return segment.words() if segment else ""


def _refilled(text: Text, segment: Element, inside: str) -> list[Edit]:
    mark = _mark(text, segment) + spans.indent(text, segment)
    return [Edit(segment.start, segment.start, mark), spans.refilled(text, segment, inside, {})]


def _added(text: Text, unit: Element, source: Element, language: str, inside: str) -> Edit:
    """A variant behind the last one, laid out as the source is."""
    last = unit.all("tuv")[-1]
    segment = source.first("seg")
    assert segment is not None, "it has words"
    name, seg = spans.named(text, source, "tuv"), spans.named(text, segment, "seg")
    attribute = "xml:lang" if safe_xml.XML_LANG in source.attributes else "lang"
    inner = spans.indent(text, segment)
    close = spans.indent(text, source) if inner else ""
    lines = f'<{name} {attribute}={quoteattr(language)} creationtool="attent">{inner}{_mark(text, segment)}{inner}'
    return Edit(last.end, last.end, f"{spans.indent(text, source)}{lines}<{seg}>{inside}</{seg}>{close}</{name}>")


def _mark(text: Text, segment: Element) -> str:
    name = spans.named(text, segment, "prop")
    return f'<{name} type="{MARK[0]}">{MARK[1]}</{name}>'
