"""ICU MessageFormat: `You have {n, plural, one {# file} other {# files}}.`

Text around a plural or select is moved into its branches, so that each is a whole sentence, and plural categories that
the target language needs are added. Arguments are codes; `''` is an apostrophe, and `'{'` a brace.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

from attent.data.formats import units
from attent.data.formats.placeholders import ICU_MESSAGE
from attent.data.formats.units import Edit, InlineCode, InlineContent, ScanResult
from attent.data.pairs import LanguagePair
from attent.storage.errors import AttentError

_CHOICE = re.compile(
    r"\{\s*(?P<argument>\w+)\s*,\s*(?P<kind>plural|selectordinal|select)\s*,\s*(?P<offset>offset:\d+)?\s*"
)
_SELECTOR = re.compile(r"\s*(?P<key>=\d+|\w+)\s*\{")
_END = re.compile(r"\s*\}")
_PART = re.compile(r"(?P<text>[^{}'#]+)|''|'(?P<quoted>[{}#|](?:[^']|'')*)(?:'|\Z)|(?P<argument>\{[^{}']*\})|['#]")
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
    branches: "Mapping[str, Message]"  # by selector


Message: TypeAlias = tuple["str | InlineCode | Choice", ...]


class MessageError(AttentError):
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
            if len(_CHOICE.findall(text)) > _MAX_CHOICES:
                raise MessageError(f"it has more than {_MAX_CHOICES} plurals and selects")
            message, end = _parse(text, 0, 0, "")
            if end < len(text):
                raise MessageError("it has a } too many")
            message = _expand(message, languages)
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

    result.add_unit(line, contents, make_edits)


def _parse(text: str, offset: int, depth: int, number: str) -> tuple[Message, int]:
    """Return the message up to a closing brace or the end. `number` is the argument that `#` stands for."""
    parts: list[str | InlineCode | Choice] = []
    if depth > _MAX_DEPTH:
        raise MessageError(f"it has forms inside each other, more than {_MAX_DEPTH} deep")
    while offset < len(text) and text[offset] != "}":
        if head := _CHOICE.match(text, offset):
            choice, offset = _parse_choice(text, head, depth, number)
            parts.append(choice)
            continue
        part = _PART.match(text, offset)
        if part is None:
            raise MessageError("it has a { that is not closed or begins no argument")
        if part["argument"]:
            parts.append(InlineCode(part[0], part[0], is_word=True))
        elif part[0] == "#" and number:
            parts.append(InlineCode(f"{{{number}}}", f"{{{number}, number}}", is_word=True))
        else:
            parts.append((part["quoted"] or part["text"] or part[0][0]).replace("''", "'"))
        offset = part.end()
    return tuple(parts), offset


def _parse_choice(text: str, head: re.Match[str], depth: int, number: str) -> tuple[Choice, int]:
    branches: dict[str, Message] = {}
    offset = head.end()
    number = head["argument"] if head["kind"] != "select" else number
    while selector := _SELECTOR.match(text, offset):
        branches[selector["key"]], offset = _parse(text, selector.end(), depth + 1, number)
        if not text.startswith("}", offset):
            raise MessageError("it has a { that is not closed")
        offset += 1
    end = _END.match(text, offset)
    if end is None or "other" not in branches:
        raise MessageError("it has forms without `other`")
    if head["offset"]:
        raise MessageError("its forms have an offset")
    return Choice(head[0], head["argument"], head["kind"], branches), end.end()


def _expand(message: Message, languages: LanguagePair) -> Message:
    """Move what surrounds a choice into its branches, and add the plural categories of the target language."""
    index, choice = next(((i, part) for i, part in enumerate(message) if isinstance(part, Choice)), (0, None))
    if choice is None:
        return message
    branches = dict(choice.branches)
    if choice.kind != "select":
        shown = {key: [part for part in branch if isinstance(part, InlineCode)] for key, branch in branches.items()}
        sources = choose_plural_sources(shown, languages, is_ordinal=choice.kind == "selectordinal")
        branches |= {key: branches[source] for key, source in sources.items()}
    before, after = message[:index], message[index + 1 :]
    expanded = {key: _expand((*before, *branch, *after), languages) for key, branch in branches.items()}
    result = (replace(choice, branches=expanded),)
    if len(list(_list_leaves(result))) > _MAX_BRANCHES:
        raise MessageError(f"it has more than {_MAX_BRANCHES} forms")
    return result


def _list_leaves(message: Message) -> Iterator[InlineContent]:
    if len(message) == 1 and isinstance(choice := message[0], Choice):
        for branch in choice.branches.values():
            yield from _list_leaves(branch)
    else:
        yield units.join_texts(part for part in message if not isinstance(part, Choice))


def _serialize(message: Message, targets: Iterator[InlineContent], doubled: bool, number: str = "") -> str:
    """Return a message with translated leaves. `number` is the argument that `#` stands for."""
    if len(message) == 1 and isinstance(choice := message[0], Choice):
        number = choice.argument if choice.kind != "select" else number
        branches = (f"{key} {{{_serialize(part, targets, doubled, number)}}}" for key, part in choice.branches.items())
        return f"{choice.head}{' '.join(branches)}}}"
    parts = list[str]()
    for part in next(targets):
        if isinstance(part, InlineCode):
            parts.append("#" if number and part.raw == f"{{{number}, number}}" else part.raw)
        else:
            text = part.replace("'", "''") if doubled else re.sub("'(?=[{}#|'])", "''", part)
            parts.append(re.sub("[{}#]+" if number else "[{}]+", r"'\g<0>'", text))
    return "".join(parts)


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
