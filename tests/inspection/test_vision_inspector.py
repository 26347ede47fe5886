"""Documents of vision models: pixels, patches, labels, idx files, errors."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import attent
from attent.inspection.ablate import ModelPart
from attent.inspection.inspectors import base
from attent.inspection.inspectors.base import InspectionRequest
from attent.inspection.inspectors.front_ends import VisionInspector, encode_png
from tests.inspection.documents import read_weights
from tests.inspection.models import ring, vision, write_ring

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return VisionInspector(vision()).inspect(InspectionRequest(text=str(write_ring(tmp_path_factory.mktemp("images")))))


def test_weights_are_those_of_the_model(document: dict[str, Any]) -> None:
    model = vision()
    with attent.record(model) as trace, torch.no_grad():
        logits = model(model.normalize(ring()[None]))
    back = read_weights(document)
    assert list(back) == list(trace) == ["encoder.blocks.0.self_attn", "encoder.blocks.1.self_attn"]
    for path, calls in trace.items():
        torch.testing.assert_close(back[path], calls[0], atol=1e-5, rtol=0)
    best = document["labels"]["best"][0]
    assert best["label"] == model.config.labels[int(logits.argmax())] == document["output"]["text"]
    assert best["p"] == pytest.approx(float(logits.softmax(-1).max()), rel=1e-3)
    json.dumps(document, allow_nan=False)


def test_side_has_the_image_and_its_patches(document: dict[str, Any]) -> None:
    from PIL import Image

    (side,) = document["sides"].values()
    assert (side["image"]["rows"], side["image"]["columns"], side["image"]["num_prefix_tokens"]) == (4, 4, 1)
    assert [token["text"] for token in side["tokens"][:6]] == ["class", "0,0", "0,1", "0,2", "0,3", "1,0"]
    assert document["title"] == "ring.png"
    src = side["image"]["src"].removeprefix("data:image/png;base64,")
    pixels = torch.tensor(list(Image.open(io.BytesIO(base64.b64decode(src))).tobytes()))
    assert torch.equal(pixels, ring().flatten())


def test_png_colors_round_trip() -> None:
    from PIL import Image

    pixels = torch.randint(0, 256, (3, 5, 7), dtype=torch.uint8)
    read = Image.open(io.BytesIO(encode_png(pixels)))
    assert (read.mode, read.size) == ("RGB", (7, 5))
    assert torch.equal(torch.tensor(list(read.tobytes())).view(5, 7, 3), pixels.permute(1, 2, 0))


def test_patch_neighbors(document: dict[str, Any]) -> None:
    """Every patch attends to the one on its left; the first of a row to the class token."""
    weights = torch.zeros(1, 17, 17)
    for position in range(17):
        weights[0, position, position - 1 if position and (position - 1) % 4 else 0] = 1
    from attent.inspection.attention_trace import build_layer
    from attent.inspection.head_stats import measure_trace_heads

    layer = build_layer("encoder.blocks.0.self_attn", ("image", "image"), weights, causal=False, scale=1.0)
    (head,) = measure_trace_heads([layer], document["sides"]).heads
    assert head.description == "attends to the previous token (100%)"
    assert head.values.first == pytest.approx(3 / 15)


def test_model_without_class_token(tmp_path: Path) -> None:
    inspection = VisionInspector(vision(class_token=False)).inspect(InspectionRequest(text=str(write_ring(tmp_path))))
    assert inspection["sides"]["image"]["image"]["num_prefix_tokens"] == 0
    assert len(inspection["sides"]["image"]["tokens"]) == 16
    assert "first" not in [column["key"] for column in inspection["head_stats"]["columns"]]


def test_all_positions_of_an_image_are_described(document: dict[str, Any]) -> None:
    (entry,) = document["positions"]
    assert (entry["scheme"], entry["pairwise"]["shape"]) == ("learned", [17, 17])


def test_images_have_a_larger_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_DENSE_WEIGHTS", 100)
    inspection = VisionInspector(vision()).inspect(InspectionRequest(text=str(write_ring(tmp_path))))
    assert all("weights" in layer for layer in inspection["layers"])
    for name in ("MAX_IMAGE_WEIGHTS", "MAX_SPARSE_WEIGHTS"):
        monkeypatch.setattr(base, name, 100)
    inspection = VisionInspector(vision()).inspect(InspectionRequest(text=str(write_ring(tmp_path))))
    assert all("sparse" in layer for layer in inspection["layers"])


def test_masked_parts(tmp_path: Path, document: dict[str, Any]) -> None:
    masked = VisionInspector(vision()).inspect(
        InspectionRequest(text=str(write_ring(tmp_path)), masked_parts=(ModelPart("encoder.blocks.0"),))
    )
    assert masked["layers"][0]["masked_heads"] == [0, 1, 2, 3]
    assert masked["labels"] != document["labels"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text": "nowhere.png"}, "nowhere.png: must be an image, but cannot be opened"),
        ({"text": __file__}, "Pillow does not recognize it"),
        ({"text": "a.png", "target": "b"}, "is for translators, but this is a vision model"),
        ({"text": "a.png", "text_pair": "b"}, "`text_pair` is for text encoders"),
    ],
)
def test_invalid_images_are_rejected(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VisionInspector(vision()).inspect(InspectionRequest(**arguments))
