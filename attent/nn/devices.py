"""Choose the device that a model runs on: the one that was requested, or the fastest that this machine has."""

import torch
from torch import nn


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
        devices = "only cpu" if available == "cpu" else available
        raise ValueError(f"device {name}: cannot be used here ({reason}); this machine has {devices}") from error
    return device


def get_device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
