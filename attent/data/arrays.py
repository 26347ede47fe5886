"""Small things that the arrays of `data` need, frugal because corpora have tens of millions of pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def concatenate_ranges(starts: Array, lengths: Array) -> Array:
    """starts[0], starts[0] + 1, ... (lengths[0] of them), then the same for the next."""
    ends = lengths.cumsum()
    numbers = np.repeat(starts - (ends - lengths), lengths)
    numbers += np.arange(len(numbers), dtype=numbers.dtype)
    return numbers


def stable_argsort(values: Array) -> Array:
    """Where the numbers, from 0 to 2**32, stand in their order; equal ones stay as they are. Faster than `argsort`."""
    keys = values.astype(np.uint64)
    keys <<= np.uint64(32)
    return _argsort_keys(keys)


def draw_permutation(n: int, seed: tuple[int, ...]) -> Array:
    """The numbers below n in an order that the seed decides, the same for every version of numpy.

    numpy promises the raw stream of PCG64, but not what `Generator.permutation` makes of it.
    """
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)
    keys &= np.uint64(0xFFFFFFFF00000000)
    return _argsort_keys(keys)


def _argsort_keys(keys: Array) -> Array:
    """The order of keys whose lower half is free: their own places go there, so that sorting moves both together."""
    assert len(keys) < 2**32, "a store holds fewer than 2**32 pairs"
    keys |= np.arange(len(keys), dtype=np.uint32)
    keys.sort()
    return keys.astype(np.uint32)
