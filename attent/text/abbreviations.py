"""Abbreviations and sentence starters of each language, from `abbreviations.toml`, for `sentence_splitter`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ABBREVIATIONS_FILE = Path(__file__).with_name("abbreviations.toml")
WORD_LISTS = ("titles", "numeric", "general", "starters")
ORDINAL_LANGUAGES = frozenset("bs et eu fi fo hr hu is lb lv mk nn sk sl sq sr tr".split())  # others


@dataclass(frozen=True, kw_only=True)
class AbbreviationRules:
    """Rules of one language; the file says what its words are."""

    titles: frozenset[str]
    numeric: frozenset[str]
    general: frozenset[str]
    starters: frozenset[str]
    ordinals: bool  # "3." means the third


@cache
def load_languages() -> dict[str, AbbreviationRules]:
    tables = tomllib.loads(ABBREVIATIONS_FILE.read_text(encoding="utf-8"))
    languages = {
        language: AbbreviationRules(
            **{name: frozenset(table[name].split()) for name in WORD_LISTS}, ordinals=table.get("ordinals", False)
        )
        for language, table in tables.items()
    }
    return languages | {"nb": languages["da"], "no": languages["da"]}


@cache
def get_abbreviations(language: str | None) -> AbbreviationRules:
    """Return the rules of a language ("de", "de-AT"), or the union of all if it is unknown or None."""
    code, languages = (language or "").replace("_", "-").split("-")[0].lower(), load_languages()
    if code in languages:
        return languages[code]
    union = {name: frozenset().union(*(getattr(words, name) for words in languages.values())) for name in WORD_LISTS}
    return AbbreviationRules(**union, ordinals=language is None or code in ORDINAL_LANGUAGES)
