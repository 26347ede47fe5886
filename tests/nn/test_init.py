"""Initialization: the distribution of every weight, and the scale of activations through the stack."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attent.nn import Mask, RelativeConfig, Stack, StackConfig
from attent.nn.positions import RelativePositions

WIDE = StackConfig(layers=1, width=128, heads=4, ffn_width=384, causal=True, cross_attention=True, dropout=0.0)


def spread(fan_in: int, fan_out: int, gain: float = 1.0) -> float:
    """The bound of Xavier's uniform distribution."""
    return gain * math.sqrt(6 / (fan_in + fan_out))


def is_uniform(weight: torch.Tensor, bound: float) -> None:
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert abs(weight.mean().item()) < bound * 0.03


def test_attention_is_initialized_as_one_fused_matrix() -> None:
    block = Stack(WIDE).blocks[0]
    for attention in (block.self_attn, block.cross_attn):
        for linear in (attention.query, attention.key, attention.value):
            is_uniform(linear.weight, spread(128, 3 * 128))
        is_uniform(attention.output.weight, spread(128, 128))


def test_the_feed_forward_is_initialized_by_xavier() -> None:
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


def test_sublayer_outputs_are_of_the_scale_of_the_residual() -> None:
    """Each output is between a tenth of and the full scale of its normalized input."""
    block, x = Stack(StackConfig(width=128, heads=4, ffn_width=512)).eval().blocks[0], torch.randn(2, 20, 128)
    attended = block.self_attn(x, block.self_attn.project_keys_values(x), Mask())
    for out in (attended, block.feedforward(x)):
        assert 0.1 < out.std().item() < 1.1
