"""Dropout masks inside a kernel: a stateless hash of the element's index and two seeds.

Philox, which torch uses, costs a GPU more time than the rest of a normalization: some eighty operations per element.
The two seeds, three multiplications and the shifts between them (the finalizer of MurmurHash3) are ten.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def draw_seeds(device: torch.device) -> Tensor:
    """Draw two seeds from torch's generator of the device."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=device)


@triton.jit
def keep_mask(seeds, index, rate):
    """True with probability 1 - rate."""
    first = tl.load(seeds).to(tl.uint32, bitcast=True)
    second = tl.load(seeds + 1).to(tl.uint32, bitcast=True)
    bits = (index.to(tl.uint32) ^ first) * 0x9E3779B1
    bits = (bits ^ (bits >> 16) ^ second) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    bits = bits ^ (bits >> 16)
    return (bits >> 8).to(tl.float32) * (1.0 / 16777216.0) >= rate
