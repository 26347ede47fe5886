"""Unicode scripts: the script of a letter, and the scripts that a language is written in.

Python has no script property, so the letter ranges of the scripts of living languages are listed here (tests compare
them with `unicodedata`). Digits, punctuation, emoji and rare scripts belong to no script. A language's script is CLDR's
(from Babel); where CLDR has none, it is detected from the text.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

from attent.text.language_tags import get_likely_script, get_primary_subtag

Scripts = frozenset[str]  # codes of ISO 15924, as keys of LETTERS

# The letters of each script, as the body of a character class. "Kana" is hiragana and katakana, which every Japanese
# sentence mixes.
SCRIPT_LETTERS: dict[str, str] = {
    "Latn": (
        "A-Za-zÀ-ÖØ-öø-\u02af"
        "\u1d00-\u1d25\u1e00-\u1eff\u2c60-\u2c7f\ua722-\ua787\ua78b-\ua7ff\uab30-\uab5a\ufb00-\ufb06Ａ-Ｚａ-ｚ"
    ),
    "Grek": (
        "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u03e1\u03f0-\u03f5\u03f7-\u03ff"
        "\u1f00-\u1fbc\u1fc2-\u1fcc\u1fd0-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ffc"
    ),
    "Cyrl": "\u0400-\u0481\u048a-\u052f\u1c80-\u1c88\ua640-\ua66e\ua680-\ua69b",
    "Armn": "\u0531-\u0556\u0560-\u0588\ufb13-\ufb17",
    "Hebr": "\u05d0-\u05ea\u05ef-\u05f2\ufb1d-\ufb28\ufb2a-\ufb4f",
    "Arab": (
        "\u0620-\u064a\u066e-\u06d3\u06d5\u06ee\u06ef\u06fa-\u06fc\u06ff\u0750-\u077f\u0870-\u0887\u0889-\u088e\u08a0-\u08c9"
        "\ufb50-\ufbb1\ufbd3-\ufd3d\ufd50-\ufdc7\ufdf0-\ufdfb\ufe70-\ufefc"
    ),
    "Syrc": "\u0710-\u074f",
    "Thaa": "\u0780-\u07b1",
    "Nkoo": "\u07ca-\u07ea",
    "Deva": "\u0904-\u0963\u0971-\u097f",
    "Beng": "\u0980-\u09e3\u09f0\u09f1",
    "Guru": "\u0a05-\u0a5e\u0a72-\u0a74",
    "Gujr": "\u0a85-\u0ae3",
    "Orya": "\u0b05-\u0b63\u0b71",
    "Taml": "\u0b83-\u0bd0",
    "Telu": "\u0c05-\u0c63",
    "Knda": "\u0c80\u0c85-\u0ce3\u0cf1\u0cf2",
    "Mlym": "\u0d04-\u0d4e\u0d54-\u0d57\u0d5f-\u0d63\u0d7a-\u0d7f",
    "Sinh": "\u0d85-\u0ddf",
    "Thai": "\u0e01-\u0e3a\u0e40-\u0e4e",
    "Laoo": "\u0e81-\u0ec6\u0edc-\u0edf",
    "Tibt": "\u0f00\u0f40-\u0f84\u0f88-\u0fbc",
    "Mymr": "\u1000-\u103f\u1050-\u108f\ua9e0-\ua9ef\uaa60-\uaa76\uaa7a-\uaa7f",
    "Geor": "\u10a0-\u10fa\u10fc-\u10ff\u1c90-\u1cbf\u2d00-\u2d2d",
    "Hang": "\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7a3\uffa0-\uffdc",
    "Ethi": "\u1200-\u135a\u1380-\u138f\u2d80-\u2dde\uab01-\uab2e",
    "Cher": "\u13a0-\u13fd\uab70-\uabbf",
    "Cans": "\u1401-\u166c\u166f-\u167f\u18b0-\u18f5",
    "Khmr": "\u1780-\u17d3",
    "Mong": "\u1820-\u18aa",
    "Olck": "\u1c5a-\u1c7d",
    "Tfng": "\u2d30-\u2d67\u2d6f",
    "Kana": "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9d",
    "Bopo": "\u3105-\u312f\u31a0-\u31bf",
    "Hani": "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufad9\U00020000-\U0003134a",
    "Yiii": "\ua000-\ua48c",
    "Vaii": "\ua500-\ua60b",
    "Java": "\ua980-\ua9c0",
    "Mtei": "\uabc0-\uabea",
    "Adlm": "\U0001e900-\U0001e94b",
}
# CLDR's codes for a writing system of several scripts, or for a variant of one.
WRITING_SYSTEMS: dict[str, tuple[str, ...]] = {
    "Jpan": ("Hani", "Kana"), "Kore": ("Hang", "Hani"), "Hans": ("Hani", "Bopo"), "Hant": ("Hani", "Bopo"),
    "Hanb": ("Hani", "Bopo"), "Hira": ("Kana",), "Hrkt": ("Kana",), "Jamo": ("Hang",), "Latf": ("Latn",),
    "Latg": ("Latn",), "Aran": ("Arab",), "Geok": ("Geor",),
}  # fmt: skip
# Languages printed in two scripts today: CLDR gives the likelier one, this table adds the other. A tag that names its
# script (sr-Latn) means that script alone.
SECONDARY_SCRIPTS: dict[str, tuple[str, ...]] = {
    "sr": ("Latn",), "bs": ("Cyrl",), "cnr": ("Cyrl", "Latn"), "sh": ("Cyrl", "Latn"), "uz": ("Cyrl",),
    "kk": ("Latn", "Arab"), "az": ("Cyrl", "Arab"), "ky": ("Latn", "Arab"), "tk": ("Cyrl", "Arab"), "tt": ("Latn",),
    "crh": ("Cyrl",), "ku": ("Arab",), "pa": ("Arab",), "ks": ("Deva",), "sd": ("Deva",), "mn": ("Mong",),
    "ms": ("Arab",), "ha": ("Arab",), "ff": ("Adlm",), "zgh": ("Latn",), "tzm": ("Tfng",), "ber": ("Latn", "Tfng"),
    "mni": ("Mtei",), "sat": ("Deva", "Beng", "Latn"), "ug": ("Latn", "Cyrl"), "iu": ("Latn",), "vai": ("Latn",),
}  # fmt: skip
UNSPACED_SCRIPTS: Scripts = frozenset({"Hani", "Kana", "Thai", "Laoo", "Khmr", "Mymr", "Tibt", "Yiii"})
MIN_MAIN_SHARE = 0.9  # of the letters, that the main scripts of a side have together
MIN_LETTERS = 20  # in a sample, before the share of a script is meaningful


@cache
def compile_letter_pattern(scripts: Scripts) -> re.Pattern[str]:
    return re.compile("[" + "".join(SCRIPT_LETTERS[code] for code in sorted(scripts)) + "]" if scripts else r"(?!)")


def get_language_scripts(tag: str | None) -> Scripts | None:
    if tag is None:
        return None
    code, is_explicit = get_likely_script(tag)
    secondary = () if is_explicit else SECONDARY_SCRIPTS.get(get_primary_subtag(tag), ())
    scripts = frozenset((*WRITING_SYSTEMS.get(code, (code,)), *secondary))
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
