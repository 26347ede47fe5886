"""Position-wise feed-forward network (section 3.3, equation 2): the same two layers at each token by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.checks import check_choice
from attent.nn.dropout import Dropout

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,  # the paper
    "gelu": F.gelu,  # BERT, ViT
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),  # GPT-2, T5 v1.1
    "silu": F.silu,  # Marian calls it swish; gated, it is LLaMA's SwiGLU
}


class FeedForward(nn.Module):
    """Equation 2: FFN(x) = max(0, x W1 + b1) W2 + b2; gated (SwiGLU and kin): (act(x W1) * x W3) W2."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        activation: Activation = "relu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, Activation)
        self.expand = nn.Linear(width, inner, bias=bias)  # W1
        self.gate = nn.Linear(width, inner, bias=bias) if gated else None  # W3
        self.contract = nn.Linear(inner, width, bias=bias)  # W2
        self.activation = activation
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        inner = ACTIVATIONS[self.activation](self.expand(x))  # (B, T, E) -> (B, T, inner)
        if self.gate is not None:
            inner = inner * self.gate(x)
        return self.contract(self.dropout(inner))  # (B, T, inner) -> (B, T, E)
