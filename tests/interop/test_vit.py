"""ViT: image preprocessing as in `transformers`, presets, and rejected folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from attent.data.images import ImageShape, read_image
from attent.interop import load, vit
from attent.models import VisionConfig, build, presets
from attent.nn import LearnedConfig, StackConfig
from attent.storage.errors import FolderError
from tests.interop.families import transformers
from tests.interop.folders import assert_rejected, change_json
from tests.interop.parity import same_bits, worst

STACK = StackConfig(
    layers=2,
    width=12,
    heads=3,
    ffn_width=20,
    activation="gelu",
    positions=LearnedConfig(max_length=5),
    norm_order="pre",
    norm_eps=1e-12,
)
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
CONFIG = VisionConfig(image_size=8, patch_size=4, stack=STACK, labels=("cat", "dog"))


# Image preprocessing.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vit.save(build(CONFIG), tmp_path / "vit")
    return tmp_path / "vit"


def load_with_processor_config(folder: Path, **keys: Any) -> VisionConfig:
    (folder / "preprocessor_config.json").write_text(json.dumps(keys))
    config: VisionConfig = load(folder).config
    return config


def test_mean_and_std_of_pixels_are_loaded(folder: Path) -> None:
    config = load_with_processor_config(folder, image_mean=MEAN, image_std=STD, do_normalize=True, size=8, resample=2)
    assert (config.mean, config.std) == (tuple(MEAN), tuple(STD))
    vit.save(load(folder), folder.parent / "again")
    written = json.loads((folder.parent / "again" / "preprocessor_config.json").read_text())
    assert (written["image_mean"], written["image_std"]) == (MEAN, STD)
    assert written["size"] == {"height": 8, "width": 8}
    assert same_bits(load(folder.parent / "again"), load(folder))


def test_pixels_are_normalized_as_by_transformers(tmp_path: Path) -> None:
    """The processor's formula: (pixel / 255 - mean) / std."""
    vit.save(build(CONFIG).double(), tmp_path / "vit")
    image = torch.randint(0, 256, (1, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    config = load_with_processor_config(tmp_path / "vit", image_mean=MEAN, image_std=STD, rescale_factor=1 / 255)
    mean, std = (torch.tensor(of, dtype=torch.float64)[:, None, None] for of in (MEAN, STD))
    assert worst(build(config).double().normalize(image), (image.double() / 255 - mean) / std) < 1e-10


def test_pixels_default_to_minus_one_to_one(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    config = load(folder).config
    assert (config.mean, config.std) == ((0.5,), (0.5,))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"image_mean": [0.5, 0.4]}, "`image_mean` must be a number, or one for each of 3 channels"),
        ({"image_std": "x"}, "`image_std` must be a number above 0, or one for each of 3 channels"),
        ({"image_std": [0.5, 0.5, 0]}, "`image_std` must be a number above 0"),
        ({"rescale_factor": 1 / 127.5}, "`rescale_factor` must be 1/255 for a ViT model that attent can compute, but"),
        ({"rescale_factor": "x"}, "`rescale_factor` must be a number"),
        ({"do_rescale": False}, "`do_rescale` must be true for a ViT model that attent can compute, but is False"),
        ({"do_normalize": False}, "`do_normalize` must be true"),
        ({"size": 224}, "`size` must be 8, as `image_size` of the model, but is 224"),
        ({"size": 1}, "`size` must be 8, as `image_size` of the model, but is 1"),
        ({"size": 0}, "`size` must be of a square, but is 0"),
        ({"size": {"height": 8, "width": 9}}, "`size` must be of a square"),
        ({"size": {"longest_edge": 8}}, "`size` must be of a square"),
        ({"size": 10, "crop_size": 9, "do_center_crop": True}, "`crop_size` must be 8, as `image_size`"),
        ({"size": 7, "crop_size": 8, "do_center_crop": True}, "`size` must be at least `crop_size`=8, but is 7"),
        ({"do_resize": False}, "`do_resize` must be true"),
        ({"resample": 1}, r"`resample` must be 2 \(bilinear\) or 3 \(bicubic\), but is 1"),
        ({"do_pad": True}, "`do_pad` must be false"),
    ],
)
def test_unsupported_pixel_settings_are_rejected(folder: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(FolderError, match=f"preprocessor_config.json: {words}"):
        load_with_processor_config(folder, **keys)


@pytest.mark.parametrize(
    ("keys", "sizing"),
    [
        ({"size": {"height": 8, "width": 8}, "resample": 3}, ("squash", None, "bicubic")),
        ({"size": 8, "feature_extractor_type": "ViTFeatureExtractor"}, ("squash", None, "bilinear")),
        ({"size": 10, "crop_size": 8, "do_center_crop": True}, ("squash", 10, "bilinear")),  # DeiT's
        ({"size": {"shortest_edge": 8}}, ("crop", None, "bilinear")),
        ({"size": 8, "image_processor_type": "CLIPImageProcessor"}, ("crop", None, "bilinear")),
        ({"size": {"shortest_edge": 9}, "do_center_crop": True, "crop_size": [8, 8]}, ("crop", 9, "bilinear")),
    ],
)
def test_resize_settings_are_read(folder: Path, keys: dict[str, Any], sizing: tuple[Any, ...]) -> None:
    config = load_with_processor_config(folder, **keys)
    assert (config.fit, config.resize_to, config.resample) == sizing


def test_images_are_squashed_by_default(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    assert load(folder).config.fit == "squash"


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@pytest.mark.parametrize("resize_to", [None, 11])
@pytest.mark.parametrize("fit", ["crop", "squash"])
def test_images_are_processed_as_by_transformers(
    fit: Literal["crop", "squash"],
    resize_to: int | None,
    resample: Literal["bilinear", "bicubic"],
    tmp_path: Path,
) -> None:
    """A saved folder processes images of any shape equally in both, up to rounding."""
    image = pytest.importorskip("PIL.Image")
    sizing = {"fit": fit, "resize_to": resize_to, "resample": resample}
    model = build(replace(CONFIG, mean=tuple(MEAN), std=tuple(STD), **sizing))  # type: ignore[arg-type]
    vit.save(model, tmp_path / "vit")
    assert load(tmp_path / "vit").config == model.config
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit", backend="pil")
    for number, size in enumerate([(60, 40), (17, 41), (8, 8), (5, 3)]):
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
        image.fromarray(pixels).save(tmp_path / "a.png")
        ours = model.normalize(read_image(tmp_path / "a.png", ImageShape.from_config(model.config))[None])
        expected = torch.tensor(np.asarray(theirs(image.open(tmp_path / "a.png"), return_tensors="np")["pixel_values"]))
        assert worst(ours, expected) * 255 * max(STD) < 2.5


def test_preset_matches_the_published_config() -> None:
    facts = vit.ViTKeys(hidden_size=768, num_hidden_layers=12, num_attention_heads=12)
    heads = {"pooler": False, "labels": ()}
    assert vit.to_config(facts, heads, {}, Path("config.json")) == presets.vit_b_16()


# Error messages of rejected folders.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qkv_bias": False}, ["`qkv_bias` must be True"]),
        ({"pooler_act": "relu"}, ["`pooler_act` must be 'tanh'"]),
        ({"image_size": [8, 12]}, ["`image_size`", "square"]),
        ({"patch_size": 3}, ["`image_size` must be a multiple of `patch_size`=3"]),
        ({"hidden_act": "quick_gelu"}, ["hidden_act", "quick_gelu"]),
        ({"layer_scale": 0.1}, ["`layer_scale` is not a key of a ViT config"]),
        ({"architectures": ["ViTForMaskedImageModeling"]}, ["`architectures` must be", "ViTForMaskedImageModeling"]),
        ({"num_channels": 1}, ["embeddings.patch_embeddings.projection.weight", "[12, 1, 4, 4]", "[12, 3, 4, 4]"]),
        ({"id2label": {"0": "a"}}, ["`id2label` must name 2 labels"]),
    ],
)
def test_unsupported_config_is_rejected(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    change_json(folder / "config.json", **changes)
    assert_rejected(folder, *words)


def test_a_pooler_of_another_width_is_rejected(tmp_path: Path) -> None:
    vit.save(build(replace(CONFIG, labels=(), pooler=True)), tmp_path / "vit")
    change_json(tmp_path / "vit" / "config.json", pooler_output_size=5)
    assert_rejected(tmp_path / "vit", "`pooler_output_size` must be `hidden_size`=12", "but is 5")


def test_square_sizes_may_be_written_as_pairs(folder: Path) -> None:
    change_json(folder / "config.json", image_size=[8, 8], patch_size=[4, 4])
    assert load(folder).config.image_size == 8


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(CONFIG, pooling="mean"), "pooling"),
        (replace(CONFIG, pooler=True), "pooler"),
        (
            replace(
                CONFIG, class_token=False, pooling="mean", stack=replace(STACK, positions=LearnedConfig(max_length=4))
            ),
            "class_token",
        ),
        (replace(CONFIG, stack=replace(STACK, norm_order="post")), "stack.norm_order"),
        (replace(CONFIG, stack=replace(STACK, positions=LearnedConfig(max_length=6))), "stack.positions"),
        (replace(CONFIG, stack=replace(STACK, bias=False)), "stack.bias"),
    ],
)
def test_a_config_without_vit_equivalent_is_not_saved(config: VisionConfig, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` must be .* for a ViT model"):
        vit.save(build(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_mean_for_all_channels_is_written_for_each() -> None:
    written = vit.to_preprocessor_config(replace(CONFIG, mean=(0.25,), std=(0.5,)))
    assert (written["image_mean"], written["image_std"]) == ([0.25] * CONFIG.channels, [0.5] * CONFIG.channels)
    assert CONFIG.channels > 1
