"""Position-wise feed-forward network (section 3.3, equation 2): the same two layers at every position."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.config import Activation, StackConfig
from attent.nn.dropout import Dropout

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,  # the paper
    "gelu": F.gelu,  # BERT, ViT
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),  # GPT-2, T5 v1.1
    "silu": F.silu,  # Marian calls it swish; gated, it is LLaMA's SwiGLU
}


class FeedForward(nn.Module):
    """Equation 2: FFN(x) = max(0, x W1 + b1) W2 + b2; gated (SwiGLU and similar): (act(x W1) * x W3) W2."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, config.ffn_width, bias=config.bias)  # W1
        self.gate = nn.Linear(config.width, config.ffn_width, bias=config.bias) if config.gated else None  # W3
        self.contract = nn.Linear(config.ffn_width, config.width, bias=config.bias)  # W2
        self.activation = config.activation
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.compute_hidden(x))  # (B, T, ffn_width) -> (B, T, E)

    def compute_hidden(self, x: Tensor) -> Tensor:
        hidden = ACTIVATIONS[self.activation](self.expand(x))  # (B, T, E) -> (B, T, ffn_width)
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        return self.dropout(hidden)
