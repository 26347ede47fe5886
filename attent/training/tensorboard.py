"""Write training metrics for TensorBoard: `pip install tensorboard`, then `--tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attent.training.config import TrainError
from attent.training.events import Event, Progress, Validated

PROGRESS_SCALARS = ("loss", "perplexity", "lr", "grad_norm", "tokens_per_second", "targets_per_second", "gpu_busy")


class TensorBoardWriter:
    """Writes event files when training reports; what a resumed run writes again replaces what was there."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrainError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            self.write("train", {name: getattr(event, name) for name in PROGRESS_SCALARS}, event.step)
        elif isinstance(event, Validated):
            self.write("valid", {"loss": event.loss, **event.metrics}, event.step)

    def close(self) -> None:
        self.writer.close()

    def write(self, prefix: str, scalars: Mapping[str, float | None], step: int) -> None:
        for name, value in scalars.items():
            if value is not None:
                self.writer.add_scalar(f"{prefix}/{name}", value, step)
        self.writer.flush()
