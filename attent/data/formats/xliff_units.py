"""XLIFF 1.2 (`trans-unit`) and 2.x (`segment`): a target that is missing or empty is filled, and marked as a draft.

In 1.2 by `state="needs-review-translation" state-qualifier="mt-suggestion"`. In 2.x a segment stays in state
`initial`, with a `subState` of ours: the next one, `translated`, is what tools show as done by a person. A unit that
is locked, approved or final keeps its empty target. Which two languages a file has is told by `tags`.
"""

from __future__ import annotations

from collections.abc import Sequence

from attent.data.formats import language_tags, xliff, xml_spans
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
from attent.data.pairs import LanguagePair

REVIEW_ATTRIBUTES_1 = {"state": "needs-review-translation", "state-qualifier": "mt-suggestion"}
REVIEW_ATTRIBUTES_2 = {"state": "initial", "subState": "attent:needs-review"}
FINAL_STATES = ("final", "signed-off", "reviewed")  # `state` of a target that is empty because somebody wants it so
INLINE_TAGS = xml_spans.InlineTags(
    spans=frozenset({"g", "mrk", "pc"}),
    openers=frozenset({"bpt", "bx", "sc", "sm"}),
    closers=frozenset({"ec", "em", "ept", "ex"}),
    standalone=frozenset({"cp", "it", "ph", "x"}),
    get_pair_id=lambda element: _get_pair_id(element),
    is_protected=lambda element: (
        element.attributes.get("translate") == "no" or element.attributes.get("mtype") == "protected"
    ),
    is_break=lambda element: element.attributes.get("mtype") == "seg" or _is_line_break(element),
)


def decode_document(content: bytes, name: str) -> FileText:
    return xml_spans.decode_xml(content, name, "xliff")


def scan_units(text: FileText, requested: LanguagePair) -> ScanResult:
    reading = _XliffScanner(text, requested)
    xml_spans.scan_elements(text, frozenset(xliff.UNIT_TAGS), reading.add_unit)
    if reading.seen_languages and not reading.has_match:
        raise PretranslateError(reading.describe_mismatch())
    return reading.result


class _XliffScanner:
    def __init__(self, text: FileText, requested: LanguagePair) -> None:
        self.text, self.requested = text, requested
        self.languages = requested  # and what the first unit settles
        self.result = ScanResult(check_text=xml_spans.check_xml_chars)
        self.seen_languages: list[LanguagePair] = []
        self.has_match = False

    def add_unit(self, unit: XmlElement, ancestors: Sequence[XmlElement]) -> None:
        source, target = unit.find_child("source"), unit.find_child("target")
        if source is None or not source.get_text().strip():
            return
        answers = self._is_requested_direction(ancestors)
        if target is not None and not _is_empty(target):
            self.result.existing_count += 1
            return
        reason = self._find_skip_reason(unit, target, ancestors, answers)
        content, unfit = xml_spans.parse_content(self.text, unit.find_child("seg-source") or source, INLINE_TAGS)
        if reason or unfit:
            self.result.skipped.append(SkippedUnit(line=unit.line, source=source.get_text(), reason=reason or unfit))
        else:
            edits = _TargetEdits(self.text, unit, source, target)
            self.result.units.append(TranslationUnit(line=unit.line, contents=(content,), make_edits=edits))

    def _find_skip_reason(
        self, unit: XmlElement, target: XmlElement | None, ancestors: Sequence[XmlElement], is_requested: bool
    ) -> str:
        """Why a unit must stay as it is."""
        if not is_requested:
            declared = _get_declared_languages(ancestors)
            return language_tags.describe_missing(
                self.languages, [tag for tag in (declared.source, declared.target) if tag]
            )
        if _is_locked(unit, ancestors):
            return 'the file says translate="no"'
        state = unit.attributes.get("state", "") or (target.attributes.get("state", "") if target else "")
        if unit.attributes.get("approved") == "yes" or state in FINAL_STATES:
            return "somebody has approved that it is empty"
        return "its empty target holds a comment" if target is not None and target.has_comments else ""

    def _is_requested_direction(self, ancestors: Sequence[XmlElement]) -> bool:
        """Is this the way round that was asked for? What was left open is settled by the first unit."""
        declared = _get_declared_languages(ancestors)
        if declared not in self.seen_languages:
            self.seen_languages.append(declared)
        if language_tags.is_reversed(self.languages, declared) is not False:
            return False
        if not self.has_match:
            self.has_match = True
            self.languages = language_tags.fill_open_sides(self.languages, declared.source, declared.target)
        return True

    def describe_mismatch(self) -> str:
        found = [tag for one in self.seen_languages for tag in (one.source, one.target) if tag]
        if any(language_tags.is_reversed(self.requested, one) for one in self.seen_languages):
            way = f"goes from {self.seen_languages[0].source} to {self.seen_languages[0].target}"
            return f"{self.text.name} {way}, and its sources cannot be filled: ask for that direction, or another file"
        return str(language_tags.make_mismatch_error(self.text.name, self.requested, found))


