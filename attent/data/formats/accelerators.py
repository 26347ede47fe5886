"""Keyboard accelerators of menus and buttons: `_File` in GNOME, `&File` in Qt and Windows, `~File` in LibreOffice.

The mark is taken out before a label is translated, and put back before a letter of the translation: the same letter at
the beginning of a word if there is one, else anywhere, else the first letter. In Chinese, Japanese and Korean the key
follows the label, as in `ファイル(_F)`.
"""

import re
from typing import NamedTuple

from attent.data.formats.placeholders import PlaceholderSyntax
from attent.data.formats.units import InlineContent

_MAX_WORDS = 8  # of a label; longer texts are prose
_MARK = re.compile(
    r"(?<![\w&~\0])[_&~](?=[^\W\d_])"  # before a word, or inside of a capitalized one: E_xit, but not file_name or R&D
    r"|(?<=\b[A-Z])[_&](?=[a-z])|(?<=\b[A-Z][a-z])[_&](?=[a-z])|(?<=\b[A-Z][a-z]{2})[_&](?=[a-z])"
    r"|(?<=\b[A-Z][a-z]{3})[_&](?=[a-z])"
)
_LETTER = re.compile(r"(?<!\0)[^\W\d_]")  # not directly after a placeholder, which the mark could extend: `$x_`
_FIRST_IDEOGRAPH = "\u2e80"
_LABEL_END = re.compile(r"[\s.:\u2026\uff1a]+\Z")


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
