"""Parts of several kernels: sums over many rows, dropout masks, and a kernel that shows whether Triton works.

For the gradients of biases and norms, each program sums its own rows; the partial sums are added here, always in the
same order. Dropout is a stateless hash of the element's index and two seeds. Philox, which torch uses, costs a GPU more
time than the rest of a normalization: some eighty operations per element. The two seeds, three multiplications and the
shifts between them (the finalizer of MurmurHash3) are ten.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attent.nn.kernels import use_device_of

PROGRAMS_PER_SM = 8  # enough that one computes while others wait for memory
ROWS, COLUMNS = 256, 32  # of a tile


def choose_num_programs(x: Tensor) -> int:
    """Return how many programs a kernel with partial sums should have."""
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.device.type == "cuda" else 1
    return PROGRAMS_PER_SM * sms


def sum_rows(parts: Tensor) -> Tensor:
    """(P, ...) -> (...), in float32."""
    width = parts[0].numel()
    out = parts.new_empty(parts.shape[1:])
    with use_device_of(parts):
        _sum_rows_kernel[(triton.cdiv(width, COLUMNS),)](
            parts, out, len(parts), width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )
    return out


@triton.jit
def _sum_rows_kernel(Parts, Out, N, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, N, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < N)[:, None] & (columns < width)[None, :]
        total += tl.load(Parts + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
    tl.store(Out + columns, tl.sum(total, 0), mask=columns < width)


def run_probe(device: torch.device) -> bool:
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _store_one[(1,)](out)
    return bool(out.item() == 1)


@triton.jit
def _store_one(Out):
    tl.store(Out, 1)


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
