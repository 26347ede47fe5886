"""Weights between a model and its folder: which tensors to save, which are tied, and how to assign them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from attent.models import folder as model_folder
from attent.models.config import ModelConfig, to_config_json
from attent.models.folder import check_tensors
from attent.models.summary import ModelSummary, summarize_modules
from attent.nn.attention import COMPILED_PREFIX
from attent.storage.errors import FolderError

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
M = TypeVar("M", bound=nn.Module)


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
    model_folder.write_folder(folder, config=to_config_json(config), tensors=tensors, files=files)


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
