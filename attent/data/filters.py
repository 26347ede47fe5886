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

from attent.data import scripts as script_table
from attent.data.pairs import Languages, Pair
from attent.data.scripts import Scripts

Keys = npt.NDArray[np.uint64]

# In this order a pair is judged, and only the first reason counts: so the counts of a report add up.
ORDER = ("empty", "control", "longest", "ratio", "identical", "script", "duplicates")


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What is dropped before training."""

    # A segment of 2,000 characters is about 350 words or 500 tokens: more is a paragraph that was never segmented.
    longest: int = 2_000  # characters of either side; a Han, Kana or Hangul one counts as three; 0: any length
    # Real translations stay below 3 in every corpus that was looked at; above 4 stand slipped alignments.
    ratio: float = 4.0  # how many times longer one side may be, each lengthened by 20 characters first; 0: any
    identical: bool = True  # both sides the same sentence, untranslated; names, codes and short labels stay
    script: bool = True  # most letters of a side belong to another script than its language is written in
    control: bool = True  # control characters, U+FFFD, and UTF-8 that was read as Windows-1252 ("fÃ¼r")
    empty: bool = True  # nothing but space on a side
    duplicates: bool = True  # the very same pair again, spaces at the ends aside

    def __post_init__(self) -> None:
        if self.longest < 0:
            raise ValueError(f"`longest` must be 0 or more characters, but is {self.longest}")
        if self.ratio != 0 and not self.ratio >= 1:
            raise ValueError(f"`ratio` must be 1 or more, or 0 to allow any, but is {self.ratio}")

    @classmethod
    def none(cls) -> Filters:
        """Keeps everything."""
        return cls(longest=0, ratio=0, identical=False, script=False, control=False, empty=False, duplicates=False)


# ---- what stands in a text -------------------------------------------------------------------------------------------

SMOOTHING = 20  # characters, so that "OK" may become "Einverstanden" and "EU" "Europäische Union"
WIDE_COUNTS = 3  # a Han, Kana or Hangul character carries about as much as three letters
FEW_LETTERS = 12  # below this a text in another script is a name or a code: "iPhone", "README"
SENTENCE_WORDS = 4  # untranslated words in small letters, from which on identical sides are a sentence
SENTENCE_WIDE = 12  # the same for scripts that write no spaces

WIDE_SCRIPTS: Scripts = frozenset({"Hani", "Kana", "Hang", "Bopo"})
WIDE = script_table.letters(WIDE_SCRIPTS)
# C0 but for tab and line ends, DEL, C1, lone surrogates, U+FFFD and the two non-characters behind it.
CONTROL_CLASS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd-\uffff"
CONTROL = re.compile(f"[{CONTROL_CLASS}]")

# Bytes 80 to BF, the second and later ones of a UTF-8 character, as Windows-1252 (and Latin-1) shows them.
_TAIL = "\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
# "Ã¼", "Â°", "â€™": what becomes of the letters of Western Europe and of curly quotes. A lone "Ã" before a
# closing quote or a no-break space may be Portuguese, so these do not count here.
_SURE = re.compile("Ã[\x80-\x9f¡-º¼-¾€‚ƒ†‡ˆ‰Š‹ŒŽ˜™šœžŸ]|Â[\x80-\x9f¡-ª¬-º¼-¾]|â€[\x80-\xbf“”™œ˜¦¢]|ï»¿")
# Every non-ASCII letter of the text is part of such a run, and the run stands for a letter that people write.
_RUN = f"[ÂÃÄÅÎÏÐÑØÙ×][{_TAIL}]|[à-ì][{_TAIL}]{{2}}|ð[{_TAIL}]{{3}}"
_ALL_RUNS = re.compile(f"[\x00-\x7f]*(?:(?:{_RUN})[\x00-\x7f]*){{2,}}")
_HINT = re.compile(f"[ÂÃâïÄÅÎÏÐÑØÙ×àáãäåæçèéêëìð][{_TAIL}]")


def clean(text: str) -> str:
    """What is encoded: the text without the space at its ends. Nothing else is changed."""
    return text.strip()


def is_mojibake(text: str) -> bool:
    """UTF-8 that some program took for Windows-1252 or Latin-1, such as "fÃ¼r" or "Ð¿Ñ€Ð¸"."""
    return _HINT.search(text) is not None and (_SURE.search(text) is not None or _ALL_RUNS.fullmatch(text) is not None)


def find_damage(text: str) -> int | None:
    """Where the first control character or wrongly read letter stands."""
    found = CONTROL.search(text) or (_HINT.search(text) if is_mojibake(text) else None)
    return found.start() if found else None


def size(text: str) -> int:
    """Characters, the wide ones of East Asia three-fold."""
    return len(text) if text.isascii() else len(text) + (WIDE_COUNTS - 1) * len(WIDE.findall(text))


def is_untranslated(text: str) -> bool:
    """Would this, the same on both sides, be a sentence that nobody translated? Names and codes would not."""
    small = sum(word[0].isalpha() and not word[0].isupper() for word in text.split())
    return small >= SENTENCE_WORDS or len(WIDE.findall(text)) >= SENTENCE_WIDE


class _Side:
    """What one side of a corpus is expected to be written in."""

    def __init__(self, scripts: Scripts | None) -> None:
        foreign = script_table.others(scripts) if scripts else frozenset()  # unknown: nothing is foreign
        self.own = script_table.letters(scripts or frozenset())
        self.foreign = script_table.letters(foreign)
        self.plain_ascii = "Latn" not in foreign
        # A text without any of these needs no closer look. One class and nothing else: Python searches that quickest.
        classes = "".join(script_table.LETTERS[code] for code in sorted(foreign | WIDE_SCRIPTS))
        self.unusual = re.compile(f"[{CONTROL_CLASS}{classes}{_TAIL}]")

    def is_plain(self, text: str) -> bool:
        if text.isascii() and self.plain_ascii:
            return text.isprintable()
        return self.unusual.search(text) is None

    def is_foreign(self, text: str) -> bool:
        """More than half of the letters, and more than a name's worth of them, are in another script."""
        found = self.foreign.findall(text)
        if not found:
            return False
        weight = size("".join(found))
        return weight >= FEW_LETTERS and weight > size("".join(self.own.findall(text)))


