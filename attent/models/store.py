"""Between a model and its folder: which tensors belong to it, which of them are one and the same, and filling an empty
model with them. The files themselves are `folder`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attent.models.folder import FolderError, check_tensors

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPILED = "_orig_mod."  # what torch.compile puts into the names of a module's parameters


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several -> its first name."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties


def tensors_of(model: nn.Module, like: nn.Module) -> dict[str, Tensor]:
    """The tensors to save: just those of `like`, an empty model of the same config, and tied as its are."""
    tensors = {name.replace(COMPILED, ""): tensor for name, tensor in model.state_dict().items()}
    check_tensors(shapes(like), tensors, "the model")
    check_ties(tensors, tied_names(like), "the model")
    return tensors


def fill(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give an empty model its weights as they are, without a copy, and tie again what was tied. In eval mode."""
    ties = tied_names(model)
    check_tensors(shapes(model), tensors, where)
    check_formats(tensors, where)
    check_ties(tensors, ties, where)
    model.load_state_dict(dict(tensors), assign=True)
    for name, first in ties.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(first))
    model.eval()


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def check_formats(tensors: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in FORMATS:
            formats = ", ".join(str(known).removeprefix("torch.") for known in FORMATS)
            raise FolderError(
                f"{where}: `{name}` must be of {formats}, but is {tensor.dtype}; convert the weights first"
            )


def check_ties(tensors: Mapping[str, Tensor], ties: Mapping[str, str], where: str) -> None:
    """Refuse two different tensors for what the config says is one: one of them would be lost."""
    for name, first in ties.items():
        one, other = tensors[name], tensors[first]
        if one.data_ptr() != other.data_ptr() and not torch.equal(one, other):
            raise FolderError(
                f"{where}: `{name}` must be the same tensor as `{first}`, as the config says (`share_embeddings`, "
                f"`tie_output`), but differs; tie it again, or change the config"
            )
