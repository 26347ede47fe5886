"""A minimum length of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, GeneratedTokens, StatelessConstraint
from attent.decoding.constraints.vocabulary import ConstraintSetup


class MinLength(StatelessConstraint):
    """Forbid the end tokens before `min_length` tokens."""

    def __init__(self, min_length: int, end_ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.min_length, self.end_ids = min_length, tuple(end_ids)

    @classmethod
    def build(cls, setup: ConstraintSetup) -> MinLength | None:
        min_length, vocabulary = setup.options.min_length, setup.vocabulary
        return cls(min_length, vocabulary.end_ids, vocabulary.device) if min_length else None

    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        for end in self.end_ids:
            logits[:, end].masked_fill_(generated.lengths < self.min_length, NEG_INF)
        return logits
