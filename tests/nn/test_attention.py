"""Attention layers as built from a config, also after pruning."""

from __future__ import annotations

import warnings

import pytest
import torch

from attent.nn import Attention, Mask, Stack, StackConfig, set_backend

CONFIG = StackConfig(layers=2, width=8, heads=2, ffn_width=8, dropout=0.0)


def test_states_are_projected_where_no_keys_are_given() -> None:
    attention, x, memory = Attention(width=12, heads=3), torch.randn(2, 5, 12), torch.randn(2, 4, 12)
    causal = Mask(causal=True)
    torch.testing.assert_close(attention(x), attention(x, attention.project_keys_values(x), Mask()))
    torch.testing.assert_close(attention(x, mask=causal), attention(x, attention.project_keys_values(x), causal))
    torch.testing.assert_close(attention(x, memory), attention(x, attention.project_keys_values(memory), Mask()))


def test_a_layer_without_heads_is_built_silently_and_returns_its_output_bias() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention = Attention(CONFIG, remaining_heads=())
    x = torch.randn(2, 3, 8)
    out = attention(x, attention.project_keys_values(x), Mask())
    torch.testing.assert_close(out, attention.output.bias.expand(2, 3, 8))


@pytest.mark.parametrize(
    ("options", "layer", "scale"),
    [
        ({}, 3, 4**-0.5),
        ({"head_width": 16}, 0, 0.25),
        ({"scale": 3.0}, 1, 3.0),
        ({"scale_by_layer": True}, 0, 4**-0.5),
        ({"scale_by_layer": True}, 1, 4**-0.5 / 2),
        ({"scale": 3.0, "scale_by_layer": True}, 2, 1.0),
        ({"compatibility": "additive"}, 0, 1.0),
        ({"compatibility": "additive", "scale": 3.0}, 0, 3.0),
    ],
)
def test_scale_of_the_scores(options: dict[str, object], layer: int, scale: float) -> None:
    config = StackConfig(**{"width": 8, "heads": 2} | options)  # type: ignore[arg-type]
    assert Attention(config, layer).scale == pytest.approx(scale)


def test_grouped_heads_have_smaller_projections() -> None:
    attention = Attention(StackConfig(width=12, heads=6, kv_heads=2, bias=False))
    shapes = [tuple(x.weight.shape) for x in (attention.query, attention.key, attention.value, attention.output)]
    assert shapes == [(12, 12), (4, 12), (4, 12), (12, 12)]
    assert attention.query.bias is None


def test_backend_is_set_in_every_layer() -> None:
    stack = Stack(CONFIG)
    set_backend(stack, "explicit")
    assert [block.self_attn.backend for block in stack.blocks] == ["explicit", "explicit"]
    with pytest.raises(ValueError, match="did you mean `explicit`"):
        set_backend(stack, "explict")
    assert stack.blocks[0].self_attn.backend == "explicit"


@pytest.mark.parametrize("remaining", [None, (), (2, 0)])
def test_a_bias_keeps_the_remaining_heads(remaining: tuple[int, ...] | None) -> None:
    attention = Attention(StackConfig(width=12, heads=3, layers=1))
    attention.remaining_heads = remaining
    bias = torch.randn(1, 3, 2, 4)
    selected = attention.select_bias(bias)
    assert selected is not None
    assert torch.equal(selected, bias if remaining is None else bias[:, list(remaining)])


def test_additive_scores_start_with_xavier_uniform_weights() -> None:
    config = StackConfig(layers=1, width=4_000, heads=2, ffn_width=8, compatibility="additive")
    weight = Attention(config).score_weight
    assert weight is not None
    limit = (6 / 2_001) ** 0.5
    assert 0.99 * limit < weight.abs().max() <= limit
    assert abs(weight.mean()) < 0.1 * limit
