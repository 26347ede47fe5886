"""The device, precision and compile cache of a training run."""

import importlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from attent.formatting import format_count
from attent.nn import kernels
from attent.nn.devices import choose_device
from attent.storage.cache import get_cache_folder
from attent.storage.errors import StorageError
from attent.storage.machine import count_usable_cores
from attent.training.run_options import Precision

INDUCTOR_CACHE_ENV = "TORCHINDUCTOR_CACHE_DIR"
MIN_BF16_SPEEDUP = 1.3  # below this, bfloat16 would cost precision for no gain
MAX_TIME_RATIO = 0.9  # fewer threads are used if a step takes less than this share of its time with all


def activate_device(name: str | None) -> torch.device:
    device = choose_device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels and events use the current device
    return device


def pick_precision(device: torch.device) -> Precision:
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32"
    speedup = measure_bf16_speedup(device.type)
    return "bfloat16" if speedup is not None and speedup >= MIN_BF16_SPEEDUP else "float32"


def measure_bf16_speedup(device_type: str) -> float | None:
    """Time a bfloat16 matrix product against float32 (above 1: faster). None: the device does not support it."""
    # Measured, because the processor's flags say only that the instructions exist, not that torch uses them.
    width = 512 if device_type == "cpu" else 4096  # a few milliseconds on either
    try:
        full = _time_matmul(torch.rand(width, width, device=device_type))
        half = _time_matmul(torch.rand(width, width, device=device_type).bfloat16())
    except RuntimeError:  # bfloat16 is not implemented, or there is no memory left
        return None
    return full / half


def _time_matmul(matrix: torch.Tensor, repeats: int = 7) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # synchronizes
        best = min(best, time.perf_counter() - start)
    return best


def describe_load() -> str | None:
    """A sentence if other programs keep the CPU busy."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, count_usable_cores()
    if load <= cores:
        return None
    return (
        f"the machine is busy: load average {load:.1f} with {format_count(cores, 'core')}; training is slower until "
        "other programs end"
    )


def pick_threads(measure: Callable[[], float]) -> tuple[int, dict[int, float]]:
    """Return the fastest number of CPU threads, which stays set, and the measured seconds of each candidate.

    On a busy machine, threads wait for each other: two gave 155 to 390 tokens/s where one gave 1,300 to 5,400.
    """
    available = torch.get_num_threads()
    candidates = [available, *([available // 2] if available >= 4 else []), *([1] if available > 1 else [])]
    seconds = {}
    for count in candidates:
        torch.set_num_threads(count)
        seconds[count] = measure()
    fastest = min(seconds, key=seconds.__getitem__)
    if not seconds[fastest] < MAX_TIME_RATIO * seconds[available]:
        fastest = available
    torch.set_num_threads(fastest)
    return fastest, seconds


def get_device_name(device: torch.device) -> str:
    """`NVIDIA H200`, or `CPU, 2 threads`"""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {format_count(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else "Apple GPU"


def describe_device(device: torch.device, precision: Precision, compiled: bool) -> str:
    """`NVIDIA H200, bfloat16, compiled`"""
    return ", ".join([get_device_name(device), precision, *(["compiled"] if compiled else [])])


def persist_compile_cache() -> None:
    """Put torch's compile cache, unless the user set one, where it survives a reboot, if that is writable."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    default = os.path.abspath(default_cache_dir())
    if os.environ.get(INDUCTOR_CACHE_ENV, default) == default:
        with suppress(OSError, StorageError):
            folder = get_cache_folder() / "compiled"
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                os.environ[INDUCTOR_CACHE_ENV] = str(folder)


def preload_libraries(device: torch.device) -> threading.Thread:
    """Start a thread that initializes CUDA and Triton and imports torch's compiler; join it after preparing data."""

    def load() -> None:
        with suppress(Exception):  # raised again where it is needed
            kernels.can_use_kernels(torch.ones(1, 1, device=device).mm(torch.ones(1, 1, device=device)))
            importlib.import_module("torch._dynamo")

    thread = threading.Thread(target=load, name="preload-libraries", daemon=True)
    thread.start()
    return thread
