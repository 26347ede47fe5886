"""Inputs of constraints: options, requests, and the target vocabulary, whose properties are computed once."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attent.decoding.constraints.phrase_automaton import TokenSpellings
from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.token_bytes import find_word_continuations, get_token_bytes
from attent.text.vocabulary import Vocabulary


class TargetVocabulary:
    """The target vocabulary, padded to the model's `size` output columns; None where no text is constrained."""

    def __init__(self, vocabulary: Vocabulary | None, size: int, end_ids: Sequence[int], device: torch.device) -> None:
        self.tokenizer_vocabulary, self.size, self.end_ids, self.device = vocabulary, size, tuple(end_ids), device

    @cached_property
    def token_bytes(self) -> list[bytes]:
        assert self.tokenizer_vocabulary is not None
        return get_token_bytes(self.tokenizer_vocabulary, self.size)

    @cached_property
    def word_continuations(self) -> Tensor:
        """(V,) True for tokens that extend the word before them, or without text, such as tags; not for end tokens."""
        continuations = find_word_continuations(self.token_bytes)
        continuations |= np.array([not piece for piece in self.token_bytes])
        continuations[list(self.end_ids)] = False
        return torch.from_numpy(continuations).to(self.device)

    @cached_property
    def spellings(self) -> TokenSpellings:
        return TokenSpellings(self.token_bytes, self.end_ids[0])


class ConstraintSetup(NamedTuple):
    options: SearchOptions
    requests: Sequence[SearchRequest]
    vocabulary: TargetVocabulary
