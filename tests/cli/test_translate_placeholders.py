"""`attent translate` with placeholders in a document: required phrases make the model generate them."""

from __future__ import annotations

from pathlib import Path

import pytest

from attent import cli
from attent.training.loop import write_model
from tests.text.corpus import tokenizer
from tests.training.toys import model

TEXT = "a man in %s sees {name} here\n\na dog " + "and %s a dog " * 25 + "\n"


def test_placeholders_are_required_phrases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", model(), tokenizer())
    (tmp_path / "text.md").write_text(TEXT, encoding="utf-8")
    flags = ["--to", "de", "--engine", "torch", "--max-length", "24"]
    assert cli.main(["translate", str(tmp_path / "model"), str(tmp_path / "text.md"), *flags]) == 0
    printed = capsys.readouterr()
    first, _, last = printed.out.splitlines()
    assert first != TEXT.splitlines()[0]
    assert sorted(word for word in ("%s", "{name}") if first.count(word) == 1) == ["%s", "{name}"]
    assert last == TEXT.splitlines()[2]  # 25 placeholders exceed --max-length
    assert "1 filled, 0 kept, 1 skipped" in printed.err
