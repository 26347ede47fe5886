"""The mean of weights: of the last checkpoints of a run (section 6.1 of the paper), or of several models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attent.models.folder import check_tensors
from attent.training import checkpoint


def average_checkpoints(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Of checkpoints."""
    return average_weights(
        checkpoint.load_checkpoint(folder, groups=("weights",)).tensors["weights"] for folder in folders
    )


@torch.no_grad()
def average_weights(state_dicts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Added up in float64, so that their order and number cost no digits."""
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for weights in state_dicts:
        if total:
            check_tensors({name: tensor.shape for name, tensor in total.items()}, weights, "one of the models")
        dtypes = {name: tensor.dtype for name, tensor in weights.items()}
        total = {name: tensor.double() + total.get(name, 0) for name, tensor in weights.items()}
        count += 1
    return {name: (tensor / count).to(dtypes[name]) for name, tensor in total.items()}
