"""Tokens drawn by chance, the same for the same seed, text, beam and place, whatever else is in the batch.

A token is drawn by adding to each logit a number of Gumbel's distribution and taking the greatest sum. The numbers come
from a hash of who draws what where, so that there is no generator whose state would depend on the neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attent.decode.options import Sampling

NEVER = float("-inf")
COLDEST = 1e-30  # as good as none: so cold, the likeliest is drawn for certain, and float32 still has all quotients
# Odd constants that spread bits (those of the SplitMix64 generator, as signed numbers).
GOLDEN, MIX, MIX_AGAIN = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
BITS = 23  # of chance: with one more, half of them added, the greatest would be 1 in float32, and its sum infinite


def drawn(logits: Tensor, sampling: Sampling, rows: Tensor, places: Tensor) -> Tensor:
    """(B, K, V) -> (B, K): `rows` (B, K) are numbers that tell the beams apart, `places` (B,) how far they are."""
    logits = among_likely(logits / max(sampling.temperature, COLDEST), sampling)
    key = mixed(mixed(rows + mixed(torch.full_like(rows, sampling.seed))) + places[:, None])
    token = torch.arange(logits.shape[-1], device=logits.device)
    bits = mixed(key[:, :, None] + token * GOLDEN) >> (64 - BITS) & (2**BITS - 1)
    uniform = (bits + 0.5) / 2**BITS
    return (logits - (-uniform.log()).log()).argmax(-1)


def mixed(x: Tensor) -> Tensor:
    """A number in which every bit depends on every bit of x (products of whole numbers wrap around)."""
    x = x + GOLDEN
    x = (x ^ shifted(x, 30)) * MIX
    x = (x ^ shifted(x, 27)) * MIX_AGAIN
    return x ^ shifted(x, 31)


def shifted(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> by) & (2 ** (64 - by) - 1)


def among_likely(logits: Tensor, sampling: Sampling) -> Tensor:
    """Without the tokens that `top_k` and `top_p` leave out."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, NEVER)
    if sampling.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True, stable=True)
        chances = ordered.softmax(-1)
        enough = chances.cumsum(-1) - chances >= sampling.top_p  # those before have it already
        logits = logits.masked_fill(enough.scatter(-1, places, enough), NEVER)
    return logits
