"""Code blocks of Markdown pages: reading them, and the checks of those that are not run.

A block that is not run here has a comment in the line before it, with the reason, which readers do not see:
`<!-- not run by the tests: REASON -->`. Its flags must still exist, and so must the names of its Python.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise

from cyclopts import CycloptsError

from attent.cli import _rewrite_stdin_args, format_usage_error, make_app

SHELL, PYTHON, PROSE = ("sh", "console"), ("python",), ("text", "toml", "json", "html")
NOT_RUN = re.compile(r"<!-- not run by the tests: \S.* -->")
OLD_NOT_RUN = "# not run by the tests:"


@dataclass(frozen=True)
class Block:
    line: int  # of the opening fence
    language: str
    text: str
    is_run: bool = True


def read_blocks(text: str) -> list[Block]:
    """Return the blocks of code, in order; those in other languages (text, toml, json, html) are left out."""
    blocks, opening, body, previous = [], None, list[str](), ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"\s*```(\S*)", line)
        if fence and opening is None:
            opening, body = Block(number, fence[1], "", NOT_RUN.fullmatch(previous) is None), []
        elif fence and opening is not None:
            blocks.append(Block(opening.line, opening.language, "\n".join(body), opening.is_run))
            opening = None
        else:
            body.append(line)
        previous = line.strip()
    assert opening is None, f"line {opening.line}: this block is never closed"
    return [block for block in blocks if is_code(block)]


def is_code(block: Block) -> bool:
    known = SHELL + PYTHON + PROSE
    assert block.language in known, f"line {block.line}: ```{block.language} must be one of {', '.join(known)}"
    assert OLD_NOT_RUN not in block.text, f"line {block.line}: put the note before the block, as {NOT_RUN.pattern}"
    return block.language not in PROSE


def read_commands(block: Block) -> Iterator[str]:
    """Yield the commands of a shell block, with continued lines joined and comments removed."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    yield from (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def split_pipeline(command: str) -> list[list[str]]:
    """Return the words of each command of a pipeline; a redirection is the two words `>` and its file."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|<>")
    lexer.whitespace_split = True
    words = list(lexer)
    pipeline: list[list[str]] = [[]]
    for word in words:
        if word == "|":
            pipeline.append([])
        else:
            pipeline[-1].append(word)
    return pipeline


# ---- checks of blocks that are not run -------------------------------------------------------------------------


def check_block(block: Block) -> None:
    if block.language in PYTHON:
        check_python(block.text)
        return
    for command in read_commands(block):
        for words in split_pipeline(command):
            check_flags(words)


def check_flags(words: list[str]) -> None:
    """Parse a command as `attent` does; `...` stands for further flags."""
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    if words[:1] != ["attent"] and ["-m", "attent"] not in list(map(list, pairwise(words))):
        return
    arguments = words[words.index("attent") + 1 : words.index(">") if ">" in words else None]
    if "..." in arguments:
        arguments = [*(word for word in arguments if word != "..."), *([] if "--out" in arguments else ["--out", "x"])]
    try:
        make_app().parse_args(_rewrite_stdin_args(arguments))
    except CycloptsError as error:
        raise AssertionError(f"attent {' '.join(arguments)}: {format_usage_error(error)}") from error


def check_python(text: str) -> None:
    """Check that imports, attributes of modules, and the methods of objects made by `Class.load` exist."""
    tree = ast.parse(text)
    values: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            values |= {alias.asname or alias.name: import_module(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = import_module(node.module or "")
            values |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolve(node, values)
    for name, loaded, method in re.findall(r"(\w+) = ([\w.]+)\.load\(.*?\b\1\.(\w+)\(", text, re.DOTALL):
        cls = resolve(ast.parse(loaded, mode="eval").body, values)
        assert hasattr(cls, method), f"{name}.{method}: {loaded} has no method {method}"


def resolve(node: ast.expr, values: dict[str, object]) -> object:
    """Return the value of a dotted name, None if it is not known; AssertionError for an attribute that is missing."""
    if isinstance(node, ast.Name):
        return values.get(node.id)
    owner = resolve(node.value, values) if isinstance(node, ast.Attribute) else None
    if owner is None:
        return None
    assert hasattr(owner, node.attr), f"{ast.unparse(node)}: there is no {node.attr}"
    return getattr(owner, node.attr)
