"""Placeholders in a text that a translation must keep: `%s`, `{name}`, `<b>`, `&amp;`, URLs.

A translation must have the same placeholders as its source, equally often, with tags nested as before; positional ones
(`%s`, `%d`) must keep their order. A text whose formats are known, by gettext's flags such as `c-format`, is checked by
the directives of these formats. The groups of a format's pattern tell the argument that a directive takes: one with a
`number` (`%2$s`) or a `name` (`%(x)s`, `{0}`), otherwise the next one; none if it is `void` (`%%`). A `fixed` directive
must keep its place, and so must a character that begins no known directive. The patterns may match more than the
language allows.
"""

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from attent.data.formats.units import InlineCode, InlineContent, Role, get_display_text, join_texts

_NEXT_STAR = re.compile(r"\*(?!\d)")  # a width or precision that is an argument
_NUMBER = r"(?P<number>[1-9]\d{0,5}\$)?"
HTML_BLOCK_TAG = (  # separates two sentences
    r"</?(?:address|article|aside|blockquote|br|caption|center|dd|details|div|dl|dt|fieldset|figcaption|figure|footer"
    r"|form|h[1-6]|header|hr|legend|li|main|nav|ol|option|p|pre|section|summary|table|tbody|td|tfoot|th|thead|title|tr|ul)"
    r"(?:\s[^<>]*)?/?>"
)
_PLACEHOLDER = re.compile(
    r"""
    \$\{[^{}\s]+\}                                      # ${x}
    | \{\{[^{}]*\}\}                                    # {{x}}
    | \{%[^{}]*%\}                                      # {% tag %}
    | %\{\w+\} | %<\w+>[a-zA-Z] | %\d+%                # %{x} %<x>s %1%
    | \{[^{}\n]*\}                                      # {x} {0} {} {0:>8}
    | %(?:\d+\$|\([\w. -]+\))?[#0+'-]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh|h|ll|l|q|j|z|t|L)?[diouxXeEfFgGaAbcCsSprn@]
    | %%
    | %L?\d{1,2}                                        # %1 of Qt
    | </?[A-Za-z](?:[^<>"']|"[^"<]*"|'[^'<]*')*>        # <b>, </b>, <br/>
    | &(?:[A-Za-z][A-Za-z0-9]*|\#\d+|\#[xX][0-9A-Fa-f]+);
    | (?:https?|ftp|mailto):[^\s<>"']*[^\s<>"'.,;:!?)\]]
    | (?<![\w.+-])[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+    # e-mail address
    """,
    re.VERBOSE,
)
_POSITIONAL = re.compile(r"%[^%(\d{]|%\d+[^$\d]|\{\}")
_HTML_TAG = re.compile(r"<(/?)([A-Za-z][^\s/<>]*)(?:[^<>\"']|\"[^\"<]*\"|'[^'<]*')*?(/?)>")
ICU_MESSAGE = re.compile(r"\{\s*\w+\s*,\s*(?:plural|select|selectordinal)\s*,")  # {n, plural, one {a} other {# b}}
# The inline tags that `attent train --augment` teaches a model to copy, numbered from 1 to 9. They are symbols of the
# tokenizer. Next to a word a space is inside the tag, so that the word keeps its tokens, and punctuation is outside:
# `a <x1> red </x1> car, (<x2> old </x2>).` A standalone tag stands for a word, or before one: `open <x3/>!`.
INLINE_TAG: dict[Role, str] = {"open": "<x{}>", "close": "</x{}>", "standalone": "<x{}/>"}
MAX_INLINE_TAGS = 9
INLINE_TAGS = tuple(form.format(number) for number in range(1, MAX_INLINE_TAGS + 1) for form in INLINE_TAG.values())
_MARKED = "\0text"  # pair id of the codes of `mark_codes`
_MAX_WORDS = 8  # of a label; longer texts are prose
_MARK = re.compile(
    r"(?<![\w&~\0])[_&~](?=[^\W\d_])"  # before a word, or inside of a capitalized one: E_xit, but not file_name or R&D
    r"|(?<=\b[A-Z])[_&](?=[a-z])|(?<=\b[A-Z][a-z])[_&](?=[a-z])|(?<=\b[A-Z][a-z]{2})[_&](?=[a-z])"
    r"|(?<=\b[A-Z][a-z]{3})[_&](?=[a-z])"
)
_LETTER = re.compile(r"(?<!\0)[^\W\d_]")  # not directly after a placeholder, which the mark could extend: `$x_`
_FIRST_IDEOGRAPH = "\u2e80"
_LABEL_END = re.compile(r"[\s.:\u2026\uff1a]+\Z")


