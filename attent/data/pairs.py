"""What every reader gives, and how languages are told apart: the words that the rest of `data` shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attent.storage.errors import StorageError


class CorpusError(StorageError):
    """A corpus that cannot be read: which file, which line, what was wrong and what to do next."""


class Pair(NamedTuple):
    """A sentence and its translation, and where they stand."""

    source: str
    target: str
    file: str  # as a person would name it
    line: int  # from 1; in XML the line on which the unit begins


class BadLine(NamedTuple):
    """A line or unit that is no pair: counted and shown, and the reading goes on behind it."""

    reason: str  # few words that many lines share, such as "one column only": reports count by it
    file: str
    line: int
    excerpt: str  # the beginning of what stands there


@dataclass(frozen=True)
class LanguagePair:
    """The languages asked for, as tags (`de`, `pt-BR`); None takes what the file itself says."""

    source: str | None = None
    target: str | None = None


def is_tag_match(requested: str, available: str) -> bool:
    """Does the tag `found` in a file answer `asked`? `de` takes `de-AT`, but `de-AT` does not take `de`."""
    requested, available = normalize_tag(requested), normalize_tag(available)
    return available == requested or available.startswith(requested + "-")


def choose_tag(requested: str, available: Sequence[str]) -> str | None:
    """The tag of `found` that answers best: the very one if it is there, else the first that matches."""
    exact = [tag for tag in available if normalize_tag(tag) == normalize_tag(requested)]
    return next(iter(exact or [tag for tag in available if is_tag_match(requested, tag)]), None)


def normalize_tag(tag: str) -> str:
    return tag.strip().replace("_", "-").lower()
