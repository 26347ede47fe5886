"""XLIFF 1.2 (`trans-unit`) and 2.x (`segment`): a source and a target.

Reading skips targets whose `state` (1.2) says that they are not translated yet, and those to be reviewed unless fuzzy
ones are included. Native codes (`bpt`, `ph`, ...) are dropped, but those for white space become it. Pre-translation
fills missing and empty targets as drafts; in 2.x the segment stays `initial` with our `subState`, since tools show the
next state, `translated`, as done by a person. Locked, approved and final units stay empty.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from attent.data import pairs
from attent.data.formats import xml
from attent.data.formats.streams import EXCERPT_CHARS, TOO_LONG, UNTRANSLATED
from attent.data.formats.units import Edit, FileText, InlineContent, ScanResult
from attent.data.formats.xml import XmlElement
from attent.data.pairs import MAX_LISTED, BadLine, CorpusError, LanguagePair, Pair, ReadOptions

LINE_BREAK_TYPES = ("lb", "pb", "x-html-br", "xlf:lb", "xlf:pb")  # `ctype` of 1.2, `subType` of 2.x
UNTRANSLATED_STATES = ("new", "needs-translation")  # of a target
FINAL_STATES = ("final", "signed-off", "reviewed")  # an empty target in one of these is intended
REVIEW_ATTRIBUTES_1 = {"state": "needs-review-translation", "state-qualifier": "mt-suggestion"}
REVIEW_ATTRIBUTES_2 = {"state": "initial", "subState": "attent:needs-review"}
_HEX_CODE = re.compile("[0-9A-Fa-f]{1,8}")


def _is_line_break(element: XmlElement) -> bool:
    return element.attributes.get("ctype", element.attributes.get("subType", "")).lower() in LINE_BREAK_TYPES


def _get_pair_id(element: XmlElement) -> str:
    """Return the id of both halves: `rid` or `id` in 1.2; in 2.x the end refers to the start."""
    named = element.attributes
    pair_id = named.get("startRef") or named.get("rid") or named.get("id") or str(element.start)
    return ("native " if element.tag in ("bpt", "ept") else "mark " if element.tag in ("sm", "em") else "") + pair_id


def _get_inline_text(element: XmlElement) -> str:
    """Return the white space that a code stands for, or the character of a `cp`, which XML cannot contain."""
    if _is_line_break(element):
        return "\n"
    attributes = element.attributes
    equivalent = attributes.get("equiv-text", attributes.get("equiv", ""))
    if equivalent.isspace():
        return equivalent
    code = attributes.get("hex", "") if element.tag == "cp" else ""
    number = int(code, 16) if _HEX_CODE.fullmatch(code) else 0
    return chr(number) if 0 < number < 0xD800 or 0xDFFF < number < 0x110000 else ""


SCHEMA = xml.XmlSchema(
    root="xliff",
    heads=frozenset({"file"}),
    units=frozenset({"trans-unit", "segment"}),
    spans=frozenset({"g", "mrk", "pc"}),
    openers=frozenset({"bpt", "bx", "sc", "sm"}),
    closers=frozenset({"ec", "em", "ept", "ex"}),
    standalone=frozenset({"cp", "it", "ph", "x"}),
    get_pair_id=_get_pair_id,
    get_inline_text=_get_inline_text,
    is_protected=lambda element: (
        element.attributes.get("translate") == "no" or element.attributes.get("mtype") == "protected"
    ),
    is_break=lambda element: element.attributes.get("mtype") == "seg" or _is_line_break(element),
)


def _get_declared_languages(file: XmlElement) -> LanguagePair:
    """Return the languages of a `file` (1.2) or of the root (2.x)."""
    root = (file.get_ancestors() or [file])[-1].attributes
    return LanguagePair(
        file.attributes.get("source-language") or root.get("srcLang"),
        file.attributes.get("target-language") or root.get("trgLang"),
    )


def read_pairs(
    content: Iterable[bytes], name: str, requested: LanguagePair, options: ReadOptions = pairs.DEFAULT_READ_OPTIONS
) -> Iterator[Pair | BadLine]:
    """Yield a pair per unit; an en-de file is read backwards if de to en is requested."""
    reader = XliffReader(name, requested)
    reader.fuzzy = options.fuzzy
    return reader.read(content)


class XliffReader(xml.UnitReader):
    schema = SCHEMA
    fuzzy = False
    is_reversed = False
    mismatch_reason = ""  # if the current file has other languages

    def read_head(self, head: XmlElement) -> None:
        """Determine the direction of the units of a file."""
        declared = _get_declared_languages(head)
        self.seen_languages.update(declared.tags[: MAX_LISTED - len(self.seen_languages)])
        is_reversed = self.languages.is_reversed(declared)
        self.mismatch_reason = self.languages.describe_missing(declared.tags) if is_reversed is None else ""
        if is_reversed is None:
            if self.requested.is_open:
                raise self.requested.make_mismatch_error(self.name, self.seen_languages)
            return
        self.is_reversed, self.has_match = is_reversed, True
        sides = declared.swap() if is_reversed else declared
        self.languages = self.languages.fill_open_sides(sides.source, sides.target)

    def read_unit(self, unit: XmlElement) -> Iterator[Pair | BadLine]:
        target_element = unit.find_child("target")
        source, target = (xml.extract_text(side, SCHEMA) for side in (unit.find_child("source"), target_element))
        state = target_element.attributes.get("state", "") if target_element else ""
        reason = self.mismatch_reason
        if source is None or target is None or unit.is_truncated:
            reason = reason or TOO_LONG
        elif not target.strip() or state in UNTRANSLATED_STATES:
            reason = reason or UNTRANSLATED
        elif state.startswith("needs-") and not self.fuzzy:
            reason = reason or "fuzzy"
        elif not reason:
            source, target = (target, source) if self.is_reversed else (source, target)
            yield Pair(source, target, self.name, unit.line)
            return
        yield BadLine(reason, self.name, unit.line, (source or target or "")[:EXCERPT_CHARS])


# ---- pre-translation -------------------------------------------------------------------------------------------------


def scan_units(content: bytes, name: str, requested: LanguagePair) -> ScanResult:
    text = xml.decode_xml(content, name, SCHEMA)
    scanner = _XliffScanner(text, requested)
    for element in xml.scan_elements(text, SCHEMA):
        if element.tag in SCHEMA.units:
            scanner.add_unit(element)
    if scanner.seen_languages and not scanner.has_match:
        raise scanner.make_mismatch_error()
    return scanner.result


class _XliffScanner:
    def __init__(self, text: FileText, requested: LanguagePair) -> None:
        self.text, self.requested = text, requested
        self.languages = requested  # open sides are filled from the first unit
        self.result = xml.make_scan_result(text)
        self.seen_languages: list[LanguagePair] = []
        self.has_match = False

    def add_unit(self, unit: XmlElement) -> None:
        source, target = unit.find_child("source"), unit.find_child("target")
        if source is None or not source.get_text().strip():
            return
        ancestors = unit.get_ancestors()
        declared = _get_declared_languages(next((e for e in ancestors if e.tag == "file"), ancestors[-1]))
        is_match = self._match_direction(declared)
        if target is not None and not _is_empty(target):
            self.result.existing_count += 1
            return
        reason = self._find_skip_reason(unit, target) if is_match else self.languages.describe_missing(declared.tags)
        content, unsupported = xml.parse_content(self.text, unit.find_child("seg-source") or source, SCHEMA)
        if reason or unsupported:
            self.result.skip(unit.line, xml.get_inner_xml(self.text, source), reason or unsupported)
            return
        self.result.add_unit(unit.line, [content], partial(self._make_edits, unit, source, target))

    def _match_direction(self, declared: LanguagePair) -> bool:
        """True if a file has the requested direction. The first match fills the open sides."""
        if declared not in self.seen_languages:
            self.seen_languages.append(declared)
        if self.languages.is_reversed(declared) is not False:
            return False
        if not self.has_match:
            self.has_match = True
            self.languages = self.languages.fill_open_sides(declared.source, declared.target)
        return True

    def _find_skip_reason(self, unit: XmlElement, target: XmlElement | None) -> str:
        segmented = unit.find_child("seg-source")
        if segmented is not None and not segmented.get_text().strip():
            return "its seg-source is empty"
        settings = (element.attributes.get("translate") for element in (unit, *unit.get_ancestors()))
        if next(filter(None, settings), "yes") == "no":  # the nearest one, of the unit or its groups, decides
            return 'the file says translate="no"'
        state = unit.attributes.get("state", "") or (target.attributes.get("state", "") if target else "")
        if unit.attributes.get("approved") == "yes" or state in FINAL_STATES:
            return "its empty target is approved"
        return "its empty target contains a comment" if target is not None and target.has_comments else ""

    def make_mismatch_error(self) -> CorpusError:
        if any(self.requested.is_reversed(declared) for declared in self.seen_languages):
            first = self.seen_languages[0]
            direction = f"goes from {first.source} to {first.target}"
            advice = "request that direction, or give another file"
            return pairs.LanguageMismatchError(f"{self.text.name} {direction}, and sources cannot be filled in", advice)
        seen = [tag for declared in self.seen_languages for tag in declared.tags]
        return self.requested.make_mismatch_error(self.text.name, seen)

    def _make_edits(
        self, unit: XmlElement, source: XmlElement, target: XmlElement | None, contents: Sequence[InlineContent]
    ) -> list[Edit]:
        inner_xml = xml.serialize_content(self.text, unit, contents[0])
        attributes = {} if unit.tag == "segment" else REVIEW_ATTRIBUTES_1
        if target is not None:
            edit = xml.replace_content(self.text, target, inner_xml, attributes)
        else:
            name = xml.make_qualified_name(self.text, source, "target")
            offset = (unit.find_child("seg-source") or source).end
            start_tag = xml.get_indent(self.text, source) + xml.set_attributes(f"<{name}>", attributes)
            edit = Edit(offset, offset, f"{start_tag}{inner_xml}</{name}>")
        if unit.tag != "segment":
            return [edit]
        tag = xml.get_slice(self.text, unit.start, unit.content_start)
        return [edit, Edit(unit.start, unit.content_start, xml.set_attributes(tag, REVIEW_ATTRIBUTES_2))]


def _is_empty(target: XmlElement) -> bool:
    """True if it has no text and no markup but segment marks."""
    return not target.get_text().strip() and all(child.tag == "mrk" and _is_empty(child) for child in target.elements)
