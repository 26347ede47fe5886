"""Kernels of our own for NVIDIA GPUs, written in Triton, for what no library does well.

    tiles     attention inside rows of many short packed sentences
    add_norm  bias, dropout, residual and layer normalisation in one pass
    relu      the paper's activation together with its product
    loss      softmax, label-smoothed cross-entropy and its gradient in one pass
    steps     what one step of decoding needs

Each is one more way to numbers that other code gives too, and is only taken where it can be: Triton comes with CUDA
builds of torch, and nothing here is imported without it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_NORM_WIDTH = 8192  # rows that a norm can have: they stay in registers
MIN_CAPABILITY = (8, 0)  # GPUs: from here on they have bfloat16
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETER_MODE = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # kernels run step by step on a CPU: slow, and good for tests


def can_use_kernels(x: Tensor) -> bool:
    """May a kernel be given this tensor?"""
    if not TRITON_INSTALLED:
        return False
    return can_run_triton(x.device.index) if x.device.type == "cuda" else INTERPRETER_MODE and x.device.type == "cpu"


def can_run_triton(index: int | None) -> bool:
    """Can this GPU run them? Asked once, outside of compiled code first, since it is tried."""
    return _can_run_triton(torch.cuda.current_device() if index is None else index)


# As torch.compiler.assume_constant_result marks it; that would import the compiler, which takes two seconds.
can_run_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _can_run_triton(index: int) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) < MIN_CAPABILITY:
        return False
    try:
        from attent.nn.kernels.probe import run_probe

        with torch.cuda.device(index):
            return run_probe(torch.device("cuda", index))
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver may say: all has another way
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(f"Triton's kernels cannot be used here, so that all is slower: {reason[0]}", stacklevel=2)
        return False


def get_compute_dtype(x: Tensor) -> torch.dtype:
    """What products are computed in: that of autocast, where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def use_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, whichever the tensors are on."""
    return torch.cuda.device_of(x)


def is_unmodified(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Is it of one of these kinds, with its forward, and does nobody wait for it to be called?"""
    of_a_kind = any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in kinds)
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return of_a_kind and "forward" not in vars(layer) and not any(hooks)
