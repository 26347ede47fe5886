"""Imports go one way: a part of the package imports only parts to its left, and there are no import cycles.

Every file is parsed with `ast`, so an import inside a function, under TYPE_CHECKING or through `import_module("...")`
counts. Imports for annotations alone (TYPE_CHECKING) make no cycle.
"""

import ast
import inspect
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

import attent

PACKAGE = Path(attent.__file__).parent

# Left to right. Parts of one group do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("storage", "formatting"),
    ("settings",),
    ("text", "nn"),
    ("models",),
    ("interop", "data"),
    ("decoding",),
    ("scoring",),
    ("inspection",),
    ("training",),
    ("serving",),
    ("cli",),
)
RANK = {part: rank for rank, group in enumerate(LAYERS) for part in group}
ENTRY_POINTS = {"__init__", "__main__"}  # of the package itself: they may import everything
NN_MAY_IMPORT = {"torch", "triton"}  # besides the standard library; triton in nn/kernels only, which is imported late


@cache
def read_modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by its path in the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_imports_go_one_way() -> None:
    problems = [
        f"attent/{path}:{problem}"
        for path, tree in read_modules().items()
        for problem in find_violations(Path(path).with_suffix("").parts[0], tree)
    ]
    assert not problems, "\n".join(problems)


def test_modules_have_no_import_cycles() -> None:
    cycle = find_cycle(read_modules())
    assert not cycle, " -> ".join(cycle)


def find_violations(part: str, tree: ast.Module) -> list[str]:
    """Return `LINE: reason` for each import that a file of this part must not have."""
    if part in ENTRY_POINTS:
        return []
    refusals = ((line, refuse_import(part, module)) for line, module in iter_imports(tree))
    return [f"{line}: {reason}" for line, reason in refusals if reason is not None]


def refuse_import(part: str, module: str) -> str | None:
    """Return why a file of this part must not import this module, or None if it may."""
    if part not in RANK:
        return f"`{part}` has no rank yet: add it to LAYERS in {Path(__file__).name}"
    if module.startswith("."):
        return "a relative import: write the absolute path"
    top, _, name = module.partition(".")
    if top != "attent":
        allowed = part != "nn" or top in sys.stdlib_module_names or top in NN_MAY_IMPORT
        return None if allowed else f"nn imports torch only, not `{top}`"
    target = name.partition(".")[0]
    if target in ("__version__", part) or part in LAYERS[-1]:
        return None
    if target not in RANK:
        return f"`{module}` is the public entry point: import the part that defines the name"
    if RANK[target] >= RANK[part]:
        order = " -> ".join(", ".join(group) for group in LAYERS)
        return f"`{part}` must not import `{module}`, which is not to its left ({order})"
    return None


def iter_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import; `from attent import models` counts as `attent.models`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            names = [f"attent.{alias.name}" for alias in node.names] if origin == "attent" else [origin]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Call) and is_import_call(node.func):
            constants = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, value) for value in constants if isinstance(value, str))


def is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def find_cycle(trees: dict[str, ast.Module]) -> list[str]:
    """Return the modules of one import cycle, or an empty list. Package `__init__` files only re-export."""
    modules = {
        f"attent.{path.removesuffix('.py').replace('/', '.')}": tree
        for path, tree in trees.items()
        if not path.endswith("__init__.py")
    }
    graph = {name: imported_modules(tree) & modules.keys() - {name} for name, tree in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imported_modules(tree: ast.Module) -> set[str]:
    ignored: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            ignored.update(id(child) for statement in node.body for child in ast.walk(statement))
    nodes = [
        node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in ignored
    ]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


# ---- the checks themselves -----------------------------------------------------------------------------------


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
        ("interop", "from attent.data.formats import read"),
        ("data", "def f():\n    from attent.training.loop import train"),
        ("decoding", "if TYPE_CHECKING:\n    from attent.inspection import Trace"),
        ("scoring", "import importlib\nimportlib.import_module('attent.serving')"),
        ("serving", "from attent.cli import main"),
        ("settings", "from attent.nn.masks import Mask"),
        ("storage", "from attent import settings"),
        ("inspection", "from attent.training import loop"),
        ("models", "from ..interop import load"),
        ("models", "from . import presets"),
        ("helpers", "import torch"),
    ],
)
def test_wrong_import_is_reported(part: str, source: str) -> None:
    assert find_violations(part, ast.parse(source))


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("nn", "import math, torch\nfrom torch.nn import functional\nfrom attent.nn.masks import Mask"),
        ("models", "from attent.nn import block\nfrom attent.text import tokenizer"),
        ("decoding", "from attent.interop import load\nfrom attent import models"),
        ("cli", "import attent"),
        ("cli", "from attent import __version__\nimport rich\nfrom attent.serving import app"),
        ("training", "from attent.settings import Run\nfrom attent.scoring import metrics"),
        ("settings", "import tomllib\nfrom attent.storage.atomic import write_atomic"),
        ("__init__", "from attent.inspection import record"),
    ],
)
def test_allowed_import_passes(part: str, source: str) -> None:
    assert find_violations(part, ast.parse(source)) == []