# Formats whose plural form for a single number may lack an argument, according to msgfmt.
_COUNT_IS_OPTIONAL = frozenset(
    "awk boost c csharp elisp java java-printf javascript kde librep objc perl perl-brace php python python-brace "
    "qt-plural sh smalltalk tcl ycp".split()
)


@cache
def _read_formats() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("directives.toml").read_text(encoding="utf-8"))


def _make_printf(
    conversion: str, argument: str = _NUMBER, flags: str = "[ #+0'-]*+", size: str = "", void: str = "%"
) -> str:
    """Return the pattern of `%`, argument, flags, width, precision, size and conversion."""
    star = r"\*(?:\d++\$)?"
    return rf"%{argument}{flags}(?:\d++|{star})?(?:\.(?:\d++|{star})?)?{size}(?:(?P<void>{void})|{conversion})"


@cache
def get_directive_pattern(format_name: str) -> re.Pattern[str] | None:
    """Return the pattern of a format's directives and stray characters; None if the format is not known."""
    if format_name not in _read_formats():
        return None
    parts = dict(_read_formats()[format_name])
    reserved, patterns = re.escape(parts.pop("reserved", "")), [parts.pop("pattern", "")]
    patterns += [_make_printf(**parts)] if parts else []
    patterns += [rf"(?P<stray>[{reserved}][^\s{reserved}]{{0,3}})"] if reserved else []
    return re.compile("|".join(filter(None, patterns)), re.DOTALL)


def find_directive_problem(source: str, target: str, pattern: re.Pattern[str]) -> str:
    """Return how the directives of a translation differ from those of its source, or ""."""
    if Counter(_assign_arguments(source, pattern)) == Counter(_assign_arguments(target, pattern)):
        return ""
    expected, actual = (Counter(match[0] for match in _find_directives(text, pattern)) for text in (source, target))
    if lost := expected - actual:
        return f"its translation lost {', '.join(lost)}"
    if gained := actual - expected:
        return f"its translation gained {', '.join(gained)}"
    return f"its translation has {' and '.join(expected)} in another order"


def can_lack_count(singular: str, plural: str, format_name: str) -> bool:
    """True if msgfmt accepts the singular as the plural form for 1; False if that is not certain.

    The singular may lack at most one argument, the last or one with a name, in formats that allow it.
    """
    pattern = get_directive_pattern(format_name)
    if pattern is None:
        return False
    in_singular, in_plural = (Counter(_assign_arguments(text, pattern)) for text in (singular, plural))
    missing = list((in_plural - in_singular).elements())
    if in_singular - in_plural or len(missing) > 1:
        return False
    if not missing:
        return True
    number, directive = missing[0]
    if format_name not in _COUNT_IS_OPTIONAL or "*" in directive or (number and format_name == "python"):
        return False
    if number:
        has_names = any(_get_name(text, pattern) for _, text in in_singular)  # `%2%` has the argument of `%2$d`
        return not has_names and {other for other, _ in in_singular if other} == set(range(1, number))
    name = _get_name(directive, pattern)
    first_words = re.findall(r"\w+", name or "")[:1]  # `0` of `{0,number}`
    # Another directive may have the same argument with another type, or inside: `{0,choice,0#a|1#b{1}}`.
    return bool(first_words) and first_words[0] not in re.findall(r"\w+", " ".join(text for _, text in in_singular))


def _get_name(directive: str, pattern: re.Pattern[str]) -> str | None:
    match = pattern.fullmatch(directive)
    return match.groupdict().get("name") if match else None


