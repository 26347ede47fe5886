"""Position-wise feed-forward network (section 3.3, equation 2): the same two layers at each token by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn import kernels
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
        return self.contract(self.inner(x))  # (B, T, inner) -> (B, T, E)

    def inner(self, x: Tensor) -> Tensor:
        """All but the last product: (B, T, E) -> (B, T, inner)"""
        if self.is_plain_relu and torch.is_grad_enabled() and self.fits(x):
            from attent.nn.kernels.relu import product_relu

            return product_relu(x, self.expand.weight, self.expand.bias)
        inner = ACTIVATIONS[self.activation](self.expand(x))
        if self.gate is not None:
            inner = inner * self.gate(x)
        return self.dropout(inner)

    def fits(self, x: Tensor) -> bool:
        return (
            kernels.usable(x) and kernels.working_format(x) in kernels.FORMATS and kernels.plain(self.expand, nn.Linear)
        )

    @property
    def is_plain_relu(self) -> bool:
        """The paper's: nothing else is done to the inner numbers."""
        plain = self.activation == "relu" and self.gate is None and self.expand.bias is not None
        return plain and not (self.training and self.dropout.p)
