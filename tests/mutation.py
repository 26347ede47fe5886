"""Mutation testing on a random sample: change one operator, constant or statement at a time in a copy of the package,
and run the tests that mirror the changed file. A mutant that no test catches is a missing test, or equivalent code.

    python tests/mutation.py --seed 1 --count 40 [--packages nn training] [--workers 2] [--wide] [--list]

Tests run in three stages until one fails: those that import the module or are named after it, those of its package, and
those of the modules that import it (with --wide: all). `tests/faults.py` is the list of hand-picked mutants.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Triton kernels and CUDA graphs run on a GPU (`make test-device`).
EXCLUDED = (
    "nn/kernels/",
    "nn/fused",
    "decoding/engines/gpu/",
    "decoding/engines/graphed_search",
    "training/step_graphs",
    "__",
)
SLOW_TESTS = ("tests/test_faults.py", "tests/test_readme.py", "tests/nn/kernels")
FOREIGN_CODE = re.compile(r"if (TYPE_CHECKING|sys\.platform == '(win32|darwin)'):|torch\.cuda\.")
SPEED_NAMES = re.compile(r"\b[A-Z_]*(BLOCK|CACHE|CHUNK|POLL|PREFETCH|SETTLE)[A-Z_]*\b")
STYLE_KEYWORDS = "color complete_style facecolor fontsize header_style linestyle linewidth maxsize zorder".split()
SKIPPED_KEYWORDS = (None, "strict", "kw_only", "frozen", *STYLE_KEYWORDS)
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: (r"is\s+not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: (r"\*\*", "*"), ast.BitAnd: ("&", "|"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str  # in attent/
    start: int  # byte offsets of the code that `new` replaces
    stop: int
    new: str

    @property
    def package(self) -> str:
        return self.file.partition("/")[0].removesuffix(".py")

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def __str__(self) -> str:
        source = read_code("attent")[f"attent/{self.file}"].encode()
        old, new = (code.decode().splitlines() for code in (source, self.apply(source)))
        diff = list(difflib.unified_diff(old, new, n=0, lineterm=""))[3:]
        return "\n  ".join([f"attent/{self.file}:{source.count(10, 0, self.start) + 1}", *diff])


def find_mutants(file: str) -> Iterator[Mutant]:
    source = read_code("attent")[f"attent/{file}"].encode()
    line_starts = [0, *(match.end() for match in re.finditer(b"\n", source))]

    def begin(node: ast.AST) -> int:
        return line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(node: ast.AST) -> int:
        return line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    for node in walk_code(ast.parse(source)):
        match node:
            case (
                ast.Compare(left=left, ops=[operator], comparators=[right])
                | ast.BoolOp(op=operator, values=[left, right, *_])
                | ast.BinOp(left=left, op=operator, right=right)
            ) if type(operator) in OPERATORS and not is_text(left) and not is_text(right):
                old, new = OPERATORS[type(operator)]
                found = re.search(rf"(?<![*/<>\w]){old}(?![*/<>=\w])".encode(), source[end(left) : begin(right)])
                if found:
                    yield Mutant(file, end(left) + found.start(), end(left) + found.end(), new)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield Mutant(file, begin(node), begin(operand), "")
            case ast.Constant(value=bool(value)):
                yield Mutant(file, begin(node), end(node), str(not value))
            case ast.Constant(value=int(value) | float(value)):
                yield Mutant(file, begin(node), end(node), repr(value + 1 if isinstance(value, int) else 2 * value + 1))
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.UnaryOp):
                yield Mutant(file, begin(test), end(test), f"not ({source[begin(test) : end(test)].decode()})")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield Mutant(file, begin(value), end(value), "None")
            case (
                ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Raise()
            ) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield Mutant(file, begin(node), end(node), "pass")
            case ast.Call(args=args, keywords=keywords):
                for previous, argument in itertools.pairwise(sorted([*args, *keywords], key=begin)):
                    if isinstance(argument, ast.keyword) and argument.arg not in SKIPPED_KEYWORDS:
                        yield Mutant(file, end(previous), end(argument), "")


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_check(node: ast.AST) -> bool:
    """Return True for code that changes no result of a correct program: an assertion, `zip(strict=True)` (lengths are
    equal by construction), keywords of dataclasses (mypy checks calls and assignments), a pause between two polls, the
    size of a cache or a block, and colors and lines of figures and tables."""
    match node:
        case ast.Assert() | ast.keyword(arg="strict" | "kw_only" | "frozen", value=ast.Constant(value=True)):
            return True
        case ast.Raise(exc=ast.Call(func=ast.Name(id=name)) | ast.Name(id=name)):
            return name in ("AssertionError", "NotImplementedError")
        case ast.keyword(arg=str(name)):
            return name in STYLE_KEYWORDS
        case ast.Assign(targets=[target]):
            return SPEED_NAMES.search(ast.unparse(target)) is not None
        case ast.Expr(value=ast.Call(func=function) | ast.Await(value=ast.Call(func=function))):
            return isinstance(function, ast.Attribute) and function.attr in ("sleep", "tick_params")
    return False


def walk_code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but annotations, imports for types, checks, code for a GPU or another operating system, and
    f-strings (3.11 has no positions in them)."""
    annotations = (getattr(node, "annotation", None), getattr(node, "returns", None))
    for child in ast.iter_child_nodes(node):
        is_foreign = isinstance(child, ast.If | ast.Expr) and FOREIGN_CODE.match(ast.unparse(child))
        if is_foreign or child in annotations or is_check(child) or isinstance(child, ast.JoinedStr):
            for other in getattr(child, "orelse", []):
                yield from (other, *walk_code(other))
        else:
            yield child
            yield from walk_code(child)


