"""What does not learn, and what learns in its place: frozen parts, and LoRA (Hu et al. 2021).

With LoRA a matrix W stays as it is, and beside it learns a product of two thin ones: W + B A. It is a parametrisation
of the layer's weight, so no other part of the package knows of it, and at the end it is added into W for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attent.nn import Attention, FeedForward
from attent.training.config import TrainError


class LowRankUpdate(nn.Module):
    """W -> W + B A. It begins as W itself: B is zero."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns) * columns**-0.5)  # A
        self.up = nn.Parameter(torch.zeros(rows, rank))  # B

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_lora(model: nn.Module, rank: int, new_parameters: Iterable[str] = ()) -> None:
    """Freeze the model, and let thin matrices learn beside every matrix of its attentions and feed-forwards. Parameters
    that are new learn as they are: nothing stands there yet that could be kept."""
    model.requires_grad_(False)
    for name in new_parameters:
        model.get_parameter(name).requires_grad_(True)
    for layer in [part for part in model.modules() if isinstance(part, Attention | FeedForward)]:
        for linear in [part for part in layer.children() if isinstance(part, nn.Linear)]:
            if rank > min(linear.weight.shape):
                raise TrainError(
                    f"`train.lora` must be at most {min(linear.weight.shape)}, the smaller side of the model's "
                    f"smallest matrix, but is {rank}"
                )
            parametrize.register_parametrization(linear, "weight", LowRankUpdate(linear.weight, rank))


def merge_lora(model: nn.Module) -> None:
    """The model as a plain one again, with what was learned added into its matrices."""
    for part in list(model.modules()):
        if isinstance(part, nn.Linear) and parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)


def freeze_parameters(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Parameters whose name, or a part of whose path, fits one of the patterns do not learn."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        frozen = [name for name in names if matches_pattern(name, pattern)]
        if not frozen:
            tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise TrainError(f"`train.freeze`: no part of the model fits `{pattern}`; its parts are {tops}")
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainError("`train.freeze`: nothing would be left to learn; freeze less")


def matches_pattern(name: str, pattern: str) -> bool:
    """`encoder` and `encoder.blocks.0` fit all that stands below them; `*norm*` whatever has it in its name."""
    return name.startswith(f"{pattern}.") or fnmatch(name, pattern)
