"""What every reader gives, and how languages are told apart: the words that the rest of `data` shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CorpusError(ValueError):
    """A corpus that cannot be read: which file, which line, what was wrong and what to do next."""


class Pair(NamedTuple):
    """A sentence and its translation, and where they stand."""

    source: str
    target: str
    file: str  # as a person would name it
    line: int  # from 1; in XML the line on which the unit begins


class Bad(NamedTuple):
    """A line or unit that is no pair: counted and shown, and the reading goes on behind it."""

    why: str  # few words that many lines share, such as "one column only": reports count by it
    file: str
    line: int
    text: str  # the beginning of what stands there


@dataclass(frozen=True)
class Languages:
    """The languages asked for, as tags (`de`, `pt-BR`); None takes what the file itself says."""

    source: str | None = None
    target: str | None = None


def matches(asked: str, found: str) -> bool:
    """Does the tag `found` in a file answer `asked`? `de` takes `de-AT`, but `de-AT` does not take `de`."""
    asked, found = normal_tag(asked), normal_tag(found)
    return found == asked or found.startswith(asked + "-")


def choose(asked: str, found: Sequence[str]) -> str | None:
    """The tag of `found` that answers best: the very one if it is there, else the first that matches."""
    exact = [tag for tag in found if normal_tag(tag) == normal_tag(asked)]
    return next(iter(exact or [tag for tag in found if matches(asked, tag)]), None)


def normal_tag(tag: str) -> str:
    return tag.strip().replace("_", "-").lower()
