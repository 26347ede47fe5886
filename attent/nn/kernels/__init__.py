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

import importlib.util
import os

import torch
from torch import Tensor, nn

FORMATS = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 8192  # rows that a norm can have: they stay in registers
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run step by step on a CPU: slow, and good for tests


def usable(x: Tensor) -> bool:
    """May a kernel be given this tensor?"""
    return INSTALLED and (x.device.type == "cuda" or (INTERPRETED and x.device.type == "cpu"))


def working_format(x: Tensor) -> torch.dtype:
    """What products are computed in: that of autocast, where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def watched(module: nn.Module) -> bool:
    """Does somebody wait for the module itself to be called?"""
    return bool(module._forward_hooks or module._forward_pre_hooks)
