"""Front-ends: modules that turn a source (token ids, later audio frames or images) into an encoder's input.

An encoder-decoder model takes any front-end on its source side; `TokenEmbedding` is the default.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.argument_checks import can_read_values
from attent.nn.init import init_normal


class FrontEnd(nn.Module):
    """The source side of an encoder-decoder model."""

    def embed_source(self, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return states (B, T, E) and their lengths (None: no padding). T may differ from the source's length."""
        raise NotImplementedError

    def check_source(self, source: Tensor) -> None:
        """Raise a ValueError for a source that this front-end cannot embed."""


class TokenEmbedding(FrontEnd):
    """Token ids (B, T) -> vectors (B, T, E), times sqrt(E) as in the paper (section 3.4) if `scaled`.

    Initialized from N(0, 1 / E). After the factor sqrt(E) each entry has variance 1, as the sinusoids have about 1/2;
    and the tied output layer, unscaled, gives logits of variance 1, so the first loss is near ln V. If that layer
    scales its input (T5), N(0, 1) gives the same: `unit_variance`.
    """

    def __init__(self, vocab: int, width: int, *, scaled: bool, unit_variance: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))
        init_normal(self.weight, std=1.0 if unit_variance else width**-0.5)
        self.scale = width**0.5 if scaled else 1.0

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.weight.shape[0])
        return F.embedding(ids, self.weight) * self.scale

    def embed_source(self, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self(source), lengths

    def check_source(self, source: Tensor) -> None:
        check_id_shape(source, "source")


def check_ids(ids: Tensor, vocab: int) -> None:
    check_id_shape(ids, "token ids")
    if ids.numel() and can_read_values(ids) and not bool(((ids >= 0) & (ids < vocab)).all()):
        raise ValueError(
            f"token ids must be from 0 to {vocab - 1}, the vocabulary, but range from {int(ids.min())} to "
            f"{int(ids.max())}; were they made by another model's tokenizer?"
        )


def check_id_shape(ids: Tensor, name: str) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        is_now = f"{ids.dtype} of {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise ValueError(f"{name} must be a tensor of int64 or int32 of (B, T), but is {is_now}")