class _TargetEdits:
    """Writes the target of a unit when its translation is there."""

    def __init__(self, text: FileText, unit: XmlElement, source: XmlElement, target: XmlElement | None) -> None:
        self.text, self.unit, self.source, self.target = text, unit, source, target

    def __call__(self, contents: Sequence[InlineContent]) -> list[Edit]:
        inside = xml_spans.serialize_content(contents[0], xml_spans.get_newline(self.text, self.unit))
        second = self.unit.tag == "segment"
        edits = [self._make_target_edit(inside, {} if second else REVIEW_ATTRIBUTES_1)]
        if second:
            tag = xml_spans.get_slice(self.text, self.unit.start, self.unit.content_start)
            edits.append(
                Edit(self.unit.start, self.unit.content_start, xml_spans.set_attributes(tag, REVIEW_ATTRIBUTES_2))
            )
        return edits

    def _make_target_edit(self, inner_xml: str, attributes: dict[str, str]) -> Edit:
        if self.target is not None:
            return xml_spans.replace_content(self.text, self.target, inner_xml, attributes)
        name = xml_spans.make_qualified_name(self.text, self.source, "target")
        after = (self.unit.find_child("seg-source") or self.source).end
        tag = xml_spans.set_attributes(f"<{name}>", attributes)
        return Edit(after, after, f"{xml_spans.get_indent(self.text, self.source)}{tag}{inner_xml}</{name}>")


def _is_locked(unit: XmlElement, ancestors: Sequence[XmlElement]) -> bool:
    """The nearest `translate` counts: that of the unit itself, then those of the groups it is in."""
    said = (one.attributes.get("translate") for one in (unit, *reversed(ancestors)))
    return next(filter(None, said), "yes") == "no"


def _is_empty(target: XmlElement) -> bool:
    """Nothing in it, or only the marks of segments without a word."""
    return not target.get_text().strip() and all(
        child.tag == "mrk" and _is_empty(child) for child in target.children if isinstance(child, XmlElement)
    )


def _get_declared_languages(ancestors: Sequence[XmlElement]) -> LanguagePair:
    file = next((one for one in ancestors if one.tag == "file"), ancestors[0])
    root = ancestors[0].attributes
    return LanguagePair(
        file.attributes.get("source-language") or root.get("srcLang"),
        file.attributes.get("target-language") or root.get("trgLang"),
    )


def _get_pair_id(element: XmlElement) -> str:
    """What both halves name: `rid` or `id` in 1.2; in 2.x the end names the beginning."""
    named = element.attributes
    found = named.get("startRef") or named.get("rid") or named.get("id") or str(element.start)
    return ("native " if element.tag in ("bpt", "ept") else "mark " if element.tag in ("sm", "em") else "") + found


def _is_line_break(element: XmlElement) -> bool:
    return element.attributes.get("ctype", element.attributes.get("subType", "")).lower() in xliff.LINE_BREAK_TYPES
