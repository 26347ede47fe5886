"""`attent classify`: labels of texts and images."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attent.cli import main
from attent.models import build, weights
from attent.training.loop import write_model
from tests.data.image_sets import write_class_folders
from tests.decoding.encoder_models import encoder, sentencepiece, vision_model
from tests.text.corpus import tokenizer
from tests.training.toys import model as translator

TEXTS = ["The cat sat.", "A dog ran in the park.", "The bird"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, words = tmp_path_factory.mktemp("classify") / "m", sentencepiece()
    weights.save_model(encoder(words, labels=("good", "bad")), folder, words.files)
    return str(folder)


@pytest.fixture
def vision(tmp_path: Path) -> str:
    vision_model().save(tmp_path / "vision")
    return str(tmp_path / "vision")


def test_one_line_per_text(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["classify", model, *TEXTS, "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode())))
    assert main(["classify", model, "--top", "2"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == TEXTS
    assert ["\t".join(row[:3]) for row in rows] == output.splitlines()
    assert all(float(row[2]) + float(row[4]) == pytest.approx(1, abs=1e-3) for row in rows)


def test_json_has_every_label(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", model, TEXTS[0], "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["labels"]) == {"good", "bad"}
    assert result["labels"][result["label"]] == result["probability"]


def test_images_are_classified_and_invalid_files_reported(
    vision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    folder = write_class_folders(tmp_path / "set")
    assert main(["classify", vision, str(folder / "cat" / "0.png"), str(folder / "dog" / "1.png")]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == [
        str(folder / "cat" / "0.png"),
        str(folder / "dog" / "1.png"),
    ]
    (tmp_path / "x.png").write_bytes(b"no picture")
    assert main(["classify", vision, str(tmp_path / "x.png")]) == 1
    assert "x.png: must be an image, but Pillow does not recognize it" in capsys.readouterr().err


def test_a_translator_is_rejected_before_the_input_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "translator", translator(), tokenizer())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["classify", str(tmp_path / "translator")]) == 1
    message = "must be an encoder of texts or images, but is a translator (encoder and decoder); use `attent"
    assert message in capsys.readouterr().err


def test_invalid_input_is_rejected(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = sentencepiece()
    weights.save_model(encoder(words), tmp_path / "mlm", words.files)
    assert main(["classify", str(tmp_path / "mlm"), "A text"]) == 1
    assert "must be a classifier, but has no labels; train one by --task" in capsys.readouterr().err


def test_images_are_cropped_or_squashed_as_configured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wide image equals its pre-cropped or pre-squashed square."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (8, 32, 3), np.uint8)
    wide = Image.fromarray(pixels)
    wide.save(tmp_path / "wide.png")
    wide.crop((12, 0, 20, 8)).save(tmp_path / "crop.png")
    wide.resize((8, 8), Image.Resampling.BILINEAR).save(tmp_path / "squash.png")
    base = vision_model()
    for fit in ("crop", "squash"):
        model = build(replace(base.config, fit=fit))
        model.load_state_dict(base.state_dict())
        model.save(tmp_path / fit)
        pictures = [str(tmp_path / f"{name}.png") for name in ("wide", "crop", "squash")]
        assert main(["classify", str(tmp_path / fit), *pictures, "--json"]) == 0
        whole, cut, squashed = (json.loads(line)["labels"] for line in capsys.readouterr().out.splitlines())
        assert whole == (cut if fit == "crop" else squashed)
        assert cut != squashed


def test_a_mistyped_file_name_is_reported(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", model, "reviews.txt"]) == 1
    assert "reviews.txt: must be an existing file" in capsys.readouterr().err
