"""Imports point one way: each part of the package may import only what stands to its left.

Every file is read with `ast`, so an import inside a function, under TYPE_CHECKING or through
`import_module("...")` counts like any other. Planted wrong arrows show that the reader notices.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attent

PACKAGE = Path(attent.__file__).parent

# Left to right. Parts of one group do not know of each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("text", "nn"),
    ("models",),
    ("interop", "data"),
    ("train", "decode"),
    ("score", "look"),
    ("serve",),
    ("cli",),
)
RANK = {part: rank for rank, group in enumerate(LAYERS) for part in group}
FREE = "settings"  # imports no other part, and every part may import it
FRONT_DOORS = {"__init__", "__main__"}  # the package's own: they stand to the right of everything
NN_MAY_IMPORT = {"torch", "triton"}  # besides the standard library; triton in nn/kernels alone, which is imported late


def test_imports_point_one_way() -> None:
    problems = [
        f"{path.relative_to(PACKAGE.parent)}:{problem}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for problem in wrong_arrows(part_of(path), path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n".join(problems)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def wrong_arrows(part: str, source: str) -> list[str]:
    """`LINE: what is wrong` for each import that a file of this part must not have."""
    if part in FRONT_DOORS:
        return []
    found = []
    for line, module in imports(ast.parse(source)):
        reason = refusal(part, module)
        if reason is not None:
            found.append(f"{line}: {reason}")
    return found


def refusal(part: str, module: str) -> str | None:
    """Why a file of this part must not import this module, or None where it may."""
    if part != FREE and part not in RANK:
        return f"`{part}` has no place yet: add it to LAYERS in {Path(__file__).name}"
    if module.startswith("."):
        return "a relative import: write the whole path, so that a reader sees where it goes"
    top, _, rest = module.partition(".")
    if top != "attent":
        return None if part != "nn" or is_allowed_in_nn(top) else f"nn imports torch only, not `{top}`"
    return refusal_inside(part, rest)


def refusal_inside(part: str, inside: str) -> str | None:
    target = inside.partition(".")[0]
    if target in ("__version__", part, FREE) or part in LAYERS[-1]:
        return None
    if target not in RANK:
        door = f"attent.{inside}".rstrip(".")
        return f"`{door}` is the front door: import the part that defines the name"
    if part == FREE:
        return f"settings imports no other part, but imports `attent.{inside}`"
    if RANK[target] >= RANK[part]:
        return f"`{part}` must not import `attent.{inside}`: it does not stand to the left ({picture()})"
    return None


def is_allowed_in_nn(top: str) -> bool:
    return top in sys.stdlib_module_names or top in NN_MAY_IMPORT


def picture() -> str:
    return " -> ".join(", ".join(group) for group in LAYERS)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module) of every import; `from attent import models` counts as `attent.models`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            whole = origin == "attent"
            yield from ((node.lineno, f"attent.{a.name}" if whole else origin) for a in node.names)
        elif isinstance(node, ast.Call) and is_import_call(node.func):
            yield from ((node.lineno, text) for text in texts(node.args[:1]))


def is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def texts(nodes: list[ast.expr]) -> list[str]:
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


# ---- the reader itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("nn", "from attent.models import build"),
        ("nn", "import attent.text.tokenizer"),
        ("nn", "import numpy as np"),
        ("text", "import attent.nn"),
        ("models", "from attent import interop"),
        ("models", "import attent"),
        ("models", "from attent import build"),
        ("interop", "from attent.data.readers import read"),
        ("data", "def f():\n    from attent.train.loop import train"),
        ("decode", "if TYPE_CHECKING:\n    from attent.look import Trace"),
        ("score", "import importlib\nimportlib.import_module('attent.serve')"),
        ("serve", "from attent.cli import main"),
        ("settings", "from attent.nn.masks import Mask"),
        ("models", "from ..interop import load"),
        ("models", "from . import presets"),
        ("helpers", "import torch"),
    ],
)
def test_a_planted_wrong_arrow_is_caught(part: str, source: str) -> None:
    assert wrong_arrows(part, source)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("nn", "import math, torch\nfrom torch.nn import functional\nfrom attent.nn.masks import Mask"),
        ("models", "from attent.nn import block\nfrom attent.text import tokenizer"),
        ("decode", "from attent.interop import load\nfrom attent import models"),
        ("cli", "import attent"),
        ("cli", "from attent import __version__\nimport rich\nfrom attent.serve import app"),
        ("train", "from attent.settings import Run"),
        ("settings", "import tomllib"),
        ("__init__", "from attent.look import record"),
    ],
)
def test_a_right_arrow_passes(part: str, source: str) -> None:
    assert wrong_arrows(part, source) == []


def test_a_complaint_names_the_line_and_the_order() -> None:
    (problem,) = wrong_arrows("nn", "import torch\nimport attent.models")
    assert problem.startswith("2: `nn` must not import `attent.models`")
    assert "text, nn -> models -> interop, data" in problem


def test_importing_attent_brings_no_torch() -> None:
    code = "import sys, attent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0


def test_every_public_name_arrives() -> None:
    assert set(attent.__all__) <= set(dir(attent))
    for name in attent.__all__:
        assert getattr(attent, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'biuld'"):
        attent.biuld  # noqa: B018