def test_violation_names_line_and_order() -> None:
    (problem,) = find_violations("nn", ast.parse("import torch\nimport attent.models"))
    assert problem.startswith("2: `nn` must not import `attent.models`")
    assert "text, nn -> models -> interop, data" in problem


def test_cycle_through_a_function_is_found() -> None:
    trees = {
        "data/a.py": "from attent.data import b",
        "data/b.py": "def f():\n    from attent.data.a import x",
        "data/c.py": "if TYPE_CHECKING:\n    from attent.data import a",
    }
    cycle = find_cycle({path: ast.parse(source) for path, source in trees.items()})
    assert set(cycle) == {"attent.data.a", "attent.data.b"}
    assert not find_cycle({path: ast.parse(trees[path]) for path in ("data/a.py", "data/c.py")})


# ---- the public names ----------------------------------------------------------------------------------------


def test_importing_attent_does_not_import_torch() -> None:
    code = "import sys, attent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0


def test_importing_the_training_code_does_not_import_the_compiler() -> None:
    """It takes seconds; a run imports it in a thread while its data are prepared."""
    code = "import sys, attent.training.run, attent.training.tasks.translation as _; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0


def test_every_public_name_resolves() -> None:
    assert dir(attent) == sorted(attent.__all__)
    for name in attent.__all__:
        assert getattr(attent, name) is not None


def test_public_functions_do_not_share_a_name_with_a_package() -> None:
    """Importing `attent.x.y` binds `attent.x`, so a function `attent.x` would be lost on its second use."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    functions = {name for name in attent.__all__ if inspect.isroutine(getattr(attent, name))}
    assert functions
    assert not functions & packages


@pytest.mark.slow
def test_public_functions_work_twice(tmp_path: Path) -> None:
    """The second call of each would find a package, if a function of the first had imported one of the same name."""
    corpus, folder, run = tmp_path / "numbers.tsv", tmp_path / "model", tmp_path / "run"
    corpus.write_text("".join(f"{number} dogs\t{number} Hunde\n" for number in range(300)), encoding="utf-8")
    shutil.copytree(Path(__file__).parent / "models" / "saved_model", folder)
    model, ids, translator = attent.load(folder), torch.tensor([[3, 4]]), attent.Translator.load(folder)

    def record() -> None:
        with attent.record(model):
            model(ids, ids)

    def mask_heads() -> None:
        with attent.mask_heads(model, "decoder.blocks.0"):
            model(ids, ids)

    def serve() -> None:
        def stop(url: str) -> None:
            signal.raise_signal(signal.SIGTERM)

        attent.serve(folder, src="en", tgt="de", port=0, on_ready=stop)

    sizes = {"model.width": 8, "model.heads": 2, "model.ffn_width": 8, "model.layers": 1}
    calls: dict[str, Callable[[], object]] = {
        "build": lambda: attent.build(model.config),
        "distil": lambda: attent.distil(
            corpus, teacher=folder, src="en", tgt="de", out=tmp_path / "student", size="1+1x64", steps=1
        ),
        "load": lambda: attent.load(folder),
        "look": lambda: attent.look(folder, "two"),
        "mask_heads": mask_heads,
        "measure_heads": lambda: attent.measure_heads(translator, [("two", "zwei")]),
        "record": record,
        "score": lambda: attent.score(folder, str(corpus), src="en", tgt="de"),
        "serve": serve,
        "train": lambda: attent.train(corpus, src="en", tgt="de", out=run, steps=1, settings=sizes),
    }
    assert set(calls) == {name for name in attent.__all__ if inspect.isroutine(getattr(attent, name))}
    for call in (*calls.values(), *calls.values()):
        call()


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'biuld'"):
        attent.biuld  # noqa: B018
