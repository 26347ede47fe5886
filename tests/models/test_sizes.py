"""The presets are the paper's: table 3, number by number, and as many parameters as it says."""

from __future__ import annotations

import pytest

from attent.models import build_empty, presets
from attent.nn import SinusoidalConfig

# Table 3: N, d_model, d_ff, h, d_k, d_v, P_drop, parameters in millions
TABLE_3 = {"base": (6, 512, 2048, 8, 64, 64, 0.1, 65), "big": (6, 1024, 4096, 16, 64, 64, 0.3, 213)}


def parameters(preset: str, vocab: int) -> int:
    """Of a model without memory for its weights; one that has two names counts once."""
    return sum(parameter.numel() for parameter in build_empty(getattr(presets, preset)(vocab)).parameters())


@pytest.mark.parametrize("preset", TABLE_3)
def test_hyper_parameters_are_those_of_table_3(preset: str) -> None:
    layers, width, inner, heads, key, value, dropout, _ = TABLE_3[preset]
    config = getattr(presets, preset)(vocab=37_000)
    for stack in (config.encoder, config.decoder):
        assert (stack.layers, stack.width, stack.inner, stack.heads) == (layers, width, inner, heads)
        assert stack.width // stack.heads == key == value
        assert (stack.head_width, stack.kv_heads, stack.scale) == (None, None, None)
        assert stack.dropout == dropout
        assert (stack.attention_dropout, stack.activation_dropout) == (0.0, 0.0)
        assert (stack.norm, stack.norm_order, stack.bias) == ("layer", "post", True)
        assert (stack.activation, stack.gated, stack.window) == ("relu", False, None)
        assert stack.positions == SinusoidalConfig(order="interleaved")
    assert config.share_embeddings
    assert config.tie_output
    assert config.scale_embeddings
    assert not config.output_bias


def test_base_has_65_million_parameters() -> None:
    """Section 5.1: about 37,000 tokens in the shared vocabulary."""
    assert 63e6 < parameters("base", 37_000) < 65e6
    assert parameters("base", 37_000) == by_formula("base", 37_000)


def test_big_has_213_million_parameters() -> None:
    assert 210e6 < parameters("big", 37_000) < 217e6
    assert parameters("big", 37_000) == by_formula("big", 37_000)


def by_formula(preset: str, vocab: int) -> int:
    """V d + 6 (4 d^2 + 2 d d_ff) for the encoder, 6 (8 d^2 + 2 d d_ff) for the decoder, biases and norms."""
    layers, d, inner, *_ = TABLE_3[preset]
    attention, feedforward, norm = 4 * (d * d + d), 2 * d * inner + inner + d, 2 * d
    return vocab * d + layers * ((attention + feedforward + 2 * norm) + (2 * attention + feedforward + 3 * norm))


def test_small_and_tiny_are_as_said() -> None:
    assert 2.2e6 < parameters("tiny", 8_000) < 2.6e6
    assert parameters("tiny", 8_000) < parameters("small", 8_000) < parameters("base", 8_000) / 3
