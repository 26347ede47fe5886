"""The output layer before the softmax (section 3.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.frontends import TokenEmbedding
from attent.nn.init import init_normal


class OutputProjection(nn.Module):
    """States (B, T, E) -> logits (B, T, V). The matrix is often the token embedding, transposed (`tied_to`)."""

    def __init__(
        self, vocab: int, width: int, *, tied_to: TokenEmbedding | None, bias: bool = False, scaled: bool = False
    ) -> None:
        super().__init__()
        self.scale = width**-0.5 if scaled else None
        self.weight = nn.Parameter(torch.empty(vocab, width)) if tied_to is None else tied_to.weight
        self.bias = nn.Parameter(torch.zeros(vocab)) if bias else None
        if tied_to is None:
            init_normal(self.weight, std=width**-0.5)

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(self.scale_states(states), self.weight, self.bias)

    def scale_states(self, states: Tensor) -> Tensor:
        """Divide by sqrt(E), as T5 does where the output is tied to the embedding."""
        return states if self.scale is None else states * self.scale
