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

from attent.data.fill import placeholders
from attent.data.fill.parts import Code, Content, FillError, Left, Scan, Unit, damaged, plain

Translate = Callable[[Sequence[str]], Sequence[str]]
# Of texts and of what must come in the translation of each: some translations of each, the best first, or none.
Insist = Callable[[Sequence[str], Sequence[tuple[str, ...]]], Sequence[Sequence[str]]]
BLOCK_TAG = (  # of HTML: what stands before it and behind it are two sentences
    r"</?(?:address|article|aside|blockquote|br|caption|center|dd|details|div|dl|dt|fieldset|figcaption|figure|footer"
    r"|form|h[1-6]|header|hr|legend|li|main|nav|ol|option|p|pre|section|summary|table|tbody|td|tfoot|th|thead|title|tr|ul)"
    r"(?:\s[^<>]*)?/?>"
)
_BREAK = re.compile(rf"((?:[\t-\r\x1c-\x1f\x85\u2028\u2029]|{BLOCK_TAG})+)", re.IGNORECASE)
_LIKE_A_MARKER = re.compile(r"</?(\d{1,9})/?>")
FORMS = {"open": "<{}>", "close": "</{}>", "alone": "<{}/>"}  # how a code is shown that has no word of its own


@dataclass(frozen=True, kw_only=True)
class Run:
    """Text that is translated at once, and what stands around it."""

    before: Content
    inside: Content  # nothing when there is nothing to translate
    behind: Content

    @property
    def shown(self) -> str:
        return plain(self.inside)

    @property
    def needed(self) -> tuple[str, ...]:
        """What must come in its translation."""
        return tuple(placeholders.events(self.inside))


def translated(scan: Scan, translate: Translate, insist: Insist | None = None) -> list[Sequence[Content] | Left]:
    """For each unit the translations of its contents, or why it is left."""
    wanted = [_Wanted(unit, scan.objection) for unit in scan.units]
    every = [(one, run) for one in wanted for run in one.all_runs()]
    _take(every, _ask(translate, every))
    lost = [(one, run) for one in wanted for run in one.again(whole=insist is not None)]
    held = [(one, run) for one, run in lost if insist is not None and run.needed]
    free = [pair for pair in lost if pair not in held]
    _take(free, _ask(translate, free))
    if insist is not None:
        _take(held, _offered(insist, held), firm=True)
    return [one.outcome() for one in wanted]


def _take(pairs: Iterable[tuple[_Wanted, Run]], known: dict[str, list[str]], *, firm: bool = False) -> None:
    for one, run in pairs:
        one.take(run, known[run.shown], firm=firm)


class _Wanted:
    """A unit on its way: what its runs have become, and what went wrong with them."""

    def __init__(self, unit: Unit, objection: Callable[[str], str]) -> None:
        self.unit, self.objection = unit, objection
        self.reason = _unfit(unit)  # that no translation can mend
        self.runs = [[] if self.reason else runs(content) for content in unit.contents]
        self.done: dict[Run, Content] = {}
        self.problems: dict[Run, str] = {}

    def all_runs(self) -> list[Run]:
        return [run for content in self.runs for run in content if run.inside]

    def again(self, *, whole: bool) -> list[Run]:
        """The runs that lost something, without the placeholders at their ends; those without such, if `whole`."""
        bare = [(run, without_ends(run)) for run in self.all_runs() if run in self.problems]
        found = [other or run for run, other in bare if other is not None or (whole and run.needed)]
        return list(dict.fromkeys(found))

    def take(self, run: Run, texts: Iterable[str], *, firm: bool) -> None:
        """The first of the texts with which nothing is wrong; if there is none, what is wrong with the first."""
        for text in texts:
            result = split(text, run.inside)
            result = placeholders.respaced(run.inside, result) if firm else result
            why = self._problem(run, text, result) or (placeholders.misplaced(run.inside, result) if firm else "")
            if not why:
                self.done[run] = result
                return
            self.problems.setdefault(run, why)

    def _problem(self, run: Run, text: str, result: Content) -> str:
        if not text:
            return "its translation is empty"
        why = self.objection(text) or placeholders.problem(run.inside, result)
        return why or _forbidden(run.inside, result, self.unit.forbidden)

    def outcome(self) -> Sequence[Content] | Left:
        contents = [[self._result(run) for run in content] for content in self.runs]
        if self.reason:
            return Left(line=self.unit.line, source=plain(self.unit.contents[0]), reason=self.reason)
        for number, content in enumerate(contents):
            if None in content:
                run = self.runs[number][content.index(None)]
                source = plain(self.unit.contents[number])
                return Left(line=self.unit.line, source=source, reason=self.problems[run])
        return [tuple(part for run in content for part in run or ()) for content in contents]

    def _result(self, run: Run) -> Content | None:
        if not run.inside:
            return (*run.before, *run.behind)
        if run in self.done:
            return (*run.before, *self.done[run], *run.behind)
        bare = without_ends(run)
        if bare is None or bare not in self.done:
            return None
        return (*bare.before, *_open_ended(bare, self.done[bare]), *bare.behind)


