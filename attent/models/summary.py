"""A model as a tree of its modules, with the shapes and numbers of their parameters."""

from itertools import groupby
from typing import NamedTuple

from torch import Tensor, nn

from attent.formatting import format_count
from attent.nn import Attention


class SummaryRow(NamedTuple):
    name: str
    kind: str  # class of the module
    shape: str
    parameters: str  # how many
    depth: int = 0


class ModelSummary(str):
    def __repr__(self) -> str:
        return str(self)


def summarize_modules(model: nn.Module) -> ModelSummary:
    """Return a tree of the modules with parameters: equal neighbors share a line, shared parameters count once."""
    rows = [row._replace(name="  " * row.depth + row.name) for row in list_rows("", model, set())]
    name, kind, shape, count = (max(map(len, column)) for column in list(zip(*rows, strict=True))[:4])
    lines = (f"{row.name:{name}}  {row.kind:{kind}}  {row.shape:{shape}}  {row.parameters:>{count}}" for row in rows)
    return ModelSummary("\n".join(lines))


def list_rows(name: str, module: nn.Module, seen: set[Tensor], depth: int = 0) -> list[SummaryRow]:
    """Return the row of a module and those below it; `seen` are the parameters of earlier ones, and gets its own."""
    own, kind = dict(module.named_parameters(recurse=False)), type(module).__name__
    shape = ", ".join(" x ".join(map(str, parameter.shape)) for key, parameter in own.items() if key != "bias")
    if isinstance(module, Attention):
        shape = f"{format_count(module.heads, 'head')} of {module.head_width}"
    new = [parameter.numel() for parameter in module.parameters() if parameter not in seen]
    row = SummaryRow(name or kind, kind if name else "", shape, f"{sum(new):,}" if new else "shared", depth)
    seen.update(own.values())
    parts = [list_rows(key, child, seen, depth + 1) for key, child in list_children(module)]
    is_member = name.rpartition(".")[2].isdigit()  # of a list
    if name and not is_member and not own and len(parts) == 1 == len(parts[0]):  # such as the norm of a Residual
        return [parts[0][0]._replace(name=f"{name}.{parts[0][0].name}", depth=depth)]
    rows = [row]
    for _, equal_parts in groupby(parts, key=lambda part: (part[0][1:], part[1:])):
        first, *others = equal_parts
        rows += [merge_rows([first[0], *(other[0] for other in others)]), *first[1:]]
    return rows


def list_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    children = []
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            children += [(f"{key}.{index}", member) for index, member in list_children(child)]
        elif any(True for _ in child.parameters()):
            children.append((key, child))
    return children


def merge_rows(rows: list[SummaryRow]) -> SummaryRow:
    """Merge the equal rows of neighbors: `blocks.0-5`, or `query, key, value`."""
    if len(rows) == 1:
        return rows[0]
    first, index = rows[0], rows[-1].name.rpartition(".")[2]
    name = f"{first.name}-{index}" if index.isdigit() else ", ".join(row.name for row in rows)
    return first._replace(name=name, kind=f"{len(rows)} x {first.kind}", parameters=f"{len(rows)} x {first.parameters}")
