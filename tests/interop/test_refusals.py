"""Error messages of `load` and `marian.save` for invalid folders and models."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attent.interop import hf_folder, llama, load, load_as, marian, t5
from attent.interop.hf_folder import to_json_bytes
from attent.models import Seq2Seq, Seq2SeqConfig, build
from attent.models.config import mirror_encoder
from attent.nn import AlibiConfig, AudioConfig, ImageConfig, LearnedConfig, RotaryConfig, StackConfig
from attent.storage.errors import FolderError
from tests.interop.folders import assert_rejected, change_json, change_tensors

STACK = StackConfig(layers=1, width=8, heads=2, ffn_width=12)
CONFIG = Seq2SeqConfig(vocab=13, encoder=STACK, decoder=mirror_encoder(STACK), output_bias=True)
Q_PROJ = "model.encoder.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid Marian folder that a test may damage."""
    marian.save(build(CONFIG), tmp_path / "marian")
    return tmp_path / "marian"


# Folders.


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert_rejected(
        tmp_path / "no", "must be a model folder, but does not exist; give the folder that holds config.json"
    )


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    assert_rejected(tmp_path / "model.bin", "must be a model folder, but is a file")


def test_a_path_in_a_folder_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    advice = "give the folder that holds config.json, or runs/en-dee@main for a model on the Hugging Face hub"
    assert_rejected("runs/en-dee", f"does not exist; {advice}")


def test_a_model_with_another_source(tmp_path: Path) -> None:
    """The message names the command for it."""
    tokens = replace(CONFIG, share_embeddings=False)
    for name, source in (("text", None), ("speech", AudioConfig()), ("caption", ImageConfig())):
        build(replace(tokens, frontend=source)).save(tmp_path / name)
    assert load_as(tmp_path / "text", Seq2Seq).config.frontend is None
    assert isinstance(load_as(tmp_path / "speech", Seq2Seq, frontend=AudioConfig), Seq2Seq)
    with pytest.raises(FolderError, match=r"must be a translator .*, but is a speech model; .* `attent transcribe`"):
        load_as(tmp_path / "speech", Seq2Seq)
    with pytest.raises(FolderError, match=r"must be a speech model, but is a translator .* `attent translate`"):
        load_as(tmp_path / "text", Seq2Seq, frontend=AudioConfig)
    with pytest.raises(FolderError, match=r"must be a speech model, but is a caption model; .* `attent caption`"):
        load_as(tmp_path / "caption", Seq2Seq, frontend=AudioConfig)


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert_rejected(tmp_path, "must hold config.json, but does not; is it a model folder?")


def test_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{'model_type': 'marian'}")
    assert_rejected(folder, "config.json: is not valid JSON")


def test_a_config_without_model_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert_rejected(folder, 'must have "format": "attent" or a `model_type`, but has neither')


@pytest.mark.parametrize("model_type", ["mistral", "xglm", "files", "../t5"])
def test_another_family(model_type: str, folder: Path) -> None:
    change_json(folder / "config.json", model_type=model_type)
    families = "bart, bert, gpt2, llama, m2m_100, marian, mbart, mt5, t5, vit, vision-encoder-decoder, whisper"
    words = f"is not supported; supported: {families}"
    assert_rejected(folder, f"config.json: model_type `{model_type}` {words}")


def test_a_model_type_of_the_wrong_type(folder: Path) -> None:
    change_json(folder / "config.json", model_type=["marian"])
    assert_rejected(folder, "model_type ['marian'] is not supported")


# Settings.


def test_an_unknown_key(folder: Path) -> None:
    change_json(folder / "config.json", rope_theta=10000.0)
    assert_rejected(
        folder,
        "`rope_theta` is not a key of a Marian config that attent knows, and might change the model's output",
    )


def test_an_unknown_key_close_to_a_known_one(folder: Path) -> None:
    change_json(folder / "config.json", scale_embeddings=True)
    assert_rejected(
        folder,
        "`scale_embeddings` is not a key of a Marian config that attent knows (did you mean `scale_emb",
    )


