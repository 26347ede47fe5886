"""TMX 1.4 translation memories: a unit `tu` has a variant `tuv` per language, with its text in `seg`.

Reading skips native codes, but keeps line breaks; of several variants in one language the first counts. Pre-translation
adds missing variants and fills empty ones, each with a `prop` that asks for review and without a timestamp. TBX, at the
end, is the related format of term bases.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from xml.sax.saxutils import quoteattr

from attent.data import pairs
from attent.data.formats import xml
from attent.data.formats.streams import EXCERPT_CHARS, TOO_LONG
from attent.data.formats.units import Edit, FileText, InlineContent, ScanResult
from attent.data.formats.xml import XmlElement
from attent.data.pairs import MAX_LISTED, BadLine, CorpusError, LanguagePair, Pair, ReadOptions
from attent.text.language_tags import choose_tag, get_primary_subtag, is_same_language, is_tag_match, normalize_tag

LINE_BREAK_TYPES = ("lb", "pb")
REVIEW_PROP = ("x-attent-state", "needs-review")
ALL_LANGUAGES = "*all*"  # as `srclang`: any variant can be the source


def _is_line_break(element: XmlElement) -> bool:
    return element.attributes.get("type") in LINE_BREAK_TYPES


SCHEMA = xml.XmlSchema(
    root="tmx",
    heads=frozenset({"header"}),
    units=frozenset({"tu"}),
    spans=frozenset({"hi"}),
    openers=frozenset({"bpt"}),
    closers=frozenset({"ept"}),
    standalone=frozenset({"it", "ph", "ut"}),
    get_pair_id=lambda element: element.attributes.get("i", str(element.start)),
    get_inline_text=lambda element: "\n" if _is_line_break(element) else "",
    is_break=_is_line_break,
)
TBX_UNITS = frozenset({"conceptEntry", "termEntry"})
TBX_SCHEMAS = [replace(SCHEMA, root=root, units=TBX_UNITS) for root in ("tbx", "martif")]
_STATUS = re.compile("(preferred|deprecated|superseded)Term")


def _get_language(variant: XmlElement) -> str:
    return variant.attributes.get(xml.XML_LANG) or variant.attributes.get("lang", "")


def read_pairs(
    content: Iterable[bytes], name: str, requested: LanguagePair, _: ReadOptions = pairs.DEFAULT_READ_OPTIONS
) -> Iterator[Pair | BadLine]:
    """Yield a pair per unit. Open sides are those of the first unit; a third language later is an error."""
    return TmxReader(name, requested).read(content)


class TmxReader(xml.UnitReader):
    schema = SCHEMA
    header_language = ""
    unit_languages: tuple[str, ...] | None = None  # of the last unit
    chosen_sides: tuple[str, str] | None = None

    def read_head(self, head: XmlElement) -> None:
        self.header_language = head.attributes.get("srclang", "")

    def read_unit(self, unit: XmlElement) -> Iterator[Pair | BadLine]:
        segments: dict[str, XmlElement] = {}
        duplicates: list[tuple[str, XmlElement]] = []
        for variant in unit.find_children("tuv"):
            language = _get_language(variant)
            first = next((known for known in segments if normalize_tag(known) == normalize_tag(language)), None)
            for segment in variant.find_children("seg"):
                if first is None:
                    segments[language], first = segment, language
                else:
                    duplicates.append((first, segment))
        yield self._make_item(unit, segments)
        for language, segment in duplicates:
            if language in (self.chosen_sides or ()):
                excerpt = (xml.extract_text(segment, SCHEMA) or "")[:EXCERPT_CHARS]
                yield BadLine(f"a second {get_primary_subtag(language)} side", self.name, unit.line, excerpt)

    def _make_item(self, unit: XmlElement, segments: dict[str, XmlElement]) -> Pair | BadLine:
        if tuple(segments) != self.unit_languages:  # most units have the languages of the one before
            self.unit_languages = tuple(segments)
            self.chosen_sides = self._choose_sides(self.unit_languages)
        texts = {tag: xml.extract_text(segment, SCHEMA) for tag, segment in segments.items()}
        if unit.is_truncated:
            reason = TOO_LONG
        elif self.chosen_sides is None:
            reason = self.languages.describe_missing(segments)
        else:
            source, target = (texts[tag] for tag in self.chosen_sides)
            if source is not None and target is not None:
                return Pair(source, target, self.name, unit.line)
            reason = TOO_LONG
        excerpt = next((text for text in texts.values() if text), "")
        return BadLine(reason, self.name, unit.line, excerpt[:EXCERPT_CHARS])

    def _choose_sides(self, present: tuple[str, ...]) -> tuple[str, str] | None:
        """Choose the languages of a unit's pair. The first choice fills the open sides."""
        source_first = tuple(
            sorted(filter(None, present), key=lambda tag: not is_same_language(self.header_language, tag))
        )
        self.seen_languages.update(source_first[: MAX_LISTED - len(self.seen_languages)])
        sides = pairs.choose_sides(self.languages, source_first)
        if sides and not self.has_match:
            self.has_match = True
            self.languages = self.languages.fill_open_sides(*sides)
        if self.requested.is_open and any(not self.languages.is_requested(tag) for tag in source_first):
            raise self.languages.make_mismatch_error(self.name, self.seen_languages)
        return sides


