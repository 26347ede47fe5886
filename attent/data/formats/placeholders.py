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

from attent.data.formats.units import InlineCode, InlineContent

_PLACEHOLDER = re.compile(
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
_POSITIONAL = re.compile(r"%[^%(\d{]|%\d+[^$\d]|\{\}")  # filled in by their place, not by a name or a number
_HTML_TAG = re.compile(r"<(/?)([A-Za-z][^\s/<>]*)(?:[^<>\"']|\"[^\"<]*\"|'[^'<]*')*?(/?)>")
_ICU_MESSAGE = re.compile(r"\{\s*\w+\s*,\s*(?:plural|select|selectordinal)\s*,")
_PUNCTUATION = " \u00a0\u202f:;,.!?()[]\"'/-"  # go with a placeholder at the end of a text
_TRAILING_PUNCTUATION = re.compile(f"[{re.escape(_PUNCTUATION)}]*")


def find_placeholders(text: str) -> list[str]:
    """The placeholders of a text, in order."""
    return _PLACEHOLDER.findall(text)


def has_words(text: str) -> bool:
    """Is there anything to translate? Figures and signs are the same in every language."""
    return any(character.isalpha() for character in _PLACEHOLDER.sub("", text))


def is_icu_message(text: str) -> bool:
    """Does it hold forms of its own, such as `{n, plural, one {a file} other {# files}}`?"""
    return _ICU_MESSAGE.search(text) is not None


def strip_placeholders(text: str, *, start: bool, end: bool) -> tuple[str, str, str]:
    """A text without the placeholders at its ends: what stood before, the text, what stood behind."""
    places = [found.span() for found in _PLACEHOLDER.finditer(text)]
    first, last = 0, len(text)
    for left, right in places if start else ():
        if left > first:
            break
        first = _skip_punctuation(text, right)
    for left, right in reversed(places) if end else ():
        if left < first or _skip_punctuation(text, right) < last:
            break
        last = left
    inside = text[first:last]
    inside = inside.rstrip(_PUNCTUATION) if last < len(text) else inside
    return text[:first], inside, text[first + len(inside) :]


def _skip_punctuation(text: str, offset: int) -> int:
    """Where what goes with a placeholder ends that ends here."""
    found = _TRAILING_PUNCTUATION.match(text, offset)
    return found.end() if found else offset


def find_problem(source: InlineContent, target: InlineContent) -> str:
    """What the translation did to the placeholders and codes of the source, in few words; nothing if all is well."""
    had, has = list_placeholders(source), list_placeholders(target)
    lost, gained = Counter(had) - Counter(has), Counter(has) - Counter(had)
    if lost:
        return f"its translation lost {', '.join(lost)}"
    if gained:
        return f"its translation gained {', '.join(gained)}"
    if _select_positional(had) != _select_positional(has):
        return f"its translation has {' and '.join(dict.fromkeys(_select_positional(had)))} in another order"
    tags_had, tags_have = list(_list_tags(source)), list(_list_tags(target))
    if tags_had != tags_have and not (_is_well_nested(tags_had) and _is_well_nested(tags_have)):
        return "its translation has tags that do not fit into each other"
    return ""


def list_placeholders(content: InlineContent) -> list[str]:
    """The placeholders and codes of a content, in order."""
    return [
        event for part in content for event in (find_placeholders(part) if isinstance(part, str) else [part.display])
    ]


def _select_positional(placeholders: Sequence[str]) -> list[str]:
    return [event for event in placeholders if _POSITIONAL.match(event)]


def _list_tags(content: InlineContent) -> Iterator[tuple[str, str]]:
    """(role, name) of what opens and closes, whether it is markup of the file or of its text."""
    for part in content:
        if isinstance(part, InlineCode):
            if part.role != "alone":
                yield part.role, f"code {part.pair_id}"
            continue
        for tag in _HTML_TAG.finditer(part):
            if not tag[3]:
                yield "close" if tag[1] else "open", tag[2].lower()


def _is_well_nested(tags: Sequence[tuple[str, str]]) -> bool:
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

_OPENING_PUNCTUATION = "([{<\"'\u00ab\u201c\u201e\u2018\u201a\u00bf\u00a1"  # signs that what comes next leans on

_SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f][\"'\u00bb\u201c\u201d)\]]*\s*$")


