"""NumPy helpers for ragged arrays and seeded order, frugal because corpora have tens of millions of pairs."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")


def select_evenly(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` evenly spaced items: corpora are often sorted."""
    count = min(count, len(items))
    return [items[len(items) * i // count] for i in range(count)]


def concatenate_ranges(starts: Array, lengths: Array) -> Array:
    """Return starts[0], starts[0] + 1, ... (lengths[0] of them), then the same for the next start."""
    ends = lengths.cumsum()
    values = np.repeat(starts - (ends - lengths), lengths)
    values += np.arange(len(values), dtype=values.dtype)
    return values


def index_in_group(counts: Array) -> Array:
    """Return 0 ... counts[0] - 1, then 0 ... counts[1] - 1, and so on."""
    return concatenate_ranges(np.zeros(len(counts), np.int64), counts)


def search_sorted(sorted_values: Array, values: Array) -> tuple[Array, Array]:
    """Return for each value its index in an array of sorted values, and True where it is one of them."""
    if not len(sorted_values):
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    indices = np.minimum(np.searchsorted(sorted_values, values), len(sorted_values) - 1)
    return indices, sorted_values[indices] == values


def stable_argsort(values: Array) -> Array:
    """Return the stable order of integers from 0 to 2**32. Faster than `np.argsort`."""
    keys = values.astype(np.uint64)
    keys <<= np.uint64(32)
    return _argsort_keys(keys)


def random_bits(count: int, seed: tuple[int, ...]) -> Array:
    """Return 64 random bits each; NumPy guarantees this stream in every version, unlike that of `Generator`."""
    return np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)


def draw_permutation(n: int, seed: tuple[int, ...]) -> Array:
    """Return the integers below n in an order that the seed determines, the same in every version of NumPy."""
    keys = random_bits(n, seed)
    keys &= np.uint64(0xFFFFFFFF00000000)
    return _argsort_keys(keys)


def _argsort_keys(keys: Array) -> Array:
    """Return the order of keys whose lower 32 bits are free: indices go there, so that one sort moves both."""
    assert len(keys) < 2**32, "a store holds fewer than 2**32 pairs"
    keys |= np.arange(len(keys), dtype=np.uint32)
    keys.sort()
    return keys.astype(np.uint32)
