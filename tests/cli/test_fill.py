"""`attent fill`: texts from arguments, files and pipes; text or JSON output."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from attent.cli import main, shared
from attent.models import weights
from tests.decoding.encoder_models import encoder, sentencepiece


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, tokenizer = tmp_path_factory.mktemp("fill") / "mlm", sentencepiece()
    weights.save_model(encoder(tokenizer, labels=("good", "bad")), folder, tokenizer.files)
    return str(folder)


def test_words_are_printed_with_probabilities(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fill", model, "The [MASK] sat.", "--top", "3", "--device", "cpu"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3
    chances = [float(row[0]) for row in rows]
    assert chances == sorted(chances, reverse=True)
    assert all(row[2].endswith(" sat.") for row in rows)


def test_top_1_prints_one_line_per_text(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "The [MASK] sat.\nA <mask> ran in the [MASK].\n"
    (tmp_path / "lines.txt").write_text(lines, encoding="utf-8")
    assert main(["fill", model, str(tmp_path / "lines.txt"), "-n", "1"]) == 0
    from_file = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert main(["fill", model, "--top", "1"]) == 0
    assert capsys.readouterr().out == from_file
    assert len(from_file.splitlines()) == 2
    assert "MASK" not in from_file


def test_json_has_every_mask(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fill", model, "A [MASK] [MASK].", "The [MASK]", "--json", "--top", "2"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [len(mask) for mask in first["masks"]] == [2, 2]
    assert second["source"] == "The [MASK]"
    assert second["masks"][0][0]["text"] == second["text"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["The cat."], "text 1 must have a mask"),
        (["The [MASK]", "--device", "abacus"], "device abacus"),
    ],
)
def test_invalid_input_is_rejected(
    model: str, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["fill", model, *more]) == 1
    assert message in capsys.readouterr().err


def test_lines_without_a_mask_are_unchanged_and_counted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("The [MASK] sat.\n\nNo mask here.\nA [MASK] ran.\n", encoding="utf-8")
    assert main(["fill", model, str(tmp_path / "lines.txt"), "-n", "2"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[2:4] == ["", "No mask here."]
    assert [line.count("\t") for line in lines] == [2, 2, 0, 0, 2, 2]
    assert "2 lines without a mask, printed unchanged" in err
    assert main(["fill", model, str(tmp_path / "lines.txt"), "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert results[2] == {"source": "No mask here.", "text": "No mask here.", "masks": []}


def test_line_numbers_continue_across_blocks(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "BLOCK_TEXTS", 2)
    far = "the cat sat on the mat " * 20 + "[MASK]"
    (tmp_path / "lines.txt").write_text(f"The [MASK]\nA cat\nA [MASK]\nA dog\n{far}\n", encoding="utf-8")
    assert main(["fill", model, str(tmp_path / "lines.txt")]) == 1
    assert "text 5 must have its masks among the first 32 tokens" in capsys.readouterr().err