# ---- pre-translation -------------------------------------------------------------------------------------------------


def scan_units(content: bytes, name: str, requested: LanguagePair) -> ScanResult:
    text = xml.decode_xml(content, name, SCHEMA)
    scanner = _TmxScanner(text, requested)
    declared = ""
    for element in xml.scan_elements(text, SCHEMA):
        if element.tag == "tu":
            scanner.add_unit(element)
        elif not declared:
            declared = element.attributes.get("srclang", "")
    if scanner.sourceless_count and not scanner.result.units and is_tag_match(scanner.target, declared):
        problem = f"goes from {scanner.target} to {scanner.source}, and sources cannot be filled in"
        raise pairs.LanguageMismatchError(f"{name} {problem}", "request that direction, or give another file")
    return scanner.result


def list_languages(content: bytes, name: str) -> list[str]:
    """Return the languages of all variants, in order of appearance."""
    return _read_languages(xml.decode_xml(content, name, SCHEMA))[0]


class _TmxScanner:
    def __init__(self, text: FileText, requested: LanguagePair) -> None:
        self.text = text
        self.source, self.target, self.target_tag = _resolve_languages(text, requested)
        self.result = xml.make_scan_result(text)
        self.sourceless_count = 0  # units with a target, but without a source

    def add_unit(self, unit: XmlElement) -> None:
        variants = unit.find_children("tuv")
        sources = [variant for variant in variants if _is_source(_get_language(variant), self.source, self.target)]
        chosen = choose_tag(self.source, [_get_language(variant) for variant in sources])
        source = next((variant for variant in sources if _get_language(variant) == chosen), None)
        others = (variant for variant in variants if variant not in sources)
        targets = [variant for variant in others if is_tag_match(self.target, _get_language(variant))]
        if any(_get_variant_text(variant).strip() for variant in targets):
            self.result.existing_count += 1
            self.sourceless_count += source is None or not _get_variant_text(source).strip()
        elif source is None:
            excerpt = next(filter(None, map(_get_variant_text, variants)), "")
            self.result.skip(unit.line, excerpt, f"no {self.source} side")
        elif _get_variant_text(source).strip():
            self._add_untranslated(unit, source, targets)

    def _add_untranslated(self, unit: XmlElement, source: XmlElement, targets: Sequence[XmlElement]) -> None:
        segment = source.find_child("seg")
        assert segment is not None, "it has text"
        empty = targets[0].find_child("seg") if targets else None
        content, reason = xml.parse_content(self.text, segment, SCHEMA)
        if targets and (empty is None or empty.has_comments or empty.find_children(*SCHEMA.spans, *SCHEMA.codes)):
            reason = reason or "its empty target contains markup or a comment"
        if reason:
            self.result.skip(unit.line, xml.get_inner_xml(self.text, segment), reason)
            return

        def make_edits(contents: Sequence[InlineContent]) -> list[Edit]:
            inner_xml = xml.serialize_content(self.text, segment, contents[0])
            if empty is None:
                return [self._add_variant(unit, source, segment, inner_xml)]
            prop = self._make_review_prop(empty) + xml.get_indent(self.text, empty)
            return [Edit(empty.start, empty.start, prop), xml.replace_content(self.text, empty, inner_xml, {})]

        self.result.add_unit(unit.line, [content], make_edits)

    def _add_variant(self, unit: XmlElement, source: XmlElement, segment: XmlElement, inner_xml: str) -> Edit:
        """Insert a variant after the last one, with the layout of the source."""
        text = self.text
        last = unit.find_children("tuv")[-1]
        tuv, seg = xml.make_qualified_name(text, source, "tuv"), xml.make_qualified_name(text, segment, "seg")
        attribute = "xml:lang" if xml.XML_LANG in source.attributes else "lang"
        outer, inner = xml.get_indent(text, source), xml.get_indent(text, segment)
        start_tag = f'<{tuv} {attribute}={quoteattr(self.target_tag)} creationtool="attent">'
        body = f"{inner}{self._make_review_prop(segment)}{inner}<{seg}>{inner_xml}</{seg}>{outer if inner else ''}"
        return Edit(last.end, last.end, f"{outer}{start_tag}{body}</{tuv}>")

    def _make_review_prop(self, segment: XmlElement) -> str:
        name = xml.make_qualified_name(self.text, segment, "prop")
        return f'<{name} type="{REVIEW_PROP[0]}">{REVIEW_PROP[1]}</{name}>'


