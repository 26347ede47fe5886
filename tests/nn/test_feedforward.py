"""Equation 2 by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attent.nn import FeedForward, StackConfig

CONFIG = StackConfig(width=3, heads=1, ffn_width=5)

BY_HAND = {
    "relu": lambda x: max(0.0, x),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", BY_HAND)
def test_equation_2(activation: str, gated: bool, bias: bool) -> None:
    """FFN(x) = act(x W1 + b1) W2 + b2; gated: (act(x W1 + b1) * (x W3 + b3)) W2 + b2."""
    layer = FeedForward(replace(CONFIG, activation=activation, gated=gated, bias=bias)).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    inner = layer.expand(x).detach().apply_(BY_HAND[activation])
    if gated:
        inner = inner * layer.gate(x)
    torch.testing.assert_close(layer(x), layer.contract(inner))
    assert sum(p.numel() for p in layer.parameters()) == 3 * 5 * (2 + gated) + bias * (5 * (1 + gated) + 3)


def test_tokens_are_independent() -> None:
    layer, x = FeedForward(CONFIG), torch.randn(1, 4, 3)
    torch.testing.assert_close(layer(x)[:, 2], layer(x[:, 2:3])[:, 0])
