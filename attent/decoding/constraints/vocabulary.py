"""Properties of the target vocabulary that constraints share; computed once per vocabulary and device."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from attent.decoding.constraints.phrase_automaton import TokenSpellings
from attent.decoding.token_bytes import find_word_continuations, get_token_bytes
from attent.text.vocabulary import Vocabulary


class TargetVocabulary:
    """The target vocabulary, padded to the model's `size` output columns."""

    def __init__(self, vocabulary: Vocabulary, size: int, end: int, device: torch.device) -> None:
        self.vocabulary, self.size, self.end, self.device = vocabulary, size, end, device

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return get_token_bytes(self.vocabulary, self.size)

    @cached_property
    def word_continuations(self) -> Tensor:
        """(V,) True for tokens that would extend the word before them."""
        return torch.from_numpy(find_word_continuations(self.token_bytes)).to(self.device)

    @cached_property
    def spellings(self) -> TokenSpellings:
        return TokenSpellings(self.token_bytes, self.end)
