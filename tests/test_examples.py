"""The examples in the docstrings of public objects run, with the committed model as `runs/en-de`."""

from __future__ import annotations

import doctest
import shutil
from pathlib import Path

import pytest
import torch

import attent
from attent.models import Seq2Seq

EXAMPLE_MODEL = Path(__file__).parent / "models" / "saved_model"
OBJECTS = {
    **{name: getattr(attent, name) for name in ("Inspection", "build", "load", "look", "mask_heads", "measure_heads")},
    **{name: getattr(attent, name) for name in ("presets", "record")},
    **{f"nn.{name}": getattr(attent.nn, name) for name in ("Attention", "Block", "FeedForward", "Residual", "Stack")},
    "Seq2Seq.summary": Seq2Seq.summary,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLE_MODEL, tmp_path / "runs" / "en-de")
    monkeypatch.chdir(tmp_path)
    names = {"attent": attent, "torch": torch}
    tests = doctest.DocTestFinder(recurse=name == "presets").find(OBJECTS[name], name, globs=names)
    assert any(test.examples for test in tests), f"{name} has no example in its docstring"
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST
    for test in tests:
        report: list[str] = []
        results = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
        assert results.failed == 0, "".join(report)
