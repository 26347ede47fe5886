"""How a new model starts: the spread of every weight, and that activations keep theirs through the stack."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attent.nn import Mask, RelativeConfig, RelativePositions, Stack, StackConfig

WIDE = StackConfig(layers=1, width=128, heads=4, ffn_width=384, causal=True, cross_attention=True, dropout=0.0)


def spread(fan_in: int, fan_out: int, gain: float = 1.0) -> float:
    """The bound of Xavier's uniform distribution."""
    return gain * math.sqrt(6 / (fan_in + fan_out))


def is_uniform(weight: torch.Tensor, bound: float) -> None:
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert abs(weight.mean().item()) < bound * 0.03


def test_attention_starts_as_if_query_key_and_value_were_one_matrix() -> None:
    block = Stack(WIDE).blocks[0]
    for attention in (block.self_attn, block.cross_attn):
        for linear in (attention.query, attention.key, attention.value):
            is_uniform(linear.weight, spread(128, 3 * 128))
        is_uniform(attention.output.weight, spread(128, 128))


def test_the_feed_forward_starts_as_xavier() -> None:
    block = Stack(WIDE).blocks[0]
    is_uniform(block.feedforward.expand.weight, spread(128, 384))
    is_uniform(block.feedforward.contract.weight, spread(384, 128))


def test_biases_start_at_zero_and_norms_at_one() -> None:
    stack = Stack(WIDE)
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            assert (module.bias == 0).all()
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def test_the_relative_bias_starts_small() -> None:
    weight = RelativePositions(RelativeConfig(buckets=64, max_distance=128), heads=64, causal=True).weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_sublayers_neither_drown_nor_vanish_beside_what_they_are_added_to() -> None:
    """Each gives between a tenth of its normalised input's size and its size."""
    block, x = Stack(StackConfig(width=128, heads=4, ffn_width=512)).eval().blocks[0], torch.randn(2, 20, 128)
    attended = block.self_attn(x, block.self_attn.project_keys_values(x), Mask())
    for out in (attended, block.feedforward(x)):
        assert 0.1 < out.std().item() < 1.1
