"""Decoding in steps with a cache equals one pass; ragged prompts equal separate ones; beams can be reordered, within
and across rows; a replaced row equals a new one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attent.nn import Cache, Memory, Stack, StackConfig
from tests.laws.helpers import (
    CROSS_DECODERS,
    DECODERS,
    assert_close,
    every_decoder,
    make_memory,
    make_stack,
    make_tensor,
    new_cache,
    pad_with_noise,
    parametrize_in_turn,
    random_states,
    select_memory,
)

T = 9


def run_in_chunks(stack: Stack, x: Tensor, cache: Cache, *chunks: int) -> Tensor:
    """Output of the stack for x in chunks of these sizes."""
    assert sum(chunks) == x.shape[1]
    return torch.cat([stack(piece, cache=cache) for piece in x.split(chunks, 1)], 1)


@parametrize_in_turn("config, chunks", DECODERS | CROSS_DECODERS, {"singly": (1,) * T, "uneven": (4, 1, 3, 1)})
def test_decoding_in_steps_equals_one_pass(config: StackConfig, chunks: tuple[int, ...], device: torch.device) -> None:
    stack, x, memory = make_stack(config, device), random_states(3, T, device=device), make_memory(config, 3, device)
    cache = new_cache(stack, T + 2, 3, memory)
    assert_close(run_in_chunks(stack, x, cache, *chunks), stack(x, memory=memory))
    assert cache.used_columns == T


@every_decoder
def test_ragged_prompts_in_one_cache_equal_separate_ones(config: StackConfig, device: torch.device) -> None:
    stack, memory = make_stack(config, device), make_memory(config, 3, device)
    prompts = [random_states(n, device=device) for n in (5, 1, 3)]
    more = random_states(3, 4, device=device)
    cache = new_cache(stack, 12, 3, memory)
    together, lengths = pad_with_noise(prompts, extra=1)
    first = stack(together, lengths, cache=cache)
    rest = run_in_chunks(stack, more, cache, 1, 2, 1)
    for row, prompt in enumerate(prompts):
        alone = stack(torch.cat([prompt, more[row]])[None], memory=select_memory(memory, slice(row, row + 1)))[0]
        assert_close(first[row, : len(prompt)], alone[: len(prompt)])
        assert_close(rest[row], alone[len(prompt) :])


@every_decoder
def test_rows_may_grow_by_different_amounts_repeatedly(config: StackConfig, device: torch.device) -> None:
    stack, memory = make_stack(config, device), make_memory(config, 2, device)
    pieces = [[random_states(n, device=device) for n in counts] for counts in ((2, 1), (1, 3), (0, 2), (2, 2))]
    cache = new_cache(stack, 12, 2, memory)
    heard: list[list[Tensor]] = [[], []]
    for piece in pieces:
        x, lengths = pad_with_noise(piece)
        out = stack(x, lengths, cache=cache)
        for row in range(2):
            heard[row].append(out[row, : lengths[row]])
    for row in range(2):
        whole = torch.cat([piece[row] for piece in pieces])
        alone = stack(whole[None], memory=select_memory(memory, slice(row, row + 1)))[0]
        assert_close(torch.cat(heard[row]), alone)


ORDERS = {"fewer": (2, 1), "more": (0, 2, 2, 1, 0)}


@parametrize_in_turn("config, order", DECODERS | CROSS_DECODERS, ORDERS)
def test_beams_follow_their_rows(config: StackConfig, order: tuple[int, ...], device: torch.device) -> None:
    stack, memory = make_stack(config, device), make_memory(config, 3, device)
    before = random_states(3, 4, device=device)
    after = random_states(len(order), 3, device=device)
    lengths = make_tensor(4, 2, 3, device=device)
    cache = new_cache(stack, 8, 3, memory)
    stack(before, lengths, cache=cache)
    cache.reorder(make_tensor(*order, device=device))
    actual = run_in_chunks(stack, after, cache, 1, 2)
    for i, row in enumerate(order):
        past = before[row, : lengths[row]]
        alone = stack(torch.cat([past, after[i]])[None], memory=select_memory(memory, slice(row, row + 1)))[0]
        assert_close(actual[i], alone[len(past) :])


@every_decoder
def test_beams_can_be_reordered_at_every_step(config: StackConfig, device: torch.device) -> None:
    stack, memory = make_stack(config, device), make_memory(config, 3, device)
    cache = new_cache(stack, 4, 3, memory)
    history = random_states(3, 0, device=device)
    for order in ((0, 0, 1), (2, 1, 0), (1, 2, 2), (0, 1, 2)):
        rows = make_tensor(*order, device=device)
        cache.reorder(rows)
        memory = select_memory(memory, rows)
        history = torch.cat([history[rows], random_states(3, 1, device=device)], 1)
        out = stack(history[:, -1:], cache=cache)
        assert_close(out, stack(history, memory=memory)[:, -1:])


def test_a_memory_without_lengths_is_all_real(device: torch.device) -> None:
    stack = make_stack(next(iter(CROSS_DECODERS.values())), device)
    x, memory = random_states(2, 3, device=device), Memory(random_states(2, 4, device=device))
    full = Memory(memory.states, make_tensor(4, 4, device=device))
    assert_close(stack(x, memory=memory), stack(x, memory=full))
    cache = stack.new_cache(3, memory=memory)
    cache.reorder(make_tensor(1, 0, device=device))
    assert_close(stack(x.flip(0), cache=cache), stack(x, memory=full).flip(0))


# --- beams that share a row -------------------------------------------------------------------------------------------

PARENTS = (((0, 0, 1), (2, 1, 0)), ((2, 2, 2), (1, 0, 2)), ((0, 1, 2), (0, 0, 0)), ((1, 2, 0), (2, 2, 1)))


def beam_cache(stack: Stack, capacity: int, rows: int, memory: Memory | None, beams: int) -> Cache:
    return stack.new_cache(capacity, rows=None if memory else rows, memory=memory, beams=beams)


class UncachedBeams:
    """The oracle of a beam cache: recomputes each beam from its full history at every step."""

    def __init__(self, stack: Stack, rows: int, beams: int, memory: Memory | None, device: torch.device) -> None:
        self.stack, self.memory = stack, memory
        self.read = [[random_states(0, device=device) for _ in range(beams)] for _ in range(rows)]

    def step(self, x: Tensor) -> Tensor:
        """(B, K, E) -> (B, K, E)"""
        beams = x.shape[1]
        self.read = [[torch.cat([row[k], x[b, k, None]]) for k in range(beams)] for b, row in enumerate(self.read)]
        outs = []
        for b, row in enumerate(self.read):
            memory = select_memory(self.memory, torch.full((beams,), b, device=x.device))
            outs.append(self.stack(torch.stack(row), memory=memory)[:, -1])
        return torch.stack(outs)

    def follow(self, parents: Tensor) -> None:
        self.read = [[row[k] for k in beams] for row, beams in zip(self.read, parents.tolist(), strict=True)]

    def reorder(self, rows: Tensor) -> None:
        self.read = [list(self.read[row]) for row in rows.tolist()]
        self.memory = select_memory(self.memory, rows)

    def restart(self, row: int, new: Memory | None) -> None:
        self.read[row] = [read[:0] for read in self.read[row]]
        if self.memory is not None and new is not None:
            assert self.memory.lengths is not None
            width = new.states.shape[1]
            self.memory.states[row, :width] = new.states[0]
            self.memory.lengths[row] = width


def compare_steps(cache: Cache, oracle: UncachedBeams, stack: Stack, *, steps: int) -> None:
    """Run steps with random parents; each must equal the oracle."""
    rows, beams = cache.rows, cache.beams
    for step in range(steps):
        x = random_states(rows, beams, device=cache.layers[0].self_attn.keys.device)
        assert_close(stack(x, cache=cache), oracle.step(x))
        parents = torch.randint(beams, (rows, beams), generator=torch.Generator().manual_seed(step)).to(x.device)
        cache.reorder_beams(parents)
        oracle.follow(parents)


@every_decoder
def test_beams_of_one_row_equal_separate_rows(config: StackConfig, device: torch.device) -> None:
    stack, memory = make_stack(config, device), make_memory(config, 2, device)
    cache, oracle = beam_cache(stack, 5, 2, memory, 3), UncachedBeams(stack, 2, 3, memory, device)
    for parents in PARENTS:
        x = random_states(2, 3, device=device)
        assert_close(stack(x, cache=cache), oracle.step(x))
        cache.reorder_beams(torch.tensor(parents, device=device))
        oracle.follow(torch.tensor(parents))
    rows = make_tensor(1, 1, 0, device=device)
    cache.reorder(rows)
    oracle.reorder(rows)
    compare_steps(cache, oracle, stack, steps=1)
    assert cache.used_columns == 5 * 3


@parametrize_in_turn("config, beams", DECODERS | CROSS_DECODERS, {"1": 1, "3": 3})
def test_a_replaced_row_equals_a_new_one(config: StackConfig, beams: int, device: torch.device) -> None:
    """With the memory of another source, while the other rows continue; also after rows were reordered."""
    stack, memory = make_stack(config, device), make_memory(config, 3, device)
    oracle = UncachedBeams(
        stack, 3, beams, memory and Memory(memory.states.clone(), make_tensor(6, 4, 2, device=device)), device
    )
    cache = beam_cache(stack, 6, 3, memory, beams)
    compare_steps(cache, oracle, stack, steps=3)
    new = None if memory is None else Memory(random_states(1, 5, device=device), make_tensor(5, device=device))
    cache.replace_sources(make_tensor(1, device=device), beam_cache(stack, 1, 1, new, beams))
    cache.set_row_lengths([3, 0, 3])
    oracle.restart(1, new)
    compare_steps(cache, oracle, stack, steps=3)
    for row in (0, 2):  # they are full, and restart without a new memory
        oracle.restart(row, None)
    cache.set_row_lengths([0, 3, 0])
    compare_steps(cache, oracle, stack, steps=2)
    order = make_tensor(1, 0, device=device)
    cache.reorder(order)
    oracle.reorder(order)
    cache.set_row_lengths([5, 2])
    compare_steps(cache, oracle, stack, steps=1)
    for row in (0, 1):
        oracle.restart(row, None)
    cache.set_row_lengths([0, 0])
    compare_steps(cache, oracle, stack, steps=2)


def test_a_step_of_beams_must_have_a_token_for_each_beam(device: torch.device) -> None:
    config = next(iter(CROSS_DECODERS.values()))
    stack, memory = make_stack(config, device), make_memory(config, 2, device)
    cache = beam_cache(stack, 2, 2, memory, 3)
    with pytest.raises(ValueError, match="a token for each of the cache's 3 beams, but has 2"):
        stack(random_states(2, 2, device=device), cache=cache)
    with pytest.raises(ValueError, match="`lengths` must be None in a cache of beams"):
        stack(random_states(2, 3, device=device), make_tensor(3, 2, device=device), cache=cache)
