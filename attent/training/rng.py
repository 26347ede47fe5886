"""Seeds and the state of all random number generators of a process.

Dropout is a function of (seed, step, batch, micro-batch) alone: validation, a retry or an interruption changes nothing,
and neither does the number of ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def derive_seed(*keys: int) -> int:
    """Hash several integers into one seed of 48 bits."""
    return int.from_bytes(hashlib.blake2b(repr(keys).encode(), digest_size=6).digest(), "big")


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_torch(*keys: int) -> None:
    """Seed torch's generators on every device."""
    torch.manual_seed(derive_seed(*keys))


def get_rng_state() -> dict[str, Tensor]:
    """Return the state of every generator as tensors."""
    _, python_state, _ = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    numpy_numbers = np.append(numpy_state["state"]["key"], numpy_state["state"]["pos"]).astype(np.int64)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(python_state, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy_numbers),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_rng_state(saved: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(saved["torch"])
    version = random.getstate()[0]
    random.setstate((version, tuple(saved["python"].tolist()), None))
    numbers = saved["numpy"].numpy()
    state: dict[str, Any] = {"key": numbers[:-1].astype(np.uint32), "pos": int(numbers[-1])}
    np.random.set_state({"bit_generator": "MT19937", "state": state, "has_gauss": 0, "gauss": 0.0})
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
