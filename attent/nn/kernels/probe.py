"""The smallest kernel, to see whether any can be built and run on a device: that takes a driver, and a C compiler."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def run_probe(device: torch.device) -> bool:
    place = torch.zeros(1, dtype=torch.int32, device=device)
    _store_one[(1,)](place)
    return bool(place.item() == 1)


@triton.jit
def _store_one(Place):
    tl.store(Place, 1)
