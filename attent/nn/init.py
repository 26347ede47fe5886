"""Weights before training, where a part draws its own."""

from __future__ import annotations

from torch import Tensor, nn


def init_normal(weight: Tensor, std: float) -> None:
    """Drawn from a normal distribution. A model that is only being described, on the meta device, has nothing to fill;
    torch would import its compiler for that, and every command that loads a model would start two seconds later."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)
