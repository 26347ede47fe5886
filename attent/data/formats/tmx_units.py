"""Translation memories (TMX): a unit without a variant in the target language gets one, an empty one is filled.

The variant says that it needs a review, by a `prop` of ours; the time is not written, so that the same file always
gives the same result. The source is the language asked for or the header's; the target the one asked for or the only
other one in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import quoteattr

from attent.data.formats import language_tags, safe_xml, tmx, xml_spans
from attent.data.formats.units import (
    Edit,
    FileText,
    InlineContent,
    PretranslateError,
    ScanResult,
    SkippedUnit,
    TranslationUnit,
)
from attent.data.formats.xml_spans import XmlElement
from attent.data.pairs import LanguagePair, choose_tag, is_tag_match, normalize_tag

REVIEW_PROP = ("x-attent-state", "needs-review")
ALL_LANGUAGES = "*all*"  # as `srclang`: any variant can be the source
INLINE_TAGS = xml_spans.InlineTags(
    spans=frozenset({"hi"}),
    openers=frozenset({"bpt"}),
    closers=frozenset({"ept"}),
    standalone=frozenset({"it", "ph", "ut"}),
    get_pair_id=lambda element: element.attributes.get("i", str(element.start)),
    is_protected=lambda element: False,
    is_break=lambda element: element.attributes.get("type") in tmx.LINE_BREAK_TYPES,
)


def decode_document(content: bytes, name: str) -> FileText:
    return xml_spans.decode_xml(content, name, "tmx")


def scan_units(text: FileText, requested: LanguagePair) -> ScanResult:
    languages, spelled = _resolve_languages(text, requested)
    found = ScanResult(check_text=xml_spans.check_xml_chars)

    def unit(element: XmlElement, above: Sequence[XmlElement]) -> None:
        _scan_unit(text, element, languages, spelled, found)

    xml_spans.scan_elements(text, frozenset({"tu"}), unit)
    return found


# Which languages.


def _resolve_languages(text: FileText, requested: LanguagePair) -> tuple[LanguagePair, str]:
    """Source and target, and how the file spells the target."""
    seen: dict[str, None] = {}  # in order of appearance
    header: list[str] = []

    def look(element: XmlElement, above: Sequence[XmlElement]) -> None:
        if element.tag == "header":
            header.append(element.attributes.get("srclang", ""))
        else:
            seen.update(dict.fromkeys(filter(None, map(_get_language, element.find_children("tuv")))))

    xml_spans.scan_elements(text, frozenset({"header", "tu"}), look)
    named = header[0] if header and header[0].lower() != ALL_LANGUAGES else ""
    source = requested.source or _infer_source(seen, requested.target, named) or ""
    others = [tag for tag in seen if not _is_source(tag, source, requested.target)]
    target = requested.target or (
        language_tags.get_primary_subtag(others[0])
        if len(set(map(language_tags.get_primary_subtag, others))) == 1
        else ""
    )
    if seen and (not source or not target or not any(_is_source(tag, source, target) for tag in seen)):
        raise PretranslateError(_describe_mismatch(text.name, requested, seen))
    return LanguagePair(source, target), choose_tag(target, others) or target


def _infer_source(available: Iterable[str], target: str | None, declared: str) -> str | None:
    """The source that a file leaves open: the header's, or the only language that is not the target."""
    others = [tag for tag in available if target is None or not is_tag_match(target, tag)]
    if declared and choose_tag(declared, others):
        return declared
    primaries = set(map(language_tags.get_primary_subtag, others))
    return primaries.pop() if target is not None and len(primaries) == 1 else None


def _is_source(tag: str, source: str, target: str | None) -> bool:
    """`pt-BR` is not the source when it is to be filled, though it is a kind of `pt`."""
    exact = normalize_tag(tag) == normalize_tag(source)
    return exact or (is_tag_match(source, tag) and (target is None or not is_tag_match(target, tag)))


def _describe_mismatch(name: str, requested: LanguagePair, available: Iterable[str]) -> str:
    found = list(available)
    if requested.target is None or len(found) > 1 or requested.source is None:
        return str(language_tags.make_mismatch_error(name, requested, found))
    return (
        f"{name} does not hold {requested.source}: it has {', '.join(found[: language_tags.MAX_LISTED])}; change --src"
    )


