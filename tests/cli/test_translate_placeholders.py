"""`attent translate` with placeholders in a document: each comes back exactly once, however many there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from attent import cli
from attent.data.formats.placeholders import list_placeholders
from attent.training.loop import write_model
from tests.text.corpus import tokenizer
from tests.training.toys import model

TEXT = "a man in %s sees {name} here\n\na dog " + "and %s a dog " * 25 + "\n"


def test_placeholders_occur_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", model(), tokenizer())
    (tmp_path / "text.md").write_text(TEXT, encoding="utf-8")
    flags = ["--to", "de", "--engine", "torch", "--max-length", "24"]
    assert cli.main(["translate", str(tmp_path / "model"), str(tmp_path / "text.md"), *flags]) == 0
    printed = capsys.readouterr()
    for source, target in zip(TEXT.splitlines(), printed.out.splitlines(), strict=True):
        assert sorted(list_placeholders((target,))) == sorted(list_placeholders((source,)))
        assert not source or target != source
    assert "2 filled, 0 kept, 0 skipped" in printed.err
