"""Filters for pairs that would teach a model nothing; each has a name and can be disabled.

The defaults drop what is broken, not what is unusual: names, codes, one-word segments, long sentences and free
translations are kept. `PairFilter` checks a pair by itself in a microsecond or two, so that every worker can call it;
`KeySet` finds duplicates. Text is not changed except for spaces at its ends.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import median
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from attent.data.arrays import search_sorted
from attent.data.pairs import LanguagePair, Pair
from attent.storage.errors import AttentError
from attent.text import scripts as script_table
from attent.text.scripts import Scripts

KeyArray = npt.NDArray[np.uint64]

# A pair is checked in this order, and only the first reason counts, so that the counts of a report add up.
FILTER_ORDER = ("empty", "control", "max_chars", "length_ratio", "identical", "script", "duplicates")
FILTER_SAMPLE_SIZE = 1_000  # first pairs of a corpus, from which its scripts and typical length ratio are inferred


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Pairs to drop before training."""

    # 2,000 characters are about 350 words or 500 tokens; longer segments are paragraphs that were never split.
    max_chars: int = 2_000  # of either side; a Han, Kana or Hangul character counts as three; 0: no limit
    # Real translations stay below 3 in every corpus that was inspected; above 4 are misalignments. Where one side is
    # typically much shorter (summaries), the ratio is relative to the median of the corpus's first pairs.
    length_ratio: float = 4.0  # how many times longer one side may be, after adding 20 characters to each; 0: no limit
    identical: bool = True  # untranslated sentences; equal names, codes and short labels are kept
    script: bool = True  # most letters of a side are in another script than its language
    control: bool = True  # control characters, U+FFFD, and UTF-8 that was read as Windows-1252 ("fÃ¼r")
    empty: bool = True  # only spaces on a side
    duplicates: bool = True  # equal pairs, except for spaces at the ends

    def __post_init__(self) -> None:
        if self.max_chars < 0:
            raise AttentError(f"`max_chars` must be 0 or more characters, but is {self.max_chars}")
        if self.length_ratio != 0 and not self.length_ratio >= 1:
            raise AttentError(f"`length_ratio` must be 1 or more, or 0 to allow any, but is {self.length_ratio}")

    @classmethod
    def disabled(cls) -> Self:
        return cls(
            max_chars=0, length_ratio=0, identical=False, script=False, control=False, empty=False, duplicates=False
        )


# ---- texts -----------------------------------------------------------------------------------------------------------

RATIO_SMOOTHING = 20  # characters, so that "OK" may become "Einverstanden" and "EU" "Europäische Union"
# Of median lengths, either way; measured: 0.90 to 1.12 for translations, 0.14 for summaries.
MAX_TRANSLATION_RATIO = 2.0
WIDE_CHAR_WEIGHT = 3  # a Han, Kana or Hangul character carries about as much information as three letters
MIN_FOREIGN_LETTERS = 12  # fewer in another script are a name or a code: "iPhone", "README"
MIN_SENTENCE_WORDS = 4  # lower-case words from which on identical sides are an untranslated sentence
MIN_SENTENCE_WIDE_CHARS = 12  # for scripts without spaces

WIDE_SCRIPTS: Scripts = frozenset({"Hani", "Kana", "Hang", "Bopo"})
WIDE_CHARS = script_table.compile_letter_pattern(WIDE_SCRIPTS)
# C0 except tab and line ends, DEL, C1, lone surrogates, U+FFFD and the two non-characters after it.
CONTROL_CLASS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd-\uffff"
CONTROL_CHARS = re.compile(f"[{CONTROL_CLASS}]")

