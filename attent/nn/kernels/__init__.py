"""Kernels for NVIDIA GPUs, written in Triton where no library has a good one.

    attention         the fast attention backends (SDPA, FlexAttention, FlashAttention varlen, ours) and their limits,
                      and workarounds for SDPA at inference
    packed_attention  attention inside rows of many short packed sentences: the backend `tiles`
    add_norm          bias, dropout, residual and layer normalization in one pass
    linear_relu       a linear layer with ReLU
    cross_entropy     softmax, label-smoothed cross-entropy and its gradient in one pass
    cuda_graphs       capture of CUDA graphs (plain PyTorch)
    row_reduce        sums over rows, for the gradients of biases and norms; dropout masks inside kernels; a kernel
                      that tells whether Triton works on this GPU

Each has a reference implementation elsewhere, and is used only where `can_use_kernels` allows it. Triton comes with
the CUDA builds of torch; nothing here that needs it is imported without it.
"""

import functools
import importlib.util
import os
import warnings
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_NORM_WIDTH = 8192  # the norm kernel keeps a row in registers
MIN_CAPABILITY = (8, 0)  # the first GPUs with bfloat16
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETER_MODE = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, slowly: for tests


def can_use_kernels(x: Tensor) -> bool:
    """True if the kernels run on the device of this tensor."""
    if not TRITON_INSTALLED:
        return False
    return can_run_triton(x.device.index) if x.device.type == "cuda" else INTERPRETER_MODE and x.device.type == "cpu"


def can_run_triton(index: int | None) -> bool:
    """True if a kernel compiles and runs on this GPU. Tried once; call it first outside of compiled code."""
    return _can_run_triton(torch.cuda.current_device() if index is None else index)


# Set as torch.compiler.assume_constant_result does, which would import the compiler and take two seconds.
can_run_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _can_run_triton(index: int) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) < MIN_CAPABILITY:
        return False
    try:
        from attent.nn.kernels.row_reduce import run_probe

        with torch.cuda.device(index):
            return run_probe(torch.device("cuda", index))
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything, and a slower path always exists
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(f"Triton kernels cannot be used; falling back to slower PyTorch code: {reason[0]}", stacklevel=2)
        return False


def get_compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's, where it is on."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def use_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device_of(x)


def is_unmodified(layer: nn.Module, *classes: type[nn.Module]) -> bool:
    """True for an instance of one of these classes with its original forward and without hooks, also global ones."""
    original = any(isinstance(layer, cls) and type(layer).forward is cls.forward for cls in classes)
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return original and "forward" not in vars(layer) and not any(hooks) and not _has_any_global_hook()
