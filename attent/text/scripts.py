"""Unicode scripts: the script of a letter, and the scripts that a language is written in.

Python has no script property, so `scripts.toml` lists the letter ranges of the scripts of living languages (tests
compare them with `unicodedata`). Digits, punctuation, emoji and rare scripts belong to no script. A language's script
is CLDR's (from Babel); where CLDR has none, it is detected from the text.
"""

import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from attent.text.language_tags import get_likely_script, get_primary_subtag

Scripts = frozenset[str]  # codes of ISO 15924, as keys of LETTERS

_TABLES = tomllib.loads(Path(__file__).with_name("scripts.toml").read_text(encoding="utf-8"))
SCRIPT_LETTERS: dict[str, str] = _TABLES["letters"]
WRITING_SYSTEMS: dict[str, list[str]] = _TABLES["writing_systems"]
SECONDARY_SCRIPTS: dict[str, list[str]] = _TABLES["secondary"]
UNSPACED_SCRIPTS: Scripts = frozenset({"Hani", "Kana", "Thai", "Laoo", "Khmr", "Mymr", "Tibt", "Yiii"})
UNSPACED_CHARS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Thai to Han
)
_UNSPACED_CHAR = re.compile(f"[{UNSPACED_CHARS}]")
MIN_MAIN_SHARE = 0.9  # of the letters, that the main scripts of a side have together
MIN_LETTERS = 20  # in a sample, before the share of a script is meaningful


@cache
def compile_letter_pattern(scripts: Scripts) -> re.Pattern[str]:
    return re.compile("[" + "".join(SCRIPT_LETTERS[code] for code in sorted(scripts)) + "]" if scripts else r"(?!)")


def get_language_scripts(tag: str | None) -> Scripts | None:
    if tag is None:
        return None
    code, is_explicit = get_likely_script(tag)
    secondary = [] if is_explicit else SECONDARY_SCRIPTS.get(get_primary_subtag(tag), [])
    scripts = frozenset((*WRITING_SYSTEMS.get(code, [code]), *secondary))
    return scripts if scripts <= SCRIPT_LETTERS.keys() else None


def detect_scripts(texts: Iterable[str]) -> Scripts | None:
    """Return every script with at least a tenth of the letters; None for too few letters or too many scripts."""
    joined = "\n".join(texts)
    counts = Counter({code: len(compile_letter_pattern(frozenset({code})).findall(joined)) for code in SCRIPT_LETTERS})
    total = counts.total()
    main = {code: n for code, n in counts.items() if n * 10 >= total}
    return frozenset(main) if total >= MIN_LETTERS and sum(main.values()) >= MIN_MAIN_SHARE * total else None


def has_word_spaces(scripts: Scripts | None) -> bool:
    return not scripts or not scripts & UNSPACED_SCRIPTS or "Hang" in scripts


def is_separate_word(text: str, start: int, end: int) -> bool:
    """True if no word extends over the ends of a part of the text, or the part is empty."""
    edges = (text[max(start - 1, 0) : start], text[start : start + 1]), (text[end - 1 : end], text[end : end + 1])
    return start == end or all(is_word_boundary(before, after) for before, after in edges)


def is_word_boundary(before: str, after: str) -> bool:
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
