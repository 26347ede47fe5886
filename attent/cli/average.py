"""`attent average`: average the weights of several models, or of the last checkpoints of a run, into one model."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def average(
    *models: Annotated[
        Path, Parameter(help="model folders of one shape and tokenizer, or the folder of one run", required=True)
    ],
    out: Annotated[Path, Parameter(help="folder for the result, which must not exist")],
    last: Annotated[int, Parameter(help="of one run: the number of its last checkpoints")] = 5,
) -> None:
    """Average the weights of models, or of a run's last checkpoints (--last)."""
    from attent.training.averaging import write_average

    print(f"{out}: average of {write_average(models, out, last)}")
