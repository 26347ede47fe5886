"""GPT-2: special cases of the comparison with `transformers`, file variants, and rejected folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.interop import gpt2, load, load_as
from attent.models import CausalConfig, CausalLM, build
from attent.models.presets import GPT2
from attent.nn import LearnedConfig, RotaryConfig
from tests.interop.families import make_causal, make_gpt2_config, make_texts, run_causal, run_hf_causal, transformers
from tests.interop.folders import assert_rejected, change_json, change_tensors
from tests.interop.greedy import check_greedy
from tests.interop.parity import same_bits, worst

STACK = replace(GPT2, layers=1, width=8, heads=2, ffn_width=12, positions=LearnedConfig(max_length=16))
CONFIG = CausalConfig(vocab=13, stack=STACK, start_id=1, end_ids=(2,))
FIRST = {  # the keys of the first published config, at toy size
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 30,
    "embd_pdrop": 0.1,
    "eos_token_id": 30,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 16,
    "n_embd": 12,
    "n_head": 3,
    "n_layer": 2,
    "n_positions": 16,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 31,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid GPT-2 folder that a test may damage."""
    gpt2.save(build(CONFIG), tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.mark.parametrize("case", range(4))
def test_greedy_search_matches_transformers(case: int, tmp_path: Path) -> None:
    changes = {"n_positions": 30, "vocab_size": 53, "n_embd": 24, "tie_word_embeddings": False}
    check_greedy(make_gpt2_config(case, **changes), case, tmp_path, rows=50, steps=12)


@pytest.mark.parametrize("scaled", [True, False])
def test_upcast_attention_gives_the_same_numbers(scaled: bool, tmp_path: Path) -> None:
    """`reorder_and_upcast_attn` computes in another order and in float32, so compare in float32."""
    config = make_gpt2_config(0, reorder_and_upcast_attn=True, scale_attn_weights=scaled, attn_implementation="eager")
    theirs, texts = make_causal(config, 0).float(), make_texts(config, 0)
    theirs.save_pretrained(tmp_path)
    assert worst(run_causal(load_as(tmp_path, CausalLM), texts), run_hf_causal(theirs, texts)) < 1e-5


# File variants.


def test_the_first_published_format_loads(tmp_path: Path) -> None:
    """Names without the prefix `transformer.`, and stored causal masks."""
    theirs = make_causal(transformers.GPT2Config.from_dict(FIRST), 0)
    theirs.save_pretrained(tmp_path)
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8).tril() for i in range(2)}
    change_tensors(tmp_path, lambda tensors: {k.removeprefix("transformer."): tensors[k] for k in tensors} | masks)
    (tmp_path / "config.json").write_text(json.dumps(FIRST))
    (tmp_path / "generation_config.json").unlink()
    ours, texts = load_as(tmp_path, CausalLM), make_texts(theirs.config, 0)
    assert (ours.config.start_id, ours.config.end_ids) == (30, (30,))
    assert worst(run_causal(ours, texts), run_hf_causal(theirs, texts)) < 1e-10


def test_a_tied_output_may_be_stored_twice(folder: Path) -> None:
    expected = load(folder)
    change_tensors(folder, lambda tensors: tensors | {gpt2.OUTPUT: tensors[gpt2.EMBEDDING]})
    ours = load_as(folder, CausalLM)
    assert same_bits(ours, expected)
    assert ours.output.weight is ours.embedding.weight


def test_end_ids_of_generation_config_take_precedence(folder: Path) -> None:
    change_json(folder / "config.json", eos_token_id=2)
    change_json(folder / "generation_config.json", eos_token_id=[2, 5])
    assert load(folder).config.end_ids == (2, 5)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float64])
def test_a_folder_is_loaded_in_another_precision(precision: torch.dtype, folder: Path) -> None:
    assert same_bits(load(folder, dtype=precision), load(folder).to(precision))


def test_mixed_precisions_are_converted_to_one(folder: Path) -> None:
    norms = ("ln_1.weight", "ln_f.weight")
    change_tensors(folder, lambda t: {k: v if k.endswith(norms) else v.bfloat16() for k, v in t.items()})
    assert next(load(folder).parameters()).dtype == torch.float32  # config.json says so
    change_json(folder / "config.json", dtype=None, torch_dtype="bfloat16")
    assert {weight.dtype for weight in load(folder).parameters()} == {torch.bfloat16}
    change_json(folder / "config.json", dtype=None, torch_dtype=None)
    assert_rejected(folder, "; save the model in one precision first, or load it with a `dtype` of your choice")
    assert {weight.dtype for weight in load(folder, dtype=torch.float32).parameters()} == {torch.float32}


