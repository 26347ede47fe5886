"""Language tags (BCP 47: `de`, `pt-BR`): normalise and compare them."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache

MACROLANGUAGES = {"nb": "no", "pbt": "ps", "quy": "qu", "fuv": "ff", "ns": "nso"}  # not in CLDR; M2M-100 writes ns
LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")


def normalize_tag(tag: str) -> str:
    return tag.strip().replace("_", "-").lower()


def get_primary_subtag(tag: str) -> str:
    """Return the language without region or script: `de` for `de-AT`."""
    return normalize_tag(tag).partition("-")[0]


def get_shortest_code(tag: str) -> str:
    """Return the code of two letters, if the language has one: `de` for `deu_Latn`."""
    primary = get_primary_subtag(tag)
    return primary if len(primary) == 2 else _get_cldr_language(tag)


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
    """Return those of the known languages that a tag means, in any notation: `en`, `eng_Latn`, `en_XX`, `>>deu<<`.

    A code that has the requested letters takes precedence over others of the same CLDR language: `tw` means `twi`
    where `aka` is there too. A script or region excludes other scripts, and selects the region if it is there.
    """
    name = normalize_tag(requested.strip("<>"))
    if exact := [tag for tag in known if normalize_tag(tag) == name]:
        return exact
    primary, *rest = name.removesuffix("-xx").split("-")
    same = [tag for tag in known if _get_cldr_language(tag) == _get_cldr_language(name)]
    same = [tag for tag in same if get_primary_subtag(tag).startswith(primary)] or same
    if rest:
        same = [tag for tag in same if get_likely_script(tag)[0] in (get_likely_script(name)[0], "")]
    return [tag for tag in same if rest and rest[-1] in normalize_tag(tag).split("-")[1:]] or same


def find_nearest_languages(requested: str, known: Sequence[str]) -> list[str]:
    """Return some known languages that an unknown tag or name is close to: first those of the same language."""
    same = [tag for tag in known if _get_cldr_language(tag) == _get_cldr_language(requested)]
    names = {get_language_name(tag).lower(): tag for tag in known} | {tag: tag for tag in known}
    near = get_close_matches(requested.lower(), names, n=3, cutoff=0.4)
    return same or list(dict.fromkeys(names[name] for name in near))


def _get_cldr_language(tag: str) -> str:
    from babel.core import get_global

    primary = get_primary_subtag(tag)
    language = str(get_global("language_aliases").get(primary, primary))
    return MACROLANGUAGES.get(language, language)


def get_likely_script(tag: str) -> tuple[str, bool]:
    """Return (script code or "", True if the tag itself names the script), by CLDR's likely subtags."""
    from babel.core import get_global

    language, *rest = normalize_tag(tag).split("-")
    explicit = next((part.title() for part in rest if len(part) == 4 and part.isalpha()), None)
    if explicit:
        return explicit, True
    language = str(get_global("language_aliases").get(language, language)).partition("_")[0]
    regions = [f"{language}_{part.upper()}" for part in rest if len(part) == 2]
    likely = get_global("likely_subtags")
    locale = next((likely[key] for key in [*regions, language] if key in likely), "")
    return next((part for part in locale.split("_") if len(part) == 4), ""), False


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
