"""A glossary: a file of `term<TAB>translation` lines, and which of its translations a text calls for.

Only the words are found here; that a translation comes in the target is left to the search. A term is met as a whole
word, the longest first; one in lower case also with a capital, others only as they are written. Translations that are
parted by `|` are all right, and the first is the one to ask for.
"""

from __future__ import annotations

import codecs
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

COMMENT_PREFIX = "#"
ALTERNATIVE_SEPARATOR = "|"
LINE_FORMAT = "a term, a tab and its translation"
UNSPACED_CHARS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Thai to Han
)
_WORD = re.compile(rf"(?:(?![{UNSPACED_CHARS}])\w)+|\S")
_UNSPACED_CHAR = re.compile(f"[{UNSPACED_CHARS}]")


class GlossaryError(ValueError):
    """A glossary that cannot be read; the message says which line and what it must be."""


@dataclass(frozen=True, kw_only=True)
class GlossaryEntry:
    """One line: a term and what it may be translated as."""

    term: str
    translations: tuple[str, ...]
    line_number: int = 0


@dataclass(frozen=True)
class Glossary:
    """Terms and their translations."""

    entries: tuple[GlossaryEntry, ...]

    @classmethod
    def from_terms(cls, terms: Mapping[str, str]) -> Glossary:
        """From terms and their translations, `|` between several."""
        entries = (_build_entry([term, text], f"`{term}` of the glossary", 0) for term, text in terms.items())
        return cls(tuple(entries))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Glossary:
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise GlossaryError(
                f"{path}: must be a text file, but cannot be read ({error.strerror}); "
                f"give a file whose lines are {LINE_FORMAT}"
            ) from error
        return cls.from_bytes(content, str(path))

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Glossary:
        """Empty lines and those that begin with # say nothing. `name` is what errors call the file."""
        found: dict[str, GlossaryEntry] = {}
        for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
            entry = _parse_line(line, f"{name}:{number}", number)
            if entry is None:
                continue
            before = found.setdefault(entry.term, entry)
            if before.translations != entry.translations:
                raise GlossaryError(
                    f"{name}:{number}: must be a term that comes once, but `{entry.term}` has another translation in "
                    f"line {before.line_number}; put both there, with {ALTERNATIVE_SEPARATOR} between them, or take one out"
                )
        return cls(tuple(found.values()))

    def find_translations(self, text: str) -> tuple[str, ...]:
        """The translations that a text calls for, each once, in the order of its words."""
        return tuple(dict.fromkeys(entry.translations[0] for entry in self.find_entries(text)))

    def find_entries(self, text: str) -> Iterator[GlossaryEntry]:
        """The entries whose terms stand in a text, without overlap, from left to right; the longest at each place."""
        text, place = _normalize_text(text), 0
        while unit := _WORD.search(text, place):
            entry, place = self._match_longest(text, unit)
            if entry is not None:
                yield entry

    def _match_longest(self, text: str, word: re.Match[str]) -> tuple[GlossaryEntry | None, int]:
        """The longest term that begins with this unit, and where to look on."""
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
        """Every way in which a term may be written. What is written so in the file goes before what has a capital."""
        capital = {_capitalize_term(entry.term): entry for entry in self.entries if entry.term == entry.term.lower()}
        return {**capital, **{entry.term: entry for entry in self.entries}}

    @cached_property
    def _term_lengths(self) -> dict[str, list[int]]:
        """For each first unit the lengths of the terms that begin with it, the longest first."""
        lengths: dict[str, set[int]] = {}
        for term in self._spellings:
            unit = _WORD.match(term)
            assert unit is not None  # a term is not empty
            lengths.setdefault(unit[0], set()).add(len(term))
        return {unit: sorted(found, reverse=True) for unit, found in lengths.items()}


def _parse_line(line: bytes, location: str, line_number: int) -> GlossaryEntry | None:
    try:
        text = line.decode().strip("\r ")
    except UnicodeDecodeError as error:
        raise GlossaryError(
            f"{location}: must be UTF-8, but byte {error.start + 1} is 0x{line[error.start]:02x}; convert the file first, "
            f"such as by `iconv -f latin1 -t utf-8`"
        ) from error
    if not text.strip() or text.startswith(COMMENT_PREFIX):
        return None
    return _build_entry(text.split("\t"), location, line_number)


def _build_entry(columns: list[str], location: str, line_number: int) -> GlossaryEntry:
    columns = [column.strip() for column in columns]
    if len(columns) != 2 or not all(columns):
        raise GlossaryError(
            f"{location}: must be {LINE_FORMAT}, but is `{_shorten_line(columns)}`; {_suggest_fix(columns)}"
        )
    translations = tuple(part.strip() for part in columns[1].split(ALTERNATIVE_SEPARATOR))
    if not all(translations):
        raise GlossaryError(
            f"{location}: must have a translation on each side of {ALTERNATIVE_SEPARATOR}, but is `{_shorten_line(columns)}`; add it"
        )
    return GlossaryEntry(term=_normalize_text(columns[0]), translations=translations, line_number=line_number)


def _suggest_fix(columns: list[str]) -> str:
    if len(columns) == 1:
        return "put a tab (not spaces) between the two"
    if len(columns) > 2:
        return f"leave out all but two of its {len(columns)} columns"
    return "write what is missing, or put # before the line"


def _shorten_line(columns: list[str]) -> str:
    text = "<TAB>".join(columns)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _normalize_text(text: str) -> str:
    """Composed signs, and one space between words: however it is typed, it is the same word."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _capitalize_term(term: str) -> str:
    return term[:1].upper() + term[1:]


def _is_word_boundary(before: str, after: str) -> bool:
    """Is there no word that goes through between these two? Either may be empty, at an end of the text."""
    if not before or not after:
        return True
    if unicodedata.category(after)[0] == "M":
        return False
    if _UNSPACED_CHAR.match(before) or _UNSPACED_CHAR.match(after):
        return True
    return not (_is_word_char(before) and _is_word_char(after))


def _is_word_char(char: str) -> bool:
    return char.isalnum() or char == "_" or unicodedata.category(char)[0] == "M"
