"""Targets that start with given tokens, or not with some, such as the space and the end token of Whisper."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from attent.decoding.constraints import base
from attent.decoding.options import SearchRequest
from attent.storage.errors import AttentError


class ForcedPrefix(base.Constraint):
    """Start each target with its prefix; after a whole word, `word_continuations` are forbidden. State: a table row."""

    def __init__(
        self, requests: Sequence[SearchRequest], word_continuations: Tensor | None, device: torch.device | str = "cpu"
    ) -> None:
        for request in requests:
            if request.max_length and len(request.prefix_ids) >= request.max_length:
                raise AttentError(
                    f"the prefix must be shorter than max_length={request.max_length} tokens, but has "
                    f"{len(request.prefix_ids)}; shorten it or raise max_length"
                )
        kinds = dict.fromkeys((tuple(request.prefix_ids), request.prefix_ends_word) for request in requests)
        self.table_rows = {kind: row for row, kind in enumerate(kinds)}
        longest = max((len(prefix) for prefix, _ in kinds), default=0)
        rows = [[*prefix, *[-1] * (longest + 1 - len(prefix))] for prefix, _ in kinds]
        self.token_table = torch.tensor(rows, dtype=torch.int64, device=device).view(len(kinds), longest + 1)
        # Lengths of the prefixes that a new word must follow; -1: anything may follow.
        boundaries = [len(prefix) if ends_word and prefix else -1 for prefix, ends_word in kinds]
        self.boundary_lengths = torch.tensor(boundaries, dtype=torch.int64, device=device)
        self.continuation_masks = None
        if word_continuations is not None and max(boundaries, default=-1) >= 0:
            # Nothing masked, and word continuations masked: indexing it per row is faster than masking.
            continuations = word_continuations.to(device)
            self.continuation_masks = torch.stack([torch.zeros_like(continuations), continuations])

    @classmethod
    def build(cls, setup: base.ConstraintSetup) -> Self | None:
        if not any(request.prefix_ids for request in setup.requests):
            return None
        return cls(setup.requests, setup.vocabulary.word_continuations, setup.vocabulary.device)

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        rows = [[self.table_rows[tuple(request.prefix_ids), request.prefix_ends_word]] for request in requests]
        return torch.tensor(rows, dtype=torch.int64, device=self.token_table.device).view(len(requests), 1)

    def get_forced_tokens(self, state: Tensor, generated: base.GeneratedTokens) -> Tensor:
        column = generated.lengths.clamp_max(self.token_table.shape[1] - 1)
        return self.token_table[state[:, 0], column]

    def mask_logits(self, logits: Tensor, state: Tensor, generated: base.GeneratedTokens) -> Tensor:
        token = self.get_forced_tokens(state, generated)[:, None]
        value = logits.gather(1, token.clamp_min(0))
        if self.continuation_masks is not None:
            at_boundary = generated.lengths == self.boundary_lengths[state[:, 0]]
            logits.masked_fill_(self.continuation_masks.index_select(0, at_boundary.long()), base.NEG_INF)
        return base.keep_only_tokens(logits, token[:, 0] >= 0, token, value)


class BannedFirstTokens(base.Constraint):
    def __init__(self, token_ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.token_ids = torch.tensor(token_ids, dtype=torch.int64, device=device)

    @classmethod
    def build(cls, setup: base.ConstraintSetup) -> Self | None:
        token_ids = setup.options.banned_first
        return cls(token_ids, setup.vocabulary.device) if token_ids else None

    def mask_logits(self, logits: Tensor, state: Tensor, generated: base.GeneratedTokens) -> Tensor:
        is_first = (generated.lengths == 0)[:, None].expand(-1, len(self.token_ids))
        return base.ban_tokens(logits, self.token_ids.expand_as(is_first), is_first)
