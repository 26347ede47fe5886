"""Recording attention changes no output, and the recorded weights explain it.

On a GPU these laws run without gradients: with them, fused kernels compute the layers that are not observed, and an
observed layer runs the reference, which is equal up to rounding only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from attent.nn import Attention, AttentionRecord, Mask, Memory, Packing, Stack, StackConfig
from attent.nn.dot_product import repeat_kv_heads
from tests.laws.helpers import (
    assert_close,
    every_decoder,
    every_stack,
    make_memory,
    make_stack,
    make_tensor,
    new_cache,
    random_states,
)

T = 7


@pytest.fixture(autouse=True)
def gradients(device: torch.device) -> Iterator[None]:
    with torch.set_grad_enabled(device.type == "cpu"):
        yield


def run_observed(
    stack: Stack, call: Callable[[], Tensor]
) -> tuple[Tensor, list[tuple[Attention, AttentionRecord, Tensor]]]:
    """Return the output of a call, and for each attention layer its last record and its output."""
    seen: list[tuple[Attention, AttentionRecord, Tensor]] = []
    hooks = []
    for module in stack.modules():
        if isinstance(module, Attention):
            records: list[AttentionRecord] = []
            module.observers.append(records.append)
            hooks.append(
                module.register_forward_hook(lambda m, _, out, records=records: seen.append((m, records[-1], out)))
            )
    out = call()
    for hook in hooks:
        hook.remove()
    for module in stack.modules():
        if isinstance(module, Attention):
            module.observers.clear()
    return out, seen


def check_records(seen: list[tuple[Attention, AttentionRecord, Tensor]]) -> None:
    assert seen
    for attention, record, out in seen:
        B, H, Tq, Tk = record.weights.shape
        visible = record.mask.to_dense(B, Tq, Tk, record.weights.device).expand(B, H, Tq, Tk)
        assert (record.weights[~visible] == 0).all(), "hidden positions must have weight 0"
        assert (record.weights[visible] > 0).all(), "visible positions must have some weight"
        assert_close(
            record.weights.sum(-1), visible.any(-1).to(record.weights.dtype)
        )  # 1, or 0 where no position is visible
        heads = record.weights @ repeat_kv_heads(record.v, attention.heads)  # the weights explain the output
        assert_close(attention.output(heads.transpose(1, 2).flatten(2)), out)


@every_stack
def test_observers_change_no_output(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make_stack(config, device), random_states(3, T, device=device), make_memory(config, 3, device)
    lengths = make_tensor(T, 3, 0, device=device)
    expected = stack(x, lengths, memory=memory)
    actual, seen = run_observed(stack, lambda: stack(x, lengths, memory=memory))
    assert torch.equal(actual, expected)
    assert len(seen) == config.layers * (1 + config.cross_attention)
    check_records(seen)


@every_stack
def test_observers_see_packed_text(config: StackConfig, device: torch.device) -> None:
    stack, x = make_stack(config, device), random_states(2, T, device=device)
    packing = Packing.from_lengths([[2, 0, 3], [6]], T, device=device)
    sources = Packing.from_lengths([[1, 2, 0], [4]], 5, device=device)
    memory = Memory(random_states(2, 5, device=device), packing=sources) if config.cross_attention else None
    expected = stack(x, packing=packing, memory=memory)
    actual, seen = run_observed(stack, lambda: stack(x, packing=packing, memory=memory))
    assert torch.equal(actual, expected)
    check_records(seen)


@every_decoder
def test_observers_see_a_cached_step(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make_stack(config, device), random_states(3, T, device=device), make_memory(config, 3, device)
    caches = [new_cache(stack, T, 3, memory) for _ in range(2)]
    for cache in caches:
        stack(x[:, :4], make_tensor(4, 1, 2, device=device), cache=cache)
    expected = stack(x[:, 4:], cache=caches[0])
    actual, seen = run_observed(stack, lambda: stack(x[:, 4:], cache=caches[1]))
    assert torch.equal(actual, expected)
    check_records(seen)


def test_observers_draw_no_random_numbers(device: torch.device) -> None:
    """In training, with dropout everywhere, an observed pass draws the same masks."""
    config = StackConfig(
        layers=2, width=32, heads=2, ffn_width=32, dropout=0.3, attention_dropout=0.2, activation_dropout=0.2
    )
    stack, x = make_stack(config, device).train(), random_states(2, T, device=device)
    torch.manual_seed(1)
    expected = stack(x)
    torch.manual_seed(1)
    actual, _ = run_observed(stack, lambda: stack(x))
    assert torch.equal(actual, expected)


def test_the_weights_are_equation_1(device: torch.device) -> None:
    """softmax(q k^T / sqrt(d_k)), computed here from the layers."""
    attention = Attention(StackConfig(width=32, heads=4)).to(device).double()
    x = torch.randn(1, T, 32).to(device).double()
    records: list[AttentionRecord] = []
    attention.observers.append(records.append)
    attention(x, attention.project_keys_values(x), Mask())
    q, k = (linear(x)[0].view(T, 4, 8).transpose(0, 1) for linear in (attention.query, attention.key))
    scores = torch.stack([torch.stack([(q[h] @ k[h, t]) / 8**0.5 for t in range(T)], -1) for h in range(4)])
    assert_close(records[0].weights[0], scores.exp() / scores.exp().sum(-1, keepdim=True))