class _Placeholder(NamedTuple):
    """A placeholder or a code in its text."""

    content: str | InlineCode
    role: str

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else self.content.display


def restore_spacing(source: InlineContent, target: InlineContent) -> InlineContent:
    """The target with space where its source has some around a placeholder, and none inside of tags that have none."""
    near: dict[str, list[tuple[str, str]]] = defaultdict(list)
    words, holes = _split_content(source)
    for number, hole in enumerate(holes):
        near[hole.text].append((words[number][-1:], words[number + 1][:1]))
    words, holes = _split_content(target)
    for number, hole in enumerate(holes):
        if known := near[hole.text]:
            before, behind = known.pop(0) if len(known) > 1 else known[0]
            words[number] = _space_before(words[number], hole.role, before, is_first=number == 0)
            words[number + 1] = _space_after(words[number + 1], hole.role, behind, is_last=number == len(holes) - 1)
    return _join_content(words, holes)


def _space_before(text: str, role: str, source_char: str, *, is_first: bool) -> str:
    """What stands before a placeholder that has `wanted` before it in its source."""
    if role == "close" and not source_char.isspace():
        return text.rstrip()
    if source_char.isspace():
        lacks = text[-1] not in _OPENING_PUNCTUATION and not text[-1].isspace() if text else not is_first
    else:
        lacks = text[-1:].isalnum() and not source_char.isalnum()
    return f"{text} " if lacks else text


def _space_after(text: str, role: str, source_char: str, *, is_last: bool) -> str:
    """What stands behind a placeholder that has `wanted` behind it in its source."""
    if role == "open" and not source_char.isspace():
        return text.lstrip()
    lacks = text[0].isalnum() if text else source_char.isspace() and not is_last
    return f" {text}" if lacks and not source_char.isalnum() else text


def find_misplaced(source: InlineContent, target: InlineContent) -> str:
    """What shows that placeholders were written because they had to be: they stand behind the end of the sentence, or
    enclose nothing. Nothing if neither is so."""
    outside, empty = _count_misplaced(target)
    had_outside, had_empty = _count_misplaced(source)
    if more := outside - had_outside:
        return f"its translation has {', '.join(more)} behind its end"
    if more := empty - had_empty:
        return f"its translation has nothing between {', '.join(more)}"
    return ""


def _count_misplaced(content: InlineContent) -> tuple[Counter[str], Counter[str]]:
    """The placeholders behind the end of a sentence, and the tags between which nothing stands."""
    words, holes = _split_content(content)
    outside = [hole.text for hole, before in zip(holes, words, strict=False) if _SENTENCE_END.search(before)]
    pairs = zip(holes, words[1:], holes[1:], strict=False)
    empty = [
        f"{one.text} and {other.text}"
        for one, between, other in pairs
        if (one.role, other.role) == ("open", "close") and not between.strip()
    ]
    return Counter(outside), Counter(empty)


def _split_content(content: InlineContent) -> tuple[list[str], list[_Placeholder]]:
    """The placeholders of a content, and the words before, between and behind them."""
    words, holes = [""], list[_Placeholder]()
    for part in content:
        if isinstance(part, InlineCode):
            holes.append(_Placeholder(part, part.role))
            words.append("")
            continue
        at = 0
        for found in _PLACEHOLDER.finditer(part):
            words[-1] += part[at : found.start()]
            holes.append(_Placeholder(found[0], _get_tag_role(found[0])))
            words.append("")
            at = found.end()
        words[-1] += part[at:]
    return words, holes


def _get_tag_role(placeholder: str) -> str:
    tag = _HTML_TAG.fullmatch(placeholder)
    return "alone" if tag is None or tag[3] else "close" if tag[1] else "open"


def _join_content(words: Sequence[str], placeholders: Sequence[_Placeholder]) -> InlineContent:
    parts: list[str | InlineCode] = [words[0]]
    for hole, text in zip(placeholders, words[1:], strict=True):
        parts += [hole.content, text]
    return tuple(part for part in parts if part)
