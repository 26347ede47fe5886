"""Which two of the languages in a file are meant, and the sentence for a person when that cannot be told."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache

from attent.data.pairs import CorpusError, LanguagePair, choose_tag, is_tag_match, normalize_tag

ANY_LANGUAGES = LanguagePair()
MAX_LISTED = 20  # languages that an error lists, and that readers therefore remember
UNTRANSLATED = "no translation"


class LanguageMismatchError(CorpusError):
    """The file can be read, but does not hold the languages asked for."""


@lru_cache(maxsize=16)  # most files have the same languages in every unit
def choose_sides(requested: LanguagePair, available: tuple[str, ...]) -> tuple[str, str] | None:
    """The tags of `found` that are source and target; None when they are not there, or when more than two could be."""
    if requested.source is None and requested.target is None:
        return (available[0], available[1]) if len(available) == 2 else None
    if requested.source is None or requested.target is None:
        return _infer_other_side(requested, available)
    for first, second, order in ((requested.source, requested.target, 1), (requested.target, requested.source, -1)):
        one = choose_tag(first, available)
        two = choose_tag(second, [tag for tag in available if tag != one])
        if one is not None and two is not None:
            return (one, two) if order == 1 else (two, one)
    return None


def _infer_other_side(requested: LanguagePair, available: tuple[str, ...]) -> tuple[str, str] | None:
    """One side was asked for: the other is the only other language."""
    known = choose_tag(requested.source or requested.target or "", available)
    others = [tag for tag in available if tag != known]
    if known is None or len(others) != 1:
        return None
    return (known, others[0]) if requested.source is not None else (others[0], known)


def is_reversed(requested: LanguagePair, declared: LanguagePair) -> bool | None:
    """Must a file from `declared.source` to `declared.target` be read the other way round? None: neither way fits.

    A language that a person or the file leaves open fits any, but a way on which more is known to fit is better.
    """
    forward = _count_matches(requested, declared)
    backward = _count_matches(requested, LanguagePair(declared.target, declared.source))
    if forward is None and backward is None:
        return None
    return forward is None or (backward is not None and backward > forward)


def _count_matches(requested: LanguagePair, declared: LanguagePair) -> int | None:
    """How many sides are known to fit; None when one does not."""
    if not (_is_compatible(requested.source, declared.source) and _is_compatible(requested.target, declared.target)):
        return None
    return sum(None not in side for side in ((requested.source, declared.source), (requested.target, declared.target)))


def _is_compatible(requested: str | None, declared: str | None) -> bool:
    return requested is None or declared is None or is_tag_match(requested, declared)


def fill_open_sides(requested: LanguagePair, source: str | None, target: str | None) -> LanguagePair:
    """What was left open, as the first unit has it: `en` for `en-US`, so that a later `en-GB` is the same language."""
    if not (source and target and is_same_language(source, target)):
        source, target = source and get_primary_subtag(source), target and get_primary_subtag(target)
    return LanguagePair(requested.source or source, requested.target or target)


def is_same_language(first: str, second: str) -> bool:
    return get_primary_subtag(first) == get_primary_subtag(second)


def get_primary_subtag(tag: str) -> str:
    """The language alone: `de` of `de-AT`."""
    return normalize_tag(tag).partition("-")[0]


def is_known_language(tag: str) -> bool:
    """Does the tag begin with a language that CLDR knows, by its two letters or by three?"""
    return get_primary_subtag(tag) in _load_language_codes()


@cache
def _load_language_codes() -> frozenset[str]:
    from babel.core import get_global  # here, since few files need it
    from babel.localedata import locale_identifiers

    return frozenset(get_primary_subtag(locale) for locale in locale_identifiers()) | frozenset(
        get_global("language_aliases")
    )


def is_requested(requested: LanguagePair, tag: str) -> bool:
    """Is this tag one of the two asked for?"""
    return _is_compatible(requested.source, tag) or _is_compatible(requested.target, tag)


def describe_missing(requested: LanguagePair, available: Iterable[str]) -> str:
    """The reason, in few words, why a unit with the languages `found` is no pair."""
    present = list(available)
    for tag in (requested.target, requested.source):
        if tag is not None and choose_tag(tag, present) is None:
            return f"no {tag} side"
    return "not two languages"


def make_mismatch_error(name: str, requested: LanguagePair, available: Iterable[str]) -> LanguageMismatchError:
    """No unit of a file answered: what was asked for, what is there, and what to type."""
    seen = sorted({normalize_tag(tag) for tag in available})
    listed = ", ".join(seen[:MAX_LISTED]) + (" and more" if len(seen) > MAX_LISTED else "")
    wanted = " and ".join(tag for tag in (requested.source, requested.target) if tag is not None)
    problem = f"does not hold {wanted}" if wanted else "does not say which two languages are meant"
    advice = "choose two of them with --src and --tgt" if len(seen) > 1 else "change --src or --tgt, or leave them out"
    return LanguageMismatchError(f"{name} {problem}: it has {listed or 'none'}; {advice}")