def _open_ended(bare: Run, result: Content) -> Content:
    """Without a full stop that the source has not: a placeholder is still to follow."""
    last = result[-1]
    if bare.shown.endswith(".") or not bare.behind or not isinstance(last, str) or not last.rstrip(".").strip():
        return result
    return (*result[:-1], last.rstrip("."))


def _unfit(unit: Unit) -> str:
    texts = [part for content in unit.contents for part in content if isinstance(part, str)]
    if any(damaged(text) for text in texts):
        return "it is not in the file's encoding"
    if any(placeholders.is_message(text) for text in texts):
        return "it holds forms of its own (plural, select)"
    return ""


def _forbidden(source: Content, target: Content, characters: str) -> str:
    """A lone `%` where a program expects a format would break it, though a person sees nothing wrong."""
    for character in characters:
        if _lone(target, character) > _lone(source, character):
            return f"its translation has a {character} that means something to the program"
    return ""


def _lone(content: Content, character: str) -> int:
    """How often a character stands in a text outside of placeholders."""
    texts = [part for part in content if isinstance(part, str)]
    return sum(text.count(character) - "".join(placeholders.found(text)).count(character) for text in texts)


def _ask(translate: Translate, pairs: Iterable[tuple[_Wanted, Run]]) -> dict[str, list[str]]:
    """The translation of each text, asked for once."""
    texts = list(dict.fromkeys(run.shown for _, run in pairs))
    return _answers(texts, [[text] for text in translate(texts)]) if texts else {}


def _offered(insist: Insist, pairs: Iterable[tuple[_Wanted, Run]]) -> dict[str, list[str]]:
    """Translations of each text that should have what is needed."""
    needed = {run.shown: run.needed for _, run in pairs}
    return _answers(list(needed), insist(list(needed), list(needed.values()))) if needed else {}


