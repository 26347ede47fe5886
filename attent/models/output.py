"""The output layer before the softmax (section 3.4)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn import StackConfig
from attent.nn.block import make_norm
from attent.nn.feedforward import ACTIVATIONS
from attent.nn.frontends import TokenEmbedding
from attent.nn.init import init_normal


class OutputProjection(nn.Module):
    """States (B, T, E) -> logits (B, T, V). The matrix is often the token embedding, transposed (`tied_to`).

    `transform` is the stack whose activation and norm a layer before the matrix has (BERT), or None.
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        tied_to: TokenEmbedding | None,
        bias: bool = False,
        scaled: bool = False,
        transform: StackConfig | None = None,
    ) -> None:
        super().__init__()
        self.transform = None if transform is None else OutputTransform(transform)
        self.scale = width**-0.5 if scaled else None
        self.weight = nn.Parameter(torch.empty(vocab, width)) if tied_to is None else tied_to.weight
        self.bias = nn.Parameter(torch.zeros(vocab)) if bias else None
        if tied_to is None:
            init_normal(self.weight, std=width**-0.5)

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(self.prepare_states(states), self.weight, self.bias)

    def prepare_states(self, states: Tensor) -> Tensor:
        """Transform states (BERT), or divide them by sqrt(E), as T5 does where the output is tied to the embedding."""
        states = states if self.transform is None else self.transform(states)
        return states if self.scale is None else states * self.scale


class OutputTransform(nn.Module):
    """A layer with its activation and norm, (..., E) -> (..., E)."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.dense = make_linear(config.width, config.width)
        self.activation = config.activation
        self.norm = make_norm(config)

    def forward(self, states: Tensor) -> Tensor:
        return self.transform(states)

    def transform(self, states: Tensor) -> Tensor:
        return self.norm(ACTIVATIONS[self.activation](self.dense(states)))


def make_linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    init_normal(layer.weight, std=inputs**-0.5)
    nn.init.zeros_(layer.bias)
    return layer
