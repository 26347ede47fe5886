"""Weights between a model and its folder: which tensors to save, which are tied, and how to assign them.

An adapter is saved without its model (`attent train --keep-adapter`): its folder has the files of a model folder, with
a config of the rank and the hash of the matrices that it belongs to. A summary shows a model as a tree of its modules.
"""

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from attent.formatting import format_count
from attent.models.config import ModelConfig, to_config_json
from attent.models.folder import check_tensors, read_folder, write_folder
from attent.nn import Attention
from attent.nn.attention import COMPILED_PREFIX
from attent.nn.lora import apply_adapter, hash_matrices
from attent.storage.errors import FolderError

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ADAPTER_FOLDER = "adapter"  # in the folder of a run
ADAPTER_KIND = "lora"
M = TypeVar("M", bound=nn.Module)


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


class SavableModel(nn.Module):
    """The base class of whole models: a torch module with a `config`."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json, model.safetensors and manifest.json; `attent.load(folder)` reads them back."""
        save_model(self, folder)

    def summary(self) -> ModelSummary:
        """Return the tree of modules with shapes and parameter counts, to print.

        >>> model = attent.build(attent.presets.tiny(vocab=100))
        >>> model.summary()
        Seq2Seq                                                               1,337,856
          source_embedding                 TokenEmbedding    100 x 128           12,800
          encoder                          Stack                                529,920
            blocks.0-3                     4 x FusedBlock                   4 x 132,480
              self_attn                    Attention         4 heads of 32       66,048
        ...
        """
        return summarize_modules(self)


def find_tied_names(model: nn.Module) -> dict[str, str]:
    """Return for each additional name of a tied parameter its first name."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties


def collect_tensors(model: nn.Module, like: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to save: exactly those of `like`, an empty model of the same config, with the same ties."""
    tensors = {name.replace(COMPILED_PREFIX, ""): tensor for name, tensor in model.state_dict().items()}
    check_weights(tensors, like, "the model")
    return tensors


def build_empty_like(model: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return type(model)(model.config)


def save_model(model: nn.Module, folder: str | os.PathLike[str], files: Mapping[str, bytes] | None = None) -> None:
    config: ModelConfig = model.config  # type: ignore[assignment]
    tensors = collect_tensors(model, build_empty_like(model))
    write_folder(folder, config=to_config_json(config), tensors=tensors, files=files)


def assign_weights(model: M, tensors: Mapping[str, Tensor], where: str | Path) -> M:
    """Assign weights to an empty model without a copy, tie them again, and return it in eval mode."""
    check_weights(tensors, model, where)
    ties = find_tied_names(model)
    model.load_state_dict(dict(tensors), assign=True)
    for name, first in ties.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(first))
    for part in model.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()  # into one buffer on a GPU; otherwise cuDNN would copy them in every call
    return model.eval()


def check_weights(tensors: Mapping[str, Tensor], like: nn.Module, where: str | Path) -> None:
    check_tensors({name: tensor.shape for name, tensor in like.state_dict().items()}, tensors, where)
    check_dtypes(tensors, where)
    for name, first in find_tied_names(like).items():
        # One of two different tensors would be lost.
        if tensors[name].data_ptr() != tensors[first].data_ptr() and not torch.equal(tensors[name], tensors[first]):
            required = f"the same tensor as `{first}`, as the config says (`share_embeddings`, `tie_output`)"
            raise FolderError(f"{where}: `{name}` must be {required}, but differs; tie it again, or change the config")


def check_dtypes(tensors: Mapping[str, Tensor], where: str | Path) -> None:
    dtypes = {tensor.dtype: name for name, tensor in tensors.items()}
    for dtype, name in dtypes.items():
        if dtype not in WEIGHT_DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHT_DTYPES)
            raise FolderError(f"{where}: `{name}` must be {allowed}, but is {dtype}; convert the weights first")
    if len(dtypes) > 1:
        examples = ", ".join(f"`{name}` is {dtype}" for dtype, name in dtypes.items())
        raise FolderError(f"{where}: all tensors must have one dtype, but {examples}; convert them (model.float())")


def write_adapter(folder: Path, updates: Mapping[str, Tensor], matrices: Mapping[str, Tensor], base_model: str) -> None:
    rank = min(min(tensor.shape) for tensor in updates.values())
    config = {"adapter": ADAPTER_KIND, "rank": rank, "base": hash_matrices(matrices), "base_model": base_model}
    write_folder(folder, config=config, tensors=updates)


def load_adapter(folder: str | Path, model: M, original: M) -> M:
    """Return a copy of the model with the adapter of a folder, or of the folder of a run, unmerged; `original` is the
    model in the stored precision."""
    folder = Path(folder).expanduser()
    folder = folder / ADAPTER_FOLDER if (folder / ADAPTER_FOLDER).is_dir() else folder
    stored = read_folder(folder)
    if stored.config.get("adapter") != ADAPTER_KIND:
        raise FolderError(f"{folder}: must be an adapter, but is a model; train one with --lora and --keep-adapter")
    paths = dict.fromkeys(name.rpartition(".")[0] for name in stored.tensors)
    modules = dict(original.named_modules())
    matrices = {path: part.weight for path in paths if isinstance(part := modules.get(path), nn.Linear)}
    if len(matrices) < len(paths) or hash_matrices(matrices) != stored.config["base"]:
        base = stored.config["base_model"]
        raise FolderError(f"{folder}: is an adapter of {base}, not of this model; give both together")
    return apply_adapter(model, stored.tensors)
