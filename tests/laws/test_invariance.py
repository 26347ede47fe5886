"""Outputs do not depend on padding, the future or the rest of the batch, and do depend on all visible tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attent.nn import Memory, StackConfig
from tests.laws.helpers import (
    DECODERS,
    ENCODERS,
    assert_close,
    every_cross_decoder,
    every_decoder,
    every_stack,
    make_memory,
    make_stack,
    make_tensor,
    noise_like,
    pad_with_noise,
    parametrize_all,
    random_states,
    select_memory,
    unpad,
)

T = 8
BY_DISTANCE = ("rotary", "relative", "alibi")


@every_stack
def test_padding_changes_nothing(config: StackConfig, device: torch.device) -> None:
    """Neither its content (noise) nor its length (beyond the longest row): each row equals the single sentence."""
    stack, memory = make_stack(config, device), make_memory(config, 3, device)
    sentences = [random_states(n, device=device) for n in (T, 1, 5)]
    x, lengths = pad_with_noise(sentences, extra=3)
    out = stack(x, lengths, memory=memory)
    for row, sentence in enumerate(sentences):
        alone = stack(sentence[None], memory=select_memory(memory, slice(row, row + 1)))[0]
        assert_close(out[row, : len(sentence)], alone)


@every_cross_decoder
def test_padding_of_the_memory_changes_nothing(config: StackConfig, device: torch.device) -> None:
    stack, x = make_stack(config, device), random_states(3, T, device=device)
    sources = [random_states(n, device=device) for n in (2, 7, 4)]
    expected = torch.cat([stack(x[i : i + 1], memory=Memory(source[None])) for i, source in enumerate(sources)])
    assert_close(stack(x, memory=Memory(*pad_with_noise(sources))), expected)
    assert_close(stack(x, memory=Memory(*pad_with_noise(sources, extra=6))), expected)


@every_stack
def test_an_empty_row_does_not_affect_others(config: StackConfig, device: torch.device) -> None:
    """With a length of zero, the other rows are unchanged and gradients are finite."""
    stack, memory = make_stack(config, device), make_memory(config, 2, device)
    x, lengths = random_states(2, T, device=device).requires_grad_(), make_tensor(0, T, device=device)
    if memory is not None:
        memory = Memory(memory.states, make_tensor(0, 4, device=device))
    out = stack(x, lengths, memory=memory)
    assert_close(out[1:], stack(x[1:], memory=select_memory(memory, slice(1, 2))))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


@every_decoder
def test_the_future_changes_nothing(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make_stack(config, device), random_states(2, T, device=device), make_memory(config, 2, device)
    out = stack(x, memory=memory)
    for t in range(T):
        other = torch.cat([x[:, :t], random_states(2, T - t, device=device)], 1)
        changed = stack(other, memory=memory)
        assert_close(changed[:, :t], out[:, :t])
        assert not torch.allclose(changed[:, t], out[:, t], rtol=1e-3, atol=1e-3)


@every_stack
def test_each_token_affects_exactly_the_queries_that_see_it(config: StackConfig, device: torch.device) -> None:
    """In one block, d out[q] / d x[k] is nonzero exactly where q may attend to k."""
    stack = make_stack(replace(config, layers=1), device)
    memory = make_memory(config, 1, device)
    x = random_states(1, T, device=device)
    before, after = config.window or (None, None)

    def out(x: Tensor) -> Tensor:
        return stack(x, memory=memory)[0] @ direction

    direction = random_states(device=device)
    noticed = torch.autograd.functional.jacobian(out, x)[:, 0].abs().amax(-1) > 1e-9  # (Tq, Tk)
    expected = [
        [
            not (config.causal and k > q) and (before is None or q - k <= before) and (after is None or k - q <= after)
            for k in range(T)
        ]
        for q in range(T)
    ]
    assert noticed.tolist() == expected


@every_stack
def test_order_matters(config: StackConfig, device: torch.device) -> None:
    """Without positions, swapping two earlier tokens would not change the output of the last."""
    stack, memory = make_stack(replace(config, window=None, layers=1), device), make_memory(config, 1, device)
    x = random_states(1, T, device=device)
    swapped = x[:, [T - 2, *range(1, T - 2), 0, T - 1]]
    change = (stack(swapped, memory=memory) - stack(x, memory=memory))[:, -1].abs().max()
    assert change > 1e-6


@parametrize_all("config", {name: config for name, config in DECODERS.items() if config.positions.kind in BY_DISTANCE})
def test_relative_positions_are_shift_invariant(config: StackConfig, device: torch.device) -> None:
    """One block with a window of two tokens gives the same at any offset. (Rotary angles are float32.)"""
    stack, x = make_stack(replace(config, layers=1, window=(2, None)), device), random_states(2, T, device=device)
    late = stack(x)
    for t in range(2, T):
        torch.testing.assert_close(late[:, t], stack(x[:, t - 2 : t + 1])[:, -1], rtol=1e-5, atol=1e-5)


@every_stack
def test_the_order_of_the_batch_does_not_matter(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make_stack(config, device), random_states(4, T, device=device), make_memory(config, 4, device)
    lengths, order = make_tensor(T, 3, 6, 1, device=device), make_tensor(2, 0, 3, 1, device=device)
    out = stack(x, lengths, memory=memory)
    again = stack(x[order], lengths[order], memory=select_memory(memory, order))
    assert_close(unpad(again, lengths[order]), unpad(out[order], lengths[order]))


@every_stack
def test_a_single_sentence_equals_its_row_in_a_batch(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make_stack(config, device), random_states(3, T, device=device), make_memory(config, 3, device)
    out = stack(x, memory=memory)
    for row in range(3):
        single_row = slice(row, row + 1)
        assert_close(out[single_row], stack(x[single_row], memory=select_memory(memory, single_row)))


@parametrize_all("config", {name: config for name, config in ENCODERS.items() if config.window is None})
def test_an_encoder_sees_the_future(config: StackConfig, device: torch.device) -> None:
    stack, x = make_stack(config, device), random_states(1, T, device=device)
    other = torch.cat([x[:, :-1], noise_like(x[0], 1)[None]], 1)
    assert not torch.allclose(stack(x)[:, 0], stack(other)[:, 0], rtol=1e-6, atol=1e-6)
