"""What the machine can do, asked of the machine itself: which device, which precision, and its name."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from attent.storage.cache import get_cache_folder
from attent.storage.errors import StorageError
from attent.training.config import Precision, TrainError
from attent.training.matmul_speed import measure_bf16_speedup

INDUCTOR_CACHE_ENV = "TORCHINDUCTOR_CACHE_DIR"  # torch's own name for the folder
MIN_BF16_SPEEDUP = 1.3  # times as fast as float32, below which bfloat16 would give away digits for nothing


def pick_device(name: str | None) -> torch.device:
    """The one that was asked for, if it is there; else the best there is."""
    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels and events are of the current one
    except (RuntimeError, AssertionError) as error:
        found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "only cpu"
        reason = str(error).splitlines()[0]
        raise TrainError(f"`train.device` {name}: cannot be used here ({reason}); this machine has {found}") from error
    return device


def pick_precision(device: torch.device) -> tuple[Precision, str]:
    """What the device is fast with, and why."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32", "this GPU has no bfloat16"
    gain = measure_bf16_speedup(device.type)
    if gain is None:
        return "float32", "bfloat16 does not work here"
    name: Precision = "bfloat16" if gain >= MIN_BF16_SPEEDUP else "float32"
    return name, f"a bfloat16 product is {gain:.1f}x as fast as a float32 one here"


def describe_device(device: torch.device, precision: Precision, compiled: bool) -> str:
    """`NVIDIA H200, bfloat16, compiled`"""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"CPU, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else "Apple GPU"
    return ", ".join([name, precision, *(["compiled"] if compiled else [])])


def persist_compile_cache() -> Path | None:
    """What is compiled goes where the next start finds it: torch's own choice, a temporary folder, is lost when the
    machine restarts. To be called before anything is compiled; None: it cannot be kept, and torch does as it likes."""
    if os.environ.get(INDUCTOR_CACHE_ENV, _default_inductor_cache()) != _default_inductor_cache():  # a person's
        return Path(os.environ[INDUCTOR_CACHE_ENV])
    try:
        folder = get_cache_folder() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, StorageError):
        return None
    if not os.access(folder, os.W_OK):
        return None
    os.environ[INDUCTOR_CACHE_ENV] = str(folder)
    return folder


def _default_inductor_cache() -> str:
    """As soon as torch is asked to compile something it writes this into the environment, as if someone had said so."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(default_cache_dir())
