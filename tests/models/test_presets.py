"""The presets have the hyper-parameters and parameter counts of the paper's table 3."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import pytest

from attent.models import build_empty, presets
from attent.models.config import PRESETS
from attent.nn import LearnedConfig, RelativeConfig, RotaryConfig, SinusoidalConfig, StackConfig

# Table 3: N, d_model, d_ff, h, d_k, d_v, P_drop, parameters in millions
TABLE_3 = {"base": (6, 512, 2048, 8, 64, 64, 0.1, 65), "big": (6, 1024, 4096, 16, 64, 64, 0.3, 213)}


def count_parameters(preset: str, vocab: int) -> int:
    """Number of parameters of a model on the meta device; tied ones count once."""
    return sum(parameter.numel() for parameter in build_empty(getattr(presets, preset)(vocab)).parameters())


@pytest.mark.parametrize("preset", TABLE_3)
def test_hyper_parameters_are_those_of_table_3(preset: str) -> None:
    layers, width, inner, heads, key, value, dropout, _ = TABLE_3[preset]
    config = getattr(presets, preset)(vocab=37_000)
    for stack in (config.encoder, config.decoder):
        assert (stack.layers, stack.width, stack.ffn_width, stack.heads) == (layers, width, inner, heads)
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
    assert 63e6 < count_parameters("base", 37_000) < 65e6
    assert count_parameters("base", 37_000) == count_by_formula("base", 37_000)


def test_big_has_213_million_parameters() -> None:
    assert 210e6 < count_parameters("big", 37_000) < 217e6
    assert count_parameters("big", 37_000) == count_by_formula("big", 37_000)


def count_by_formula(preset: str, vocab: int) -> int:
    """V d + 6 (4 d^2 + 2 d d_ff) for the encoder, 6 (8 d^2 + 2 d d_ff) for the decoder, biases and norms."""
    layers, d, inner, *_ = TABLE_3[preset]
    attention, feedforward, norm = 4 * (d * d + d), 2 * d * inner + inner + d, 2 * d
    return vocab * d + layers * ((attention + feedforward + 2 * norm) + (2 * attention + feedforward + 3 * norm))


def test_small_and_tiny_have_the_documented_sizes() -> None:
    small, tiny = presets.small(8_000).encoder, presets.tiny(8_000).encoder
    assert small == StackConfig(layers=3, width=256, ffn_width=1024)
    assert tiny == StackConfig(layers=4, width=128, ffn_width=256, heads=4, dropout=0.3)
    assert 2.2e6 < count_parameters("tiny", 8_000) < 2.6e6
    assert count_parameters("tiny", 8_000) < count_parameters("small", 8_000) < count_parameters("base", 8_000) / 3


# Published parameter counts, from the papers or the model files.
PUBLISHED = {
    "gpt2": 124_439_808,
    "llama_2_7b": 6_738_415_616,
    "llama_3_8b": 8_030_261_248,
    "t5_small": 60_506_624,
    "t5_v1_1_small": 76_961_152,
    "t5_v1_1_base": 247_577_856,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_descendants_have_as_many_parameters_as_published(preset: str) -> None:
    model = build_empty(getattr(presets, preset)())
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[preset]


def test_bert_has_the_published_parts() -> None:
    """109,482,240 with the pooler, and the masked LM head: a layer, its norm, a bias per token."""
    head = 768 * 768 + 768 + 2 * 768 + 30_522
    model = build_empty(presets.bert_base())
    assert sum(parameter.numel() for parameter in model.parameters()) == 109_482_240 + head


def test_vit_has_86_million_parameters() -> None:
    model = build_empty(presets.vit_b_16(tuple(map(str, range(1000)))))
    assert sum(parameter.numel() for parameter in model.parameters()) == 86_567_656


# What the number of parameters does not show: activation, gated, norm order, epsilon, dropout, on attention, positions.
PUBLISHED_DETAILS = {
    "gpt2": ("gelu_tanh", False, "pre", 1e-5, 0.1, 0.1, LearnedConfig(max_length=1024)),
    "llama_2_7b": ("silu", True, "pre", 1e-5, 0.0, 0.0, RotaryConfig(base=10_000.0)),
    "llama_3_8b": ("silu", True, "pre", 1e-5, 0.0, 0.0, RotaryConfig(base=500_000.0)),
    "bert_base": ("gelu", False, "post", 1e-12, 0.1, 0.1, LearnedConfig(max_length=512)),
    "vit_b_16": ("gelu", False, "pre", 1e-12, 0.0, 0.0, LearnedConfig(max_length=197)),
    "t5_small": ("relu", False, "pre", 1e-6, 0.1, 0.1, RelativeConfig()),
    "t5_v1_1_small": ("gelu_tanh", True, "pre", 1e-6, 0.1, 0.1, RelativeConfig()),
}


@pytest.mark.parametrize("preset", PUBLISHED_DETAILS)
def test_descendants_compute_as_published(preset: str) -> None:
    config = getattr(presets, preset)()
    for stack in (config.encoder, config.decoder) if hasattr(config, "encoder") else (config.stack,):
        shape = (stack.activation, stack.gated, stack.norm_order, stack.norm_eps)
        assert (*shape, stack.dropout, stack.attention_dropout, stack.positions) == PUBLISHED_DETAILS[preset]
        assert stack.scale == (1.0 if preset.startswith("t5") else None)


# Vocabulary, start and end tokens, heads of attention, and where dropout is applied besides.
PUBLISHED_TOKENS = {
    "gpt2": (50_257, 50_256, (50_256,), 12, 0.0, 0.0),
    "llama_2_7b": (32_000, 1, (2,), 32, 0.0, 0.0),
    "llama_3_8b": (128_256, 128_000, (128_001,), 32, 0.0, 0.0),
    "t5_small": (32_128, 0, 1, 8, 0.1, 0.1),
}


@pytest.mark.parametrize("preset", PUBLISHED_TOKENS)
def test_descendants_have_the_published_tokens_and_heads(preset: str) -> None:
    config = getattr(presets, preset)()
    stack, ends = (config.encoder, config.end_id) if preset.startswith("t5") else (config.stack, config.end_ids)
    facts = (config.vocab, config.start_id, ends, stack.heads, stack.activation_dropout, stack.output_dropout)
    assert facts == PUBLISHED_TOKENS[preset]


def test_t5_scales_the_output_and_not_the_embeddings() -> None:
    config = presets.t5_small()
    assert (config.scale_embeddings, config.scale_output, config.tie_output) == (False, True, True)
    later = presets.t5_v1_1_small()
    assert (later.scale_embeddings, later.scale_output, later.tie_output) == (False, False, False)
    bert = presets.bert_base()
    assert (bert.segments, bert.masked_lm, bert.pooler, presets.BERT.heads) == (2, True, True, 12)


def test_lstms_have_about_as_many_parameters_as_transformers() -> None:
    for size, width, dropout in (("tiny", 128, 0.3), ("small", 256, 0.1), ("base", 704, 0.1), ("big", 1408, 0.3)):
        for name, attention, feeding in (("lstm", "additive", True), ("lstm-no-attention", "none", False)):
            config = presets.ARCHS[name](8_000, size)
            assert {config.encoder.width, config.decoder.width} == {width}
            assert {config.encoder.dropout, config.decoder.dropout} == {dropout}
            assert (config.decoder.attention, config.decoder.input_feeding) == (attention, feeding)
        assert presets.ARCHS["transformer"](8_000, size) == getattr(presets, size)(8_000)
    assert presets.lstm(9) == presets.lstm(9, "small")
    assert presets.lstm_no_attention(9) == presets.lstm_no_attention(9, "small")


def test_convolutions_have_about_as_many_parameters_as_transformers() -> None:
    sizes = {"tiny": (5, 128, 0.3), "small": (5, 256, 0.1), "base": (10, 512, 0.1), "big": (10, 1024, 0.3)}
    for size, expected in sizes.items():
        config = presets.ARCHS["conv"](8_000, size)
        for stack in (config.encoder, config.decoder):
            assert (stack.layers, stack.width, stack.dropout) == expected


# ---- repr ------------------------------------------------------------------------------------------------------------

TINY = presets.tiny(300)
CONFIGS = {
    "presets.base(vocab=8000)": presets.base(8_000),
    "presets.tiny(vocab=300) with encoder.dropout=0.0, decoder.dropout=0.0": presets.replace_stacks(TINY, dropout=0.0),
    "presets.tiny(vocab=300) with tie_output=False": replace(TINY, tie_output=False),
    "presets.base(vocab=300) with encoder.layers=2, encoder.heads=4, decoder.layers=2, decoder.heads=4": (
        presets.replace_stacks(presets.base(300), layers=2, heads=4)  # not an LSTM with two other stacks
    ),
    "presets.gpt2() with stack.layers=2": presets.replace_stacks(presets.gpt2(), layers=2),
    "presets.vit_b_16() with labels=('cat',)": presets.vit_b_16(("cat",)),
    "presets.base(vocab=300) with encoder.layers=2": replace(presets.base(300), encoder=StackConfig(layers=2)),
    "presets.t5_small() with vocab=2": replace(presets.t5_small(), vocab=2),
}


@pytest.mark.parametrize("text", CONFIGS)
def test_configs_are_written_as_changes_of_a_preset(text: str) -> None:
    assert repr(CONFIGS[text]) == text


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_written_by_name(name: str) -> None:
    config = PRESETS[name](*([300] if "vocab" in signature(PRESETS[name]).parameters else []))
    assert repr(config).startswith(f"presets.{name}(")
