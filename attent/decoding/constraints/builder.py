"""What a person demands of a translation, in words, and the rules on the device that make it so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attent.decoding.constraints.banned_phrases import BannedPhrases, TokenSpellings
from attent.decoding.constraints.base import Constraint, ForcedPrefix, MinLength, NoLoops, NoRepeatNgram
from attent.decoding.constraints.required_phrases import RequiredPhrases
from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.token_bytes import find_word_continuations, get_token_bytes
from attent.text.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What the translation of one text must be like."""

    prefix: str = ""  # what it begins with
    prefix_is_partial: bool = False  # the last word of the prefix may go on
    required: tuple[str, ...] = ()  # words that must come
    banned: tuple[str, ...] = ()  # words that must not, in whatever case

    @property
    def prefix_ends_word(self) -> bool:
        """Must what follows the prefix begin a new word? Behind a sign, such as an opening quote, a word may go on."""
        last = self.prefix[-1:]
        return not self.prefix_is_partial and (last.isspace() or last.isalnum())


NO_CONSTRAINTS = Constraints()


class ConstraintBuilder:
    """Makes the rules of a search, for one vocabulary of targets and one device."""

    def __init__(self, vocabulary: Vocabulary, size: int, end: int, device: torch.device) -> None:
        self.vocabulary, self.size, self.end, self.device = vocabulary, size, end, device

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return get_token_bytes(self.vocabulary, self.size)

    @cached_property
    def word_continuations(self) -> Tensor:
        return torch.from_numpy(find_word_continuations(self.token_bytes)).to(self.device)

    @cached_property
    def spellings(self) -> TokenSpellings:
        return TokenSpellings(self.token_bytes, self.end)

    def build_constraints(
        self, options: SearchOptions, requests: Sequence[SearchRequest]
    ) -> tuple[tuple[Constraint, ...], RequiredPhrases | None]:
        rules: list[Constraint] = []
        if options.min_length:
            rules.append(MinLength(options.min_length, self.end, self.device))
        if options.no_repeat_ngram_size:
            rules.append(NoRepeatNgram(options.no_repeat_ngram_size, self.device))
        if options.forbid_loops or any(job.forbid_loops for job in requests):
            rules.append(NoLoops(self.device, all_requests=options.forbid_loops))
        if any(job.banned_phrases for job in requests):
            rules.append(BannedPhrases(requests, self.spellings, self.device))
        if any(job.prefix_ids for job in requests):
            rules.append(ForcedPrefix(requests, self.word_continuations, self.device))
        if not any(job.required_phrases for job in requests):
            return tuple(rules), None
        return tuple(rules), RequiredPhrases(
            requests, end=self.end, word_continuations=self.word_continuations, device=self.device
        )