def _find_directives(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    return [match for match in pattern.finditer(text) if match.lastgroup != "text"]


def _assign_arguments(text: str, pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """Return (number of the argument, directive without it) of each directive.

    If arguments are given in several ways, it is the place of the directive: no other order is certain to be right.
    """
    directives: list[tuple[int, str]] = []
    ways: set[str] = set()
    next_number, fixed_count = 1, 0
    matches = _find_directives(text, pattern)
    for match in matches:
        way, directive, number = match.lastgroup or "next", match[0], 0
        star_count = len(_NEXT_STAR.findall(directive))
        given_number = match.groupdict().get("number")
        ways |= {way, *(["next"] if star_count else []), *(["number"] if given_number else [])}
        if way == "number" and given_number:
            number = int(re.sub(r"\D", "", given_number) or 0) + given_number.endswith(":")  # Pascal counts from 0
            directive = directive.replace(given_number, "", 1)
        elif way == "next":
            number = next_number
        elif way in ("fixed", "stray"):
            fixed_count += 1
            number = fixed_count
        next_number += star_count + (way == "next")
        directives.append((number, directive))
    if len(ways - {"void", "fixed"}) > 1:
        return [(index, match[0]) for index, match in enumerate(matches)]
    return directives


@dataclass(frozen=True)
class PlaceholderSyntax:
    pattern: re.Pattern[str]  # of a directive or any other placeholder
    directives: tuple[re.Pattern[str], ...] = ()  # of the formats of the text


GENERIC = PlaceholderSyntax(_PLACEHOLDER)


@cache
def get_syntax(format_names: tuple[str, ...]) -> PlaceholderSyntax:
    """Return the placeholders of texts in these formats (`c`, `python-brace`); unknown ones are ignored."""
    patterns = tuple(filter(None, map(get_directive_pattern, format_names)))
    unnamed = [re.sub(r"\(\?P<\w+>", "(?:", pattern.pattern) for pattern in patterns]
    return PlaceholderSyntax(re.compile("|".join([*unnamed, f"(?x:{_PLACEHOLDER.pattern})"]), re.DOTALL), patterns)


def has_words(text: str, syntax: PlaceholderSyntax = GENERIC) -> bool:
    """True if there is something to translate: figures and signs are the same in every language."""
    return any(character.isalpha() for character in syntax.pattern.sub("", text))


def find_problem(source: InlineContent, target: InlineContent, syntax: PlaceholderSyntax = GENERIC) -> str:
    """Return in a few words what the translation did to the placeholders and codes, or ""."""
    for pattern in syntax.directives:
        texts = get_display_text(source), get_display_text(target)
        if problem := find_directive_problem(*texts, pattern):
            return problem
        source, target = (
            tuple(pattern.sub("\u2026", part) if isinstance(part, str) else part for part in content)
            for content in (source, target)
        )
    expected, actual = list_placeholders(source), list_placeholders(target)
    lost, gained = Counter(expected) - Counter(actual), Counter(actual) - Counter(expected)
    if lost:
        return f"its translation lost {', '.join(lost)}"
    if gained:
        return f"its translation gained {', '.join(gained)}"
    if _select_positional(expected) != _select_positional(actual):
        return f"its translation has {' and '.join(dict.fromkeys(_select_positional(expected)))} in another order"
    source_tags, target_tags = list(_list_tags(source)), list(_list_tags(target))
    if source_tags != target_tags and not (_is_well_nested(source_tags) and _is_well_nested(target_tags)):
        return "its translation has badly nested tags"
    return ""


def list_placeholders(content: InlineContent, syntax: PlaceholderSyntax = GENERIC) -> list[str]:
    """Return the placeholders and codes of a content in order."""
    return [placeholder.text for placeholder in _split_content(content, syntax)[1]]


def _select_positional(placeholders: Sequence[str]) -> list[str]:
    return [placeholder for placeholder in placeholders if is_positional(placeholder)]


def _list_tags(content: InlineContent) -> Iterator[tuple[str, str]]:
    """Yield (role, name) of opening and closing tags, both of codes and in the text."""
    for part in content:
        if isinstance(part, InlineCode):
            if part.role != "standalone":
                yield part.role, f"code {part.pair_id}"
            continue
        for tag in _HTML_TAG.finditer(part):
            if not tag[3]:
                yield "close" if tag[1] else "open", tag[2].lower()


def _is_well_nested(tags: Sequence[tuple[str, str]]) -> bool:
    """True if every tag closes the one opened last. A tag that is never closed (`<br>`) is standalone."""
    closed = {name for role, name in tags if role == "close"}
    stack: list[str] = []
    for role, name in tags:
        if role == "open" and name in closed:
            stack.append(name)
        elif role == "close" and (not stack or stack.pop() != name):
            return False
    return not stack


class _Placeholder(NamedTuple):
    content: str | InlineCode
    role: Role

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else self.content.display


def mark_codes(
    content: InlineContent, syntax: PlaceholderSyntax = GENERIC, is_copied: Callable[[str], bool] = lambda _: False
) -> InlineContent:
    """Return a content whose tags and placeholders are codes; words that the model copies are text."""
    words, placeholders = _split_content(content, syntax)
    opened: dict[str, list[int]] = defaultdict(list)
    parts: list[str | InlineCode] = [words[0]]
    for placeholder, word in zip(placeholders, words[1:], strict=True):
        code = placeholder.content
        if isinstance(code, str):
            tag = _HTML_TAG.fullmatch(code)
            name = tag[2].lower() if tag else ""
            if placeholder.role == "close" and opened[name]:
                index = opened[name].pop()
                pair_id = f"{_MARKED} {index}"
                parts[index] = InlineCode(get_display_text((parts[index],)), "", "open", pair_id)
                code = InlineCode(code, "", "close", pair_id)
            elif tag or not is_copied(code):
                if placeholder.role == "open":
                    opened[name].append(len(parts))
                code = InlineCode(code, "", "standalone", _MARKED, is_word=not tag)
        elif code.is_word and is_copied(code.display):
            code = code.display
        parts += [code, word]
    return join_texts(parts)


def unmark_codes(content: InlineContent) -> InlineContent:
    """Return a content in which the codes of `mark_codes` are text again."""
    return join_texts(
        part.display if isinstance(part, InlineCode) and part.pair_id.startswith(_MARKED) else part for part in content
    )


def is_positional(placeholder: str) -> bool:
    """True if a placeholder is told apart by its order: `%s`, but not `%(name)s`."""
    return _POSITIONAL.match(placeholder) is not None


def _split_content(content: InlineContent, syntax: PlaceholderSyntax) -> tuple[list[str], list[_Placeholder]]:
    """Return the words before, between and after the placeholders, and the placeholders."""
    words, placeholders = [""], list[_Placeholder]()
    for part in content:
        if isinstance(part, InlineCode):
            placeholders.append(_Placeholder(part, part.role))
            words.append("")
            continue
        offset = 0
        for match in syntax.pattern.finditer(part):
            words[-1] += part[offset : match.start()]
            tag = _HTML_TAG.fullmatch(match[0])
            role: Role = "standalone" if tag is None or tag[3] else "close" if tag[1] else "open"
            placeholders.append(_Placeholder(match[0], role))
            words.append("")
            offset = match.end()
        words[-1] += part[offset:]
    return words, placeholders


# ---- keyboard accelerators of menus and buttons ----------------------------------------------------------------------
# `_File` in GNOME, `&File` in Qt and Windows, `~File` in LibreOffice. The mark is taken out before a label is
# translated, and put back before a letter of the translation: the same letter at the beginning of a word if there is
# one, else anywhere, else the first letter. In Chinese, Japanese and Korean the key follows the label:
# `ファイル(_F)`.


class Mnemonic(NamedTuple):
    mark: str
    letter: str


def remove_accelerator(content: InlineContent, syntax: PlaceholderSyntax) -> tuple[InlineContent, Mnemonic | None]:
    """Return a content without the mark of its accelerator, and the accelerator if it has exactly one."""
    texts = [_mask_placeholders(part, syntax) if isinstance(part, str) else "" for part in content]
    marks = [(index, match) for index, text in enumerate(texts) for match in _MARK.finditer(text)]
    if len(marks) != 1 or len(" ".join(texts).split()) > _MAX_WORDS:
        return content, None
    index, match = marks[0]
    part, mark = content[index], match[0]
    if not isinstance(part, str) or "".join(texts).count(mark) > 1:
        return content, None
    unmarked = part[: match.start()] + part[match.end() :]
    return (*content[:index], unmarked, *content[index + 1 :]), Mnemonic(mark, part[match.end()])


def insert_accelerator(content: InlineContent, mnemonic: Mnemonic, syntax: PlaceholderSyntax) -> InlineContent | None:
    """Return a translation with the mark of an accelerator; None if it has no letter for it."""
    texts = [_mask_placeholders(part, syntax) if isinstance(part, str) else "" for part in content]
    letter = re.escape(mnemonic.letter)
    for pattern in (rf"(?<!\0)\b{letter}", rf"(?<!\0){letter}", _LETTER.pattern):
        for index, text in enumerate(texts):
            match = re.search(pattern, text, re.IGNORECASE)
            part = content[index]
            if match and isinstance(part, str):
                offset, added = match.start(), mnemonic.mark
                if match[0] >= _FIRST_IDEOGRAPH:
                    offset = len(_LABEL_END.sub("", text))
                    added = f"({mnemonic.mark}{mnemonic.letter.upper()})"
                return (*content[:index], part[:offset] + added + part[offset:], *content[index + 1 :])
    return None


def _mask_placeholders(text: str, syntax: PlaceholderSyntax) -> str:
    return syntax.pattern.sub(lambda match: "\0" * len(match[0]), text)
