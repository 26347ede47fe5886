"""ICU MessageFormat: `You have {n, plural, one {# file} other {# files}}.`

Text around a plural or select is moved into its branches, so that each is a whole sentence, and plural categories that
the target language needs are added. Arguments are codes; `''` is an apostrophe, and `'{'` a brace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

from attent.data.formats import units
from attent.data.formats.placeholders import ICU_MESSAGE
from attent.data.formats.units import Edit, InlineCode, InlineContent, ScanResult, TranslationUnit
from attent.data.pairs import LanguagePair

_CHOICE = re.compile(
    r"\{\s*(?P<argument>\w+)\s*,\s*(?P<kind>plural|selectordinal|select)\s*,\s*(?P<offset>offset:\d+)?\s*"
)
_SELECTOR = re.compile(r"\s*(?P<key>=\d+|\w+)\s*\{")
_ARGUMENT = re.compile(r"\{[^{}']*\}")
_QUOTED = re.compile(r"'(?:'|(?P<quoted>[{}#|](?:[^']|'')*)(?:'|\Z))")
_TEXT = re.compile(r"[^{}'#]+")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_DEPTH = 10
_MAX_CHOICES = 20
_MAX_BRANCHES = 100  # of a message
_MAX_NUMBER = 200  # up to which the categories of numbers are compared
CATEGORIES = ("zero", "one", "two", "few", "many", "other")


@dataclass(frozen=True)
class Choice:
    head: str  # `{n, plural, `
    argument: str
    kind: str
    branches: tuple[tuple[str, Message], ...]  # selector and message


Message: TypeAlias = tuple["str | InlineCode | Choice", ...]


class MessageError(ValueError):
    """A message that cannot be translated, in a few words."""


def add_unit(
    result: ScanResult,
    line: int,
    text: str,
    languages: LanguagePair,
    write: Callable[[str], Edit],
    *,
    doubled: bool = False,
    code: re.Pattern[str] | None = None,
) -> None:
    """Add the unit of a text that may be an ICU message.

    `doubled`: apostrophes are doubled in any case. `code`: pattern of placeholders that are not known elsewhere.
    """
    if _LONE_SURROGATE.search(text):
        result.skip(line, text, "it has half of a surrogate pair or bytes that are not UTF-8")
        return
    is_message = doubled or ICU_MESSAGE.search(text)
    parts = re.split(f"({code.pattern})", text) if code else [text]
    message: Message = tuple(InlineCode(part, part, is_word=True) if n % 2 else part for n, part in enumerate(parts))
    try:
        if is_message:
            message = _expand(_parse(text), languages)
    except MessageError as error:
        result.skip(line, text, str(error))
        return
    contents = tuple(_list_leaves(message))

    def make_edits(targets: Sequence[InlineContent]) -> list[Edit]:
        if units.is_unchanged(contents, targets):
            return []
        if not is_message:
            return [write(units.get_raw_text(targets[0]))]
        return [write(_serialize(message, iter(targets), doubled or "''" in text))]

    result.units.append(TranslationUnit(line=line, contents=contents, make_edits=make_edits))


def _parse(text: str) -> Message:
    if len(_CHOICE.findall(text)) > _MAX_CHOICES:
        raise MessageError(f"it has more than {_MAX_CHOICES} plurals and selects")
    message, end = _parse_message(text, 0, 0, "")
    if end < len(text):
        raise MessageError("it has a } too many")
    return message


def _parse_message(text: str, offset: int, depth: int, number: str) -> tuple[Message, int]:
    """Return the message up to a closing brace or the end. `number` is the argument that `#` stands for."""
    parts: list[str | InlineCode | Choice] = []
    if depth > _MAX_DEPTH:
        raise MessageError(f"it has forms inside each other, more than {_MAX_DEPTH} deep")
    while offset < len(text) and text[offset] != "}":
        if match := _TEXT.match(text, offset):
            parts.append(match[0])
        elif match := _QUOTED.match(text, offset):
            parts.append((match["quoted"] or "'").replace("''", "'"))
        elif match := _CHOICE.match(text, offset):
            choice, offset = _parse_choice(text, match, depth, number)
            parts.append(choice)
            continue
        elif match := _ARGUMENT.match(text, offset):
            parts.append(InlineCode(match[0], match[0], is_word=True))
        elif text[offset] == "#" and number:
            parts.append(InlineCode(f"{{{number}}}", "#", is_word=True))
        elif text[offset] in "'#":
            parts.append(text[offset])
        else:
            raise MessageError("it has a { that is not closed or begins no argument")
        offset = match.end() if match else offset + 1
    return tuple(parts), offset


def _parse_choice(text: str, head: re.Match[str], depth: int, number: str) -> tuple[Choice, int]:
    branches: list[tuple[str, Message]] = []
    offset = head.end()
    number = head["argument"] if head["kind"] != "select" else number
    while selector := _SELECTOR.match(text, offset):
        message, offset = _parse_message(text, selector.end(), depth + 1, number)
        if not text.startswith("}", offset):
            raise MessageError("it has a { that is not closed")
        branches.append((selector["key"], message))
        offset += 1
    end = re.compile(r"\s*\}").match(text, offset)
    if end is None or "other" not in dict(branches):
        raise MessageError("it has forms without `other`")
    if head["offset"]:
        raise MessageError("its forms have an offset")
    return Choice(head[0], head["argument"], head["kind"], tuple(branches)), end.end()


def _expand(message: Message, languages: LanguagePair) -> Message:
    """Move what surrounds a choice into its branches, and add the plural categories of the target language."""
    index = next((index for index, part in enumerate(message) if isinstance(part, Choice)), None)
    if index is None:
        return message
    choice = message[index]
    assert isinstance(choice, Choice)
    branches = dict(choice.branches)
    if choice.kind != "select":
        shown = {key: [part for part in branch if isinstance(part, InlineCode)] for key, branch in branches.items()}
        sources = choose_plural_sources(shown, languages, is_ordinal=choice.kind == "selectordinal")
        branches |= {key: branches[source] for key, source in sources.items()}
    before, after = message[:index], message[index + 1 :]
    if choice.kind != "select":
        before, after = _name_numbers(before), _name_numbers(after)
    expanded = tuple((key, _expand((*before, *branch, *after), languages)) for key, branch in branches.items())
    result = (replace(choice, branches=expanded),)
    if len(list(_list_leaves(result))) > _MAX_BRANCHES:
        raise MessageError(f"it has more than {_MAX_BRANCHES} forms")
    return result


def _name_numbers(message: Message) -> Message:
    """Replace `#` of an outer plural, which an inner one would take over."""
    parts: list[str | InlineCode | Choice] = []
    for part in message:
        if isinstance(part, InlineCode) and part.raw == "#":
            part = part._replace(raw=f"{part.display[:-1]}, number}}")
        elif isinstance(part, Choice) and part.kind == "select":
            part = replace(part, branches=tuple((key, _name_numbers(branch)) for key, branch in part.branches))
        parts.append(part)
    return tuple(parts)


def _list_leaves(message: Message) -> Iterable[InlineContent]:
    if len(message) == 1 and isinstance(choice := message[0], Choice):
        for _, branch in choice.branches:
            yield from _list_leaves(branch)
    else:
        yield units.join_texts(part for part in message if not isinstance(part, Choice))


def _serialize(message: Message, targets: Iterable[InlineContent], doubled: bool, in_plural: bool = False) -> str:
    if len(message) == 1 and isinstance(choice := message[0], Choice):
        in_plural |= choice.kind != "select"
        branches = (f"{key} {{{_serialize(branch, targets, doubled, in_plural)}}}" for key, branch in choice.branches)
        return f"{choice.head}{' '.join(branches)}}}"
    content = next(iter(targets))
    special = "[{}#]+" if in_plural else "[{}]+"
    parts = list[str]()
    for part in content:
        if isinstance(part, InlineCode):
            parts.append(part.raw)
        else:
            text = part.replace("'", "''") if doubled else re.sub("'(?=[{}#|'])", "''", part)
            parts.append(re.sub(special, lambda match: f"'{match[0]}'", text))
    return "".join(parts)


# ---- plural categories -----------------------------------------------------------------------------------------------


def choose_plural_sources(
    shown: Mapping[str, Sequence[object]], languages: LanguagePair, *, is_ordinal: bool = False
) -> dict[str, str]:
    """Return the categories that a target language needs in addition, and the category to translate for each.

    It is that of the least number of the category, if it shows the same arguments as `other` does: in English the
    singular for `one` in Russian, which counts 1, 21 and 31 so.
    """
    targets = _group_numbers(languages.target, is_ordinal)
    sources = _group_numbers(languages.source or "en", is_ordinal)
    chosen: dict[str, str] = {}
    for category, numbers in targets.items():
        if category not in shown:
            own = next((key for key, others in sources.items() if min(numbers, default=-1) in others), "other")
            chosen[category] = own if own in shown and shown[own] == shown["other"] else "other"
    return chosen


@cache
def _group_numbers(language: str | None, is_ordinal: bool) -> dict[str, frozenset[int]]:
    """Return the numbers of each plural category of a language by CLDR; {} if it is not known."""
    from babel.core import Locale, UnknownLocaleError

    try:
        locale = Locale.parse((language or "").replace("-", "_"))
    except (UnknownLocaleError, ValueError):
        return {}
    rule = locale.ordinal_form if is_ordinal else locale.plural_form
    categories = [rule(number) for number in range(_MAX_NUMBER)]
    tags = sorted({*rule.tags, "other"}, key=CATEGORIES.index)
    return {tag: frozenset(n for n, category in enumerate(categories) if category == tag) for tag in tags}
