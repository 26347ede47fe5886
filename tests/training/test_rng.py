"""Seeds of the random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attent.training.state import derive_seed, seed_everything, seed_torch


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def restored_generators() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_a_seed_sets_every_generator() -> None:
    seed_everything(7)
    first, second = draw(), draw()
    assert all(a != b for a, b in zip(first, second, strict=True))
    seed_everything(7)
    assert (draw(), draw()) == (first, second)
    seed_everything(8)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


def test_numpy_gets_the_lowest_32_bits_of_a_large_seed() -> None:
    seed_everything(2**40 + 5)
    numbers = np.random.rand(3).tolist()
    np.random.seed(5)
    assert numbers == np.random.rand(3).tolist()


def test_derived_seeds_have_48_bits_and_depend_on_each_key() -> None:
    seeds = {derive_seed(*keys) for keys in ((1,), (2,), (1, 2), (2, 1), (12,), (1, 2, 3))}
    assert len(seeds) == 6
    assert all(2**32 < seed < 2**48 for seed in seeds)
    assert derive_seed(1, 2) == 0x05C87722130B  # the order of old runs depends on it
    seed_torch(1, 2)
    first = torch.rand(())
    torch.manual_seed(derive_seed(1, 2))
    assert torch.equal(first, torch.rand(()))