def _get_language(variant: XmlElement) -> str:
    return variant.attributes.get(safe_xml.XML_LANG) or variant.attributes.get("lang", "")


# Units.


def _scan_unit(text: FileText, unit: XmlElement, languages: LanguagePair, target_tag: str, result: ScanResult) -> None:
    wanted_source, wanted_target = languages.source or "", languages.target or ""
    variants = unit.find_children("tuv")
    sources = [one for one in variants if _is_source(_get_language(one), wanted_source, wanted_target)]
    chosen = choose_tag(wanted_source, [_get_language(one) for one in sources])
    source = next((one for one in sources if _get_language(one) == chosen), None)
    targets = [one for one in variants if one not in sources and is_tag_match(wanted_target, _get_language(one))]
    words = _get_variant_text(source)
    if any(_get_variant_text(one).strip() for one in targets):
        result.existing_count += 1
    elif source is None:
        shown = next(filter(None, map(_get_variant_text, variants)), "")
        result.skipped.append(SkippedUnit(line=unit.line, source=shown, reason=f"no {wanted_source} side"))
    elif words.strip():
        _add_unit(text, unit, source, targets, target_tag, result)


def _add_unit(
    text: FileText,
    unit: XmlElement,
    source: XmlElement,
    targets: Sequence[XmlElement],
    target_tag: str,
    result: ScanResult,
) -> None:
    segment = source.find_child("seg")
    assert segment is not None, "it has words"
    empty = targets[0].find_child("seg") if targets else None
    content, reason = xml_spans.parse_content(text, segment, INLINE_TAGS)
    if targets and (empty is None or empty.has_comments or empty.find_children(*_INLINE_TAG_NAMES)):
        reason = reason or "its target is empty, but holds markup or a comment"
    if reason:
        result.skipped.append(SkippedUnit(line=unit.line, source=segment.get_text(), reason=reason))
        return

    def edits(contents: Sequence[InlineContent]) -> list[Edit]:
        inside = xml_spans.serialize_content(contents[0], xml_spans.get_newline(text, segment))
        return (
            _fill_empty_variant(text, empty, inside)
            if empty
            else [_make_variant_edit(text, unit, source, target_tag, inside)]
        )

    result.units.append(TranslationUnit(line=unit.line, contents=(content,), make_edits=edits))


_INLINE_TAG_NAMES = tuple(INLINE_TAGS.spans | INLINE_TAGS.openers | INLINE_TAGS.closers | INLINE_TAGS.standalone)


def _get_variant_text(variant: XmlElement | None) -> str:
    """The text of a variant; what native codes hold is not text, but makes no empty segment full either."""
    segment = variant.find_child("seg") if variant else None
    return segment.get_text() if segment else ""


def _fill_empty_variant(text: FileText, segment: XmlElement, inner_xml: str) -> list[Edit]:
    mark = _make_review_prop(text, segment) + xml_spans.get_indent(text, segment)
    return [Edit(segment.start, segment.start, mark), xml_spans.replace_content(text, segment, inner_xml, {})]


def _make_variant_edit(text: FileText, unit: XmlElement, source: XmlElement, language: str, inner_xml: str) -> Edit:
    """A variant behind the last one, laid out as the source is."""
    last = unit.find_children("tuv")[-1]
    segment = source.find_child("seg")
    assert segment is not None, "it has words"
    name, seg = xml_spans.make_qualified_name(text, source, "tuv"), xml_spans.make_qualified_name(text, segment, "seg")
    attribute = "xml:lang" if safe_xml.XML_LANG in source.attributes else "lang"
    inner = xml_spans.get_indent(text, segment)
    close = xml_spans.get_indent(text, source) if inner else ""
    lines = f'<{name} {attribute}={quoteattr(language)} creationtool="attent">{inner}{_make_review_prop(text, segment)}{inner}'
    return Edit(
        last.end, last.end, f"{xml_spans.get_indent(text, source)}{lines}<{seg}>{inner_xml}</{seg}>{close}</{name}>"
    )


def _make_review_prop(text: FileText, segment: XmlElement) -> str:
    name = xml_spans.make_qualified_name(text, segment, "prop")
    return f'<{name} type="{REVIEW_PROP[0]}">{REVIEW_PROP[1]}</{name}>'
