"""The interface of a search constraint, its inputs, and how several are applied to the logits of a step.

A constraint works on all rows of a search at once, on their device, and never synchronizes with the host. What it
remembers of a row is a row of integers that the search reorders with its beams.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attent.decoding.constraints.phrase_automaton import TokenSpellings, find_word_continuations, get_token_bytes
from attent.decoding.options import SearchOptions, SearchRequest
from attent.text.vocabulary import Vocabulary

NEG_INF = float("-inf")


@dataclass(frozen=True, eq=False)
class GeneratedTokens:
    """The tokens that each row has generated so far."""

    tokens: Tensor  # (R, T) int64, without the start token; padding from `lengths` on
    lengths: Tensor  # (R,)
    max_lengths: Tensor  # (R,) tokens that the row may have, including the end token


class Constraint(ABC):
    """Masks tokens that a row may not generate next. The state is (R, S) int64, with a fixed S; by default empty."""

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        """Return the state (len(requests), S) before the first token."""
        return torch.zeros(len(requests), 0, dtype=torch.int64)

    @abstractmethod
    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        """Return the logits (R, V) with -inf at forbidden tokens; may work in place."""

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        """Return the state (R, S) after each row has generated its token (R,)."""
        return state

    def get_forced_tokens(self, state: Tensor, generated: GeneratedTokens) -> Tensor | None:
        """Return the token (R,) that must come next whatever other constraints mask, -1 where any may; None: any."""
        return None

    def is_satisfied(self, state: Tensor) -> Tensor | bool:
        """Return (R,) whether the target may end, even in a row without any other token."""
        return True


def apply_constraints(
    constraints: Sequence[Constraint], logits: Tensor, states: Sequence[Tensor], generated: GeneratedTokens, end_id: int
) -> Tensor:
    """Return the logits (R, V) with -inf where any constraint forbids a token. Works in place.

    A forced token stays allowed whatever the others mask. A row without any allowed token may end, unless a required
    phrase is missing or it would end in a banned one: then all its logits are -inf.
    """
    end_logits = logits[:, end_id].clone()
    pairs = list(zip(constraints, states, strict=True))
    forced = [
        (token[:, None], logits.gather(1, token[:, None].clamp_min(0)))
        for constraint, state in pairs
        if (token := constraint.get_forced_tokens(state, generated)) is not None
    ]
    for constraint, state in pairs:
        logits = constraint.mask_logits(logits, state, generated)
    is_stuck = logits.amax(1) == NEG_INF
    for constraint, state in pairs:
        is_stuck = is_stuck & constraint.is_satisfied(state)
    logits[:, end_id] = torch.where(is_stuck, end_logits, logits[:, end_id])
    for token, value in forced:
        logits = keep_only_tokens(logits, token[:, 0] >= 0, token, value)
    return logits


def ban_tokens(logits: Tensor, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Set -inf at `token_ids` (R, N) where `mask` (R, N) is True, in place. Masked-out ids may be anything."""
    values = torch.where(mask, NEG_INF, -NEG_INF).to(logits.dtype)
    return logits.scatter_reduce_(1, token_ids.where(mask, 0), values, "amin")


def keep_only_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """In the rows where `rows` (R,) is True allow only `token_ids` (R, N), with `values`, in place; ignore ids < 0."""
    logits += torch.where(rows, NEG_INF, 0.0).to(logits.dtype)[:, None]
    allowed_logits = values.where(rows[:, None] & (token_ids >= 0), NEG_INF)
    return logits.scatter_reduce_(1, token_ids.clamp_min(0), allowed_logits, "amax")


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
