"""Timing for the benchmarks: interleaved rounds, medians, and a description of the machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


def interleave(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time rounds a, b, a, b ..., so that background load affects all alike."""
    for run in work.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            seconds[name].append(time_run(run))
    return seconds


def time_run(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return our speedup: the median of the ratios of each round."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True, kw_only=True)
class PeakRates:
    """Measured peak rates of a machine, per second."""

    flops: float  # of a large matrix product
    bytes: float  # read and written, by a copy


def measure_peak_rates(device: torch.device, dtype: torch.dtype | None = None, tries: int = 20) -> PeakRates:
    """Return the median rates of large products of random matrices (bfloat16 on a GPU) and of copies."""
    gpu = device.type == "cuda"
    width, count = (8192, 2**29) if gpu else (512, 2**22)
    dtype = dtype or (torch.bfloat16 if gpu else torch.float32)
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    product = median_seconds(lambda: left @ right, device, tries)
    source, destination = torch.randn(count, device=device), torch.empty(count, device=device)
    copy = median_seconds(lambda: destination.copy_(source), device, tries)
    return PeakRates(flops=2 * width**3 / product, bytes=2 * count * 4 / copy)


def median_seconds(run: Callable[[], object], device: torch.device, tries: int) -> float:
    for _ in range(3):
        run()
    return statistics.median(time_by_events(run) if device.type == "cuda" else time_run(run) for _ in range(tries))


def time_by_events(run: Callable[[], object]) -> float:
    """Return seconds on the GPU, by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def describe_machine() -> str:
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{get_cpu_name()}, {torch.get_num_threads()} thread(s)"
    )
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"


def get_cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
