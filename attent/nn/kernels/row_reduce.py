"""Sums over many rows, for the gradients of biases and norms. Each program of a kernel sums its own rows; the partial
sums are added here, always in the same order."""

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
