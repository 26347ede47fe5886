"""A glossary of `term<TAB>translation` lines, and the translations that a text requires.

The search then enforces them as required phrases. A term matches as a whole word, the longest first; a lower-case term
also matches with a capital, others only as written. Translations separated by `|` are alternatives; the first is used.
"""

from __future__ import annotations

import codecs
import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attent.decoding.input_lines import decode_line
from attent.decoding.options import InputError

COMMENT_PREFIX = "#"
ALTERNATIVE_SEPARATOR = "|"
LINE_FORMAT = "a term, a tab and its translation"
UNSPACED_CHARS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Thai to Han
)
_WORD = re.compile(rf"(?:(?![{UNSPACED_CHARS}])\w)+|\S")
_UNSPACED_CHAR = re.compile(f"[{UNSPACED_CHARS}]")


@dataclass(frozen=True, kw_only=True)
class GlossaryEntry:
    term: str
    translations: tuple[str, ...]
    line_number: int = 0


@dataclass(frozen=True)
class Glossary:
    entries: tuple[GlossaryEntry, ...]

    @classmethod
    def from_terms(cls, terms: Mapping[str, str]) -> Glossary:
        """Build a glossary from terms and translations; `|` separates alternatives."""
        entries = (_build_entry([term, text], f"`{term}` of the glossary", 0) for term, text in terms.items())
        return cls(tuple(entries))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Glossary:
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise InputError(
                f"{path}: must be a text file, but cannot be read ({error.strerror}); its lines must be {LINE_FORMAT}"
            ) from error
        return cls.from_bytes(content, str(path))

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Glossary:
        """Parse a file, whose `name` is for messages. Empty lines and lines that start with # are skipped."""
        entries: dict[str, GlossaryEntry] = {}
        for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
            text = decode_line(line, f"{name}:{number}").strip("\r ")
            if not text.strip() or text.startswith(COMMENT_PREFIX):
                continue
            entry = _build_entry(text.split("\t"), f"{name}:{number}", number)
            first = entries.setdefault(entry.term, entry)
            if first.translations != entry.translations:
                raise InputError(
                    f"{name}:{number}: must be a new term, but `{entry.term}` has another translation in line "
                    f"{first.line_number}; join both with {ALTERNATIVE_SEPARATOR} there, or remove one"
                )
        return cls(tuple(entries.values()))

    def find_translations(self, text: str) -> tuple[str, ...]:
        """Return the translations that a text requires, each once; at each position the longest term counts."""
        text, start = _normalize_text(text), 0
        translations: dict[str, None] = {}
        while word := _WORD.search(text, start):
            entry, start = self._match_longest(text, word)
            if entry is not None:
                translations[entry.translations[0]] = None
        return tuple(translations)

    def _match_longest(self, text: str, word: re.Match[str]) -> tuple[GlossaryEntry | None, int]:
        start = word.start()
        if _is_word_boundary(text[max(start - 1, 0) : start], text[start]):
            for length in self._term_lengths.get(word[0], ()):
                entry = self._spellings.get(text[start : start + length])
                if entry is not None and _is_word_boundary(
                    text[start + length - 1], text[start + length : start + length + 1]
                ):
                    return entry, start + length
        return None, word.end()

    @cached_property
    def _spellings(self) -> dict[str, GlossaryEntry]:
        lower = [entry for entry in self.entries if entry.term == entry.term.lower()]
        capital = {entry.term[:1].upper() + entry.term[1:]: entry for entry in lower}
        return {**capital, **{entry.term: entry for entry in self.entries}}

    @cached_property
    def _term_lengths(self) -> dict[str, list[int]]:
        lengths: dict[str, set[int]] = {}
        for term in self._spellings:
            word = _WORD.match(term)
            assert word is not None  # a term is not empty
            lengths.setdefault(word[0], set()).add(len(term))
        return {word: sorted(sizes, reverse=True) for word, sizes in lengths.items()}


def _build_entry(columns: list[str], location: str, line_number: int) -> GlossaryEntry:
    columns = [column.strip() for column in columns]
    if len(columns) != 2 or not all(columns):
        fix = "add what is missing, or start the line with #"
        if len(columns) != 2:
            fix = f"remove all but two of its {len(columns)} columns"
        if len(columns) == 1:
            fix = "put a tab (not spaces) between the two"
        raise InputError(f"{location}: must be {LINE_FORMAT}, but is `{_shorten_line(columns)}`; {fix}")
    translations = tuple(part.strip() for part in columns[1].split(ALTERNATIVE_SEPARATOR))
    if not all(translations):
        raise InputError(
            f"{location}: must have a translation on each side of {ALTERNATIVE_SEPARATOR}, but is "
            f"`{_shorten_line(columns)}`; add it"
        )
    return GlossaryEntry(term=_normalize_text(columns[0]), translations=translations, line_number=line_number)


def _shorten_line(columns: list[str]) -> str:
    text = "<TAB>".join(columns)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _normalize_text(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _is_word_boundary(before: str, after: str) -> bool:
    """True if no word spans these two characters; either is empty at an end of the text."""
    if not before or not after:
        return True
    if unicodedata.category(after)[0] == "M":
        return False
    if _UNSPACED_CHAR.match(before) or _UNSPACED_CHAR.match(after):
        return True
    return not (_is_word_char(before) and _is_word_char(after))


def _is_word_char(char: str) -> bool:
    return char.isalnum() or char == "_" or unicodedata.category(char)[0] == "M"
