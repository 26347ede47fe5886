"""`attent embed`: vectors in files or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from attent.cli import main
from attent.cli.embed import save_vectors
from attent.decoding.predictor import Predictor
from attent.models import weights
from tests.decoding.encoder_models import encoder, sentencepiece, vision_model

TEXTS = ["The cat sat.", "A dog ran in the park.", ""]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, tokenizer = tmp_path_factory.mktemp("embed") / "mlm", sentencepiece()
    weights.save_model(encoder(tokenizer), folder, tokenizer.files)
    return str(folder)


def test_vectors_are_written_as_npy(model: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    out = tmp_path / "vectors.npy"
    assert main(["embed", model, str(tmp_path / "lines.txt"), "-o", str(out), "--normalize", "--pooling", "class"]) == 0
    vectors = np.load(out, allow_pickle=False)
    expected = Predictor.load(model, device="cpu").embed(TEXTS, "class", normalize=True)
    assert vectors.dtype == np.float32
    assert np.allclose(vectors, expected.numpy(), atol=1e-5)
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_json_has_one_line_per_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", model, *TEXTS[:2], "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == TEXTS[:2]
    expected = Predictor.load(model, device="cpu").embed(TEXTS[:2])
    assert np.allclose([row["vector"] for row in rows], expected.numpy(), atol=1e-5)


def test_images_are_embedded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    vision_model().save(tmp_path / "vision")
    image.new("RGB", (9, 9), "red").save(tmp_path / "red.png")
    assert main(["embed", str(tmp_path / "vision"), str(tmp_path / "red.png"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["vector"]) == 16


def test_vectors_are_written_through_a_link_with_another_suffix(tmp_path: Path) -> None:
    (tmp_path / "link.npy").symlink_to(tmp_path / "vectors.bin")
    save_vectors(torch.ones(2, 3), tmp_path / "link.npy")
    assert np.load(tmp_path / "vectors.bin").shape == (2, 3)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_input_is_never_the_output(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.npy"
    path.write_text("a dog\n", encoding="utf-8")
    assert main(["embed", model, str(path), "-o", str(path)]) == 1
    assert "texts.npy: must not be an input" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "a dog\n"
