"""Choose the device that a model runs on: the one that was requested, or the fastest that this machine has."""

from __future__ import annotations

import time

import torch
from torch import nn


class DeviceError(ValueError):
    """The requested device cannot be used; the message says why and what there is."""


def choose_device(name: str | None = None) -> torch.device:
    """Return the named device, after one allocation on it; None or "auto": CUDA, else Apple's GPU, else the CPU."""
    available = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name in (None, "auto"):
        return torch.device(available)
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        available_devices = "only cpu" if available == "cpu" else available
        raise DeviceError(
            f"device {name}: cannot be used here ({reason}); this machine has {available_devices}"
        ) from error
    return device


def get_device(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next(module.parameters()).device


def measure_bf16_speedup(device_type: str) -> float | None:
    """Time a bfloat16 matrix product against float32 (above 1: faster). None: the device does not support it.

    Measured, because the processor's flags say only that the instructions exist, not that torch uses them.
    """
    width = 512 if device_type == "cpu" else 4096  # a few milliseconds on either
    try:
        full = _time_matmul(torch.rand(width, width, device=device_type))
        half = _time_matmul(torch.rand(width, width, device=device_type).bfloat16())
    except RuntimeError:  # bfloat16 is not implemented, or there is no memory left
        return None
    return full / half


def _time_matmul(matrix: torch.Tensor, repeats: int = 7) -> float:
    """Seconds of the fastest of several products: the first warm up, others may be disturbed."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # synchronizes
        best = min(best, time.perf_counter() - start)
    return best
