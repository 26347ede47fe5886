"""`attent average`: the mean of the weights of several models, or of the last checkpoints of a run, as one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def average(
    models: Annotated[list[Path], Parameter(help="model folders of one shape and vocabulary, or one run's folder")],
    /,
    *,
    out: Annotated[Path, Parameter(help="folder for the mean; it must not exist yet")],
    last: Annotated[int, Parameter(help="of one run: how many of its last checkpoints")] = 5,
) -> None:
    """Average the weights of models, or of a run's last checkpoints (--last)."""
    import torch

    from attent.interop import load
    from attent.models import build
    from attent.text.tokenizer import Tokenizer
    from attent.train import checkpoint
    from attent.train.config import TrainError
    from attent.train.loop import write_model
    from attent.train.means import mean_of, mean_weights

    if len(models) == 1 and last < 2:
        raise TrainError(f"`--last` must be 2 or more, but is {last}; a mean of one would be the checkpoint itself")
    if out.exists():
        raise TrainError(f"{out}: is there already, and nothing is overwritten; give another --out")
    first = load(models[0])
    if len(models) == 1:
        state = models[0] / "state"
        steps = checkpoint.steps(state)[-last:]
        if len(steps) < 2:
            raise TrainError(
                f"{models[0]}: has {len(steps)} checkpoint{'s' * (len(steps) != 1)} in state/, and a mean needs 2 or "
                "more; name several models, or keep more with --keep-last when training"
            )
        tensors = mean_weights([state / f"step-{step:08d}" for step in steps])
        told = f"of the checkpoints at updates {', '.join(f'{step:,}' for step in steps)}"
    else:
        for folder in models[1:]:
            if Tokenizer.load(folder) != Tokenizer.load(models[0]):
                raise TrainError(
                    f"{folder}: has another tokenizer than {models[0]}; a mean would be of different words"
                )
        tensors = mean_of(dict(load(folder).named_parameters()) for folder in models)
        told = f"of {len(models)} models"
    model = build(first.config)
    whole = {name: tensors[name] for name, _ in model.named_parameters() if name in tensors}
    if whole.keys() != tensors.keys():
        raise TrainError(f"{models[0]}: its checkpoints hold added matrices (LoRA), of which no mean can be taken")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole[name])
    write_model(out, model, Tokenizer.load(models[0]))
    print(f"{out}: the mean {told}")
