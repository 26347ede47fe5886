"""`attent average`: the mean of the weights of several models, or of the last checkpoints of a run, as one model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from torch import Tensor

    from attent.models import Model
    from attent.text.tokenizer import Tokenizer


def average(
    models: Annotated[list[Path], Parameter(help="model folders of one shape and vocabulary, or one run's folder")],
    /,
    *,
    out: Annotated[Path, Parameter(help="folder for the mean; it must not exist yet")],
    last: Annotated[int, Parameter(help="of one run: how many of its last checkpoints")] = 5,
) -> None:
    """Average the weights of models, or of a run's last checkpoints (--last)."""
    from attent.interop import load
    from attent.models import build
    from attent.training.config import TrainError
    from attent.training.loop import write_model

    if len(models) == 1 and last < 2:
        raise TrainError(f"`--last` must be 2 or more, but is {last}; a mean of one would be the checkpoint itself")
    if out.exists():
        raise TrainError(f"{out}: is there already, and nothing is overwritten; give another --out")
    model = build(load(models[0]).config)
    tensors, told = average_run(models[0], last) if len(models) == 1 else average_models(models)
    load_weights(model, tensors, models[0])
    write_model(out, model, load_tokenizer(models[0]))
    print(f"{out}: the mean {told}")


def average_run(run: Path, last: int) -> tuple[dict[str, Tensor], str]:
    """The mean of a run's last checkpoints, and what it is of."""
    from attent.training import checkpoint
    from attent.training.averaging import average_checkpoints
    from attent.training.config import TrainError

    steps = checkpoint.list_steps(run / "state")[-last:]
    if len(steps) < 2:
        raise TrainError(
            f"{run}: has {len(steps)} checkpoint{'s' * (len(steps) != 1)} in state/, and a mean needs 2 or "
            "more; name several models, or keep more with --keep-last when training"
        )
    means = average_checkpoints([checkpoint.checkpoint_path(run / "state", step) for step in steps])
    return means, f"of the checkpoints at updates {', '.join(f'{step:,}' for step in steps)}"


def average_models(models: Sequence[Path]) -> tuple[dict[str, Tensor], str]:
    """The mean of several models of one tokenizer."""
    from attent.interop import load
    from attent.training.averaging import average_weights
    from attent.training.config import TrainError

    for folder in models[1:]:
        if load_tokenizer(folder) != load_tokenizer(models[0]):
            raise TrainError(f"{folder}: has another tokenizer than {models[0]}; a mean would be of different words")
    return average_weights(dict(load(folder).named_parameters()) for folder in models), f"of {len(models)} models"


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """A model's tokenizer; those of images have none."""
    from attent.text.tokenizer import TOKENIZER_FORMATS, Tokenizer

    return (
        Tokenizer.load(folder)
        if any((folder / layout.required_files[0]).exists() for layout in TOKENIZER_FORMATS)
        else None
    )


def load_weights(model: Model, tensors: dict[str, Tensor], where: Path) -> None:
    import torch

    from attent.training.config import TrainError

    named = dict(model.named_parameters())
    if not tensors.keys() <= named.keys():
        raise TrainError(f"{where}: its checkpoints hold added matrices (LoRA), of which no mean can be taken")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(tensors[name])
