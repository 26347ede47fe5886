"""LLaMA: special cases of the comparison with `transformers`, file variants, and rejected folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.interop import llama, load, load_as
from attent.models import CausalConfig, CausalLM, build
from attent.models.presets import LLAMA
from attent.nn import LearnedConfig, LinearScaling, Llama3Scaling, RotaryConfig
from tests.interop.families import (
    ROPES,
    make_causal,
    make_llama_config,
    make_texts,
    run_causal,
    run_hf_causal,
    transformers,
)
from tests.interop.folders import assert_rejected, change_json, change_tensors, split_shards
from tests.interop.greedy import check_greedy
from tests.interop.parity import same_bits, worst

STACK = replace(LLAMA, layers=1, width=8, heads=2, ffn_width=12)
CONFIG = CausalConfig(vocab=13, stack=STACK, tie_output=False, start_id=1, end_ids=(2,))
LLAMA_3_1 = {  # the published config, at toy size
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 8, 9],
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 28,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 31,
}
LLAMA_1 = {  # the first conversions to transformers
    "architectures": ["LLaMAForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 28,
    "initializer_range": 0.02,
    "max_sequence_length": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": -1,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 31,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid LLaMA folder that a test may damage."""
    llama.save(build(CONFIG), tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("case", range(4))
def test_greedy_search_matches_transformers(case: int, tmp_path: Path) -> None:
    changes = {"vocab_size": 53, "tie_word_embeddings": False}
    config = make_llama_config(case, **changes, rope_parameters=dict(ROPES[case + 1]))
    check_greedy(config, case, tmp_path, rows=50, steps=12)


def test_the_test_cases_cover_every_kind() -> None:
    quick = [make_llama_config(case) for case in range(12)]
    kinds = {config.rope_parameters["rope_type"] for config in quick}
    assert kinds == {"default", "linear", "llama3"}
    assert any(config.num_key_value_heads == 1 < config.num_attention_heads for config in quick)
    assert {config.tie_word_embeddings for config in quick} == {True, False}


# File variants.


@pytest.mark.parametrize("published", [LLAMA_3_1, LLAMA_1], ids=["3.1", "1"])
def test_a_published_folder_loads(published: dict[str, Any], tmp_path: Path) -> None:
    theirs = make_causal(transformers.LlamaConfig.from_dict(published), 0)
    theirs.generation_config.pad_token_id = None
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    speeds = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)}
    change_tensors(tmp_path, lambda tensors: tensors | speeds)
    (tmp_path / "config.json").write_text(json.dumps(published))
    ours, texts = load_as(tmp_path, CausalLM), make_texts(theirs.config, 0)
    assert ours.config.end_ids == ((2, 8, 9) if published is LLAMA_3_1 else (1,))
    assert worst(run_causal(ours, texts), run_hf_causal(theirs, texts)) < 1e-10


def test_rope_settings_are_read_in_either_spelling(folder: Path) -> None:
    rope = {"type": "linear", "factor": 4.0}
    change_json(folder / "config.json", rope_theta=50_000_000, rope_scaling=rope)
    older = load_as(folder, CausalLM).config.stack.positions
    assert older == RotaryConfig(base=5e7, scaling=LinearScaling(factor=4.0), trained_length=llama.DEFAULT_LENGTH)
    change_json(folder / "config.json", rope_theta=None, rope_scaling=None, rope_parameters=rope | {"rope_theta": 5e7})
    assert load_as(folder, CausalLM).config.stack.positions == older
    change_json(folder / "config.json", rope_theta=10_000.0)  # `rope_parameters` takes precedence
    assert load_as(folder, CausalLM).config.stack.positions == older


def test_trained_length_survives_a_round_trip(folder: Path, tmp_path: Path) -> None:
    change_json(folder / "config.json", max_position_embeddings=77)
    model = load_as(folder, CausalLM)
    assert getattr(model.config.stack.positions, "trained_length", None) == 77
    assert model(torch.zeros(1, 90, dtype=torch.int64)).shape[1] == 90
    llama.save(model, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 77


def test_errors_in_generation_config_name_that_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": ["a"]}')
    assert_rejected(folder, "generation_config.json: `eos_token_id` must be")
    change_json(folder / "config.json", hidden_size="8")
    assert_rejected(folder, f"{folder}/config.json: `hidden_size` must be an integer")


def test_original_length_defaults_to_that_of_the_model(folder: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    change_json(folder / "config.json", rope_scaling=rope, max_position_embeddings=77)
    positions = load_as(folder, CausalLM).config.stack.positions
    assert isinstance(positions, RotaryConfig)
    assert positions.scaling == Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_length=77)
    inside = rope | {"original_max_position_embeddings": 33}
    for changes, length in (
        ({"original_max_position_embeddings": 22}, 22),
        ({"original_max_position_embeddings": None}, 33),
    ):
        change_json(
            folder / "config.json", rope_scaling=inside, **changes
        )  # as in transformers, the top-level key takes precedence
        assert load_as(folder, CausalLM).config.stack.positions == replace(
            positions,
            scaling=Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_length=length),
        )