def choose_mutants(packages: list[str], seed: int, count: int) -> list[Mutant]:
    """Choose mutants at random, the same number of each package."""
    sites: dict[str, list[Mutant]] = {}
    for file in sorted(path.removeprefix("attent/") for path in read_code("attent")):
        for mutant in find_mutants(file) if not file.startswith(EXCLUDED) else ():
            sites.setdefault(mutant.package, []).append(mutant)
    names = [name for name in sites if name in packages or not packages]
    samples = [random.Random(f"{seed} {name}").sample(sites[name], min(count, len(sites[name]))) for name in names]
    rounds = itertools.zip_longest(*samples)
    return [mutant for mutants in rounds for mutant in mutants if mutant is not None][:count]


@cache
def read_code(folder: str) -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}


def find_users(file: str, folder: str) -> list[str]:
    """Return the files of a folder that import a module of the package."""
    parent, _, name = f"attent/{file}".removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
    pattern = re.compile(rf"{parent}\.{name}\b|from {parent} import (\([^)]*|[^\n(]*)\b{name}\b")
    return [path for path, code in sorted(read_code(folder).items()) if pattern.search(code)]


def choose_tests(file: str, wide: bool) -> list[list[str]]:
    """Return the tests of each stage."""
    tests = [path for path in sorted(read_code("tests")) if "/test_" in path and not path.startswith(SLOW_TESTS)]
    package = f"tests/{file.partition('/')[0]}/" if "/" in file else f"tests/test_{file}"
    direct = [path for path in find_users(file, "tests") if path in tests]
    named = {re.sub(r"^attent/(.*?)([^/]+)$", r"tests/\1test_\2", user) for user in find_users(file, "attent")}
    own = [path for path in tests if path.startswith(package)]
    first = [path for path in own if path in direct or path.endswith(f"/test_{Path(file).name}")]
    laws = [path for path in tests if path.startswith("tests/laws/") and file.startswith(("nn/", "models/"))]
    wider = tests if wide else [path for path in tests if path in direct or path in named]
    second = [path for path in own + laws if path not in first]
    third = [path for path in wider if path not in first + second]
    return [stage for stage in (first, second, third) if stage]


def find_failing_test(folder: Path, options: argparse.Namespace, tests: list[str]) -> str | None:
    """Return the first test that fails, "timeout", or None."""
    command = [options.python, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    variables = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(
            command, cwd=folder, env=variables, timeout=options.limit, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", result.stdout, re.MULTILINE)
    return None if result.returncode in (0, 5) else failed[1] if failed else "pytest stopped"


def run_mutant(mutant: Mutant, folder: Path, options: argparse.Namespace, broken: set[str]) -> str | None:
    """Return the test that catches the mutant, or None. Tests that fail without it join `broken`; a stage that takes
    longer than the limit without it decides nothing."""
    path = folder / "attent" / mutant.file
    source = path.read_bytes()
    for stage in choose_tests(mutant.file, options.wide):
        while True:
            path.write_bytes(mutant.apply(source))
            deselected = [f"--deselect={test}" for test in sorted(broken)]
            failed = find_failing_test(folder, options, [*stage, *deselected])
            path.write_bytes(source)
            file = (failed or "").partition("::")[0]
            if file not in stage:
                break
            # The same files without the mutant, not the test alone: it may fail only after others.
            unrelated = find_failing_test(folder, options, [*stage[: stage.index(file) + 1], *deselected])
            if unrelated is None or "::" not in unrelated:
                break
            broken.add(unrelated)
        if failed == "timeout" and find_failing_test(folder, options, stage) == "timeout":
            continue
        if failed is not None:
            return failed
    return None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("seed", 0, "of the random choice"), ("count", 40, "mutants, spread evenly over the packages"),
        ("workers", 1, "processes"), ("limit", 600.0, "seconds for one stage"),
        ("minutes", 1e9, "start no mutant after this time"), ("python", sys.executable, "interpreter of the tests"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--packages", nargs="*", default=[], help="such as nn, cli, settings; default: all")
    parser.add_argument("--wide", action="store_true", help="run all tests before a mutant counts as a survivor")
    parser.add_argument("--list", action="store_true", help="show the mutants and their tests, run nothing")
    return parser.parse_args()


def main() -> None:
    options, results, broken = parse_options(), dict[Mutant, str | None](), set[str]()
    mutants = choose_mutants(options.packages, options.seed, options.count)
    if options.list:
        print(*(f"{mutant}\n  {choose_tests(mutant.file, options.wide)}" for mutant in mutants), sep="\n")
        return
    deadline = time.monotonic() + 60 * options.minutes

    def work(number: int) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "repository")
            ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build", "dist", "shared")
            shutil.copytree(ROOT, folder, ignore=ignored)
            # Bytecode validated by hash: by time and size, that of another mutant could pass for this one's.
            compiler = [options.python, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
            subprocess.run([*compiler, "attent", "tests"], cwd=folder, check=True)
            for mutant in mutants[number :: options.workers]:
                if time.monotonic() < deadline:
                    results[mutant] = run_mutant(mutant, folder, options, broken)
                    print(f"[{len(results)}/{len(mutants)}] {mutant}\n  {results[mutant] or 'SURVIVED'}", flush=True)

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(work, range(options.workers)))
    print(f"\nseed {options.seed}; tests that fail without a mutant: {', '.join(sorted(broken)) or 'none'}; survivors:")
    print(*(mutant for mutant, test in results.items() if test is None), sep="\n")
    for package in (*sorted({mutant.package for mutant in results}), "all"):
        caught = [test is not None for mutant, test in results.items() if package in ("all", mutant.package)]
        print(f"{package:12} {sum(caught):4} of {len(caught):4} caught {sum(caught) / max(1, len(caught)):5.0%}")


if __name__ == "__main__":
    main()
