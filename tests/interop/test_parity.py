"""The same random weights in `transformers` and here give the same outputs and gradients, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attent.interop import load
from tests.interop.families import FAMILIES, Family, SpeechBatch
from tests.interop.folders import assert_rejected, change_tensors, split_shards
from tests.interop.parity import exact, gradient_errors, max_error, projection, same_bits, save_gradients


def every_family(quick: int) -> pytest.MarkDecorator:
    """30 random models of each; all but the first few are slow."""
    params = [
        pytest.param(family, case, id=f"{family.name}-{case}", marks=pytest.mark.slow if case >= quick else ())
        for family in FAMILIES
        for case in range(30)
    ]
    return pytest.mark.parametrize(("family", "case"), params)


@every_family(quick=8)
def test_outputs_and_gradients_match_transformers(family: Family, case: int, tmp_path: Path) -> None:
    theirs = family.make_model(case)
    inputs = family.make_inputs(theirs.config, case)
    theirs.save_pretrained(tmp_path / "weights")
    ours = load(tmp_path / "weights")
    with exact(theirs):
        expected = family.run_theirs(theirs, inputs)
    actual = family.run_ours(ours, inputs, expected)
    assert max_error(actual, expected) < 1e-10
    if family.name == "marian":  # its output bias is a buffer there: see test_marian
        return
    projection(*expected.values()).backward()
    projection(*actual.values()).backward()
    save_gradients(theirs, tmp_path / "gradients")
    errors = gradient_errors(ours, load(tmp_path / "gradients"))
    assert errors.keys() <= {"output.bias"}  # BART's is a buffer there, without a gradient


@every_family(quick=3)
def test_round_trip_in_float32(family: Family, case: int, tmp_path: Path) -> None:
    theirs = family.make_model(case)
    inputs = family.make_inputs(theirs.config, case)
    inputs = inputs.float() if isinstance(inputs, Tensor | SpeechBatch) else inputs
    theirs.save_pretrained(tmp_path / "theirs")
    ours, theirs = load(tmp_path / "theirs", dtype=torch.float32), theirs.float()
    expected = family.run_theirs(theirs, inputs)
    assert max_error(family.run_ours(ours, inputs, expected), expected) < 1e-5

    options = {"pad": theirs.config.pad_token_id} if family.name == "marian" else {}
    family.module.save(ours, tmp_path / "ours", **options)
    assert same_bits(load(tmp_path / "ours"), ours)
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not [name for name in info["missing_keys"] if not name.startswith(family.may_be_missing or ("-",))]
    assert max_error(family.run_theirs(again.eval(), inputs), expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_shards_are_merged(family: Family, tmp_path: Path) -> None:
    family.make_model(3).save_pretrained(tmp_path)
    expected = load(tmp_path)
    split_shards(tmp_path, 3)
    assert same_bits(load(tmp_path), expected)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_missing_and_unknown_tensors_are_rejected(family: Family, tmp_path: Path) -> None:
    family.make_model(3).save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    missing = next(name for name in sorted(whole) if "norm" in name.lower() or "ln_" in name)
    change_tensors(tmp_path, lambda _: {name: tensor for name, tensor in whole.items() if name != missing})
    assert_rejected(tmp_path, "missing", missing)
    change_tensors(tmp_path, lambda _: whole | {"decoder.adapter.weight": torch.zeros(2)})
    assert_rejected(tmp_path, "not known", "decoder.adapter.weight")
