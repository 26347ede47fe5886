"""`attent average` of other models than translators: vision models, and text models without a tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attent.cli.average import average
from attent.interop import load
from attent.models import CausalConfig, ModelConfig, VisionConfig, build, presets
from attent.nn import LearnedConfig
from attent.storage.errors import FolderError
from tests.laws.helpers import randomize

SMALL = {"layers": 1, "width": 8, "heads": 2, "ffn_width": 12}
CONFIGS: list[ModelConfig] = [
    VisionConfig(
        image_size=8, patch_size=4, stack=replace(presets.VIT, **SMALL, positions=LearnedConfig(max_length=5))
    ),
    CausalConfig(vocab=7, stack=replace(presets.LLAMA, **SMALL)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_average_of_two_models(config: ModelConfig, tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        randomize(build(config)).save(tmp_path / name)
    average(tmp_path / "a", tmp_path / "b", out=tmp_path / "mean")
    first, second, mean = (load(tmp_path / name).state_dict() for name in ("a", "b", "mean"))
    assert all(torch.allclose(mean[name], (first[name] + second[name]) / 2) for name in mean)
    assert any(not torch.equal(first[name], second[name]) for name in mean)


def test_models_of_different_kinds_are_rejected(tmp_path: Path) -> None:
    for config, name in zip(CONFIGS, ("a", "b"), strict=True):
        build(config).save(tmp_path / name)
    with pytest.raises(FolderError, match="one of the models: missing:"):
        average(tmp_path / "a", tmp_path / "b", out=tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
