"""LoRA (Hu et al. 2021) and frozen parameters: train a small part of a model.

LoRA freezes a matrix W and trains a low-rank update, W + B A. In training it is a parametrization of the layer's
weight, so no other code knows of it; `merge_lora` adds the update into W. For inference `apply_adapter` keeps it apart:
y = W x + B (A x), so that many adapters share one model.
"""

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attent.nn.attention import Attention
from attent.nn.feedforward import FeedForward

M = TypeVar("M", bound=nn.Module)


class LoRAError(ValueError):
    """The requested LoRA rank or frozen parameters do not fit the model."""


class LowRankUpdate(nn.Module):
    """W -> W + B A. B is zero at first, so training starts from W."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns) * columns**-0.5)  # A
        self.up = nn.Parameter(torch.zeros(rows, rank))  # B

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_lora(model: nn.Module, rank: int, new_parameters: Iterable[str] = ()) -> None:
    """Freeze the model except new parameters, and add a low-rank update to each attention and feed-forward matrix."""
    model.requires_grad_(False)
    for name in new_parameters:
        model.get_parameter(name).requires_grad_(True)
    layers = [part for part in model.modules() if isinstance(part, Attention | FeedForward)]
    if not layers:
        raise LoRAError("`train.lora` must be 0 for a model without attention, whose matrices it adapts; leave it out")
    for layer in layers:
        for linear in [part for part in layer.children() if isinstance(part, nn.Linear)]:
            if rank > min(linear.weight.shape):
                raise LoRAError(
                    f"`train.lora` must be at most {min(linear.weight.shape)}, the smaller side of the model's "
                    f"smallest matrix, but is {rank}"
                )
            parametrize.register_parametrization(linear, "weight", LowRankUpdate(linear.weight, rank))


def merge_lora(model: nn.Module) -> None:
    """Add the low-rank updates into the matrices, which leaves an ordinary model."""
    for part in [part for part in model.modules() if parametrize.is_parametrized(part, "weight")]:
        parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)


class AdaptedLinear(nn.Module):
    """y = W x + b + B (A x). Code that reads the weight gets the merged one."""

    def __init__(self, base: nn.Linear, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.base = base
        weight = base.weight
        self.down, self.up = (nn.Parameter(x.to(weight.device, weight.dtype), requires_grad=False) for x in (down, up))

    @property
    def weight(self) -> Tensor:
        return self.base.weight + self.up @ self.down

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + F.linear(F.linear(x, self.down), self.up)


def split_parameters(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the low-rank updates, as PATH.down and PATH.up, and the matrices W, as PATH, of a model in training."""
    pattern = re.compile(r"(.+)\.parametrizations\.weight\.(?:0\.(down|up)|original)")
    matches = {name: pattern.fullmatch(name) for name in parameters}
    updates = {f"{match[1]}.{match[2]}": parameters[name] for name, match in matches.items() if match and match[2]}
    return updates, {match[1]: parameters[name] for name, match in matches.items() if match and not match[2]}


def hash_matrices(matrices: Mapping[str, Tensor]) -> str:
    """SHA-256 of the matrices that an adapter belongs to, in float32."""
    digest = hashlib.sha256()
    for name, matrix in sorted(matrices.items()):
        digest.update(f"{name} {tuple(matrix.shape)}\n".encode())
        digest.update(matrix.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def apply_adapter(model: M, updates: Mapping[str, Tensor]) -> M:
    """Return a copy of the model with these updates, unmerged; it shares the parameters of the model."""
    adapted = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
    for path in dict.fromkeys(name.rpartition(".")[0] for name in updates):
        linear = adapted.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        parent, _, name = path.rpartition(".")
        adapted_linear = AdaptedLinear(linear, updates[f"{path}.down"], updates[f"{path}.up"])
        setattr(adapted.get_submodule(parent), name, adapted_linear)
    return adapted


def has_adapter(model: nn.Module) -> bool:
    return any(isinstance(part, AdaptedLinear) for part in model.modules())


def freeze_parameters(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters that match a pattern: a module path such as `encoder.blocks.0`, or a glob as `*norm*`."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        frozen = [name for name in names if matches_pattern(name, pattern)]
        if not frozen:
            modules = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise LoRAError(f"`train.freeze`: no parameter matches `{pattern}`; the model's modules are {modules}")
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise LoRAError("`train.freeze`: no parameter is left to train; freeze less")


def matches_pattern(name: str, pattern: str) -> bool:
    return name.startswith(f"{pattern}.") or fnmatch(name, pattern)
