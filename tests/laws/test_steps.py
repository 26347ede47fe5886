"""Step by step with a cache equals all at once; ragged prompts equal each alone; beams follow their rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attent.nn import Cache, Memory, Stack, StackConfig
from tests.laws.helpers import (
    CROSS_DECODERS,
    close,
    every_decoder,
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


@pytest.mark.parametrize("chunks", [(1,) * T, (4, 1, 3, 1)], ids=["singly", "uneven"])
@every_decoder
def test_step_by_step_equals_all_at_once(config: StackConfig, chunks: tuple[int, ...], device: torch.device) -> None:
    stack, x, memory = make(config, device), states(3, T, device=device), memory_for(config, 3, device)
    cache = new_cache(stack, T + 2, 3, memory)
    close(continued(stack, x, cache, *chunks), stack(x, memory=memory))
    assert cache.used == T


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


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@every_decoder
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
