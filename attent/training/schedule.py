"""The learning rate as a pure function of the step, so that resuming needs no state."""

import math
from typing import Literal

Schedule = Literal["inverse_sqrt", "cosine", "constant"]


def compute_lr(step: int, *, schedule: Schedule, peak_lr: float, warmup: int, total_steps: int) -> float:
    """Return the learning rate of `step`, counted from 1: linear warm-up to `peak_lr`, then the schedule.

    `inverse_sqrt` is equation 3 of the paper, where the peak is width^-0.5 * warmup^-0.5 (`compute_paper_lr`).
    """
    ramp = min(1.0, step / max(1, warmup))
    if schedule == "constant":
        return peak_lr * ramp
    if schedule == "inverse_sqrt":
        return peak_lr * min(step / max(1, warmup), math.sqrt(max(1, warmup) / step))
    progress = min(1.0, max(0, step - warmup) / max(1, total_steps - warmup))
    return peak_lr * ramp * 0.5 * (1 + math.cos(math.pi * progress))


def compute_paper_lr(width: int, warmup: int) -> float:
    """Return the peak learning rate of equation 3."""
    return float(width**-0.5 * max(1, warmup) ** -0.5)
