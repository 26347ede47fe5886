"""Sample tokens, independent of the rest of the batch: the same seed, text, beam and position give the same token.

Gumbel-max: the argmax of logits plus Gumbel noise. The noise is a hash of key, position and token, so that no generator
state depends on other rows.
"""

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF
from attent.decoding.options import SamplingOptions

MIN_TEMPERATURE = 1e-30  # practically greedy, with all quotients finite in float32
# Odd constants of the SplitMix64 generator, as signed integers.
GOLDEN_GAMMA, MIX_MULTIPLIER_1, MIX_MULTIPLIER_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
RANDOM_BITS = 23  # with 24 the largest uniform number would round to 1 in float32, and its noise be infinite


def sample_tokens(logits: Tensor, sampling: SamplingOptions, rng_keys: Tensor, positions: Tensor) -> Tensor:
    """(B, K, V) -> (B, K): `rng_keys` (B, K) identify the beams, `positions` (B,) their lengths."""
    logits = filter_logits(logits / max(sampling.temperature, MIN_TEMPERATURE), sampling)
    seeded = rng_keys + mix_bits(torch.full_like(rng_keys, sampling.seed))
    key = mix_bits(mix_bits(seeded) + positions[:, None])
    token = torch.arange(logits.shape[-1], device=logits.device)
    bits = mix_bits(key[:, :, None] + token * GOLDEN_GAMMA) >> (64 - RANDOM_BITS) & (2**RANDOM_BITS - 1)
    uniform = (bits + 0.5) / 2**RANDOM_BITS
    return (logits - (-uniform.log()).log()).argmax(-1)


def mix_bits(x: Tensor) -> Tensor:
    """Hash 64-bit integers so that every bit depends on every bit of x (products wrap around)."""
    x = x + GOLDEN_GAMMA
    x = (x ^ logical_shift_right(x, 30)) * MIX_MULTIPLIER_1
    x = (x ^ logical_shift_right(x, 27)) * MIX_MULTIPLIER_2
    return x ^ logical_shift_right(x, 31)


def logical_shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)


def filter_logits(logits: Tensor, sampling: SamplingOptions) -> Tensor:
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, NEG_INF)
    if sampling.top_p < 1:
        ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        excluded = probabilities.cumsum(-1) - probabilities >= sampling.top_p  # the tokens before suffice
        logits = logits.masked_fill(excluded.scatter(-1, token_ids, excluded), NEG_INF)
    return logits
