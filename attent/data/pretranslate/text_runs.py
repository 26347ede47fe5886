"""From the units of a file to their translations: each text once, in two calls at most, and one that insists.

A content is cut into runs: at line breaks and tabs, at markup that ends a sentence, without the space and the markup
around it; what is between is translated and must come back with its placeholders. Where a placeholder at an end was
lost, the second call asks for the text without it, and it is put back. For those in the middle of a text whoever
translates may be able to insist: of what is offered then, the first that is whole is taken, spaced as its source. A
unit that is still not whole is left.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from attent.data.formats import placeholders
from attent.data.formats.units import (
    InlineCode,
    InlineContent,
    PretranslateError,
    ScanResult,
    SkippedUnit,
    TranslationUnit,
    has_undecodable_bytes,
    to_display_text,
)

TranslateTexts = Callable[[Sequence[str]], Sequence[str]]
# Of texts and of what must come in the translation of each: some translations of each, the best first, or none.
TranslateConstrained = Callable[[Sequence[str], Sequence[tuple[str, ...]]], Sequence[Sequence[str]]]
HTML_BLOCK_TAG = (  # of HTML: what stands before it and behind it are two sentences
    r"</?(?:address|article|aside|blockquote|br|caption|center|dd|details|div|dl|dt|fieldset|figcaption|figure|footer"
    r"|form|h[1-6]|header|hr|legend|li|main|nav|ol|option|p|pre|section|summary|table|tbody|td|tfoot|th|thead|title|tr|ul)"
    r"(?:\s[^<>]*)?/?>"
)
_TEXT_BREAK = re.compile(rf"((?:[\t-\r\x1c-\x1f\x85\u2028\u2029]|{HTML_BLOCK_TAG})+)", re.IGNORECASE)
_NUMBERED_TAG = re.compile(r"</?(\d{1,9})/?>")
CODE_TEMPLATES = {"open": "<{}>", "close": "</{}>", "alone": "<{}/>"}  # how a code is shown that has no word of its own


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """Text that is translated at once, and what stands around it."""

    prefix: InlineContent
    core: InlineContent  # nothing when there is nothing to translate
    suffix: InlineContent

    @property
    def text(self) -> str:
        return to_display_text(self.core)

    @property
    def required_placeholders(self) -> tuple[str, ...]:
        """What must come in its translation."""
        return tuple(placeholders.list_placeholders(self.core))


def translate_units(
    scan: ScanResult, translate: TranslateTexts, translate_constrained: TranslateConstrained | None = None
) -> list[Sequence[InlineContent] | SkippedUnit]:
    """For each unit the translations of its contents, or why it is left."""
    wanted = [_PendingUnit(unit, scan.check_text) for unit in scan.units]
    every = [(one, run) for one in wanted for run in one.list_runs()]
    _record_translations(every, _request_translations(translate, every))
    lost = [(one, run) for one in wanted for run in one.list_retries(include_whole=translate_constrained is not None)]
    held = [(one, run) for one, run in lost if translate_constrained is not None and run.required_placeholders]
    free = [pair for pair in lost if pair not in held]
    _record_translations(free, _request_translations(translate, free))
    if translate_constrained is not None:
        _record_translations(held, _request_constrained(translate_constrained, held), constrained=True)
    return [one.build_result() for one in wanted]


def _record_translations(
    pairs: Iterable[tuple[_PendingUnit, TextRun]], translations: dict[str, list[str]], *, constrained: bool = False
) -> None:
    for one, run in pairs:
        one.record_first_valid(run, translations[run.text], constrained=constrained)


class _PendingUnit:
    """A unit on its way: what its runs have become, and what went wrong with them."""

    def __init__(self, unit: TranslationUnit, check_text: Callable[[str], str]) -> None:
        self.unit, self.check_text = unit, check_text
        self.skip_reason = _find_unit_problem(unit)  # that no translation can mend
        self.runs = [[] if self.skip_reason else split_runs(content) for content in unit.contents]
        self.translations: dict[TextRun, InlineContent] = {}
        self.problems: dict[TextRun, str] = {}

    def list_runs(self) -> list[TextRun]:
        return [run for content in self.runs for run in content if run.core]

    def list_retries(self, *, include_whole: bool) -> list[TextRun]:
        """The runs that lost something, without the placeholders at their ends; those without such, if `whole`."""
        bare = [(run, strip_end_placeholders(run)) for run in self.list_runs() if run in self.problems]
        found = [
            other or run for run, other in bare if other is not None or (include_whole and run.required_placeholders)
        ]
        return list(dict.fromkeys(found))

    def record_first_valid(self, run: TextRun, candidates: Iterable[str], *, constrained: bool) -> None:
        """The first of the texts with which nothing is wrong; if there is none, what is wrong with the first."""
        for text in candidates:
            result = restore_codes(text, run.core)
            result = placeholders.restore_spacing(run.core, result) if constrained else result
            why = self._find_problem(run, text, result) or (
                placeholders.find_misplaced(run.core, result) if constrained else ""
            )
            if not why:
                self.translations[run] = result
                return
            self.problems.setdefault(run, why)

    def _find_problem(self, run: TextRun, text: str, result: InlineContent) -> str:
        if not text:
            return "its translation is empty"
        why = self.check_text(text) or placeholders.find_problem(run.core, result)
        return why or _find_reserved_char(run.core, result, self.unit.reserved_chars)

    def build_result(self) -> Sequence[InlineContent] | SkippedUnit:
        contents = [[self._assemble_run(run) for run in content] for content in self.runs]
        if self.skip_reason:
            return SkippedUnit(
                line=self.unit.line, source=to_display_text(self.unit.contents[0]), reason=self.skip_reason
            )
        for number, content in enumerate(contents):
            if None in content:
                run = self.runs[number][content.index(None)]
                source = to_display_text(self.unit.contents[number])
                return SkippedUnit(line=self.unit.line, source=source, reason=self.problems[run])
        return [tuple(part for run in content for part in run or ()) for content in contents]

    def _assemble_run(self, run: TextRun) -> InlineContent | None:
        if not run.core:
            return (*run.prefix, *run.suffix)
        if run in self.translations:
            return (*run.prefix, *self.translations[run], *run.suffix)
        bare = strip_end_placeholders(run)
        if bare is None or bare not in self.translations:
            return None
        return (*bare.prefix, *_strip_added_period(bare, self.translations[bare]), *bare.suffix)


def _strip_added_period(stripped: TextRun, result: InlineContent) -> InlineContent:
    """Without a full stop that the source has not: a placeholder is still to follow."""
    last = result[-1]
    if stripped.text.endswith(".") or not stripped.suffix or not isinstance(last, str) or not last.rstrip(".").strip():
        return result
    return (*result[:-1], last.rstrip("."))


def _find_unit_problem(unit: TranslationUnit) -> str:
    texts = [part for content in unit.contents for part in content if isinstance(part, str)]
    if any(has_undecodable_bytes(text) for text in texts):
        return "it is not in the file's encoding"
    if any(placeholders.is_icu_message(text) for text in texts):
        return "it holds forms of its own (plural, select)"
    return ""


def _find_reserved_char(source: InlineContent, target: InlineContent, characters: str) -> str:
    """A lone `%` where a program expects a format would break it, though a person sees nothing wrong."""
    for character in characters:
        if _count_outside_placeholders(target, character) > _count_outside_placeholders(source, character):
            return f"its translation has a {character} that means something to the program"
    return ""


def _count_outside_placeholders(content: InlineContent, character: str) -> int:
    """How often a character stands in a text outside of placeholders."""
    texts = [part for part in content if isinstance(part, str)]
    return sum(text.count(character) - "".join(placeholders.find_placeholders(text)).count(character) for text in texts)


def _request_translations(
    translate: TranslateTexts, pairs: Iterable[tuple[_PendingUnit, TextRun]]
) -> dict[str, list[str]]:
    """The translation of each text, asked for once."""
    texts = list(dict.fromkeys(run.text for _, run in pairs))
    return _index_by_source(texts, [[text] for text in translate(texts)]) if texts else {}


def _request_constrained(
    translate_constrained: TranslateConstrained, pairs: Iterable[tuple[_PendingUnit, TextRun]]
) -> dict[str, list[str]]:
    """Translations of each text that should have what is needed."""
    needed = {run.text: run.required_placeholders for _, run in pairs}
    return _index_by_source(list(needed), translate_constrained(list(needed), list(needed.values()))) if needed else {}


def _index_by_source(texts: Sequence[str], candidates: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """What came back for each text, on one line, whatever it was."""
    if len(candidates) != len(texts):
        raise PretranslateError(
            f"there must be {len(texts):,} translations, but there are {len(candidates):,}: the model is at fault"
        )
    lines = [[" ".join(answer.split("\n")).strip() for answer in some] for some in candidates]
    return dict(zip(texts, lines, strict=True))


# Contents to runs, and back.


def split_runs(content: InlineContent) -> list[TextRun]:
    """A content cut at its breaks; the breaks are runs without an inside."""
    found: list[TextRun] = []
    waiting: list[str | InlineCode] = []
    for part in _split_at_breaks(number_codes(content)):
        if part.is_break if isinstance(part, InlineCode) else _TEXT_BREAK.fullmatch(part):
            found += [_trim_run(tuple(waiting)), TextRun(prefix=(part,), core=(), suffix=())]
            waiting = []
        else:
            waiting.append(part)
    return [*found, _trim_run(tuple(waiting))]


def number_codes(content: InlineContent) -> InlineContent:
    """Codes that have no word of their own are shown by numbers that the text does not use: `<1>`, `</1>`, `<2/>`."""
    texts = "".join(part for part in content if isinstance(part, str))
    numbers = count(max((int(found) for found in _NUMBERED_TAG.findall(texts)), default=0) + 1)
    pairs: dict[str, int] = defaultdict(lambda: next(numbers))
    halves = {
        role: {part.pair_id for part in content if isinstance(part, InlineCode) and part.role == role}
        for role in CODE_TEMPLATES
    }
    parts: list[str | InlineCode] = []
    for part in content:
        if isinstance(part, InlineCode):
            whole = part.pair_id in halves["open"] & halves["close"]
            role = part.role if whole else "alone"
            number = pairs[part.pair_id] if role != "alone" else next(numbers)
            part = part._replace(role=role, display=part.display or CODE_TEMPLATES[role].format(number))
        parts.append(part)
    return tuple(parts)


def _split_at_breaks(content: InlineContent) -> list[str | InlineCode]:
    cut = [_TEXT_BREAK.split(part) if isinstance(part, str) else [part] for part in content]
    return [piece for pieces in cut for piece in pieces if piece]


def _trim_run(core: InlineContent, *, include_words: bool = False) -> TextRun:
    """A run without space and markup around it; without codes that stand for words only if asked."""
    run = TextRun(prefix=(), core=core, suffix=())
    while True:
        smaller = _trim_codes(_trim_space(run), include_words)
        if smaller == run:
            break
        run = smaller
    if placeholders.has_words(to_display_text(tuple(part for part in run.core if isinstance(part, str)))):
        return run
    return TextRun(prefix=(*run.prefix, *run.core, *run.suffix), core=(), suffix=())


def _trim_space(run: TextRun) -> TextRun:
    inside, before, behind = list(run.core), run.prefix, run.suffix
    if inside and isinstance(inside[0], str):
        space, inside[0] = inside[0][: -len(inside[0].lstrip()) or None], inside[0].lstrip()
        before = (*before, space) if space else before
    if inside and isinstance(inside[-1], str):
        text = inside[-1].rstrip()
        space, inside[-1] = inside[-1][len(text) :], text
        behind = (space, *behind) if space else behind
    return TextRun(prefix=before, core=tuple(part for part in inside if part), suffix=behind)


def _trim_codes(run: TextRun, include_words: bool) -> TextRun:
    """Without the first and the last code, if neither has its other half inside."""
    inside = run.core
    if not inside:
        return run
    first, last = inside[0], inside[-1]
    if _is_standalone_code(first, include_words):
        return replace(run, prefix=(*run.prefix, first), core=inside[1:])
    if _is_standalone_code(last, include_words):
        return replace(run, core=inside[:-1], suffix=(last, *run.suffix))
    if _is_code_pair(first, last):
        return TextRun(prefix=(*run.prefix, first), core=inside[1:-1], suffix=(last, *run.suffix))
    return run


def _is_standalone_code(part: str | InlineCode, include_words: bool) -> bool:
    return isinstance(part, InlineCode) and part.role == "alone" and (include_words or not part.is_word)


def _is_code_pair(first: str | InlineCode, last: str | InlineCode) -> bool:
    if not (isinstance(first, InlineCode) and isinstance(last, InlineCode)):
        return False
    return (first.role, last.role, first.pair_id) == ("open", "close", last.pair_id)


def strip_end_placeholders(run: TextRun) -> TextRun | None:
    """The run without the placeholders at its ends; None if there are none, or if nothing would be left."""
    bare = _trim_run(run.core, include_words=True)
    inside, before, behind = list(bare.core), bare.prefix, bare.suffix
    if inside and isinstance(inside[0], str):
        cut, inside[0], _ = placeholders.strip_placeholders(inside[0], start=True, end=False)
        before = (*before, cut) if cut else before
    if inside and isinstance(inside[-1], str):
        _, inside[-1], cut = placeholders.strip_placeholders(inside[-1], start=False, end=True)
        behind = (cut, *behind) if cut else behind
    left = _trim_run(tuple(part for part in inside if part), include_words=True)
    if left.core in ((), run.core):
        return None
    return TextRun(
        prefix=(*run.prefix, *before, *left.prefix), core=left.core, suffix=(*left.suffix, *behind, *run.suffix)
    )


def restore_codes(text: str, template: InlineContent) -> InlineContent:
    """A translation with its codes, as they are shown in `like`, told from its words."""
    codes: dict[str, list[InlineCode]] = {}
    for part in template:
        if isinstance(part, InlineCode):
            codes.setdefault(part.display, []).append(part)
    if not codes:
        return (text,)
    shown = sorted(codes, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, shown)) + ")", text)
    return tuple(_take_code(codes[piece]) if piece in codes else piece for piece in pieces if piece)


def _take_code(codes: list[InlineCode]) -> InlineCode:
    """The codes that look alike, in their order; the last of them again for those that are too many."""
    return codes.pop(0) if len(codes) > 1 else codes[0]
