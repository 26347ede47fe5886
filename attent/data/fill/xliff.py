"""XLIFF 1.2 (`trans-unit`) and 2.x (`segment`): a target that is missing or empty is filled, and marked as a draft.

In 1.2 by `state="needs-review-translation" state-qualifier="mt-suggestion"`. In 2.x a segment stays in state
`initial`, with a `subState` of ours: the next one, `translated`, is what tools show as done by a person. A unit that
is locked, approved or final keeps its empty target. Which two languages a file has is told by `tags`.
"""

from __future__ import annotations

from collections.abc import Sequence

from attent.data.fill import spans
from attent.data.fill.parts import Content, Edit, FillError, Left, Scan, Text, Unit
from attent.data.fill.spans import Element
from attent.data.pairs import Languages
from attent.data.readers import tags, xliff

MARK = {"state": "needs-review-translation", "state-qualifier": "mt-suggestion"}
MARK_2 = {"state": "initial", "subState": "attent:needs-review"}
FINISHED = ("final", "signed-off", "reviewed")  # `state` of a target that is empty because somebody wants it so
INLINE = spans.Inline(
    spans=frozenset({"g", "mrk", "pc"}),
    opens=frozenset({"bpt", "bx", "sc", "sm"}),
    closes=frozenset({"ec", "em", "ept", "ex"}),
    alone=frozenset({"cp", "it", "ph", "x"}),
    pair=lambda element: _pair(element),
    protected=lambda element: (
        element.attributes.get("translate") == "no" or element.attributes.get("mtype") == "protected"
    ),
    breaks=lambda element: element.attributes.get("mtype") == "seg" or _is_line_break(element),
)


def text_of(content: bytes, name: str) -> Text:
    return spans.text_of(content, name, "xliff")


def scan(text: Text, asked: Languages) -> Scan:
    reading = _Reading(text, asked)
    spans.read(text, frozenset(xliff.UNITS), reading.unit)
    if reading.seen and not reading.answered:
        raise FillError(reading.mismatch())
    return reading.scan


class _Reading:
    def __init__(self, text: Text, asked: Languages) -> None:
        self.text, self.asked = text, asked
        self.languages = asked  # and what the first unit settles
        self.scan = Scan(objection=spans.objection)
        self.seen: list[Languages] = []
        self.answered = False

    def unit(self, unit: Element, above: Sequence[Element]) -> None:
        source, target = unit.first("source"), unit.first("target")
        if source is None or not source.words().strip():
            return
        answers = self._answers(above)
        if target is not None and not _is_empty(target):
            self.scan.kept += 1
            return
        reason = self._reason(unit, target, above, answers)
        content, unfit = spans.content_of(self.text, unit.first("seg-source") or source, INLINE)
        if reason or unfit:
            self.scan.left.append(Left(line=unit.line, source=source.words(), reason=reason or unfit))
        else:
            edits = _Edits(self.text, unit, source, target)
            self.scan.units.append(Unit(line=unit.line, contents=(content,), edits=edits))

    def _reason(self, unit: Element, target: Element | None, above: Sequence[Element], answers: bool) -> str:
        """Why a unit must stay as it is."""
        if not answers:
            declared = _declared(above)
            return tags.missing(self.languages, [tag for tag in (declared.source, declared.target) if tag])
        if _is_locked(unit, above):
            return 'the file says translate="no"'
        state = unit.attributes.get("state", "") or (target.attributes.get("state", "") if target else "")
        if unit.attributes.get("approved") == "yes" or state in FINISHED:
            return "somebody has approved that it is empty"
        return "its empty target holds a comment" if target is not None and target.has_notes else ""

    def _answers(self, above: Sequence[Element]) -> bool:
        """Is this the way round that was asked for? What was left open is settled by the first unit."""
        declared = _declared(above)
        if declared not in self.seen:
            self.seen.append(declared)
        if tags.swapped(self.languages, declared) is not False:
            return False
        if not self.answered:
            self.answered = True
            self.languages = tags.settled(self.languages, declared.source, declared.target)
        return True

    def mismatch(self) -> str:
        found = [tag for one in self.seen for tag in (one.source, one.target) if tag]
        if any(tags.swapped(self.asked, one) for one in self.seen):
            way = f"goes from {self.seen[0].source} to {self.seen[0].target}"
            return f"{self.text.name} {way}, and its sources cannot be filled: ask for that direction, or another file"
        return str(tags.error(self.text.name, self.asked, found))


class _Edits:
    """Writes the target of a unit when its translation is there."""

    def __init__(self, text: Text, unit: Element, source: Element, target: Element | None) -> None:
        self.text, self.unit, self.source, self.target = text, unit, source, target

    def __call__(self, contents: Sequence[Content]) -> list[Edit]:
        inside = spans.written(contents[0], spans.newline_of(self.text, self.unit))
        second = self.unit.tag == "segment"
        edits = [self._filled(inside, {} if second else MARK)]
        if second:
            tag = spans.slice_of(self.text, self.unit.start, self.unit.inner)
            edits.append(Edit(self.unit.start, self.unit.inner, spans.with_attributes(tag, MARK_2)))
        return edits

    def _filled(self, inside: str, mark: dict[str, str]) -> Edit:
        if self.target is not None:
            return spans.refilled(self.text, self.target, inside, mark)
        name = spans.named(self.text, self.source, "target")
        after = (self.unit.first("seg-source") or self.source).end
        tag = spans.with_attributes(f"<{name}>", mark)
        return Edit(after, after, f"{spans.indent(self.text, self.source)}{tag}{inside}</{name}>")


def _is_locked(unit: Element, above: Sequence[Element]) -> bool:
    """The nearest `translate` counts: that of the unit itself, then those of the groups it is in."""
    said = (one.attributes.get("translate") for one in (unit, *reversed(above)))
    return next(filter(None, said), "yes") == "no"


def _is_empty(target: Element) -> bool:
    """Nothing in it, or only the marks of segments without a word."""
    return not target.words().strip() and all(
        child.tag == "mrk" and _is_empty(child) for child in target.children if isinstance(child, Element)
    )


def _declared(above: Sequence[Element]) -> Languages:
    file = next((one for one in above if one.tag == "file"), above[0])
    root = above[0].attributes
    return Languages(
        file.attributes.get("source-language") or root.get("srcLang"),
        file.attributes.get("target-language") or root.get("trgLang"),
    )


def _pair(element: Element) -> str:
    """What both halves name: `rid` or `id` in 1.2; in 2.x the end names the beginning."""
    named = element.attributes
    found = named.get("startRef") or named.get("rid") or named.get("id") or str(element.start)
    return ("native " if element.tag in ("bpt", "ept") else "mark " if element.tag in ("sm", "em") else "") + found


def _is_line_break(element: Element) -> bool:
    return element.attributes.get("ctype", element.attributes.get("subType", "")).lower() in xliff.LINE_BREAKS
