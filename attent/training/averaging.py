"""Weight averaging: of the last checkpoints of a run (section 6.1 of the paper), or of several models."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attent.formatting import format_count
from attent.interop import load
from attent.models import build
from attent.models.folder import check_tensors, read_extra_files, read_tokenizer
from attent.storage.hub import locate_model
from attent.storage.manifest import MANIFEST_FILE
from attent.training import checkpoint
from attent.training.checkpoint import STATE_FOLDER
from attent.training.loop import write_model
from attent.training.run_options import TrainError


def average_checkpoints(folders: Sequence[Path]) -> dict[str, Tensor]:
    return average_weights(checkpoint.load_checkpoint(path, groups=("weights",)).tensors["weights"] for path in folders)


@torch.no_grad()
def average_weights(state_dicts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average in float64, so that order and number do not matter."""
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


def write_average(models: Sequence[Path], out: Path, last: int) -> str:
    """Write the average of several models, or of the last checkpoints of one run; return what was averaged."""
    if len(models) == 1 and last < 2:
        raise TrainError(f"`--last` must be 2 or more, but is {last}; raise it")
    if out.exists():
        raise TrainError(f"{out}: exists, and nothing is overwritten; give another --out")
    models = [locate_model(folder) for folder in models]
    model = build(load(models[0]).config)
    if len(models) == 1:
        state_dir = models[0] / STATE_FOLDER
        steps = checkpoint.list_steps(state_dir)[-last:]
        if len(steps) < 2:
            raise TrainError(
                f"{models[0]}: must have 2 checkpoints or more, but has {len(steps)}; name several models, or keep "
                "more checkpoints with --keep-last when training"
            )
        weights = average_checkpoints([checkpoint.checkpoint_path(state_dir, step) for step in steps])
        description = f"the checkpoints at steps {', '.join(f'{step:,}' for step in steps)}"
    else:
        for path in models[1:]:
            if path.is_dir() and read_tokenizer(path) != read_tokenizer(models[0]):
                problem = f"must have the tokenizer of {models[0]}, but has another; give models of one run"
                raise TrainError(f"{path}: {problem}")
        weights = average_weights(dict(load(path).named_parameters()) for path in models)
        description = format_count(len(models), "model")
    parameters = dict(model.named_parameters())
    if not weights.keys() <= parameters.keys():
        raise TrainError(f"{models[0]}: its checkpoints hold LoRA factors, which have no average; average its models")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    extra_files = read_extra_files(models[0]) if (models[0] / MANIFEST_FILE).exists() else {}
    write_model(out, model, read_tokenizer(models[0]), extra_files)
    return description
