"""Placeholders in a text that a translation must keep: `%s`, `{name}`, `<b>`, `&amp;`, URLs.

A translation must have the same placeholders as its source, equally often, with tags nested as before; positional ones
(`%s`, `%d`) must keep their order. A text whose formats are known (`directives`) is checked by their rules.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from attent.data.formats import directives
from attent.data.formats.units import InlineCode, InlineContent, Role, get_display_text

HTML_BLOCK_TAG = (  # separates two sentences
    r"</?(?:address|article|aside|blockquote|br|caption|center|dd|details|div|dl|dt|fieldset|figcaption|figure|footer"
    r"|form|h[1-6]|header|hr|legend|li|main|nav|ol|option|p|pre|section|summary|table|tbody|td|tfoot|th|thead|title|tr|ul)"
    r"(?:\s[^<>]*)?/?>"
)
TAG_TEMPLATES = {"open": "<{}>", "close": "</{}>", "standalone": "<{}/>"}  # inline tags as the model reads them
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
_PUNCTUATION = " \u00a0\u202f:;,.!?()[]\"'/-"  # belongs to a placeholder at the end of a text
_TRAILING_PUNCTUATION = re.compile(f"[{re.escape(_PUNCTUATION)}]*")
_OPENING_PUNCTUATION = "([{<\"'\u00ab\u201c\u201e\u2018\u201a\u00bf\u00a1"
# The inline tags that `attent train --augment` teaches a model to copy, numbered from 1 to 9. They are symbols of the
# tokenizer. Next to a word a space is inside the tag, so that the word keeps its tokens, and punctuation is outside:
# `a <x1> red </x1> car, (<x2> old </x2>).` A standalone tag stands for a word, or before one: `open <x3/>!`.
INLINE_TAG: dict[Role, str] = {"open": "<x{}>", "close": "</x{}>", "standalone": "<x{}/>"}
MAX_INLINE_TAGS = 9
INLINE_TAGS = tuple(form.format(number) for number in range(1, MAX_INLINE_TAGS + 1) for form in INLINE_TAG.values())
_SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f][\"'\u00bb\u201c\u201d)\]]*\s*$")


@dataclass(frozen=True)
class PlaceholderSyntax:
    pattern: re.Pattern[str]  # of a directive or any other placeholder
    directives: tuple[re.Pattern[str], ...] = ()  # of the formats of the text


GENERIC = PlaceholderSyntax(_PLACEHOLDER)


@cache
def get_syntax(format_names: tuple[str, ...]) -> PlaceholderSyntax:
    """Return the placeholders of texts in these formats (`c`, `python-brace`); unknown ones are ignored."""
    patterns = tuple(filter(None, map(directives.get_directive_pattern, format_names)))
    unnamed = [re.sub(r"\(\?P<\w+>", "(?:", pattern.pattern) for pattern in patterns]
    return PlaceholderSyntax(re.compile("|".join([*unnamed, f"(?x:{_PLACEHOLDER.pattern})"]), re.DOTALL), patterns)


def has_words(text: str, syntax: PlaceholderSyntax = GENERIC) -> bool:
    """True if there is something to translate: figures and signs are the same in every language."""
    return any(character.isalpha() for character in syntax.pattern.sub("", text))


def strip_placeholders(
    text: str, *, start: bool, end: bool, syntax: PlaceholderSyntax = GENERIC
) -> tuple[str, str, str]:
    """Return (prefix, text without the placeholders at its ends, suffix)."""
    spans = [match.span() for match in syntax.pattern.finditer(text)]
    first, last = 0, len(text)
    for left, right in spans if start else ():
        if left > first:
            break
        first = _skip_punctuation(text, right)
    for left, right in reversed(spans) if end else ():
        if left < first or _skip_punctuation(text, right) < last:
            break
        last = left
    core = text[first:last]
    core = core.rstrip(_PUNCTUATION) if last < len(text) else core
    return text[:first], core, text[first + len(core) :]


def _skip_punctuation(text: str, offset: int) -> int:
    match = _TRAILING_PUNCTUATION.match(text, offset)
    return match.end() if match else offset


def find_problem(source: InlineContent, target: InlineContent, syntax: PlaceholderSyntax = GENERIC) -> str:
    """Return in a few words what the translation did to the placeholders and codes, or ""."""
    for pattern in syntax.directives:
        texts = get_display_text(source), get_display_text(target)
        if problem := directives.find_directive_problem(*texts, pattern):
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
    return [placeholder for placeholder in placeholders if _POSITIONAL.match(placeholder)]


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


# ---- spacing: constrained decoding inserts placeholders as words of their own ----------------------------------------


class _Placeholder(NamedTuple):
    content: str | InlineCode
    role: str

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else self.content.display


def restore_spacing(source: InlineContent, target: InlineContent, syntax: PlaceholderSyntax = GENERIC) -> InlineContent:
    """Add space around placeholders where the source has it, and remove it inside tags where the source has none."""
    contexts: dict[str, list[tuple[str, str]]] = defaultdict(list)  # characters before and after in the source
    words, placeholders = _split_content(source, syntax)
    for index, placeholder in enumerate(placeholders):
        contexts[placeholder.text].append((words[index][-1:], words[index + 1][:1]))
    words, placeholders = _split_content(target, syntax)
    for index, placeholder in enumerate(placeholders):
        if known := contexts[placeholder.text]:
            before, after = known.pop(0) if len(known) > 1 else known[0]
            is_last = index == len(placeholders) - 1
            words[index] = _space_before(words[index], placeholder.role, before, is_first=index == 0)
            words[index + 1] = _space_after(words[index + 1], placeholder.role, after, is_last=is_last)
    parts = (
        part for word, placeholder in zip(words, placeholders, strict=False) for part in (word, placeholder.content)
    )
    return tuple(part for part in (*parts, words[-1]) if part)


def _space_before(text: str, role: str, source_char: str, *, is_first: bool) -> str:
    """Return the text before a placeholder that follows `source_char` in the source."""
    if role == "close" and not source_char.isspace():
        return text.rstrip()
    if source_char.isspace():
        lacks_space = text[-1] not in _OPENING_PUNCTUATION and not text[-1].isspace() if text else not is_first
    else:
        lacks_space = text[-1:].isalnum() and not source_char.isalnum()
    return f"{text} " if lacks_space else text


def _space_after(text: str, role: str, source_char: str, *, is_last: bool) -> str:
    """Return the text after a placeholder that precedes `source_char` in the source."""
    if role == "open" and not source_char.isspace():
        return text.lstrip()
    lacks_space = text[0].isalnum() if text else source_char.isspace() and not is_last
    return f" {text}" if lacks_space and not source_char.isalnum() else text


def find_misplaced(source: InlineContent, target: InlineContent, syntax: PlaceholderSyntax = GENERIC) -> str:
    """Return a sign that placeholders were forced in, or "": they follow the end of the sentence or enclose nothing."""
    after_end, empty = _count_misplaced(target, syntax)
    source_after_end, source_empty = _count_misplaced(source, syntax)
    if extra := after_end - source_after_end:
        return f"its translation has {', '.join(extra)} after its end"
    if extra := empty - source_empty:
        return f"its translation has nothing between {', '.join(extra)}"
    return ""


def _count_misplaced(content: InlineContent, syntax: PlaceholderSyntax) -> tuple[Counter[str], Counter[str]]:
    """Count the placeholders after the end of a sentence, and the pairs of tags that enclose nothing."""
    words, placeholders = _split_content(content, syntax)
    after_end = [
        placeholder.text
        for placeholder, before in zip(placeholders, words, strict=False)
        if _SENTENCE_END.search(before)
    ]
    empty = [
        f"{opening.text} and {closing.text}"
        for opening, between, closing in zip(placeholders, words[1:], placeholders[1:], strict=False)
        if (opening.role, closing.role) == ("open", "close") and not between.strip()
    ]
    return Counter(after_end), Counter(empty)


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
            role = "standalone" if tag is None or tag[3] else "close" if tag[1] else "open"
            placeholders.append(_Placeholder(match[0], role))
            words.append("")
            offset = match.end()
        words[-1] += part[offset:]
    return words, placeholders
