"""Chance inside a kernel: whether the number with an index is kept by dropout, from two seeds, without any state.

Philox, which torch takes, costs a GPU more time than all else in a normalisation: some eighty operations a number. The
seeds, three multiplications and the shifts between them (as in the last steps of MurmurHash3) are ten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def draw_seeds(device: torch.device) -> Tensor:
    """Two new ones, drawn by torch's generator of the device."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=device)


@triton.jit
def keep_mask(seeds, index, rate):
    """True with probability 1 - rate."""
    first = tl.load(seeds).to(tl.uint32, bitcast=True)
    second = tl.load(seeds + 1).to(tl.uint32, bitcast=True)
    drawn = (index.to(tl.uint32) ^ first) * 0x9E3779B1
    drawn = (drawn ^ (drawn >> 16) ^ second) * 0x85EBCA6B
    drawn = (drawn ^ (drawn >> 13)) * 0xC2B2AE35
    drawn = drawn ^ (drawn >> 16)
    return (drawn >> 8).to(tl.float32) * (1.0 / 16777216.0) >= rate
