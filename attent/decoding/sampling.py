"""Tokens drawn by chance, the same for the same seed, text, beam and place, whatever else is in the batch.

A token is drawn by adding to each logit a number of Gumbel's distribution and taking the greatest sum. The numbers come
from a hash of who draws what where, so that there is no generator whose state would depend on the neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attent.decoding.options import SamplingOptions

NEG_INF = float("-inf")
MIN_TEMPERATURE = (
    1e-30  # as good as none: so cold, the likeliest is drawn for certain, and float32 still has all quotients
)
# Odd constants that spread bits (those of the SplitMix64 generator, as signed numbers).
GOLDEN_GAMMA, MIX_MULTIPLIER_1, MIX_MULTIPLIER_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
RANDOM_BITS = (
    23  # of chance: with one more, half of them added, the greatest would be 1 in float32, and its sum infinite
)


def sample_tokens(logits: Tensor, sampling: SamplingOptions, rng_keys: Tensor, positions: Tensor) -> Tensor:
    """(B, K, V) -> (B, K): `rows` (B, K) are numbers that tell the beams apart, `places` (B,) how far they are."""
    logits = filter_logits(logits / max(sampling.temperature, MIN_TEMPERATURE), sampling)
    key = mix_bits(mix_bits(rng_keys + mix_bits(torch.full_like(rng_keys, sampling.seed))) + positions[:, None])
    token = torch.arange(logits.shape[-1], device=logits.device)
    bits = mix_bits(key[:, :, None] + token * GOLDEN_GAMMA) >> (64 - RANDOM_BITS) & (2**RANDOM_BITS - 1)
    uniform = (bits + 0.5) / 2**RANDOM_BITS
    return (logits - (-uniform.log()).log()).argmax(-1)


def mix_bits(x: Tensor) -> Tensor:
    """A number in which every bit depends on every bit of x (products of whole numbers wrap around)."""
    x = x + GOLDEN_GAMMA
    x = (x ^ shift_right(x, 30)) * MIX_MULTIPLIER_1
    x = (x ^ shift_right(x, 27)) * MIX_MULTIPLIER_2
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def filter_logits(logits: Tensor, sampling: SamplingOptions) -> Tensor:
    """Without the tokens that `top_k` and `top_p` leave out."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, NEG_INF)
    if sampling.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True, stable=True)
        chances = ordered.softmax(-1)
        enough = chances.cumsum(-1) - chances >= sampling.top_p  # those before have it already
        logits = logits.masked_fill(enough.scatter(-1, places, enough), NEG_INF)
    return logits
