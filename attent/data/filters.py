"""Which pairs would teach nothing, and are better dropped; each filter has a name, and can be turned off.

The defaults drop what is broken, not what is unusual: names, codes, one-word segments, long sentences and free
translations all stay. A `Sieve` judges one pair by itself, in a microsecond or two, so that the store can call it in
every worker; `Seen` remembers which pairs came before. Text is never changed here but for the spaces at its ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from attent.data.pairs import LanguagePair, Pair
from attent.text import scripts as script_table
from attent.text.scripts import Scripts

KeyArray = npt.NDArray[np.uint64]

# In this order a pair is judged, and only the first reason counts: so the counts of a report add up.
FILTER_ORDER = ("empty", "control", "max_chars", "length_ratio", "identical", "script", "duplicates")


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """What is dropped before training."""

    # A segment of 2,000 characters is about 350 words or 500 tokens: more is a paragraph that was never segmented.
    max_chars: int = 2_000  # characters of either side; a Han, Kana or Hangul one counts as three; 0: any length
    # Real translations stay below 3 in every corpus that was looked at; above 4 stand slipped alignments.
    length_ratio: float = 4.0  # how many times longer one side may be, each lengthened by 20 characters first; 0: any
    identical: bool = True  # both sides the same sentence, untranslated; names, codes and short labels stay
    script: bool = True  # most letters of a side belong to another script than its language is written in
    control: bool = True  # control characters, U+FFFD, and UTF-8 that was read as Windows-1252 ("fÃ¼r")
    empty: bool = True  # nothing but space on a side
    duplicates: bool = True  # the very same pair again, spaces at the ends aside

    def __post_init__(self) -> None:
        if self.max_chars < 0:
            raise ValueError(f"`max_chars` must be 0 or more characters, but is {self.max_chars}")
        if self.length_ratio != 0 and not self.length_ratio >= 1:
            raise ValueError(f"`length_ratio` must be 1 or more, or 0 to allow any, but is {self.length_ratio}")

    @classmethod
    def disabled(cls) -> FilterConfig:
        """Keeps everything."""
        return cls(
            max_chars=0, length_ratio=0, identical=False, script=False, control=False, empty=False, duplicates=False
        )


# ---- what stands in a text -------------------------------------------------------------------------------------------

RATIO_SMOOTHING = 20  # characters, so that "OK" may become "Einverstanden" and "EU" "Europäische Union"
WIDE_CHAR_WEIGHT = 3  # a Han, Kana or Hangul character carries about as much as three letters
MIN_FOREIGN_LETTERS = 12  # below this a text in another script is a name or a code: "iPhone", "README"
MIN_SENTENCE_WORDS = 4  # untranslated words in small letters, from which on identical sides are a sentence
MIN_SENTENCE_WIDE_CHARS = 12  # the same for scripts that write no spaces

WIDE_SCRIPTS: Scripts = frozenset({"Hani", "Kana", "Hang", "Bopo"})
WIDE_CHARS = script_table.compile_letter_pattern(WIDE_SCRIPTS)
# C0 but for tab and line ends, DEL, C1, lone surrogates, U+FFFD and the two non-characters behind it.
CONTROL_CLASS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd-\uffff"
CONTROL_CHARS = re.compile(f"[{CONTROL_CLASS}]")

# Bytes 80 to BF, the second and later ones of a UTF-8 character, as Windows-1252 (and Latin-1) shows them.
_CONTINUATION_CLASS = "\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
# "Ã¼", "Â°", "â€™": what becomes of the letters of Western Europe and of curly quotes. A lone "Ã" before a
# closing quote or a no-break space may be Portuguese, so these do not count here.
_SURE_MOJIBAKE = re.compile("Ã[\x80-\x9f¡-º¼-¾€‚ƒ†‡ˆ‰Š‹ŒŽ˜™šœžŸ]|Â[\x80-\x9f¡-ª¬-º¼-¾]|â€[\x80-\xbf“”™œ˜¦¢]|ï»¿")
# Every non-ASCII letter of the text is part of such a run, and the run stands for a letter that people write.
_MOJIBAKE_RUN = f"[ÂÃÄÅÎÏÐÑØÙ×][{_CONTINUATION_CLASS}]|[à-ì][{_CONTINUATION_CLASS}]{{2}}|ð[{_CONTINUATION_CLASS}]{{3}}"
_ALL_MOJIBAKE = re.compile(f"[\x00-\x7f]*(?:(?:{_MOJIBAKE_RUN})[\x00-\x7f]*){{2,}}")
_MOJIBAKE_HINT = re.compile(f"[ÂÃâïÄÅÎÏÐÑØÙ×àáãäåæçèéêëìð][{_CONTINUATION_CLASS}]")


def strip_text(text: str) -> str:
    """What is encoded: the text without the space at its ends. Nothing else is changed."""
    return text.strip()


def is_mojibake(text: str) -> bool:
    """UTF-8 that some program took for Windows-1252 or Latin-1, such as "fÃ¼r" or "Ð¿Ñ€Ð¸"."""
    return _MOJIBAKE_HINT.search(text) is not None and (
        _SURE_MOJIBAKE.search(text) is not None or _ALL_MOJIBAKE.fullmatch(text) is not None
    )


def find_damage(text: str) -> int | None:
    """Where the first control character or wrongly read letter stands."""
    found = CONTROL_CHARS.search(text) or (_MOJIBAKE_HINT.search(text) if is_mojibake(text) else None)
    return found.start() if found else None


def weighted_length(text: str) -> int:
    """Characters, the wide ones of East Asia three-fold."""
    return len(text) if text.isascii() else len(text) + (WIDE_CHAR_WEIGHT - 1) * len(WIDE_CHARS.findall(text))


def is_untranslated(text: str) -> bool:
    """Would this, the same on both sides, be a sentence that nobody translated? Names and codes would not."""
    small = sum(word[0].isalpha() and not word[0].isupper() for word in text.split())
    return small >= MIN_SENTENCE_WORDS or len(WIDE_CHARS.findall(text)) >= MIN_SENTENCE_WIDE_CHARS


class _ScriptCheck:
    """What one side of a corpus is expected to be written in."""

    def __init__(self, scripts: Scripts | None) -> None:
        foreign = script_table.get_other_scripts(scripts) if scripts else frozenset()  # unknown: nothing is foreign
        self.own_letters = script_table.compile_letter_pattern(scripts or frozenset())
        self.foreign_letters = script_table.compile_letter_pattern(foreign)
        self.allows_ascii = "Latn" not in foreign
        # A text without any of these needs no closer look. One class and nothing else: Python searches that quickest.
        classes = "".join(script_table.SCRIPT_LETTERS[code] for code in sorted(foreign | WIDE_SCRIPTS))
        self.suspicious_chars = re.compile(f"[{CONTROL_CLASS}{classes}{_CONTINUATION_CLASS}]")

    def is_plain(self, text: str) -> bool:
        if text.isascii() and self.allows_ascii:
            return text.isprintable()
        return self.suspicious_chars.search(text) is None

    def is_foreign(self, text: str) -> bool:
        """More than half of the letters, and more than a name's worth of them, are in another script."""
        found = self.foreign_letters.findall(text)
        if not found:
            return False
        weight = weighted_length("".join(found))
        return weight >= MIN_FOREIGN_LETTERS and weight > weighted_length("".join(self.own_letters.findall(text)))