@pytest.mark.parametrize("key", ["auto_map", "quantization_config"])
def test_code_and_quantisation(key: str, folder: Path) -> None:
    change_json(folder / "config.json", **{key: {"AutoModel": "modeling.Evil"}})
    why = {"auto_map": "it names code of the folder", "quantization_config": "quan"}
    assert_rejected(folder, f"`{key}` is not a key of a Marian config that attent knows ({why[key]}")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("normalize_before", True, "False"),
        ("normalize_embedding", True, "False"),
        ("add_final_layer_norm", True, "False"),
        ("static_position_embeddings", False, "True"),
        ("is_encoder_decoder", False, "True"),
        ("is_decoder", True, "False"),
        ("encoder_layerdrop", 0.1, "0"),
        ("decoder_layerdrop", False, "0"),
        ("pruned_heads", {"0": [1]}, "{}"),
        ("architectures", ["MarianForCausalLM"], "['MarianMTModel']"),
    ],
)
def test_an_unsupported_value(key: str, value: object, expected: str, folder: Path) -> None:
    change_json(folder / "config.json", **{key: value})
    assert_rejected(
        folder,
        f"config.json: `{key}` must be {expected} for a Marian model that attent can compute, but is {value}",
    )


def test_an_unsupported_activation(folder: Path) -> None:
    change_json(folder / "config.json", activation_function="quick_gelu")
    assert_rejected(folder, "`activation_function` must be")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("d_model", "8"),
        ("vocab_size", 13.5),
        ("scale_embedding", 1),
        ("dropout", None),
        ("encoder_layers", True),
    ],
)
def test_a_value_of_the_wrong_type(key: str, value: object, folder: Path) -> None:
    change_json(folder / "config.json", **{key: value})
    assert_rejected(folder, f"`{key}` must be")


def test_a_missing_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["d_model"]
    (folder / "config.json").write_text(json.dumps(config))
    assert_rejected(folder, "config.json: missing key `d_model`")


def test_two_names_for_one_size_that_disagree(folder: Path) -> None:
    change_json(folder / "config.json", num_hidden_layers=6)
    assert_rejected(folder, "`num_hidden_layers` must equal `encoder_layers`=1, but is 6; find out which one is true")


def test_heads_that_do_not_fit(folder: Path) -> None:
    change_json(folder / "config.json", encoder_attention_heads=3)
    assert_rejected(
        folder, "config.json: `d_model` must be a multiple of `encoder_attention_heads`=3, but is 8; change one"
    )
    change_json(folder / "config.json", encoder_attention_heads=2, decoder_attention_heads=3)
    assert_rejected(folder, "config.json: `d_model` must be a multiple of `decoder_attention_heads`=3, but is 8")


@pytest.mark.parametrize("layers", [-1, 0, 2**20])
def test_an_impossible_number_of_layers(layers: int, folder: Path) -> None:
    change_json(folder / "config.json", encoder_layers=layers)
    assert_rejected(
        folder, "too few for `encoder_layers`" if layers > 0 else "`encoder_layers` must be a number from 1"
    )


def test_layers_may_be_as_many_as_tensors(folder: Path) -> None:
    count = len(load_file(folder / "model.safetensors"))
    change_json(folder / "config.json", encoder_layers=count)
    assert_rejected(folder, "missing")
    change_json(folder / "config.json", encoder_layers=count + 1)
    assert_rejected(folder, f"holds {count} tensors, too few for `encoder_layers`={count + 1}")


def test_an_impossible_vocabulary_size(folder: Path) -> None:
    change_json(folder / "config.json", vocab_size=2**24)
    assert_rejected(folder, "wrong shape")
    change_json(folder / "config.json", vocab_size=10**30)
    assert_rejected(folder, "config.json: `vocab_size` must be at most 16777216, but is 1e+30")


def test_tokens_on_which_two_files_disagree(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=5)
    assert_rejected(folder, "generation_config.json: `eos_token_id` must be that of config.json, 2, but is 5")


