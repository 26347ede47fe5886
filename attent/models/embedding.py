"""Tokens in, logits out (section 3.4): the two ends of a model of text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.argument_checks import can_read_values
from attent.nn.init import init_normal


class Embedding(nn.Module):
    """Token ids (B, T) -> vectors (B, T, E), times sqrt(E) as in the paper unless told otherwise.

    Drawn from N(0, 1 / E): after the factor sqrt(E) each entry has variance 1, as the sinusoids next to it have about
    1/2; and as the tied output layer, unscaled, it gives logits of variance 1, so that the first loss is near ln V. If
    that layer scales its input (T5), the same is reached from N(0, 1): `wide`.
    """

    def __init__(self, vocab: int, width: int, *, scaled: bool, unit_variance: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))
        init_normal(self.weight, std=1.0 if unit_variance else width**-0.5)
        self.scale = width**0.5 if scaled else 1.0

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.weight.shape[0])
        return F.embedding(ids, self.weight) * self.scale


class OutputProjection(nn.Module):
    """States (B, T, E) -> logits (B, T, V): the linear layer before the softmax, often the embedding transposed."""

    def __init__(
        self, vocab: int, width: int, *, tied_to: Embedding | None, bias: bool = False, scaled: bool = False
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
        """What the matrix is multiplied with: T5 divides by sqrt(E) first, where it is the embedding."""
        return states if self.scale is None else states * self.scale


def check_ids(ids: Tensor, vocab: int) -> None:
    """Refuse what is not a batch of token ids. Values are looked at on CPU only, where that costs nothing."""
    check_id_shape(ids, "token ids")
    if ids.numel() and can_read_values(ids) and not bool(((ids >= 0) & (ids < vocab)).all()):
        raise ValueError(
            f"token ids must be from 0 to {vocab - 1}, the vocabulary, but reach from {int(ids.min())} to "
            f"{int(ids.max())}; was the text made into ids by another model's tokenizer?"
        )


def check_id_shape(ids: Tensor, name: str) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        is_now = f"{ids.dtype} of {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise ValueError(f"{name} must be a tensor of int64 or int32 of (B, T), but is {is_now}")
