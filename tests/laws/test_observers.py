"""Looking inside changes nothing, and what is seen is what was computed."""

from __future__ import annotations

from collections.abc import Callable

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


def observed(
    stack: Stack, call: Callable[[], Tensor]
) -> tuple[Tensor, list[tuple[Attention, AttentionRecord, Tensor]]]:
    """The output of a call, and for each attention what its observer saw and what it gave."""
    seen: list[tuple[Attention, AttentionRecord, Tensor]] = []
    hooks = []
    for module in stack.modules():
        if isinstance(module, Attention):
            looks: list[AttentionRecord] = []
            module.observers.append(looks.append)
            hooks.append(module.register_forward_hook(lambda m, _, out, looks=looks: seen.append((m, looks[-1], out))))
    out = call()
    for hook in hooks:
        hook.remove()
    for module in stack.modules():
        if isinstance(module, Attention):
            module.observers.clear()
    return out, seen


def check_looks(seen: list[tuple[Attention, AttentionRecord, Tensor]]) -> None:
    assert seen
    for attention, look, out in seen:
        B, H, Tq, Tk = look.weights.shape
        visible = look.mask.to_dense(B, Tq, Tk, look.weights.device).expand(B, H, Tq, Tk)
        assert (look.weights[~visible] == 0).all(), "what may not be looked at has weight 0"
        assert (look.weights[visible] > 0).all(), "and what may be looked at has some"
        assert_close(
            look.weights.sum(-1), visible.any(-1).to(look.weights.dtype)
        )  # one; zero where there is nothing to see
        heads = look.weights @ repeat_kv_heads(look.v, attention.heads)  # the weights explain the output
        assert_close(attention.output(heads.transpose(1, 2).flatten(2)), out)


@every_stack
def test_the_tap_changes_no_output(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make_stack(config, device), random_states(3, T, device=device), make_memory(config, 3, device)
    lengths = make_tensor(T, 3, 0, device=device)
    expected = stack(x, lengths, memory=memory)
    actual, seen = observed(stack, lambda: stack(x, lengths, memory=memory))
    assert torch.equal(actual, expected)
    assert len(seen) == config.layers * (1 + config.cross_attention)
    check_looks(seen)


@every_stack
def test_the_tap_sees_packed_text(config: StackConfig, device: torch.device) -> None:
    stack, x = make_stack(config, device), random_states(2, T, device=device)
    packing = Packing.from_lengths([[2, 0, 3], [6]], T, device=device)
    sources = Packing.from_lengths([[1, 2, 0], [4]], 5, device=device)
    memory = Memory(random_states(2, 5, device=device), packing=sources) if config.cross_attention else None
    expected = stack(x, packing=packing, memory=memory)
    actual, seen = observed(stack, lambda: stack(x, packing=packing, memory=memory))
    assert torch.equal(actual, expected)
    check_looks(seen)


@every_decoder
def test_the_tap_sees_a_step_of_a_cache(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make_stack(config, device), random_states(3, T, device=device), make_memory(config, 3, device)
    caches = [new_cache(stack, T, 3, memory) for _ in range(2)]
    for cache in caches:
        stack(x[:, :4], make_tensor(4, 1, 2, device=device), cache=cache)
    expected = stack(x[:, 4:], cache=caches[0])
    actual, seen = observed(stack, lambda: stack(x[:, 4:], cache=caches[1]))
    assert torch.equal(actual, expected)
    check_looks(seen)


def test_the_tap_draws_no_random_numbers(device: torch.device) -> None:
    """In training, with dropout everywhere, an observed pass meets the same dice."""
    config = StackConfig(
        layers=2, width=32, heads=2, ffn_width=32, dropout=0.3, attention_dropout=0.2, activation_dropout=0.2
    )
    stack, x = make_stack(config, device).train(), random_states(2, T, device=device)
    torch.manual_seed(1)
    expected = stack(x)
    torch.manual_seed(1)
    actual, _ = observed(stack, lambda: stack(x))
    assert torch.equal(actual, expected)


def test_the_weights_are_equation_1(device: torch.device) -> None:
    """softmax(q k^T / sqrt(d_k)), worked out here once more."""
    attention = Attention(StackConfig(width=32, heads=4)).to(device).double()
    x = torch.randn(1, T, 32).to(device).double()
    looks: list[AttentionRecord] = []
    attention.observers.append(looks.append)
    attention(x, attention.project_keys_values(x), Mask())
    q, k = (linear(x)[0].view(T, 4, 8).transpose(0, 1) for linear in (attention.query, attention.key))
    scores = torch.stack([torch.stack([(q[h] @ k[h, t]) / 8**0.5 for t in range(T)], -1) for h in range(4)])
    assert_close(looks[0].weights[0], scores.exp() / scores.exp().sum(-1, keepdim=True))
