"""Language tags (BCP 47: `de`, `pt-BR`): normalise and compare them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")


def normalize_tag(tag: str) -> str:
    return tag.strip().replace("_", "-").lower()


def get_primary_subtag(tag: str) -> str:
    """Return the language without region or script: `de` for `de-AT`."""
    return normalize_tag(tag).partition("-")[0]


def is_same_language(first: str, second: str) -> bool:
    return get_primary_subtag(first) == get_primary_subtag(second)


def is_tag_match(requested: str, available: str) -> bool:
    """True if `available` is the requested tag or a variant of it: `de` matches `de-AT`, but `de-AT` not `de`."""
    requested, available = normalize_tag(requested), normalize_tag(available)
    return available == requested or available.startswith(requested + "-")


def choose_tag(requested: str, available: Sequence[str]) -> str | None:
    """Return the best match for a requested tag: the same tag if present, else its first variant."""
    exact = [tag for tag in available if normalize_tag(tag) == normalize_tag(requested)]
    return next(iter(exact or [tag for tag in available if is_tag_match(requested, tag)]), None)


def find_language(requested: str, known: Sequence[str]) -> list[str]:
    """Return those of the known languages that a tag means, in any notation: `en`, `eng`, `eng_Latn`, `en_XX`.

    A code that has the requested letters takes precedence over others of the same CLDR language: `tw` means `twi`
    where `aka` is there too.
    """
    if exact := [tag for tag in known if normalize_tag(tag) == normalize_tag(requested)]:
        return exact
    primary, _, rest = normalize_tag(requested).partition("-")
    same = [tag for tag in known if _get_cldr_language(tag) == _get_cldr_language(requested)]
    if rest:
        same = [tag for tag in same if rest in normalize_tag(tag).split("-")[1:]]
    return [tag for tag in same if get_primary_subtag(tag).startswith(primary)] or same


def _get_cldr_language(tag: str) -> str:
    from babel.core import get_global

    primary = get_primary_subtag(tag)
    return str(get_global("language_aliases").get(primary, primary))


def is_known_language(tag: str) -> bool:
    return get_primary_subtag(tag) in _load_language_codes()


@cache
def get_language_name(tag: str) -> str:
    from babel.core import Locale, UnknownLocaleError

    try:
        return Locale.parse(normalize_tag(tag).replace("-", "_")).english_name or tag
    except (UnknownLocaleError, ValueError):
        return str(Locale("en").languages.get(get_primary_subtag(tag), tag))


@cache
def _load_language_codes() -> frozenset[str]:
    from babel.core import get_global  # imported late: few files need it
    from babel.localedata import locale_identifiers

    locales = frozenset(get_primary_subtag(locale) for locale in locale_identifiers())
    return locales | frozenset(get_global("language_aliases"))
