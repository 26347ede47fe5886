"""A saved model is complete and matches its config; a loaded one does not depend on the file."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import attent
from attent.models import Seq2Seq, build, build_empty
from attent.models import folder as model_folder
from attent.models.config import Seq2SeqConfig, mirror_encoder
from attent.models.weights import assign_weights
from attent.nn import StackConfig
from attent.storage.errors import FolderError

ENCODER = StackConfig(layers=1, width=8, heads=2, ffn_width=8, dropout=0.0)
CONFIG = Seq2SeqConfig(vocab=9, encoder=ENCODER, decoder=mirror_encoder(ENCODER))
IDS = torch.tensor([[3, 4, 5]])


@pytest.fixture
def model() -> Seq2Seq:
    return build(CONFIG).eval()


def test_untied_parameters_are_not_saved(model: Seq2Seq, tmp_path: Path) -> None:
    model.save(tmp_path)
    expected = model(IDS, IDS)
    model.output.weight = nn.Parameter(torch.randn(9, 8))
    with pytest.raises(FolderError, match=r"`output.weight` must be the same tensor as `source_embedding.weight`"):
        model.save(tmp_path)
    assert torch.equal(attent.load(tmp_path)(IDS, IDS), expected), "the model that was there before is still there"


def test_equal_copies_are_tied_again(model: Seq2Seq, tmp_path: Path) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert model.output.weight is not model.target_embedding.weight
    model.save(tmp_path)
    again = attent.load(tmp_path)
    assert again.output.weight is again.target_embedding.weight is again.source_embedding.weight
    assert torch.equal(again(IDS, IDS), model(IDS, IDS))


def test_compiled_module_is_saved_under_its_own_name(model: Seq2Seq, tmp_path: Path) -> None:
    expected = model(IDS, IDS)
    model.encoder = torch.compile(model.encoder, backend="eager")
    model.save(tmp_path)
    assert torch.equal(attent.load(tmp_path)(IDS, IDS), expected)


def test_unknown_module_is_not_saved(model: Seq2Seq, tmp_path: Path) -> None:
    model.encoder.extra = nn.Linear(2, 2)
    with pytest.raises(FolderError, match=r"not known to the model: `encoder.extra.weight`"):
        model.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_loaded_model_does_not_change_with_its_file(model: Seq2Seq, tmp_path: Path) -> None:
    model.save(tmp_path)
    loaded = attent.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(loaded(IDS, IDS), model(IDS, IDS))


@pytest.mark.parametrize("stored", [torch.int32, torch.float8_e4m3fn])
def test_unsupported_dtypes_are_refused(model: Seq2Seq, stored: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in model.state_dict().items()}
    with pytest.raises(FolderError, match="must be float32, bfloat16, float16, float64, but is torch"):
        assign_weights(build_empty(CONFIG), tensors, "here")


def test_ties_must_match_the_config(model: Seq2Seq) -> None:
    tensors = dict(model.state_dict()) | {"output.weight": torch.zeros(9, 8)}
    with pytest.raises(FolderError, match=r"here: `output.weight` must be the same tensor"):
        assign_weights(build_empty(CONFIG), tensors, "here")


def seal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Save the folder again with a changed config.json, so that the manifest is valid and the config is not."""
    stored = model_folder.read_folder(folder)
    config = copy.deepcopy(stored.config)
    change(config)
    model_folder.write_folder(folder, config=config, tensors=stored.tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: c.update(version=2),
            "config.json: has `version` 2, and this attent reads 1; it may have been",
        ),
        (
            lambda c: c.update(kind="rnn"),
            "config.json: has `kind` 'rnn', and this attent reads seq2seq or causal or encoder or vision; it may",
        ),
        (lambda c: c["model"].update(vocabs=3), "config.json: unknown key `model.vocabs`; did you mean `model.vocab`?"),
        (lambda c: c["model"].update(zzzz=3), "config.json: unknown key `model.zzzz`; remove it, or update attent."),
        (lambda c: c["model"]["encoder"].update(layers=16_000_000), "`layers` must be a number from 1 to 1,000, but"),
        (lambda c: c["model"]["encoder"].update(width=2**40), "`width` must be a number from 1 to 16,777,216"),
        (lambda c: c["model"]["encoder"].update(head_width=2**62), "`head_width` must be a number from 1"),
        (
            lambda c: c["model"]["encoder"].update(ffn_width=9),
            "model.safetensors: wrong shape: `encoder.blocks.0.",
        ),
        (
            lambda c: c["model"]["encoder"].update(layers=2),
            "model.safetensors: missing: `encoder.blocks.1.self_attn.",
        ),
    ],
)
def test_config_of_another_model_is_refused(
    change: Callable[[dict[str, Any]], None], words: str, model: Seq2Seq, tmp_path: Path
) -> None:
    model.save(tmp_path)
    seal(tmp_path, change)
    with pytest.raises(FolderError, match=re.escape(words)):
        attent.load(tmp_path)


def test_changed_byte_is_refused(model: Seq2Seq, tmp_path: Path) -> None:
    model.save(tmp_path)
    for name in ("config.json", "model.safetensors"):
        content = (tmp_path / name).read_bytes()
        middle = len(content) // 2
        (tmp_path / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(FolderError, match=re.escape(f"{name}: is damaged or was changed")):
            attent.load(tmp_path)
        (tmp_path / name).write_bytes(content)


@pytest.mark.parametrize("change", [lambda m: m.to(torch.float8_e4m3fn), lambda m: m.encoder.half()])
def test_unloadable_model_is_not_saved(change: Callable[[Seq2Seq], object], model: Seq2Seq, tmp_path: Path) -> None:
    change(model)
    with pytest.raises(FolderError, match=r"the model: .* must (be|have)"):
        model.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_tilde_is_expanded(model: Seq2Seq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model.save("~/model")
    assert torch.equal(attent.load("~/model")(IDS, IDS), model(IDS, IDS))
    assert (tmp_path / "model" / "config.json").exists()


def test_weights_are_plain_safetensors(model: Seq2Seq, tmp_path: Path) -> None:
    """Other libraries can read it, and the embedding that has three names is stored once."""
    model.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["source_embedding.weight"], model.source_embedding.weight)
    assert not {"target_embedding.weight", "output.weight"} & stored.keys()


def test_weights_of_a_loaded_model_are_not_those_of_the_file(tmp_path: Path) -> None:
    model = build(CONFIG)
    model.save(tmp_path / "model")
    loaded = attent.load(tmp_path / "model")
    with open(tmp_path / "model" / model_folder.WEIGHTS_FILE, "r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(size))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
