"""How fast the machine is with a number format, by trying. Imports torch alone: `attent doctor` asks too, whatever
else is missing.
"""

from __future__ import annotations

import time

import torch


def measure_bf16_speedup(device_type: str) -> float | None:
    """How many times faster a bfloat16 matrix product is than a float32 one, on a device of this kind.

    Measured, because the processor's flags only say that the instructions exist, not that torch uses them.
    """
    width = 512 if device_type == "cpu" else 4096  # a few milliseconds on either
    try:
        full = _time_matmul(torch.rand(width, width, device=device_type))
        half = _time_matmul(torch.rand(width, width, device=device_type).bfloat16())
    except RuntimeError:  # a device without bfloat16, or without memory to spare
        return None
    return full / half


def _time_matmul(matrix: torch.Tensor, repeats: int = 7) -> float:
    """The best of several: the first ones warm up, and on a shared machine the others may be disturbed."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # reading a number back waits for the device
        best = min(best, time.perf_counter() - start)
    return best