# ---- judging ---------------------------------------------------------------------------------------------------------


class PairFilter:
    """Judges pairs one by one, by what stands in them alone; duplicates are for `Seen`."""

    def __init__(self, config: FilterConfig, scripts: tuple[Scripts | None, Scripts | None]) -> None:
        self.config = config
        self.scripts = scripts
        self._script_checks = _ScriptCheck(scripts[0]), _ScriptCheck(scripts[1])

    def __reduce__(self) -> tuple[type[PairFilter], tuple[FilterConfig, tuple[Scripts | None, Scripts | None]]]:
        return PairFilter, (self.config, self.scripts)

    def drop_reason(self, source: str, target: str) -> str | None:
        """The name of the first filter that drops this pair, or None where it stays."""
        filters = self.config
        source, target = source.strip(), target.strip()
        if filters.empty and not (source and target):
            return "empty"
        one, other = self._script_checks
        if one.is_plain(source) and other.is_plain(target):
            return self._check_length(len(source), len(target)) or self._check_identical(source, target)
        if filters.control and _is_damaged(source, target):
            return "control"
        return (
            self._check_length(weighted_length(source), weighted_length(target))
            or self._check_identical(source, target)
            or ("script" if filters.script and self._is_foreign(source, target) else None)
        )

    def _check_length(self, source: int, target: int) -> str | None:
        filters = self.config
        short, long = (source, target) if source < target else (target, source)
        if filters.max_chars and long > filters.max_chars:
            return "max_chars"
        if filters.length_ratio and long + RATIO_SMOOTHING > filters.length_ratio * (short + RATIO_SMOOTHING):
            return "length_ratio"
        return None

    def _check_identical(self, source: str, target: str) -> str | None:
        same = self.config.identical and source == target and is_untranslated(source)
        return "identical" if same else None

    def _is_foreign(self, source: str, target: str) -> bool:
        if source == target:  # a name or a code, or else "identical" would have dropped it
            return False
        one, other = self._script_checks
        return one.is_foreign(source) or other.is_foreign(target)


