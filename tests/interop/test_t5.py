"""T5: special cases of the comparison with `transformers`, file variants, and rejected folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attent.interop import load, t5
from attent.models import Seq2SeqConfig, build, presets
from attent.models.config import mirror_encoder
from attent.nn import RelativeConfig, SinusoidalConfig, StackConfig
from tests.greedy import greedy_search
from tests.interop.families import (
    T5_OUTPUTS,
    make_t5,
    make_t5_batch,
    run_hf_seq2seq,
    run_seq2seq,
    transformers,
)
from tests.interop.folders import assert_rejected, change_json, change_tensors
from tests.interop.parity import exact, randomise, same_bits, until, worst

STACK = StackConfig(
    layers=2,
    width=12,
    heads=3,
    head_width=5,
    ffn_width=20,
    positions=RelativeConfig(buckets=8, max_distance=20),
    norm="rms",
    norm_order="pre",
    norm_eps=1e-6,
    bias=False,
    scale=1.0,
    attention_dropout=0.1,
    activation_dropout=0.1,
    output_dropout=0.1,
)
CONFIG = Seq2SeqConfig(
    vocab=23,
    encoder=STACK,
    decoder=mirror_encoder(STACK),
    scale_embeddings=False,
    scale_output=True,
    start_id=0,
    end_id=1,
)


@pytest.mark.parametrize("case", range(4))
def test_output_scaling_follows_tensors_and_config(case: int, tmp_path: Path) -> None:
    make_t5(case).save_pretrained(tmp_path)
    config = load(tmp_path).config
    assert (config.tie_output, config.scale_output) == T5_OUTPUTS[case]


def load_with_transformers(folder: Path) -> Any:
    """Load a saved folder with `transformers`; no tensor may be missing or unexpected."""
    model, info = transformers.T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("case", [0, 1, 3, 4, 5])
def test_greedy_search_matches_transformers(case: int, tmp_path: Path) -> None:
    """Decode 40 prompts step by step with a cache."""
    theirs = make_t5(case)
    with torch.no_grad():
        for block in theirs.decoder.block:
            block.layer[1].EncDecAttention.o.weight *= 5  # so that the output depends on the source
    theirs.save_pretrained(tmp_path)
    ours, batch = load(tmp_path), make_t5_batch(theirs.config, case, rows=40)
    expected = theirs.generate(
        batch.source,
        attention_mask=batch.source_mask.long(),
        do_sample=False,
        max_length=13,
        suppress_tokens=[theirs.config.decoder_start_token_id],  # attent never generates the start token
    )[:, 1:]
    start, end = ours.config.start_id, ours.config.end_id
    got = greedy_search(ours, batch.source, batch.source_lengths, start_id=start, end_id=end, max_length=12)
    assert len({tuple(row) for row in expected.tolist()}) > 10
    assert [until(row, end) for row in got.tolist()] == [until(row, end) for row in expected.tolist()]


# File variants.


def test_a_file_of_2020_loads(tmp_path: Path) -> None:
    """Copies of the embedding, and an unused bias of the first cross-attention."""
    make_t5(0).save_pretrained(tmp_path)
    expected = load(tmp_path)
    left_over = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def to_old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = dict.fromkeys([t5.SOURCE, t5.TARGET, t5.OUTPUT], tensors[t5.SHARED])
        return tensors | copies | {left_over: torch.randn(32, 8).double()}

    change_tensors(tmp_path, to_old_names)
    stored = json.loads((tmp_path / "config.json").read_text())
    new = ("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "tie_word_embeddings", "classifier_dropout")
    old = {key: value for key, value in stored.items() if key not in new}
    old |= {"n_positions": 512, "architectures": ["T5WithLMHeadModel"], "task_specific_params": {}, "output_past": True}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert same_bits(load(tmp_path), expected)


def test_an_untied_output_is_not_scaled(tmp_path: Path) -> None:
    """The config of flan-t5, which has no `scale_decoder_outputs`."""
    theirs = make_t5(1)
    theirs.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["scale_decoder_outputs"]
    (tmp_path / "config.json").write_text(json.dumps(stored | {"tie_word_embeddings": False}))
    ours, batch = load(tmp_path), make_t5_batch(theirs.config, 1)
    assert (ours.config.tie_output, ours.config.scale_output) == (False, False)
    with exact(theirs):
        assert worst(run_seq2seq(ours, batch)[batch.real], run_hf_seq2seq(theirs, batch)[batch.real]) < 1e-10


def test_tied_tensors_load_under_any_name(tmp_path: Path) -> None:
    make_t5(0).save_pretrained(tmp_path)
    expected, tensors = load(tmp_path), load_file(tmp_path / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if name != t5.SHARED}
    for keep in ([t5.SOURCE], [t5.OUTPUT], [t5.TARGET, t5.OUTPUT]):
        change_tensors(tmp_path, lambda _, keep=keep: rest | dict.fromkeys(keep, tensors[t5.SHARED]))
        assert same_bits(load(tmp_path), expected)


def test_mt5_is_supported(tmp_path: Path) -> None:
    """mT5 has the architecture of T5 1.1, and never scales its output, whether tied or not."""
    config = transformers.MT5Config(
        vocab_size=23, d_model=12, d_kv=5, d_ff=20, num_layers=1, num_heads=3, feed_forward_proj="gated-gelu"
    )
    theirs = transformers.MT5ForConditionalGeneration(config).double().eval()
    randomise(theirs, 0)
    theirs.save_pretrained(tmp_path)
    ours, batch = t5.load(tmp_path), make_t5_batch(config, 0)
    with exact(theirs):
        assert worst(run_seq2seq(ours, batch)[batch.real], run_hf_seq2seq(theirs, batch)[batch.real]) < 1e-10


@pytest.mark.parametrize(
    ("preset", "facts"),
    [
        (presets.t5_small(), t5.T5Keys()),
        (
            presets.t5_v1_1_base(),
            t5.T5Keys(
                num_layers=12,
                d_model=768,
                num_heads=12,
                d_ff=2048,
                feed_forward_proj="gated-gelu",
                tie_word_embeddings=False,
            ),
        ),
    ],
)
def test_presets_match_published_configs(preset: Seq2SeqConfig, facts: t5.T5Keys) -> None:
    assert t5.to_config(facts, tied=facts.tie_word_embeddings, where=Path("config.json")) == preset


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_every_feedforward_kind_is_saved(activation: Any, gated: bool, tmp_path: Path) -> None:
    stack = replace(STACK, layers=1, activation=activation, gated=gated)
    ours = build(replace(CONFIG, encoder=stack, decoder=mirror_encoder(stack))).double().eval()
    t5.save(ours, tmp_path / "out")
    assert same_bits(load(tmp_path / "out"), ours)
    theirs = load_with_transformers(tmp_path / "out")
    batch = make_t5_batch(theirs.config, 0)
    with exact(theirs):
        assert worst(run_hf_seq2seq(theirs, batch)[batch.real], run_seq2seq(ours, batch)[batch.real]) < 1e-10


# Error messages of rejected folders.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    t5.save(build(CONFIG), tmp_path / "t5")
    return tmp_path / "t5"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relative_attention_num_buckets": 6}, ["`relative_attention_num_buckets` must be a multiple of 4"]),
        ({"relative_attention_max_distance": 8}, ["`relative_attention_max_distance` must be more than", "=8", "is 8"]),
        ({"feed_forward_proj": "gated-quick_gelu"}, ["`feed_forward_proj` must be one of", "`gated-quick_gelu`"]),
        ({"feed_forward_proj": "double-gelu"}, ["`feed_forward_proj` must be one of", "`double-gelu`"]),
        ({"dense_act_fn": "gelu"}, ["`dense_act_fn` must be 'relu', as `feed_forward_proj`"]),
        ({"is_gated_act": True}, ["`is_gated_act` must be False"]),
        ({"hidden_size": 13}, ["`hidden_size` must equal `d_model`=12"]),
        ({"architectures": ["T5EncoderModel"]}, ["`architectures` must be ['T5ForConditionalGeneration']"]),
        ({"layer_scale": 0.1}, ["`layer_scale` is not a key of a T5 config"]),
        ({"eos_token_id": [1, 2]}, ["`eos_token_id` must be"]),
        ({"d_ff": 21}, ["encoder.block.0.layer.1.DenseReluDense.wo.weight", "[12, 21]", "[12, 20]"]),
        ({"num_decoder_layers": 3}, ["missing", "decoder.block.2.layer.0.layer_norm.weight"]),
    ],
)
def test_unsupported_config_is_rejected(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    change_json(folder / "config.json", **changes)
    assert_rejected(folder, *words)


def test_different_embeddings_are_rejected(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors | {t5.TARGET: torch.zeros(23, 12)})
    assert_rejected(folder, "`shared.weight` and `decoder.embed_tokens.weight` must be equal")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"norm_order": "post"}, "encoder.norm_order"),
        ({"positions": SinusoidalConfig()}, "encoder.positions"),
        ({"scale": None}, "encoder.scale"),
        ({"bias": True}, "encoder.bias"),
        ({"attention_dropout": 0.0}, "encoder.attention_dropout"),
    ],
)
def test_a_stack_without_t5_equivalent_is_not_saved(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    stack = replace(STACK, **changes)
    with pytest.raises(ValueError, match=rf"`{field}` must be .* for a T5 model"):
        t5.save(build(replace(CONFIG, encoder=stack, decoder=mirror_encoder(stack))), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(CONFIG, share_embeddings=False), "share_embeddings"),
        (replace(CONFIG, output_bias=True), "output_bias"),
        (replace(CONFIG, output_transform=True), "output_transform"),
        (replace(CONFIG, scale_embeddings=True), "scale_embeddings"),
        (replace(CONFIG, decoder=replace(CONFIG.decoder, heads=2)), "decoder.heads"),
    ],
)
def test_a_config_without_t5_equivalent_is_not_saved(config: Seq2SeqConfig, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` must be .* for a T5 model"):
        t5.save(build(config), tmp_path / "out")
