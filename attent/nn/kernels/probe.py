"""The smallest kernel, which shows whether Triton works on a device: it needs a driver and a C compiler."""

import torch
import triton
import triton.language as tl


def run_probe(device: torch.device) -> bool:
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _store_one[(1,)](out)
    return bool(out.item() == 1)


@triton.jit
def _store_one(Out):
    tl.store(Out, 1)
