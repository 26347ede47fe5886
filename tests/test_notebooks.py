"""The notebooks of docs/: stored with the outputs of one run from top to bottom, and they still run."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

import attent
from tests.notebooks import NOTEBOOKS, execute, normalize

MAX_BYTES = 1_500_000
MACHINE_PATHS = re.compile(r"/(?:home|root|tmp|work|Users|usr|opt)/|[A-Z]:\\")
ACCURACY = re.compile(r"([\d.]+)% of 500 unseen dates are read exactly")
FIGURES = {"attention-from-scratch": 11, "tour": 4}  # at least
CHECKED_PIECES = [
    "Attention", "Block", "FeedForward", "Residual", "Seq2Seq", "Stack", "attend", "attend_explicit", "compute_lr",
    "linear_cross_entropy", "make_sinusoids",
]  # fmt: skip

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def get_code(notebook: NotebookNode) -> list[str]:
    """Return the code cells as Python, with IPython's magic commands as calls."""
    transform = TransformerManager().transform_cell
    return [transform(cell.source) for cell in notebook.cells if cell.cell_type == "code"]


def get_output_text(notebook: NotebookNode) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def check_outputs(notebook: NotebookNode, name: str) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    errors = [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert all(error.get("text") == "generating dates, which takes a few seconds\n" for error in errors)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= FIGURES[name]
    text = get_output_text(notebook)
    assert float(ACCURACY.search(text)[1]) > 90
    if name == "attention-from-scratch":
        assert sorted(set(re.findall(r"^equal to (\w+) in attent/", text, re.MULTILINE))) == CHECKED_PIECES


def test_both_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(FIGURES)


@each_notebook
def test_stored_outputs_are_those_of_one_complete_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    check_outputs(notebook, path.stem)


@each_notebook
def test_stored_file_is_normalized_small_and_without_machine_paths(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert normalize(nbformat.from_dict(nbformat.reads(text, as_version=4))) == text
    assert len(text.encode()) < MAX_BYTES
    assert not MACHINE_PATHS.search(re.sub(r'"image/png": "[^"]+"', "", text))


@each_notebook
def test_code_uses_names_that_exist(path: Path) -> None:
    """Imports from attent succeed, and so does every `attent.a.b` in the code."""
    tree = ast.parse("\n".join(get_code(nbformat.read(path, as_version=4))))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attent"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and (names := ast.unparse(node)).startswith("attent."):
            value: object = attent
            for name in re.match(r"[\w.]+", names)[0].split(".")[1:]:
                value = getattr(value, name)


@each_notebook
def test_links_lead_to_files(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    targets = [target for source in cells for target in re.findall(r"\]\(([^)#]+)\)", source)]
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert targets
    assert not missing


@pytest.mark.slow
@each_notebook
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    check_outputs(execute(path, tmp_path), path.stem)