# ---- judging ---------------------------------------------------------------------------------------------------------


class Sieve:
    """Judges pairs one by one, by what stands in them alone; duplicates are for `Seen`."""

    def __init__(self, filters: Filters, scripts: tuple[Scripts | None, Scripts | None]) -> None:
        self.filters = filters
        self.scripts = scripts
        self._sides = _Side(scripts[0]), _Side(scripts[1])

    def __reduce__(self) -> tuple[type[Sieve], tuple[Filters, tuple[Scripts | None, Scripts | None]]]:
        return Sieve, (self.filters, self.scripts)

    def why(self, source: str, target: str) -> str | None:
        """The name of the first filter that drops this pair, or None where it stays."""
        filters = self.filters
        source, target = source.strip(), target.strip()
        if filters.empty and not (source and target):
            return "empty"
        one, other = self._sides
        if one.is_plain(source) and other.is_plain(target):
            return self._by_size(len(source), len(target)) or self._by_sameness(source, target)
        if filters.control and _is_damaged(source, target):
            return "control"
        return (
            self._by_size(size(source), size(target))
            or self._by_sameness(source, target)
            or ("script" if filters.script and self._is_foreign(source, target) else None)
        )

    def _by_size(self, source: int, target: int) -> str | None:
        filters = self.filters
        short, long = (source, target) if source < target else (target, source)
        if filters.longest and long > filters.longest:
            return "longest"
        if filters.ratio and long + SMOOTHING > filters.ratio * (short + SMOOTHING):
            return "ratio"
        return None

    def _by_sameness(self, source: str, target: str) -> str | None:
        same = self.filters.identical and source == target and is_untranslated(source)
        return "identical" if same else None

    def _is_foreign(self, source: str, target: str) -> bool:
        if source == target:  # a name or a code, or else "identical" would have dropped it
            return False
        one, other = self._sides
        return one.is_foreign(source) or other.is_foreign(target)


def _is_damaged(source: str, target: str) -> bool:
    return any(CONTROL.search(text) is not None or is_mojibake(text) for text in (source, target))


def expected_scripts(languages: Languages, sample: Sequence[Pair]) -> tuple[Scripts | None, Scripts | None]:
    """What each side should be written in: by its language, or by what most of the sample is written in."""
    source, target = script_table.of_language(languages.source), script_table.of_language(languages.target)
    return (
        source or script_table.of_texts(pair.source for pair in sample),
        target or script_table.of_texts(pair.target for pair in sample),
    )


# ---- pairs that came before ------------------------------------------------------------------------------------------

# Two odd numbers without a pattern (the golden ratio and pi), so that (a, b) and (b, a) have different keys.
_SOURCE_FACTOR, _TARGET_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x243F6A8885A308D3)


def text_keys(texts: Sequence[str]) -> Keys:
    """A number of 64 bits for each text, the same in every process.

    Among 10 million texts two meet by chance in one corpus of 400,000.
    """
    digests = [blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64, copy=False)


def join_keys(sources: Keys, targets: Keys) -> Keys:
    return sources * _SOURCE_FACTOR + targets * _TARGET_FACTOR  # wraps around, as it should


def pair_keys(sources: Sequence[str], targets: Sequence[str]) -> Keys:
    """A number of 64 bits for each pair, the same in every process."""
    return join_keys(text_keys(sources), text_keys(targets))


class Seen:
    """Which keys came before, in 8 bytes each: sorted runs, the small ones merged like the digits of a counter."""

    LONGEST_RUN = 2_000_000  # longer ones are left apart: a merge needs as much memory again for a moment

    def __init__(self) -> None:
        self._runs: list[Keys] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def add(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """True where a key is new, also against those before it in this call."""
        unique, first = np.unique(np.asarray(keys, dtype=np.uint64), return_index=True)
        unseen = np.ones(len(unique), dtype=bool)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            unseen &= run[at] != unique
        new = np.zeros(len(keys), dtype=bool)
        new[first[unseen]] = True
        self._keep(unique[unseen])
        return new

    def _keep(self, run: Keys) -> None:
        if not len(run):
            return
        self._runs.append(run)
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]) <= self.LONGEST_RUN:
            last, before = self._runs.pop(), self._runs.pop()
            merged = np.concatenate([before, last])
            merged.sort(kind="stable")  # two sorted halves: one pass
            self._runs.append(merged)
