"""A minimum length of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, GeneratedTokens, StatelessConstraint
from attent.decoding.constraints.vocabulary import TargetVocabulary
from attent.decoding.options import SearchOptions, SearchRequest


class MinLength(StatelessConstraint):
    """Forbid the end token before `min_length` tokens."""

    def __init__(self, min_length: int, end: int, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.min_length, self.end = min_length, end

    @classmethod
    def build(
        cls, options: SearchOptions, requests: Sequence[SearchRequest], vocabulary: TargetVocabulary
    ) -> MinLength | None:
        return cls(options.min_length, vocabulary.end, vocabulary.device) if options.min_length else None

    def mask_scores(self, scores: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        scores[:, self.end].masked_fill_(generated.lengths < self.min_length, NEG_INF)
        return scores
