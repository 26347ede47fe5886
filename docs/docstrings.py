"""Convert attent's docstrings, which are plain text, to reStructuredText.

    name   explanation       lines in columns become a list of parameters
    `code`                   code; the name of a documented object becomes a link
    indented lines, code     a literal block
    >>> doctest              unchanged

The fields of a dataclass are taken from its source, where a comment or an annotation explains them.
"""

import ast
import inspect
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Annotated, Any, get_args, get_origin, get_type_hints

COLUMNS = re.compile(r"(\w+(?:, \w+)*)  +(\S.*)")


def convert_docstring(lines: Sequence[str], value: object, links: Mapping[str, str]) -> list[str]:
    """Return a docstring as reStructuredText; `links` are the full names of documented objects by their short names."""
    if is_dataclass(value) and is_generated(lines, value):
        lines = []
    converted: list[str] = []
    explanations: dict[str, str] = {}
    for paragraph in split_paragraphs(lines):
        if COLUMNS.fullmatch(paragraph[0]):
            explanations |= dict(read_columns(paragraph))
        else:
            converted += [*convert_paragraph(paragraph, links), ""]
    if isinstance(value, type) and is_dataclass(value):
        order = {field.name: "" for field in fields(value)}
        explanations = {
            name: text for name, text in (order | read_field_comments(value) | explanations).items() if text
        }
    return converted + [f":param {name}: {convert_text(text, links)}" for name, text in explanations.items()]


def is_generated(lines: Sequence[str], cls: object) -> bool:
    """True for the docstring that `dataclass` adds."""
    return bool(lines) and lines[0].startswith(f"{getattr(cls, '__name__', '')}(")


def split_paragraphs(lines: Sequence[str]) -> list[list[str]]:
    return [list(group) for is_text, group in groupby(lines, key=lambda line: bool(line.strip())) if is_text]


def convert_paragraph(lines: list[str], links: Mapping[str, str]) -> list[str]:
    if lines[0].startswith(">>>"):
        return lines
    is_python = is_code("\n".join(lines))
    if is_python or lines[0].startswith(" "):
        return [f".. code-block:: {'python' if is_python else 'text'}", "", *(f"    {line}" for line in lines)]
    return convert_text("\n".join(lines), links).split("\n")


def is_code(text: str) -> bool:
    """True if a paragraph is Python with a call or an assignment, which prose never is."""
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    return any(isinstance(statement, ast.Assign | ast.With | ast.For) for statement in statements)


def read_columns(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the explanation of each entry; further lines of one are indented."""
    entries = re.split(r"\n(?=\S)", "\n".join(lines))
    for entry in entries:
        if columns := COLUMNS.fullmatch(" ".join(entry.split("\n")).strip()):
            for name in columns[1].split(", "):
                yield name, re.sub(r"  +", " ", columns[2])


def convert_text(text: str, links: Mapping[str, str]) -> str:
    """Escape what reStructuredText would take for markup, and mark code and the names of documented objects."""
    parts = re.split(r"`([^`]+)`", text)
    for index, part in enumerate(parts):
        name = part.removesuffix("()")
        if index % 2 == 0:
            parts[index] = re.sub(r"([\\*|_])", r"\\\1", part)
        elif name in links:
            parts[index] = rf"\ :py:obj:`{name} <{links[name]}>`\ "
        else:
            parts[index] = rf"\ ``{part}``\ "
    return "".join(parts)


def read_field_comments(cls: type) -> dict[str, str]:
    """Return the explanation of each field of a dataclass: the comment in its line, or the text of its annotation."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            comments |= dict(iterate_comments(base))
    hints = get_type_hints(cls, include_extras=True)
    texts = {name: get_args(hint)[1] for name, hint in hints.items() if get_origin(hint) is Annotated}
    return comments | texts


def iterate_comments(cls: type) -> Iterator[tuple[str, str]]:
    try:
        source = inspect.getsource(cls).splitlines(keepends=True)
    except (OSError, TypeError):  # made by `make_dataclass`
        return
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(iter(source).__next__)
        if token.type == tokenize.COMMENT
    }
    definition: Any = ast.parse("".join(source)).body[0]
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            line = statement.end_lineno
            if line in comments:
                yield statement.target.id, comments[line]