# UTF-8 continuation bytes, 80 to BF, decoded as Windows-1252 or Latin-1.
_CONTINUATION_CLASS = "\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
# "Ã¼", "Â°", "â€™": Western European letters and curly quotes. A lone "Ã" before a closing quote or a no-break
# space may be Portuguese and is not included.
_SURE_MOJIBAKE = re.compile("Ã[\x80-\x9f¡-º¼-¾€‚ƒ†‡ˆ‰Š‹ŒŽ˜™šœžŸ]|Â[\x80-\x9f¡-ª¬-º¼-¾]|â€[\x80-\xbf“”™œ˜¦¢]|ï»¿")
# Every non-ASCII letter of the text is part of such a run, which encodes a common letter.
_MOJIBAKE_RUN = f"[ÂÃÄÅÎÏÐÑØÙ×][{_CONTINUATION_CLASS}]|[à-ì][{_CONTINUATION_CLASS}]{{2}}|ð[{_CONTINUATION_CLASS}]{{3}}"
_ALL_MOJIBAKE = re.compile(f"[\x00-\x7f]*(?:(?:{_MOJIBAKE_RUN})[\x00-\x7f]*){{2,}}")
_MOJIBAKE_HINT = re.compile(f"[ÂÃâïÄÅÎÏÐÑØÙ×àáãäåæçèéêëìð][{_CONTINUATION_CLASS}]")


def is_mojibake(text: str) -> bool:
    """True for UTF-8 that was decoded as Windows-1252 or Latin-1, such as "fÃ¼r" or "Ð¿Ñ€Ð¸"."""
    return bool(_MOJIBAKE_HINT.search(text) and (_SURE_MOJIBAKE.search(text) or _ALL_MOJIBAKE.fullmatch(text)))


def find_damage(text: str) -> int | None:
    """Return the index of the first control character or wrongly decoded letter."""
    match = CONTROL_CHARS.search(text) or (_MOJIBAKE_HINT.search(text) if is_mojibake(text) else None)
    return match.start() if match else None


def weighted_length(text: str) -> int:
    """Return the number of characters; wide East Asian ones count three times."""
    return len(text) if text.isascii() else len(text) + (WIDE_CHAR_WEIGHT - 1) * len(WIDE_CHARS.findall(text))


class _ScriptCheck:
    def __init__(self, scripts: Scripts | None) -> None:
        foreign = script_table.SCRIPT_LETTERS.keys() - scripts if scripts else set()  # unknown: nothing is foreign
        self.own_letters = script_table.compile_letter_pattern(scripts or frozenset())
        self.foreign_letters = script_table.compile_letter_pattern(frozenset(foreign))
        self.allows_ascii = "Latn" not in foreign
        # A text without any of these needs no further checks. A single character class is the fastest search.
        classes = "".join(script_table.SCRIPT_LETTERS[code] for code in sorted(foreign | WIDE_SCRIPTS))
        self.suspicious_chars = re.compile(f"[{CONTROL_CLASS}{classes}{_CONTINUATION_CLASS}]")

    def is_plain(self, text: str) -> bool:
        if text.isascii() and self.allows_ascii:
            return text.isprintable()
        return self.suspicious_chars.search(text) is None

    def is_foreign(self, text: str) -> bool:
        """True if more than half of the letters, and more than a name has, are in another script."""
        letters = self.foreign_letters.findall(text)
        if not letters:
            return False
        weight = weighted_length("".join(letters))
        return weight >= MIN_FOREIGN_LETTERS and weight > weighted_length("".join(self.own_letters.findall(text)))


class PairFilter:
    """Checks single pairs; `KeySet` finds duplicates."""

    def __init__(
        self, config: FilterConfig, scripts: tuple[Scripts | None, Scripts | None], typical_ratio: float = 1.0
    ) -> None:
        self.config = config
        self.scripts = scripts
        self.typical_ratio = typical_ratio  # of target to source length
        self._script_checks = _ScriptCheck(scripts[0]), _ScriptCheck(scripts[1])

    @classmethod
    def from_sample(cls, config: FilterConfig, languages: LanguagePair, sample: Sequence[Pair]) -> Self:
        """Build the filter of a corpus from its first pairs."""
        sample = sample[:FILTER_SAMPLE_SIZE]
        return cls(config, infer_scripts(languages, sample), measure_typical_ratio(sample))

    def __reduce__(self) -> "tuple[type[PairFilter], tuple[Any, ...]]":
        return PairFilter, (self.config, self.scripts, self.typical_ratio)

    def drop_reason(self, source: str, target: str) -> str | None:
        """Return the name of the first filter that drops this pair, or None."""
        config = self.config
        source, target = source.strip(), target.strip()
        if config.empty and not (source and target):
            return "empty"
        source_check, target_check = self._script_checks
        if source_check.is_plain(source) and target_check.is_plain(target):
            return self._check_length(len(source), len(target)) or self._check_identical(source, target)
        if config.control and any(find_damage(text) is not None for text in (source, target)):
            return "control"
        if reason := self._check_length(weighted_length(source), weighted_length(target)):
            return reason
        if source == target:  # of equal sides, only names and codes remain, which may be in any script
            return self._check_identical(source, target)
        is_foreign = config.script and any(map(_ScriptCheck.is_foreign, self._script_checks, (source, target)))
        return "script" if is_foreign else None

    def _check_length(self, source: int, target: int) -> str | None:
        config = self.config
        if config.max_chars and max(source, target) > config.max_chars:
            return "max_chars"
        expected, actual = (source + RATIO_SMOOTHING) * self.typical_ratio, target + RATIO_SMOOTHING
        short, long = (expected, actual) if expected < actual else (actual, expected)
        return "length_ratio" if config.length_ratio and long > config.length_ratio * short else None

    def _check_identical(self, source: str, target: str) -> str | None:
        """Find untranslated sentences; names and code may be equal on both sides."""
        if not self.config.identical or source != target:
            return None
        lower_case_words = sum(word[0].isalpha() and not word[0].isupper() for word in source.split())
        has_wide_chars = len(WIDE_CHARS.findall(source)) >= MIN_SENTENCE_WIDE_CHARS
        return "identical" if lower_case_words >= MIN_SENTENCE_WORDS or has_wide_chars else None


