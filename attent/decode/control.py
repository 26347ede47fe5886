"""What a person demands of a translation, in words, and the rules on the device that make it so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attent.decode.demand import Demands
from attent.decode.forbidden import Alphabet, Forbidden
from attent.decode.options import Job, Search
from attent.decode.rules import MinLength, NoLoops, NoRepeat, Prefix, Rule
from attent.decode.spelling import continuing, spelled
from attent.text.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Control:
    """What the translation of one text must be like."""

    prefix: str = ""  # what it begins with
    unfinished: bool = False  # the last word of the prefix may go on
    demanded: tuple[str, ...] = ()  # words that must come
    forbidden: tuple[str, ...] = ()  # words that must not, in whatever case

    @property
    def ends_word(self) -> bool:
        """Must what follows the prefix begin a new word? Behind a sign, such as an opening quote, a word may go on."""
        last = self.prefix[-1:]
        return not self.unfinished and (last.isspace() or last.isalnum())


FREE = Control()


class Ruler:
    """Makes the rules of a search, for one vocabulary of targets and one device."""

    def __init__(self, vocabulary: Vocabulary, size: int, end: int, device: torch.device) -> None:
        self.vocabulary, self.size, self.end, self.device = vocabulary, size, end, device

    @cached_property
    def pieces(self) -> list[bytes]:
        return spelled(self.vocabulary, self.size)

    @cached_property
    def continues(self) -> Tensor:
        return torch.from_numpy(continuing(self.pieces)).to(self.device)

    @cached_property
    def alphabet(self) -> Alphabet:
        return Alphabet(self.pieces, self.end)

    def rules(self, search: Search, jobs: Sequence[Job]) -> tuple[tuple[Rule, ...], Demands | None]:
        rules: list[Rule] = []
        if search.min_length:
            rules.append(MinLength(search.min_length, self.end, self.device))
        if search.no_repeat_ngram_size:
            rules.append(NoRepeat(search.no_repeat_ngram_size, self.device))
        if search.no_loops or any(job.no_loops for job in jobs):
            rules.append(NoLoops(self.device, every=search.no_loops))
        if any(job.forbidden for job in jobs):
            rules.append(Forbidden(jobs, self.alphabet, self.device))
        if any(job.prefix for job in jobs):
            rules.append(Prefix(jobs, self.continues, self.device))
        if not any(job.demanded for job in jobs):
            return tuple(rules), None
        return tuple(rules), Demands(jobs, end=self.end, continues=self.continues, device=self.device)
