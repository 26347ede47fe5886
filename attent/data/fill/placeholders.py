"""What in a text is no language and must come out as it went in: `%s`, `{name}`, `<b>`, `&amp;`, addresses; and
whether a translation has kept it.

A translation has what its source has, as often, with tags inside each other as they were; what a program fills in
one after the other (`%s`, `%d`) keeps its order. Whose text it is, and what to do when something is lost, is left to
`runs`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from attent.data.fill.parts import Code, Content

_FOUND = re.compile(
    r"""
    \$\{[^{}\s]+\}                                      # ${x}
    | \{\{[^{}]*\}\}                                    # {{x}}
    | \{%[^{}]*%\}                                      # {% tag %}
    | %\{\w+\}                                          # %{x}
    | \{[^{}\n]*\}                                      # {x} {0} {} {0:>8}
    | %(?:\d+\$|\([\w. -]+\))?[#0+'-]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh|h|ll|l|q|j|z|t|L)?[diouxXeEfFgGaAcCsSpn@]
    | %%
    | %L?\d{1,2}                                        # %1 of Qt
    | </?[A-Za-z](?:[^<>"']|"[^"<]*"|'[^'<]*')*>        # <b>, </b>, <br/>
    | &(?:[A-Za-z][A-Za-z0-9]*|\#\d+|\#[xX][0-9A-Fa-f]+);
    | (?:https?|ftp|mailto):[^\s<>"']*[^\s<>"'.,;:!?)\]]
    | (?<![\w.+-])[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+    # an address of a person
    """,
    re.VERBOSE,
)
_IN_ORDER = re.compile(r"%[^%(\d{]|%\d+[^$\d]|\{\}")  # filled in by their place, not by a name or a number
_TAG = re.compile(r"<(/?)([A-Za-z][^\s/<>]*)(?:[^<>\"']|\"[^\"<]*\"|'[^'<]*')*?(/?)>")
_MESSAGE = re.compile(r"\{\s*\w+\s*,\s*(?:plural|select|selectordinal)\s*,")
_SIGNS = " \u00a0\u202f:;,.!?()[]\"'/-"  # go with a placeholder at the end of a text
_BESIDE = re.compile(f"[{re.escape(_SIGNS)}]*")


def found(text: str) -> list[str]:
    """The placeholders of a text, in order."""
    return _FOUND.findall(text)


def has_words(text: str) -> bool:
    """Is there anything to translate? Figures and signs are the same in every language."""
    return any(character.isalpha() for character in _FOUND.sub("", text))


def is_message(text: str) -> bool:
    """Does it hold forms of its own, such as `{n, plural, one {a file} other {# files}}`?"""
    return _MESSAGE.search(text) is not None


def peeled(text: str, *, start: bool, end: bool) -> tuple[str, str, str]:
    """A text without the placeholders at its ends: what stood before, the text, what stood behind."""
    places = [found.span() for found in _FOUND.finditer(text)]
    first, last = 0, len(text)
    for left, right in places if start else ():
        if left > first:
            break
        first = _beside(text, right)
    for left, right in reversed(places) if end else ():
        if left < first or _beside(text, right) < last:
            break
        last = left
    inside = text[first:last]
    inside = inside.rstrip(_SIGNS) if last < len(text) else inside
    return text[:first], inside, text[first + len(inside) :]


def _beside(text: str, at: int) -> int:
    """Where what goes with a placeholder ends that ends here."""
    found = _BESIDE.match(text, at)
    return found.end() if found else at


def problem(source: Content, target: Content) -> str:
    """What the translation did to the placeholders and codes of the source, in few words; nothing if all is well."""
    had, has = events(source), events(target)
    lost, gained = Counter(had) - Counter(has), Counter(has) - Counter(had)
    if lost:
        return f"its translation lost {', '.join(lost)}"
    if gained:
        return f"its translation gained {', '.join(gained)}"
    if _in_order(had) != _in_order(has):
        return f"its translation has {' and '.join(dict.fromkeys(_in_order(had)))} in another order"
    tags_had, tags_have = list(_tags(source)), list(_tags(target))
    if tags_had != tags_have and not (_nests(tags_had) and _nests(tags_have)):
        return "its translation has tags that do not fit into each other"
    return ""


def events(content: Content) -> list[str]:
    """The placeholders and codes of a content, in order."""
    return [event for part in content for event in (found(part) if isinstance(part, str) else [part.shown])]


def _in_order(events: Sequence[str]) -> list[str]:
    return [event for event in events if _IN_ORDER.match(event)]


def _tags(content: Content) -> Iterator[tuple[str, str]]:
    """(role, name) of what opens and closes, whether it is markup of the file or of its text."""
    for part in content:
        if isinstance(part, Code):
            if part.role != "alone":
                yield part.role, f"code {part.pair}"
            continue
        for tag in _TAG.finditer(part):
            if not tag[3]:
                yield "close" if tag[1] else "open", tag[2].lower()


def _nests(tags: Sequence[tuple[str, str]]) -> bool:
    """Does every tag close what was opened last? One that is never closed (`<br>`) stands alone."""
    closed = {name for role, name in tags if role == "close"}
    stack: list[str] = []
    for role, name in tags:
        if role == "open" and name in closed:
            stack.append(name)
        elif role == "close" and (not stack or stack.pop() != name):
            return False
    return not stack


# Space around placeholders: whoever is made to write them may not know that tags lean on words.

_OPENS = "([{<\"'\u00ab\u201c\u201e\u2018\u201a\u00bf\u00a1"  # signs that what comes next leans on

_ENDED = re.compile(r"[.!?\u2026\u3002\uff01\uff1f][\"'\u00bb\u201c\u201d)\]]*\s*$")


class _Hole(NamedTuple):
    """A placeholder or a code in its text."""

    part: str | Code
    role: str

    @property
    def shown(self) -> str:
        return self.part if isinstance(self.part, str) else self.part.shown


def respaced(source: Content, target: Content) -> Content:
    """The target with space where its source has some around a placeholder, and none inside of tags that have none."""
    near: dict[str, list[tuple[str, str]]] = defaultdict(list)
    words, holes = _taken_apart(source)
    for number, hole in enumerate(holes):
        near[hole.shown].append((words[number][-1:], words[number + 1][:1]))
    words, holes = _taken_apart(target)
    for number, hole in enumerate(holes):
        if known := near[hole.shown]:
            before, behind = known.pop(0) if len(known) > 1 else known[0]
            words[number] = _left(words[number], hole.role, before, first=number == 0)
            words[number + 1] = _right(words[number + 1], hole.role, behind, last=number == len(holes) - 1)
    return _put_together(words, holes)


def _left(text: str, role: str, wanted: str, *, first: bool) -> str:
    """What stands before a placeholder that has `wanted` before it in its source."""
    if role == "close" and not wanted.isspace():
        return text.rstrip()
    if wanted.isspace():
        lacks = text[-1] not in _OPENS and not text[-1].isspace() if text else not first
    else:
        lacks = text[-1:].isalnum() and not wanted.isalnum()
    return f"{text} " if lacks else text


def _right(text: str, role: str, wanted: str, *, last: bool) -> str:
    """What stands behind a placeholder that has `wanted` behind it in its source."""
    if role == "open" and not wanted.isspace():
        return text.lstrip()
    lacks = text[0].isalnum() if text else wanted.isspace() and not last
    return f" {text}" if lacks and not wanted.isalnum() else text


def misplaced(source: Content, target: Content) -> str:
    """What shows that placeholders were written because they had to be: they stand behind the end of the sentence, or
    enclose nothing. Nothing if neither is so."""
    outside, empty = _oddities(target)
    had_outside, had_empty = _oddities(source)
    if more := outside - had_outside:
        return f"its translation has {', '.join(more)} behind its end"
    if more := empty - had_empty:
        return f"its translation has nothing between {', '.join(more)}"
    return ""


def _oddities(content: Content) -> tuple[Counter[str], Counter[str]]:
    """The placeholders behind the end of a sentence, and the tags between which nothing stands."""
    words, holes = _taken_apart(content)
    outside = [hole.shown for hole, before in zip(holes, words, strict=False) if _ENDED.search(before)]
    pairs = zip(holes, words[1:], holes[1:], strict=False)
    empty = [
        f"{one.shown} and {other.shown}"
        for one, between, other in pairs
        if (one.role, other.role) == ("open", "close") and not between.strip()
    ]
    return Counter(outside), Counter(empty)


def _taken_apart(content: Content) -> tuple[list[str], list[_Hole]]:
    """The placeholders of a content, and the words before, between and behind them."""
    words, holes = [""], list[_Hole]()
    for part in content:
        if isinstance(part, Code):
            holes.append(_Hole(part, part.role))
            words.append("")
            continue
        at = 0
        for found in _FOUND.finditer(part):
            words[-1] += part[at : found.start()]
            holes.append(_Hole(found[0], _role(found[0])))
            words.append("")
            at = found.end()
        words[-1] += part[at:]
    return words, holes


def _role(hole: str) -> str:
    tag = _TAG.fullmatch(hole)
    return "alone" if tag is None or tag[3] else "close" if tag[1] else "open"


def _put_together(words: Sequence[str], holes: Sequence[_Hole]) -> Content:
    parts: list[str | Code] = [words[0]]
    for hole, text in zip(holes, words[1:], strict=True):
        parts += [hole.part, text]
    return tuple(part for part in parts if part)
