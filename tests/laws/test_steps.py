"""Step by step with a cache equals all at once; ragged prompts equal each alone; beams follow their rows, and one
another in a row that they share; a row that begins anew equals a fresh one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attent.nn import Cache, Memory, Stack, StackConfig
from tests.laws.helpers import (
    CROSS_DECODERS,
    DECODERS,
    close,
    every_decoder,
    in_turn,
    make,
    memory_for,
    new_cache,
    numbers,
    padded,
    states,
    take,
)

T = 9


def continued(stack: Stack, x: Tensor, cache: Cache, *chunks: int) -> Tensor:
    """What the stack says about x when it is read in pieces of these sizes."""
    assert sum(chunks) == x.shape[1]
    return torch.cat([stack(piece, cache=cache) for piece in x.split(chunks, 1)], 1)


@in_turn("config, chunks", DECODERS | CROSS_DECODERS, {"singly": (1,) * T, "uneven": (4, 1, 3, 1)})
def test_step_by_step_equals_all_at_once(config: StackConfig, chunks: tuple[int, ...], device: torch.device) -> None:
    stack, x, memory = make(config, device), states(3, T, device=device), memory_for(config, 3, device)
    cache = new_cache(stack, T + 2, 3, memory)
    close(continued(stack, x, cache, *chunks), stack(x, memory=memory))
    assert cache.used_columns == T


@every_decoder
def test_ragged_prompts_in_one_cache_equal_each_alone(config: StackConfig, device: torch.device) -> None:
    stack, memory = make(config, device), memory_for(config, 3, device)
    prompts = [states(n, device=device) for n in (5, 1, 3)]
    more = states(3, 4, device=device)
    cache = new_cache(stack, 12, 3, memory)
    together, lengths = padded(prompts, extra=1)
    first = stack(together, lengths, cache=cache)
    rest = continued(stack, more, cache, 1, 2, 1)
    for row, prompt in enumerate(prompts):
        alone = stack(torch.cat([prompt, more[row]])[None], memory=take(memory, slice(row, row + 1)))[0]
        close(first[row, : len(prompt)], alone[: len(prompt)])
        close(rest[row], alone[len(prompt) :])


@every_decoder
def test_rows_may_grow_by_different_amounts_again_and_again(config: StackConfig, device: torch.device) -> None:
    stack, memory = make(config, device), memory_for(config, 2, device)
    pieces = [[states(n, device=device) for n in counts] for counts in ((2, 1), (1, 3), (0, 2), (2, 2))]
    cache = new_cache(stack, 12, 2, memory)
    heard: list[list[Tensor]] = [[], []]
    for piece in pieces:
        x, lengths = padded(piece)
        out = stack(x, lengths, cache=cache)
        for row in range(2):
            heard[row].append(out[row, : lengths[row]])
    for row in range(2):
        whole = torch.cat([piece[row] for piece in pieces])
        alone = stack(whole[None], memory=take(memory, slice(row, row + 1)))[0]
        close(torch.cat(heard[row]), alone)


ORDERS = {"fewer": (2, 1), "more": (0, 2, 2, 1, 0)}


@in_turn("config, order", DECODERS | CROSS_DECODERS, ORDERS)
def test_beams_follow_their_rows(config: StackConfig, order: tuple[int, ...], device: torch.device) -> None:
    stack, memory = make(config, device), memory_for(config, 3, device)
    before = states(3, 4, device=device)
    after = states(len(order), 3, device=device)
    lengths = numbers(4, 2, 3, device=device)
    cache = new_cache(stack, 8, 3, memory)
    stack(before, lengths, cache=cache)
    cache.reorder(numbers(*order, device=device))
    actual = continued(stack, after, cache, 1, 2)
    for i, row in enumerate(order):
        past = before[row, : lengths[row]]
        alone = stack(torch.cat([past, after[i]])[None], memory=take(memory, slice(row, row + 1)))[0]
        close(actual[i], alone[len(past) :])


@every_decoder
def test_beams_can_be_reordered_at_every_step(config: StackConfig, device: torch.device) -> None:
    stack, memory = make(config, device), memory_for(config, 3, device)
    cache = new_cache(stack, 4, 3, memory)
    history = states(3, 0, device=device)
    for order in ((0, 0, 1), (2, 1, 0), (1, 2, 2), (0, 1, 2)):
        rows = numbers(*order, device=device)
        cache.reorder(rows)
        memory = take(memory, rows)
        history = torch.cat([history[rows], states(3, 1, device=device)], 1)
        out = stack(history[:, -1:], cache=cache)
        close(out, stack(history, memory=memory)[:, -1:])


def test_a_memory_without_lengths_is_all_real(device: torch.device) -> None:
    stack = make(next(iter(CROSS_DECODERS.values())), device)
    x, memory = states(2, 3, device=device), Memory(states(2, 4, device=device))
    full = Memory(memory.states, numbers(4, 4, device=device))
    close(stack(x, memory=memory), stack(x, memory=full))
    cache = stack.new_cache(3, memory=memory)
    cache.reorder(numbers(1, 0, device=device))
    close(stack(x.flip(0), cache=cache), stack(x, memory=full).flip(0))


# --- beams that share a row -------------------------------------------------------------------------------------------

PARENTS = (((0, 0, 1), (2, 1, 0)), ((2, 2, 2), (1, 0, 2)), ((0, 1, 2), (0, 0, 0)), ((1, 2, 0), (2, 2, 1)))


def beam_cache(stack: Stack, capacity: int, rows: int, memory: Memory | None, beams: int) -> Cache:
    return stack.new_cache(capacity, rows=None if memory else rows, memory=memory, beams=beams)


class Histories:
    """The oracle of a cache of beams: all that each beam has read, read again from the beginning at every step."""

    def __init__(self, stack: Stack, rows: int, beams: int, memory: Memory | None, device: torch.device) -> None:
        self.stack, self.memory = stack, memory
        self.read = [[states(0, device=device) for _ in range(beams)] for _ in range(rows)]

    def step(self, x: Tensor) -> Tensor:
        """(B, K, E) -> (B, K, E)"""
        beams = x.shape[1]
        self.read = [[torch.cat([row[k], x[b, k, None]]) for k in range(beams)] for b, row in enumerate(self.read)]
        outs = []
        for b, row in enumerate(self.read):
            memory = take(self.memory, torch.full((beams,), b, device=x.device))
            outs.append(self.stack(torch.stack(row), memory=memory)[:, -1])
        return torch.stack(outs)

    def follow(self, parents: Tensor) -> None:
        self.read = [[row[k] for k in beams] for row, beams in zip(self.read, parents.tolist(), strict=True)]

    def reorder(self, rows: Tensor) -> None:
        self.read = [list(self.read[row]) for row in rows.tolist()]
        self.memory = take(self.memory, rows)

    def restart(self, row: int, new: Memory | None) -> None:
        self.read[row] = [read[:0] for read in self.read[row]]
        if self.memory is not None and new is not None:
            assert self.memory.lengths is not None
            width = new.states.shape[1]
            self.memory.states[row, :width] = new.states[0]
            self.memory.lengths[row] = width


def both(cache: Cache, told: Histories, stack: Stack, *, steps: int) -> None:
    """Some steps with the cache, each beam going on from any of its row; each must be what reading anew gives."""
    rows, beams = cache.rows, cache.beams
    for step in range(steps):
        x = states(rows, beams, device=cache.layers[0].self_attn.buffer.keys.device)
        close(stack(x, cache=cache), told.step(x))
        parents = torch.randint(beams, (rows, beams), generator=torch.Generator().manual_seed(step)).to(x.device)
        cache.reorder_beams(parents)
        told.follow(parents)


@every_decoder
def test_beams_of_one_row_equal_rows_of_their_own(config: StackConfig, device: torch.device) -> None:
    stack, memory = make(config, device), memory_for(config, 2, device)
    cache, told = beam_cache(stack, 5, 2, memory, 3), Histories(stack, 2, 3, memory, device)
    for parents in PARENTS:
        x = states(2, 3, device=device)
        close(stack(x, cache=cache), told.step(x))
        cache.reorder_beams(torch.tensor(parents, device=device))
        told.follow(torch.tensor(parents))
    rows = numbers(1, 1, 0, device=device)
    cache.reorder(rows)
    told.reorder(rows)
    both(cache, told, stack, steps=1)
    assert cache.used_columns == 5 * 3


@in_turn("config, beams", DECODERS | CROSS_DECODERS, {"1": 1, "3": 3})
def test_a_row_that_begins_anew_equals_a_fresh_one(config: StackConfig, beams: int, device: torch.device) -> None:
    """With the memory of another source, while its neighbours go on; and so again, when rows were moved."""
    stack, memory = make(config, device), memory_for(config, 3, device)
    told = Histories(stack, 3, beams, memory and Memory(memory.states.clone(), numbers(6, 4, 2, device=device)), device)
    cache = beam_cache(stack, 6, 3, memory, beams)
    both(cache, told, stack, steps=3)
    new = None if memory is None else Memory(states(1, 5, device=device), numbers(5, device=device))
    cache.replace_rows(numbers(1, device=device), beam_cache(stack, 1, 1, new, beams))
    cache.rewind([3, 0, 3])
    told.restart(1, new)
    both(cache, told, stack, steps=3)
    for row in (0, 2):  # they are full, and go on with nothing
        told.restart(row, None)
    cache.rewind([0, 3, 0])
    both(cache, told, stack, steps=2)
    order = numbers(1, 0, device=device)
    cache.reorder(order)
    told.reorder(order)
    cache.rewind([5, 2])
    both(cache, told, stack, steps=1)
    for row in (0, 1):
        told.restart(row, None)
    cache.rewind([0, 0])
    both(cache, told, stack, steps=2)


def test_a_step_of_beams_must_have_a_token_for_each(device: torch.device) -> None:
    config = next(iter(CROSS_DECODERS.values()))
    stack, memory = make(config, device), memory_for(config, 2, device)
    cache = beam_cache(stack, 2, 2, memory, 3)
    with pytest.raises(ValueError, match="a token for each of the cache's 3 beams, but has 2"):
        stack(states(2, 2, device=device), cache=cache)
    with pytest.raises(ValueError, match="`lengths` must be None in a cache of beams"):
        stack(states(2, 3, device=device), numbers(3, 2, device=device), cache=cache)
