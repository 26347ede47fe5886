"""Which two of the languages in a file are meant, and the sentence for a person when that cannot be told."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache

from attent.data.pairs import CorpusError, Languages, choose, matches, normal_tag

ANY = Languages()
MOST_NAMED = 20  # languages that an error lists, and that readers therefore remember
UNTRANSLATED = "no translation"


class OtherLanguages(CorpusError):
    """The file can be read, but does not hold the languages asked for."""


@lru_cache(maxsize=16)  # most files have the same languages in every unit
def sides(asked: Languages, found: tuple[str, ...]) -> tuple[str, str] | None:
    """The tags of `found` that are source and target; None when they are not there, or when more than two could be."""
    if asked.source is None and asked.target is None:
        return (found[0], found[1]) if len(found) == 2 else None
    if asked.source is None or asked.target is None:
        return _with_the_other(asked, found)
    for first, second, order in ((asked.source, asked.target, 1), (asked.target, asked.source, -1)):
        one = choose(first, found)
        two = choose(second, [tag for tag in found if tag != one])
        if one is not None and two is not None:
            return (one, two) if order == 1 else (two, one)
    return None


def _with_the_other(asked: Languages, found: tuple[str, ...]) -> tuple[str, str] | None:
    """One side was asked for: the other is the only other language."""
    known = choose(asked.source or asked.target or "", found)
    others = [tag for tag in found if tag != known]
    if known is None or len(others) != 1:
        return None
    return (known, others[0]) if asked.source is not None else (others[0], known)


def swapped(asked: Languages, declared: Languages) -> bool | None:
    """Must a file from `declared.source` to `declared.target` be read the other way round? None: neither way fits.

    A language that a person or the file leaves open fits any, but a way on which more is known to fit is better.
    """
    forward = _fit(asked, declared)
    backward = _fit(asked, Languages(declared.target, declared.source))
    if forward is None and backward is None:
        return None
    return forward is None or (backward is not None and backward > forward)


def _fit(asked: Languages, declared: Languages) -> int | None:
    """How many sides are known to fit; None when one does not."""
    if not (_fits(asked.source, declared.source) and _fits(asked.target, declared.target)):
        return None
    return sum(None not in side for side in ((asked.source, declared.source), (asked.target, declared.target)))


def _fits(asked: str | None, found: str | None) -> bool:
    return asked is None or found is None or matches(asked, found)


def settled(asked: Languages, source: str | None, target: str | None) -> Languages:
    """What was left open, as the first unit has it: `en` for `en-US`, so that a later `en-GB` is the same language."""
    if not (source and target and related(source, target)):
        source, target = source and primary(source), target and primary(target)
    return Languages(asked.source or source, asked.target or target)


def related(one: str, two: str) -> bool:
    return primary(one) == primary(two)


def primary(tag: str) -> str:
    """The language alone: `de` of `de-AT`."""
    return normal_tag(tag).partition("-")[0]


def is_language(tag: str) -> bool:
    """Does the tag begin with a language that CLDR knows, by its two letters or by three?"""
    return primary(tag) in _codes()


@cache
def _codes() -> frozenset[str]:
    from babel.core import get_global  # here, since few files need it
    from babel.localedata import locale_identifiers

    return frozenset(primary(locale) for locale in locale_identifiers()) | frozenset(get_global("language_aliases"))


def answers(asked: Languages, found: str) -> bool:
    """Is this tag one of the two asked for?"""
    return _fits(asked.source, found) or _fits(asked.target, found)


def missing(asked: Languages, found: Iterable[str]) -> str:
    """The reason, in few words, why a unit with the languages `found` is no pair."""
    present = list(found)
    for tag in (asked.target, asked.source):
        if tag is not None and choose(tag, present) is None:
            return f"no {tag} side"
    return "not two languages"


def error(name: str, asked: Languages, found: Iterable[str]) -> OtherLanguages:
    """No unit of a file answered: what was asked for, what is there, and what to type."""
    seen = sorted({normal_tag(tag) for tag in found})
    listed = ", ".join(seen[:MOST_NAMED]) + (" and more" if len(seen) > MOST_NAMED else "")
    wanted = " and ".join(tag for tag in (asked.source, asked.target) if tag is not None)
    problem = f"does not hold {wanted}" if wanted else "does not say which two languages are meant"
    advice = "choose two of them with --src and --tgt" if len(seen) > 1 else "change --src or --tgt, or leave them out"
    return OtherLanguages(f"{name} {problem}: it has {listed or 'none'}; {advice}")