def _answers(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """What came back for each text, on one line, whatever it was."""
    if len(answers) != len(texts):
        raise FillError(
            f"there must be {len(texts):,} translations, but there are {len(answers):,}: the model is at fault"
        )
    lines = [[" ".join(answer.split("\n")).strip() for answer in some] for some in answers]
    return dict(zip(texts, lines, strict=True))


# Contents to runs, and back.


def runs(content: Content) -> list[Run]:
    """A content cut at its breaks; the breaks are runs without an inside."""
    found: list[Run] = []
    waiting: list[str | Code] = []
    for part in _pieces(numbered(content)):
        if part.breaks if isinstance(part, Code) else _BREAK.fullmatch(part):
            found += [_peeled(tuple(waiting)), Run(before=(part,), inside=(), behind=())]
            waiting = []
        else:
            waiting.append(part)
    return [*found, _peeled(tuple(waiting))]


def numbered(content: Content) -> Content:
    """Codes that have no word of their own are shown by numbers that the text does not use: `<1>`, `</1>`, `<2/>`."""
    texts = "".join(part for part in content if isinstance(part, str))
    numbers = count(max((int(found) for found in _LIKE_A_MARKER.findall(texts)), default=0) + 1)
    pairs: dict[str, int] = defaultdict(lambda: next(numbers))
    halves = {role: {part.pair for part in content if isinstance(part, Code) and part.role == role} for role in FORMS}
    parts: list[str | Code] = []
    for part in content:
        if isinstance(part, Code):
            whole = part.pair in halves["open"] & halves["close"]
            role = part.role if whole else "alone"
            number = pairs[part.pair] if role != "alone" else next(numbers)
            part = part._replace(role=role, shown=part.shown or FORMS[role].format(number))
        parts.append(part)
    return tuple(parts)


def _pieces(content: Content) -> list[str | Code]:
    cut = [_BREAK.split(part) if isinstance(part, str) else [part] for part in content]
    return [piece for pieces in cut for piece in pieces if piece]


def _peeled(inside: Content, *, words: bool = False) -> Run:
    """A run without space and markup around it; without codes that stand for words only if asked."""
    run = Run(before=(), inside=inside, behind=())
    while True:
        smaller = _without_codes(_without_space(run), words)
        if smaller == run:
            break
        run = smaller
    if placeholders.has_words(plain(tuple(part for part in run.inside if isinstance(part, str)))):
        return run
    return Run(before=(*run.before, *run.inside, *run.behind), inside=(), behind=())


def _without_space(run: Run) -> Run:
    inside, before, behind = list(run.inside), run.before, run.behind
    if inside and isinstance(inside[0], str):
        space, inside[0] = inside[0][: -len(inside[0].lstrip()) or None], inside[0].lstrip()
        before = (*before, space) if space else before
    if inside and isinstance(inside[-1], str):
        text = inside[-1].rstrip()
        space, inside[-1] = inside[-1][len(text) :], text
        behind = (space, *behind) if space else behind
    return Run(before=before, inside=tuple(part for part in inside if part), behind=behind)


def _without_codes(run: Run, words: bool) -> Run:
    """Without the first and the last code, if neither has its other half inside."""
    inside = run.inside
    if not inside:
        return run
    first, last = inside[0], inside[-1]
    if _is_loose(first, words):
        return replace(run, before=(*run.before, first), inside=inside[1:])
    if _is_loose(last, words):
        return replace(run, inside=inside[:-1], behind=(last, *run.behind))
    if _are_a_pair(first, last):
        return Run(before=(*run.before, first), inside=inside[1:-1], behind=(last, *run.behind))
    return run


def _is_loose(part: str | Code, words: bool) -> bool:
    return isinstance(part, Code) and part.role == "alone" and (words or not part.word)


def _are_a_pair(first: str | Code, last: str | Code) -> bool:
    if not (isinstance(first, Code) and isinstance(last, Code)):
        return False
    return (first.role, last.role, first.pair) == ("open", "close", last.pair)


def without_ends(run: Run) -> Run | None:
    """The run without the placeholders at its ends; None if there are none, or if nothing would be left."""
    bare = _peeled(run.inside, words=True)
    inside, before, behind = list(bare.inside), bare.before, bare.behind
    if inside and isinstance(inside[0], str):
        cut, inside[0], _ = placeholders.peeled(inside[0], start=True, end=False)
        before = (*before, cut) if cut else before
    if inside and isinstance(inside[-1], str):
        _, inside[-1], cut = placeholders.peeled(inside[-1], start=False, end=True)
        behind = (cut, *behind) if cut else behind
    left = _peeled(tuple(part for part in inside if part), words=True)
    if left.inside in ((), run.inside):
        return None
    return Run(
        before=(*run.before, *before, *left.before), inside=left.inside, behind=(*left.behind, *behind, *run.behind)
    )


def split(text: str, like: Content) -> Content:
    """A translation with its codes, as they are shown in `like`, told from its words."""
    codes: dict[str, list[Code]] = {}
    for part in like:
        if isinstance(part, Code):
            codes.setdefault(part.shown, []).append(part)
    if not codes:
        return (text,)
    shown = sorted(codes, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, shown)) + ")", text)
    return tuple(_next(codes[piece]) if piece in codes else piece for piece in pieces if piece)


def _next(codes: list[Code]) -> Code:
    """The codes that look alike, in their order; the last of them again for those that are too many."""
    return codes.pop(0) if len(codes) > 1 else codes[0]
