"""What must not matter does not: padding, the future, the rest of the batch; and what must matter does."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attent.nn import Memory, StackConfig
from tests.laws.helpers import (
    DECODERS,
    ENCODERS,
    close,
    every,
    every_cross_decoder,
    every_decoder,
    every_stack,
    make,
    memory_for,
    noise_like,
    numbers,
    padded,
    real,
    states,
    take,
)

T = 8
BY_DISTANCE = ("rotary", "relative", "alibi")


@every_stack
def test_padding_changes_nothing(config: StackConfig, device: torch.device) -> None:
    """Neither its content (noise) nor its amount (more than the longest needs): each row equals the sentence alone."""
    stack, memory = make(config, device), memory_for(config, 3, device)
    sentences = [states(n, device=device) for n in (T, 1, 5)]
    x, lengths = padded(sentences, extra=3)
    out = stack(x, lengths, memory=memory)
    for row, sentence in enumerate(sentences):
        alone = stack(sentence[None], memory=take(memory, slice(row, row + 1)))[0]
        close(out[row, : len(sentence)], alone)


@every_cross_decoder
def test_padding_of_the_memory_changes_nothing(config: StackConfig, device: torch.device) -> None:
    stack, x = make(config, device), states(3, T, device=device)
    sources = [states(n, device=device) for n in (2, 7, 4)]
    expected = torch.cat([stack(x[i : i + 1], memory=Memory(source[None])) for i, source in enumerate(sources)])
    close(stack(x, memory=Memory(*padded(sources))), expected)
    close(stack(x, memory=Memory(*padded(sources, extra=6))), expected)


@every_stack
def test_a_row_without_tokens_disturbs_nobody(config: StackConfig, device: torch.device) -> None:
    """Lengths of zero: the other rows are as they were, and gradients stay finite."""
    stack, memory = make(config, device), memory_for(config, 2, device)
    x, lengths = states(2, T, device=device).requires_grad_(), numbers(0, T, device=device)
    if memory is not None:
        memory = Memory(memory.states, numbers(0, 4, device=device))
    out = stack(x, lengths, memory=memory)
    close(out[1:], stack(x[1:], memory=take(memory, slice(1, 2))))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


@every_decoder
def test_the_future_changes_nothing(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make(config, device), states(2, T, device=device), memory_for(config, 2, device)
    out = stack(x, memory=memory)
    for t in range(T):
        other = torch.cat([x[:, :t], states(2, T - t, device=device)], 1)
        changed = stack(other, memory=memory)
        close(changed[:, :t], out[:, :t])
        assert not torch.allclose(changed[:, t], out[:, t], rtol=1e-3, atol=1e-3)


@every_stack
def test_each_token_is_noticed_exactly_where_the_config_says(config: StackConfig, device: torch.device) -> None:
    """One block: d out[q] / d x[k] is zero unless q may look at k, and is not zero where it may."""
    stack = make(replace(config, layers=1), device)
    memory = memory_for(config, 1, device)
    x = states(1, T, device=device)
    before, after = config.window or (None, None)

    def out(x: Tensor) -> Tensor:
        return stack(x, memory=memory)[0] @ direction

    direction = states(device=device)
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
    """Without positions, a last token would not care which of two others is its neighbour and which is far."""
    stack, memory = make(replace(config, window=None, layers=1), device), memory_for(config, 1, device)
    x = states(1, T, device=device)
    swapped = x[:, [T - 2, *range(1, T - 2), 0, T - 1]]
    change = (stack(swapped, memory=memory) - stack(x, memory=memory))[:, -1].abs().max()
    assert change > 1e-6


@every("config", {name: config for name, config in DECODERS.items() if config.positions.kind in BY_DISTANCE})
def test_where_only_distance_counts_a_shift_changes_nothing(config: StackConfig, device: torch.device) -> None:
    """One block that sees two tokens back says the same about them wherever they stand. (Rotary angles are float32.)"""
    stack, x = make(replace(config, layers=1, window=(2, None)), device), states(2, T, device=device)
    late = stack(x)
    for t in range(2, T):
        torch.testing.assert_close(late[:, t], stack(x[:, t - 2 : t + 1])[:, -1], rtol=1e-5, atol=1e-5)


@every_stack
def test_the_order_of_the_batch_does_not_matter(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make(config, device), states(4, T, device=device), memory_for(config, 4, device)
    lengths, order = numbers(T, 3, 6, 1, device=device), numbers(2, 0, 3, 1, device=device)
    out = stack(x, lengths, memory=memory)
    again = stack(x[order], lengths[order], memory=take(memory, order))
    close(real(again, lengths[order]), real(out[order], lengths[order]))


@every_stack
def test_a_sentence_alone_equals_the_same_in_a_batch(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make(config, device), states(3, T, device=device), memory_for(config, 3, device)
    out = stack(x, memory=memory)
    for row in range(3):
        one = slice(row, row + 1)
        close(out[one], stack(x[one], memory=take(memory, one)))


@every("config", {name: config for name, config in ENCODERS.items() if config.window is None})
def test_an_encoder_sees_the_future(config: StackConfig, device: torch.device) -> None:
    stack, x = make(config, device), states(1, T, device=device)
    other = torch.cat([x[:, :-1], noise_like(x[0], 1)[None]], 1)
    assert not torch.allclose(stack(x)[:, 0], stack(other)[:, 0], rtol=1e-6, atol=1e-6)
