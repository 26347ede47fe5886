"""The figures of training for TensorBoard, for those who have it: `pip install tensorboard`, then `--tensorboard`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from attent.training.config import TrainError
from attent.training.events import Event, Progress, Validated

SCALARS = {
    Progress: ("loss", "perplexity", "lr", "grad_norm", "tokens_per_second", "targets_per_second", "gpu_busy"),
    Validated: ("loss", "bleu", "chrf", "exact", "accuracy"),
}
TAG_PREFIXES = {Progress: "train", Validated: "valid"}


class TensorBoardWriter:
    """Listens to training and writes event files; what a resumed run writes again replaces what was there."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrainError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress | Validated):
            figures = asdict(event)
            for name in SCALARS[type(event)]:
                if figures[name] is not None:
                    self.writer.add_scalar(f"{TAG_PREFIXES[type(event)]}/{name}", figures[name], event.step)
            self.writer.flush()