# Rejected folders.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"add_cross_attention": True}, "`add_cross_attention` must be False for a GPT-2 model that attent can comp"),
        ({"architectures": ["GPT2ForTokenClassification"]}, "`architectures` must be ['GPT2LMHeadModel'] for a GPT-2"),
        ({"activation_function": "quick_gelu"}, "`activation_function` must be one of 'relu'"),
        ({"n_special": 1}, "`n_special` must be 0 for a GPT-2 model that attent can compute, but is 1"),
        ({"n_ctx": 17}, "`n_ctx` must equal `n_positions`=16, but is 17"),
        ({"n_head": 3}, "config.json: `n_embd` must be a multiple of `n_head`=3, but is 8; change one"),
        ({"n_layer": -1}, "config.json: `n_layer` must be a number from 1"),
        ({"resid_pdrop": 1.5}, "config.json: `resid_pdrop` must be at least 0 and less than 1"),
        ({"n_positions": 0}, "config.json: `n_positions` must be"),
        ({"n_layer": 400}, "model.safetensors: holds 16 tensors, too few for `n_layer`=400"),
        ({"rope_theta": 1e4}, "`rope_theta` is not a key of a GPT-2 config that attent knows, and might change"),
        (
            {"auto_map": {"AutoModel": "evil.Model"}},
            "`auto_map` is not a key of a GPT-2 config that attent knows (it n",
        ),
        ({"quantization_config": {}}, "attent knows (quantized weights are not supported"),
        ({"n_inner": 11}, "wrong shape: `transformer.h.0.mlp.c_fc.weight` must be [8, 11], but is [8, 12]"),
        ({"n_positions": 20}, "wrong shape: `transformer.wpe.weight` must be [20, 8], but is [16, 8]"),
        ({"tie_word_embeddings": False}, "model.safetensors: missing: `lm_head.weight`"),
    ],
)
def test_unsupported_config_is_rejected(changes: dict[str, Any], words: str, folder: Path) -> None:
    change_json(folder / "config.json", **changes)
    assert_rejected(folder, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t | {gpt2.OUTPUT: torch.zeros(13, 8)},
            "`transformer.wte.weight` and `lm_head.weight` must be equal",
        ),
        (
            lambda t: t | {"transformer.h.0.crossattention.c_attn.bias": torch.zeros(3)},
            "not known to the model: `trans",
        ),
        (
            lambda t: {k: v for k, v in t.items() if k != gpt2.EMBEDDING},
            "missing: `transformer.wte.weight` or `lm_head",
        ),
        (lambda t: {k: v for k, v in t.items() if "ln_f" not in k}, "missing: `transformer.ln_f.weight`, `transform"),
        (lambda t: t | {"transformer.ln_f.bias": torch.zeros(8, dtype=torch.int8)}, "all tensors must be of one float"),
    ],
)
def test_invalid_tensors_are_rejected(change: Callable[[Any], Any], words: str, folder: Path) -> None:
    change_tensors(folder, change)
    assert_rejected(folder, words)


def test_an_invalid_dtype_is_rejected(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"`dtype` must be one of torch.float32, .*, but is torch.int8"):
        load(folder, dtype=torch.int8)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(CONFIG, stack=replace(STACK, **{name: value})), f"stack.{name}")
        for name, value in {
            "kv_heads": 1,
            "head_width": 6,
            "remaining_heads": (((0,),),),
            "gated": True,
            "window": (4, 0),
            "positions": RotaryConfig(),
            "norm": "rms",
            "norm_order": "post",
            "bias": False,
            "scale": 0.3,
            "embedding_norm": True,
            "output_dropout": 0.1,
            "activation_dropout": 0.1,
        }.items()
    ]
    + [
        (replace(CONFIG, output_bias=True), "output_bias"),
        (replace(CONFIG, scale_embeddings=True), "scale_embeddings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_without_gpt2_equivalent_is_not_saved(config: CausalConfig, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` must be .* for a GPT-2 model, but is .*keep it as an attent"):
        gpt2.save(build(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()
