"""The mean of weights: of the last checkpoints of a run (section 6.1 of the paper), or of several models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attent.models.folder import check_tensors
from attent.train import checkpoint


def mean_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Of checkpoints."""
    return mean_of(checkpoint.load(folder, only=("weights",)).tensors["weights"] for folder in folders)


@torch.no_grad()
def mean_of(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Added up in float64, so that their order and number cost no digits."""
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for weights in models:
        if total:
            check_tensors({name: tensor.shape for name, tensor in total.items()}, weights, "one of the models")
        dtypes = {name: tensor.dtype for name, tensor in weights.items()}
        total = {name: tensor.double() + total.get(name, 0) for name, tensor in weights.items()}
        count += 1
    return {name: (tensor / count).to(dtypes[name]) for name, tensor in total.items()}