def _get_variant_text(variant: XmlElement) -> str:
    """Return all text of a variant, with that of native codes: a segment of codes alone is not empty."""
    segment = variant.find_child("seg")
    return segment.get_text() if segment else ""


def _resolve_languages(text: FileText, requested: LanguagePair) -> tuple[str, str, str]:
    """Return source, target and the file's spelling of the target.

    The source is the requested language or the header's; the target the requested one or the only other one.
    """
    languages, declared = _read_languages(text)
    declared = declared if declared.lower() != ALL_LANGUAGES else ""
    source = requested.source or _infer_source(languages, requested.target, declared) or ""
    others = [tag for tag in languages if not _is_source(tag, source, requested.target)]
    primary_subtags = set(map(get_primary_subtag, others))
    target = requested.target or (primary_subtags.pop() if len(primary_subtags) == 1 else "")
    if languages and (not source or not target or not any(_is_source(tag, source, target) for tag in languages)):
        if requested.is_open or len(languages) > 1:
            raise requested.make_mismatch_error(text.name, languages)
        problem = f"does not contain {requested.source}: it has {languages[0]}"
        raise pairs.LanguageMismatchError(f"{text.name} {problem}", "change --src")
    return source, target, choose_tag(target, others) or target


def _read_languages(text: FileText) -> tuple[list[str], str]:
    """Return the languages of all variants, in order of appearance, and the header's."""
    languages: dict[str, None] = {}
    declared: str | None = None
    for element in xml.scan_elements(text, SCHEMA):
        if element.tag == "header" and declared is None:
            declared = element.attributes.get("srclang", "")
        languages.update(dict.fromkeys(filter(None, map(_get_language, element.find_children("tuv")))))
    return list(languages), declared or ""


def _infer_source(languages: Iterable[str], target: str | None, declared: str) -> str | None:
    """Return the header's language, or the only one that is not the target."""
    others = [tag for tag in languages if target is None or not is_tag_match(target, tag)]
    if declared and choose_tag(declared, others):
        return declared
    primary_subtags = set(map(get_primary_subtag, others))
    return primary_subtags.pop() if target is not None and len(primary_subtags) == 1 else None


def _is_source(tag: str, source: str, target: str | None) -> bool:
    """`pt-BR` is not the source if it is the target, though it is a variant of the source `pt`."""
    is_exact = normalize_tag(tag) == normalize_tag(source)
    return is_exact or (is_tag_match(source, tag) and (target is None or not is_tag_match(target, tag)))


# ---- term bases (TBX) ------------------------------------------------------------------------------------------------


def is_tbx(head: str) -> bool:
    return any(schema.matches_head(head) for schema in TBX_SCHEMAS)


def read_concepts(content: bytes, name: str) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Yield the line and the (language, term) pairs of each concept of TBX, version 2 (`martif`) or 3 (`tbx`).

    Deprecated and superseded terms are left out; preferred ones come first.
    """
    roots = (schema for schema in TBX_SCHEMAS if re.search(rf"<(?:[\w.-]+:)?{schema.root}[\s>/]".encode(), content))
    for unit in xml.parse_xml([content], name, next(roots, TBX_SCHEMAS[0])):
        if unit.is_truncated:
            raise CorpusError(f"{name}, line {unit.line:,}: this concept is too large; split it")
        sections = [
            (section.attributes.get(xml.XML_LANG, ""), *_list_terms(section))
            for section in unit.find_children("langSec", "langSet")
        ]
        yield unit.line, [(language, term) for language, *terms in sections for term in terms]


def _list_terms(section: XmlElement) -> list[str]:
    """Return the terms of a language, the preferred ones first."""
    groups = section.find_children("termSec", "tig", "ntig", "termGrp")
    terms = [" ".join(term.get_text().split()) for term in section.find_children("term")]
    statuses = "".join(child.get_text() for child in section.elements)
    status = _STATUS.search(statuses) if terms else None
    if status and status[1] != "preferred":
        return []
    nested = [(group, _list_terms(group)) for group in groups]
    nested.sort(key=lambda item: "preferredTerm" not in item[0].get_text())
    return [term for term in (*terms, *(term for _, group_terms in nested for term in group_terms)) if term]