def measure_typical_ratio(sample: Sequence[Pair]) -> float:
    """Return the median ratio of target to source length of pairs without an empty side, or 1.0 if it is usual."""
    texts = [(source, target) for p in sample if (source := p.source.strip()) and (target := p.target.strip())]
    lengths = [[weighted_length(text) + RATIO_SMOOTHING for text in pair] for pair in texts]
    ratio = median(target / source for source, target in lengths) if lengths else 1.0
    return 1.0 if 1 / MAX_TRANSLATION_RATIO <= ratio <= MAX_TRANSLATION_RATIO else ratio


def infer_scripts(languages: LanguagePair, sample: Sequence[Pair]) -> tuple[Scripts | None, Scripts | None]:
    """Return the expected scripts of each side, by its language or else by most of the sample."""
    source, target = map(script_table.get_language_scripts, (languages.source, languages.target))
    return (
        source or script_table.detect_scripts(pair.source for pair in sample),
        target or script_table.detect_scripts(pair.target for pair in sample),
    )


# ---- duplicates ------------------------------------------------------------------------------------------------------

# Two odd constants (the golden ratio and pi), so that (a, b) and (b, a) have different keys.
_SOURCE_FACTOR, _TARGET_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x243F6A8885A308D3)


def hash_texts(texts: Sequence[str]) -> KeyArray:
    """Return a 64-bit key per text, the same in every process.

    Among 10 million texts there is a collision in one corpus of 400,000.
    """
    digests = [blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64, copy=False)


def combine_keys(sources: KeyArray, targets: KeyArray) -> KeyArray:
    return sources * _SOURCE_FACTOR + targets * _TARGET_FACTOR  # modulo 2**64


def hash_pairs(sources: Sequence[str], targets: Sequence[str]) -> KeyArray:
    """Return a 64-bit key per pair, the same in every process."""
    return combine_keys(hash_texts(sources), hash_texts(targets))


class KeySet:
    """A set of keys in 8 bytes each: sorted runs, of which small ones are merged like the digits of a counter."""

    MAX_MERGED_RUN = 2_000_000  # longer runs are not merged, since a merge needs the same memory again

    def __init__(self) -> None:
        self._runs: list[KeyArray] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def add(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Add keys; return True for each that is new, also compared with earlier ones of this call."""
        unique, first = np.unique(np.asarray(keys, dtype=np.uint64), return_index=True)
        is_unseen = np.ones(len(unique), dtype=bool)
        for run in self._runs:
            is_unseen &= ~search_sorted(run, unique)[1]
        is_new = np.zeros(len(keys), dtype=bool)
        is_new[first[is_unseen]] = True
        if is_unseen.any():
            self._runs.append(unique[is_unseen])
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]) <= self.MAX_MERGED_RUN:
            merged = np.concatenate([self._runs.pop(-2), self._runs.pop()])
            merged.sort(kind="stable")  # linear for two sorted halves
            self._runs.append(merged)
        return is_new
