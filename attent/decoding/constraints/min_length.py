"""A minimum length of the target."""

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, Constraint, ConstraintSetup, GeneratedTokens


class MinLength(Constraint):
    def __init__(self, min_length: int, end_ids: Sequence[int]) -> None:
        self.min_length, self.end_ids = min_length, tuple(end_ids)

    @classmethod
    def build(cls, setup: ConstraintSetup) -> Self | None:
        min_length, vocabulary = setup.options.min_length, setup.vocabulary
        return cls(min_length, vocabulary.end_ids) if min_length else None

    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        for end in self.end_ids:
            logits[:, end].masked_fill_(generated.lengths < self.min_length, NEG_INF)
        return logits
