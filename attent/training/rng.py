"""Every source of chance in a process: fixed for each piece of each update, and kept in checkpoints.

What dropout draws is a function of (seed, update, batch, piece) alone: a validation, a retry or a rest in between
changes nothing, and neither does the number of processes that share the pieces.
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
    return int.from_bytes(hashlib.blake2b(repr(keys).encode(), digest_size=6).digest(), "big")


def seed_everything(seed: int) -> None:
    """Every generator of this process, so that whatever draws from one of them draws the same in every run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_torch(*keys: int) -> None:
    """torch's generators, on every device."""
    torch.manual_seed(derive_seed(*keys))


def get_rng_state() -> dict[str, Tensor]:
    """The state of every generator of this process."""
    _, numbers, _ = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(numbers, dtype=torch.int64),
        "numpy": torch.from_numpy(np.append(numpy_state["state"]["key"], numpy_state["state"]["pos"]).astype(np.int64)),
    }
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_rng_state(saved: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(saved["torch"])
    version = random.getstate()[0]
    random.setstate((version, tuple(saved["python"].tolist()), None))
    numbers = saved["numpy"].numpy()
    state: dict[str, Any] = {"key": numbers[:-1].astype(np.uint32), "pos": int(numbers[-1])}
    np.random.set_state({"bit_generator": "MT19937", "state": state, "has_gauss": 0, "gauss": 0.0})
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