def test_several_ends(folder: Path) -> None:
    change_json(folder / "config.json", eos_token_id=[2, 5])
    (folder / "generation_config.json").unlink()
    assert_rejected(folder, "`eos_token_id` must be one token id, the one that ends a sentence, but is (2, 5)")


def test_no_start(folder: Path) -> None:
    change_json(folder / "config.json", decoder_start_token_id=None, pad_token_id=None)
    (folder / "generation_config.json").unlink()
    assert_rejected(folder, "missing key `decoder_start_token_id`")


def test_a_start_outside_the_vocabulary(folder: Path) -> None:
    change_json(folder / "config.json", decoder_start_token_id=13)
    (folder / "generation_config.json").unlink()
    assert_rejected(folder, "config.json: `decoder_start_token_id` must be a token id from 0 to 12, but is 13")


# Tensors.


def test_an_unknown_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors | {"model.encoder.layernorm_embedding.weight": torch.ones(8)})
    assert_rejected(folder, "not known to the model: `model.encoder.layernorm_embedding.weight`")


def test_a_missing_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: {name: x for name, x in tensors.items() if name != Q_PROJ})
    assert_rejected(folder, f"model.safetensors: missing: `{Q_PROJ}`")


def test_missing_embeddings(folder: Path) -> None:
    change_tensors(folder, lambda tensors: {name: x for name, x in tensors.items() if name != marian.SHARED})
    assert_rejected(
        folder,
        "missing: `model.shared.weight` or `model.encoder.embed_tokens.weight` or `model.decoder.embed_t",
    )


def test_a_wrong_shape(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors | {Q_PROJ: torch.zeros(8, 9)})
    assert_rejected(folder, f"wrong shape: `{Q_PROJ}` must be [8, 8], but is [8, 9]")


def test_a_bias_of_a_wrong_shape(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors | {marian.LOGITS_BIAS: torch.zeros(13)})
    assert_rejected(folder, "wrong shape: `final_logits_bias` must be [1, 13], but is [13]")


def test_tied_tensors_that_differ(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors | {marian.OUTPUT: torch.zeros(13, 8)})
    assert_rejected(
        folder,
        "`model.shared.weight` and `lm_head.weight` must be equal, as config.json ties them, but differ",
    )


def test_two_precisions(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors | {Q_PROJ: tensors[Q_PROJ].half()})
    change_json(folder / "config.json", dtype=None)
    assert_rejected(folder, "all tensors must be of one floating type")


def test_a_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_rejected(folder, "model.safetensors: is not valid safetensors")


@pytest.mark.parametrize("content", [b"", bytes(8), b"\xff" * 64])
def test_a_file_that_is_no_safetensors(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert_rejected(folder, "model.safetensors: is not safetensors")


@pytest.mark.parametrize("content", [b"\x80\x04\x95", b"PK\x03\x04" + bytes(100)])
def test_a_pickle_under_another_name(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert_rejected(folder, "model.safetensors: is a pickle or zip, which is never opened")


def test_only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_rejected(folder, "but holds only pytorch_model.bin: a pickle can run code and is never opened here")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_rejected(folder, "must hold model.safetensors (or model.safetensors.index.json), but does not")


# Shards.


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "a\\b.safetensors", "x.bin", ""],
)
def test_an_index_that_points_elsewhere(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert_rejected(folder, "must be the name of a .safetensors file in the same folder; do not trust this folder")


def test_a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    assert_rejected(folder, "b.safetensors: is missing, but model.safetensors.index.json names it")


def test_a_shard_without_a_tensor_of_the_model(folder: Path) -> None:
    change_tensors(folder, lambda tensors: {name: tensors[name] for name in tensors if name != Q_PROJ})
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q_PROJ: "b.safetensors"}}))
    assert_rejected(folder, f"missing: `{Q_PROJ}`")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {}}])