def test_weights_without_a_head_load_if_the_output_is_tied(tmp_path: Path) -> None:
    llama.save(build(replace(CONFIG, tie_output=True)), tmp_path / "tied")
    expected = load(tmp_path / "tied")
    change_tensors(tmp_path / "tied", lambda tensors: {k.removeprefix("model."): v for k, v in tensors.items()})
    assert same_bits(load(tmp_path / "tied"), expected)


# Rejected folders.


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
def test_unsupported_rope_scaling_is_rejected(kind: str, folder: Path) -> None:
    change_json(folder / "config.json", rope_scaling={"rope_type": kind, "factor": 2.0})
    assert_rejected(folder, f"config.json: `rope_type` must be default, linear or llama3, but is `{kind}`")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"attention_bias": True},
            "`attention_bias` must be as `mlp_bias`, False, but is True; a model with biases in s",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "`rope_type` linear must come with `factor`, but does not"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "`rope_type` llama3 must come with `low_freq_factor`"),
        ({"rope_scaling": {"type": "default", "mscale": 1.0}}, "unknown key `rope_scaling.mscale`"),
        ({"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"type": "default"}}, "but has both; remove one"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "`partial_rotary_factor` must be 1 for a LLaMA model"),
        ({"sliding_window": 4096}, "`sliding_window` must be None for a LLaMA model that attent can compute, but is"),
        ({"num_key_value_heads": 3}, "`num_attention_heads` must be a multiple of `num_key_value_heads`=3, but is 2"),
        ({"rope_theta": -1.0}, "config.json: `rope_theta` must be more than 0"),
        ({"head_dim": 3}, "config.json: rotary positions rotate pairs of features: `head_dim` must be even"),
        ({"num_hidden_layers": 90}, "holds 12 tensors, too few for `num_hidden_layers`=90"),
        ({"hidden_act": "relu2"}, "`hidden_act` must be one of"),
        ({"model_type": "mistral"}, "model_type `mistral` is not supported; supported: bart, bert, gpt2, llama"),
        (
            {"intermediate_size": 13},
            "wrong shape: `model.layers.0.mlp.gate_proj.weight` must be [13, 8], but is [12, 8]",
        ),
    ],
)
def test_unsupported_config_is_rejected(changes: dict[str, Any], words: str, folder: Path) -> None:
    change_json(folder / "config.json", **changes)
    assert_rejected(folder, words)


def test_a_missing_shard_is_reported_before_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_shards(folder, 3)
    monkeypatch.setattr("attent.interop.hf_folder.LazyTensor.read", lambda self: pytest.fail("read too early"))
    (folder / "model-00002-of-00003.safetensors").rename(folder / "elsewhere")
    assert_rejected(folder, "model-00002-of-00003.safetensors: is missing, but model.safetensors.index.json names it")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t | {"model.norm.weight": torch.zeros(9)},
            "wrong shape: `model.norm.weight` must be [8], but is [9]",
        ),
        (lambda t: t | {"model.layers.0.self_attn.q_norm.weight": torch.zeros(4)}, "not known to the model: `model.la"),
        (lambda t: {k: v for k, v in t.items() if k != llama.OUTPUT}, "missing: `lm_head.weight`"),
    ],
)
def test_invalid_tensors_are_reported_before_reading(
    change: Callable[[Any], Any], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_tensors(folder, change)
    monkeypatch.setattr("attent.interop.hf_folder.LazyTensor.read", lambda self: pytest.fail("read too early"))
    assert_rejected(folder, words)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(CONFIG, stack=replace(STACK, **{name: value})), f"stack.{name}")
        for name, value in {
            "remaining_heads": (((0,),),),
            "gated": False,
            "window": (4, 0),
            "positions": LearnedConfig(max_length=16),
            "norm": "layer",
            "norm_order": "post",
            "scale": 0.3,
            "scale_by_layer": True,
            "embedding_norm": True,
            "dropout": 0.1,
            "embedding_dropout": 0.1,
            "output_dropout": 0.1,
            "activation_dropout": 0.1,
        }.items()
    ]
    + [
        (replace(CONFIG, stack=replace(STACK, positions=RotaryConfig(order="interleaved"))), "stack.positions"),
        (replace(CONFIG, output_bias=True), "output_bias"),
        (replace(CONFIG, scale_embeddings=True), "scale_embeddings"),
        (replace(CONFIG, stack=replace(STACK, width=9, head_width=4)), "stack.width"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_without_llama_equivalent_is_not_saved(config: CausalConfig, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` must be .* for a LLaMA model, but is .*keep it as an attent"):
        llama.save(build(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()
