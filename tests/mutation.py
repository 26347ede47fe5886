"""Mutation testing on a random sample: change one operator, constant or statement at a time in a copy of the package,
and run the tests that reach the changed code. A mutant that no test catches is a missing test, or equivalent code.

    python tests/mutation.py --seed 1 --count 40 [--packages nn --tests tests/nn] [--workers 2] [--list]

The quick tests, or those of `--tests`, run once with a probe at each mutant's statement, which records the tests that
reach it. For each mutant these run, fastest first, and then others of their files, up to `--budget` seconds in total.
Tests that caught a mutant must pass without it. `tests/faults.py` is the list of hand-picked mutants.
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
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Triton kernels and CUDA graphs run on a GPU (`make test-device`).
EXCLUDED = (
    "nn/kernels/",
    "nn/fused",
    "decoding/engines/gpu/",
    "training/step_graphs",
    "__",
)
IGNORED_TESTS = ("tests/test_faults.py", "tests/test_readme.py", "tests/nn/kernels")
# A pytest plugin in the copy. Subprocesses of a test inherit its name in PYTEST_CURRENT_TEST.
PLUGIN = """import os
hits, open_file, folder = set(), open, os.path.dirname(__file__)
def write(*fields):
    with open_file(folder + "/events.txt", "a", encoding="utf-8") as file:
        file.write("\\t".join(fields) + "\\n")
def hit(*numbers):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (test, numbers) not in hits:
        hits.add((test, numbers))
        write("hit", test, *map(str, numbers))
def pytest_runtest_logreport(report):
    write(report.outcome, report.nodeid, report.when, str(report.duration))
