"""Timing for the benchmarks: interleaved rounds, medians, and a word about the machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleave(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of each: a, b, a, b ... so that a busy moment of the machine meets both."""
    for run in work.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            seconds[name].append(timed(run))
    return seconds


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def ratio(ours: list[float], theirs: list[float]) -> float:
    """How many times as fast as they we are: the median over rounds, each round its own comparison."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def machine() -> str:
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{cpu_name()}, {torch.get_num_threads()} thread(s)"
    )
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