def test_an_index_without_a_map(index: dict[str, Any], folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_rejected(folder, "`weight_map` must map tensors to files")


# Saving.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positions", RotaryConfig()),
        ("positions", LearnedConfig()),
        ("positions", AlibiConfig()),
        ("norm_order", "pre"),
        ("norm", "rms"),
        ("norm_eps", 1e-6),
        ("window", (4, 0)),
        ("kv_heads", 1),
        ("head_width", 8),
        ("gated", True),
        ("bias", False),
        ("scale", 1.0),
        ("scale_by_layer", True),
        ("compatibility", "additive"),
        ("embedding_norm", True),
        ("embedding_dropout", 0.3),
        ("output_dropout", 0.1),
    ],
)
def test_a_config_without_marian_equivalent(field: str, value: object, tmp_path: Path) -> None:
    stack = replace(STACK, **{field: value})
    model = build(replace(CONFIG, encoder=stack, decoder=mirror_encoder(stack)))
    words = f"`encoder.{field}` must be"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}.* for a Marian model, but is .*keep it as an attent"):
        marian.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["scale_output", "output_transform"])
def test_output_options_without_marian_equivalent(field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^`{field}` must be False for a Marian model, but is True"):
        marian.save(build(replace(CONFIG, **{field: True})), tmp_path / "out")


@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "activation_dropout"])
def test_sides_that_differ_where_marian_has_one_value(field: str, tmp_path: Path) -> None:
    model = build(replace(CONFIG, decoder=replace(CONFIG.decoder, **{field: 0.25})))
    with pytest.raises(ValueError, match=f"^`decoder.{field}` must be that of the encoder, .*, but is 0.25"):
        marian.save(model, tmp_path / "out")


@pytest.mark.parametrize("pad", [-1, 13])
def test_a_pad_outside_the_vocabulary(pad: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"`pad` must be a token id, from 0 to 12, but is {pad}"):
        marian.save(build(CONFIG), tmp_path / "out", pad=pad)


def test_a_pad_that_ends_sentences(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`pad` must not be the token that ends a sentence, 2"):
        marian.save(build(CONFIG), tmp_path / "out", pad=2)


def test_a_nonempty_folder(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FolderError, match="exists already; give a new folder, or remove that one first"):
        marian.save(build(CONFIG), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_failed_save_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attent.storage.tensor_files.save_file", raise_disk_full)
    with pytest.raises(FolderError, match=r"could not be saved: the disk is full.*free some space"):
        marian.save(build(CONFIG), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_files_have_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    marian.save(build(CONFIG), tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_a_broken_tie_is_not_exported(tmp_path: Path) -> None:
    model = build(CONFIG)
    model.output.weight = torch.nn.Parameter(torch.randn_like(model.output.weight))
    with pytest.raises(FolderError, match=r"`output.weight` must be the same tensor as"):
        marian.save(model, tmp_path / "out")


def test_a_compiled_model_is_exported(tmp_path: Path) -> None:
    model = build(CONFIG).eval()
    source, target = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 6]])
    expected = model(source, target)
    model.encoder = torch.compile(model.encoder, backend="eager")
    marian.save(model, tmp_path / "out")
    torch.testing.assert_close(load(tmp_path / "out")(source, target), expected)


def test_values_are_quoted_up_to_79_characters() -> None:
    assert hf_folder.quote_value("x" * 79) == f"`{'x' * 79}`"
    assert hf_folder.quote_value("x" * 80) == "'xxxxxxxxxxxx...xxxxxxxxxxxxx'"
    assert hf_folder.quote_value(7) == "7"


def test_json_files_are_text_without_nan() -> None:
    assert to_json_bytes({"piece": "é", "n": 1}) == '{\n  "piece": "é",\n  "n": 1\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json_bytes({"n": float("nan")})


def test_lengths_of_generation_and_positions() -> None:
    assert (marian.GENERATION_LENGTH, marian.MAX_POSITIONS, marian.NORM_EPS) == (512, 1_024, 1e-5)
    assert (t5.GENERATION_LENGTH, llama.DEFAULT_LENGTH) == (512, 8_192)
