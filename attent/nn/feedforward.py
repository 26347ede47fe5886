"""Position-wise feed-forward network (section 3.3, equation 2): the same two layers at every position."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.argument_checks import check_choice
from attent.nn.dropout import Dropout

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,  # the paper
    "gelu": F.gelu,  # BERT, ViT
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),  # GPT-2, T5 v1.1
    "silu": F.silu,  # Marian calls it swish; gated, it is LLaMA's SwiGLU
}


class FeedForward(nn.Module):
    """Equation 2: FFN(x) = max(0, x W1 + b1) W2 + b2; gated (SwiGLU and similar): (act(x W1) * x W3) W2."""

    def __init__(
        self,
        width: int,
        ffn_width: int,
        *,
        activation: Activation = "relu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, Activation)
        self.expand = nn.Linear(width, ffn_width, bias=bias)  # W1
        self.gate = nn.Linear(width, ffn_width, bias=bias) if gated else None  # W3
        self.contract = nn.Linear(ffn_width, width, bias=bias)  # W2
        self.activation = activation
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.compute_hidden(x))  # (B, T, ffn_width) -> (B, T, E)

    def compute_hidden(self, x: Tensor) -> Tensor:
        hidden = ACTIVATIONS[self.activation](self.expand(x))  # (B, T, E) -> (B, T, ffn_width)
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        return self.dropout(hidden)
