"""Errors that a user can correct have one base class, and a notebook shows them as one sentence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

import attent
from attent.storage.errors import AttentError

PACKAGE = Path(attent.__file__).parent


@pytest.fixture(scope="module")
def shell() -> InteractiveShell:
    return InteractiveShell(colors="nocolor")


def test_every_public_error_has_the_common_base() -> None:
    """`nn` imports torch only, and raises ValueError."""
    classes = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "nn"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    errors = [name for name in classes if name.endswith("Error") and not name.startswith("_")]
    assert len(errors) > 15
    for name in errors:
        ancestors = [name]
        while ancestors[-1] in classes and classes[ancestors[-1]]:
            ancestors.append(classes[ancestors[-1]][0])
        assert ancestors[-2:] == ["AttentError", "ValueError"], ancestors


def test_a_notebook_shows_one_sentence(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("import attent; attent.Translator.load('no-such-folder')")
    printed = capsys.readouterr().out.strip()
    assert printed.startswith("FolderError: no-such-folder: ")
    assert "\n" not in printed


def test_an_invalid_option_is_one_sentence(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("from attent.decoding.options import SearchOptions; SearchOptions(beam_size=0)")
    assert capsys.readouterr().out.strip() == "InputError: `beam_size` must be 1 or more, but is 0"


def test_a_bug_keeps_its_traceback(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("import attent; attent.presets.tiny(nonsense=1)")
    printed = capsys.readouterr().out
    assert "Traceback" in printed
    assert "TypeError" in printed


def test_other_programs_can_catch_value_errors() -> None:
    assert issubclass(AttentError, ValueError)
