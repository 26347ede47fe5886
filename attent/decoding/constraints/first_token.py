"""Tokens that no target starts with, such as the space and the end token of Whisper."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from attent.decoding.constraints.base import Constraint, GeneratedTokens, ban_tokens
from attent.decoding.constraints.vocabulary import ConstraintSetup


class BannedFirstTokens(Constraint):
    def __init__(self, token_ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.token_ids = torch.tensor(token_ids, dtype=torch.int64, device=device)

    @classmethod
    def build(cls, setup: ConstraintSetup) -> Self | None:
        token_ids = setup.options.banned_first
        return cls(token_ids, setup.vocabulary.device) if token_ids else None

    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        is_first = (generated.lengths == 0)[:, None].expand(-1, len(self.token_ids))
        return ban_tokens(logits, self.token_ids.expand_as(is_first), is_first)