def _is_damaged(source: str, target: str) -> bool:
    return any(CONTROL_CHARS.search(text) is not None or is_mojibake(text) for text in (source, target))


def infer_scripts(languages: LanguagePair, sample: Sequence[Pair]) -> tuple[Scripts | None, Scripts | None]:
    """What each side should be written in: by its language, or by what most of the sample is written in."""
    source, target = (
        script_table.get_language_scripts(languages.source),
        script_table.get_language_scripts(languages.target),
    )
    return (
        source or script_table.detect_scripts(pair.source for pair in sample),
        target or script_table.detect_scripts(pair.target for pair in sample),
    )


# ---- pairs that came before ------------------------------------------------------------------------------------------

# Two odd numbers without a pattern (the golden ratio and pi), so that (a, b) and (b, a) have different keys.
_SOURCE_FACTOR, _TARGET_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x243F6A8885A308D3)


def hash_texts(texts: Sequence[str]) -> KeyArray:
    """A number of 64 bits for each text, the same in every process.

    Among 10 million texts two meet by chance in one corpus of 400,000.
    """
    digests = [blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64, copy=False)


def combine_keys(sources: KeyArray, targets: KeyArray) -> KeyArray:
    return sources * _SOURCE_FACTOR + targets * _TARGET_FACTOR  # wraps around, as it should


def hash_pairs(sources: Sequence[str], targets: Sequence[str]) -> KeyArray:
    """A number of 64 bits for each pair, the same in every process."""
    return combine_keys(hash_texts(sources), hash_texts(targets))


class KeySet:
    """Which keys came before, in 8 bytes each: sorted runs, the small ones merged like the digits of a counter."""

    MAX_MERGED_RUN = 2_000_000  # longer ones are left apart: a merge needs as much memory again for a moment

    def __init__(self) -> None:
        self._runs: list[KeyArray] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def add(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """True where a key is new, also against those before it in this call."""
        unique, first = np.unique(np.asarray(keys, dtype=np.uint64), return_index=True)
        unseen = np.ones(len(unique), dtype=bool)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            unseen &= run[at] != unique
        new = np.zeros(len(keys), dtype=bool)
        new[first[unseen]] = True
        self._add_run(unique[unseen])
        return new

    def _add_run(self, run: KeyArray) -> None:
        if not len(run):
            return
        self._runs.append(run)
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]) <= self.MAX_MERGED_RUN:
            last, before = self._runs.pop(), self._runs.pop()
            merged = np.concatenate([before, last])
            merged.sort(kind="stable")  # two sorted halves: one pass
            self._runs.append(merged)
