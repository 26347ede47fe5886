"""The types of all corpus readers: sentence pairs, bad lines, the language pair to read, and the names of splits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from attent.formatting import escape_invisible
from attent.storage.errors import StorageError
from attent.text.language_tags import choose_tag, get_primary_subtag, is_same_language, is_tag_match, normalize_tag

MAX_LISTED = 20  # languages listed in an error, and therefore remembered by readers
MAX_EXAMPLES = 3  # per reason for dropping a pair
SPLIT_WORDS = {  # in names of files and folders
    "train": ("train", "training"),
    "valid": ("valid", "val", "validation", "dev"),
    "test": ("test", "testing"),
}


class CorpusError(StorageError):
    """A corpus that cannot be read. The message names file and line, the problem and what to do."""


class LanguageMismatchError(CorpusError):
    """A readable file without the requested languages: `problem` is the message without the advice."""

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(f"{problem}; {advice}" if advice else problem)
        self.problem = problem


class Pair(NamedTuple):
    """A sentence and its translation, and their position."""

    source: str
    target: str
    file: str  # name for messages
    line: int  # from 1; in XML the first line of the unit
    target_file: str | None = None  # if it is another
    context: str = ""  # preceding sources, with separators (`attent.text.vocabulary`)


class BadLine(NamedTuple):
    """A line or unit that is not a pair. Readers yield it and continue."""

    reason: str  # short and general, such as "one column only": reports count by it
    file: str
    line: int
    excerpt: str


Example = TypeVar("Example")


@dataclass
class ReasonTally(Generic[Example]):
    """Counts of lines or pairs by reason, with the first few of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Example]] = field(default_factory=dict)

    def add(self, reason: str, example: Example) -> None:
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(example)

    def describe(self, min_count: int = 1) -> str:
        """Return each reason with its count and first location, the most frequent first."""
        reasons = [(reason, count) for reason, count in self.counts.most_common() if count >= min_count]
        return ", ".join(f"{count:,} {reason} (the first: {self.examples[reason][0]})" for reason, count in reasons)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Entries to include. Unapproved units of TMX and XLIFF are always read."""

    fuzzy: bool = False  # PO entries and XLIFF units that need review
    obsolete: bool = False  # PO entries that the program no longer uses (`#~`)


DEFAULT_READ_OPTIONS = ReadOptions()


@dataclass(frozen=True)
class LanguagePair:
    """Requested languages as tags (`de`, `pt-BR`); None is an open side, which the file decides."""

    source: str | None = None
    target: str | None = None

    @property
    def is_open(self) -> bool:
        return self.source is None or self.target is None

    @property
    def tags(self) -> list[str]:
        """The known sides."""
        return [tag for tag in (self.source, self.target) if tag]

    def swap(self) -> LanguagePair:
        return LanguagePair(self.target, self.source)

    def is_reversed(self, declared: LanguagePair) -> bool | None:
        """True if a file must be read backwards, False if not, None if no side matches; the most known matches win."""
        forward, backward = self._count_matches(declared), self._count_matches(declared.swap())
        if forward is None and backward is None:
            return None
        return forward is None or (backward is not None and backward > forward)

    def _count_matches(self, declared: LanguagePair) -> int | None:
        sides = ((self.source, declared.source), (self.target, declared.target))
        return sum(None not in side for side in sides) if all(_is_compatible(*side) for side in sides) else None

    def fill_open_sides(self, source: str | None, target: str | None) -> LanguagePair:
        """Fill open sides from a file's first unit, without regions: a later `en-GB` matches a first `en-US`."""
        if not (source and target and is_same_language(source, target)):
            source, target = source and get_primary_subtag(source), target and get_primary_subtag(target)
        return LanguagePair(self.source or source, self.target or target)

    def is_requested(self, tag: str) -> bool:
        return _is_compatible(self.source, tag) or _is_compatible(self.target, tag)

    def describe_missing(self, available: Iterable[str]) -> str:
        """Return in a few words why a unit in the `available` languages is not a pair."""
        present = list(available)
        missing = next((tag for tag in (self.target, self.source) if tag and choose_tag(tag, present) is None), None)
        return f"no {missing} side" if missing else "not two languages"

    def make_mismatch_error(self, name: str, available: Iterable[str]) -> LanguageMismatchError:
        seen = sorted({escape_invisible(normalize_tag(tag)) for tag in available})
        listed = ", ".join(seen[:MAX_LISTED]) + (" and more" if len(seen) > MAX_LISTED else "")
        requested = " and ".join(self.tags)
        problem = f"does not contain {requested}" if requested else "does not say which two languages to read"
        advice = (
            "choose two of them with --src and --tgt" if len(seen) > 1 else "change --src or --tgt, or leave them out"
        )
        return LanguageMismatchError(f"{name} {problem}: it has {listed or 'none'}", advice)


ANY_LANGUAGES = LanguagePair()


def _is_compatible(requested: str | None, declared: str | None) -> bool:
    return requested is None or declared is None or is_tag_match(requested, declared)


@lru_cache(maxsize=16)  # most files have the same languages in every unit
def choose_sides(requested: LanguagePair, available: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the available tags of source and target; None if they are missing or ambiguous."""
    if requested == ANY_LANGUAGES:
        return (available[0], available[1]) if len(available) == 2 else None
    if requested.source is None or requested.target is None:  # the other side must be the only other language
        known = choose_tag(requested.source or requested.target or "", available)
        others = [tag for tag in available if tag != known]
        if known is None or len(others) != 1:
            return None
        return (known, others[0]) if requested.source is not None else (others[0], known)
    for first, second, is_forward in (
        (requested.source, requested.target, True),
        (requested.target, requested.source, False),
    ):
        first_tag = choose_tag(first, available)
        second_tag = choose_tag(second, [tag for tag in available if tag != first_tag])
        if first_tag is not None and second_tag is not None:
            return (first_tag, second_tag) if is_forward else (second_tag, first_tag)
    return None


def detect_split(name: str) -> str | None:
    """Return the split that a name begins with: `train500k`, `test_2016_flickr`, but not `testimony`."""
    for split, words in SPLIT_WORDS.items():
        if re.match(rf"({'|'.join(words)})(?![a-z])", name.lower()):
            return split
    return None