def pytest_collection_modifyitems(items):
    if os.path.exists(folder + "/chosen.txt"):
        with open_file(folder + "/chosen.txt", encoding="utf-8") as file:
            order = {line.rstrip("\\n"): number for number, line in enumerate(file)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
"""
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


def find_users(file: str) -> list[str]:
    """Return the test files that import a module of the package."""
    parent, _, name = f"attent/{file}".removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
    pattern = re.compile(rf"{parent}\.{name}\b|from {parent} import (\([^)]*|[^\n(]*)\b{name}\b")
    return [path for path, code in sorted(read_code("tests").items()) if pattern.search(code)]


def find_statements(tree: ast.Module, mutant: Mutant) -> list[ast.stmt]:
    """Return the innermost statement that has the mutant; if it runs on import, all functions of the file."""
    before = read_code("attent")[f"attent/{mutant.file}"].encode()[: mutant.start]
    position = (before.count(b"\n") + 1, len(before) - before.rfind(b"\n") - 1)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    path = [node for node in nodes if get_start(node) <= position < (node.end_lineno or 0, node.end_col_offset or 0)]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    is_run = any(isinstance(node, functions) for node in path)
    return path[-1:] if is_run else [node for node in nodes if isinstance(node, functions)]


def get_start(node: ast.stmt) -> tuple[int, int]:
    return min((part.lineno, part.col_offset) for part in (node, *getattr(node, "decorator_list", ())))


class ProbeInserter(ast.NodeTransformer):
    """Insert calls of `hit` before statements, and as the first statement of functions."""

    def __init__(self, numbers: dict[ast.AST, list[int]]) -> None:
        self.numbers = numbers  # of the mutants of each statement or function

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if node not in self.numbers:
            return node
        call = ast.parse(f"__import__('mutation_plugin').hit(*{self.numbers[node]})").body[0]
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return [call, node]
        node.body.insert(0 if ast.get_docstring(node) is None else 1, call)
        return node


def run_tests(
    folder: Path, options: argparse.Namespace, tests: Collection[str] | None, *flags: str, limit: float | None = None
) -> int | None:
    """Run tests in the copy, which writes `events.txt`; return the exit status, or None if they take too long."""
    (folder / "events.txt").write_text("")
    (folder / "chosen.txt").unlink(missing_ok=True)
    files = [*options.tests, *(f"--ignore={path}" for path in IGNORED_TESTS)]
    if tests is not None:
        (folder / "chosen.txt").write_text("\n".join(tests), encoding="utf-8")
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    settings = ["-q", "-p", "mutation_plugin", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [options.python, "-m", "pytest", *settings, *flags, *files]
    variables = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, start_new_session=True
    ) as pytest:
        try:
            return pytest.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(pytest.pid, signal.SIGKILL)
            return None


def read_events(folder: Path) -> list[list[str]]:
    return [line.split("\t") for line in (folder / "events.txt").read_text(encoding="utf-8").splitlines()]


class Reach:
    """The tests that reach each mutant, and the duration of all tests."""

    def __init__(self, mutants: list[Mutant], folder: Path, options: argparse.Namespace) -> None:
        """Run all tests once, with probes in the copy."""
        self.seconds, self.tests = defaultdict[str, float](float), defaultdict[int, set[str]](set)
        trees = {path: ast.parse(read_code("attent")[path]) for path in {f"attent/{mutant.file}" for mutant in mutants}}
        numbers: dict[ast.AST, list[int]] = defaultdict(list)
        for number, mutant in enumerate(mutants):
            for node in find_statements(trees[f"attent/{mutant.file}"], mutant):
                numbers[node].append(number)
        for path, tree in trees.items():
            (folder / path).write_text(ast.unparse(ProbeInserter(numbers).visit(tree)), encoding="utf-8")
        run_tests(folder, options, None, f"-n{options.workers if options.workers > 1 else 0}")
        for kind, test, *values in read_events(folder):
            if kind == "hit":
                for value in values:
                    self.tests[int(value)].add(test)
            else:
                self.seconds[test] += float(values[1])
        for path in trees:
            (folder / path).write_text(read_code("attent")[path], encoding="utf-8")

    def choose_tests(self, number: int, file: str, budget: float) -> list[list[str]]:
        """Return the tests of the file that is named after the module, or has most of them, and the other tests, within
        the budget: fastest first, and before all others those that reach the mutant."""
        reaching = self.tests[number]
        files = {*find_users(file), *(test.partition("::")[0] for test in reaching)}
        tests: dict[str, list[str]] = {}  # by file: fixtures of a module are built once
        for test in sorted(self.seconds, key=lambda test: (test not in reaching, self.seconds[test])):
            if test.partition("::")[0] in files and budget > 0:
                budget -= self.seconds[test]
                tests.setdefault(test.partition("::")[0], []).append(test)
        named = f"/test_{Path(file).name}"
        first = max(tests, key=lambda path: (path.endswith(named), len(tests[path])), default="")
        rest = [test for path, others in tests.items() if path != first for test in others]
        return [stage for stage in (tests.get(first, []), rest) if stage]


def run_mutant(number: int, mutant: Mutant, folder: Path, options: argparse.Namespace, reach: Reach) -> str | None:
    """Return the test that catches the mutant, or None."""
    path = folder / "attent" / mutant.file
    source = path.read_bytes()
    path.write_bytes(mutant.apply(source))
    try:
        for stage in reach.choose_tests(number, mutant.file, options.budget):
            limit = 60 + 5 * sum(reach.seconds[test] for test in stage)
            status = run_tests(folder, options, stage, "-x", limit=limit)
            if status not in (0, 5):
                failed = [test for kind, test, *_ in read_events(folder) if kind == "failed"]
                return failed[0] if failed else "timeout" if status is None else "pytest stopped"
    finally:
        path.write_bytes(source)
    return None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("seed", 0, "of the random choice"), ("count", 40, "mutants, spread evenly over the packages"),
        ("workers", 1, "processes"), ("budget", 60.0, "seconds of tests per mutant"),
        ("minutes", 1e9, "start no mutant after this time"), ("python", sys.executable, "interpreter of the tests"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--packages", nargs="*", default=[], help="such as nn, cli, settings; default: all")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders of tests; default: all")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    return parser.parse_args()


def copy_repository(scratch: str, options: argparse.Namespace) -> Path:
    folder = Path(scratch, "repository")
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build", "dist", "shared")
    shutil.copytree(ROOT, folder, ignore=ignored)
    (folder / "mutation_plugin.py").write_text(PLUGIN)
    # Bytecode validated by hash: by time and size, that of another mutant could pass for this one's.
    compiler = [options.python, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compiler, "attent", "tests"], cwd=folder, check=True)
    return folder


def main() -> None:
    options, results, broken = parse_options(), dict[int, str | None](), set[str]()
    mutants = choose_mutants(options.packages, options.seed, options.count)
    if options.list:
        print(*mutants, sep="\n")
        return
    deadline = time.monotonic() + 60 * options.minutes
    with ExitStack() as stack, ThreadPoolExecutor(options.workers) as pool:
        scratch = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(options.workers)]
        folders = [copy_repository(path, options) for path in scratch]
        reach = Reach(mutants, folders[0], options)

        def work(folder: Path, numbers: list[int]) -> None:
            for number in numbers:
                if time.monotonic() < deadline:
                    results[number] = run_mutant(number, mutants[number], folder, options, reach)
                    count = f"[{len(results)}/{len(mutants)}, {len(reach.tests[number])} tests]"
                    print(f"{count} {mutants[number]}\n  {results[number] or 'SURVIVED'}", flush=True)

        pending = list(range(len(mutants)))
        while pending:
            list(pool.map(work, folders, [pending[start :: options.workers] for start in range(options.workers)]))
            catching = {str(results.get(number)) for number in pending} & reach.seconds.keys()
            run_tests(folders[0], options, catching)
            failed = {test for kind, test, *_ in read_events(folders[0]) if kind == "failed"} & catching
            broken |= failed
            for test in failed:
                del reach.seconds[test]
            pending = [number for number, test in results.items() if test in failed]
            for number in pending:
                del results[number]
    print(f"\nseed {options.seed}; tests that fail without a mutant: {', '.join(sorted(broken)) or 'none'}; survivors:")
    print(*(mutants[number] for number, test in results.items() if test is None), sep="\n")
    for package in (*sorted({mutants[number].package for number in results}), "all"):
        caught = [test is not None for number, test in results.items() if package in ("all", mutants[number].package)]
        print(f"{package:12} {sum(caught):4} of {len(caught):4} caught {sum(caught) / max(1, len(caught)):5.0%}")


if __name__ == "__main__":
    main()
