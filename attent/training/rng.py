"""Seeds of the random number generators of a process.

Dropout is a function of (seed, step, batch, micro-batch) alone: validation, a retry or an interruption changes nothing,
and neither does the number of ranks. So checkpoints need no states of generators.
"""

import hashlib
import random

import numpy as np
import torch


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
