"""The learning rate of each update, as a pure function of its number: resuming needs no state."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["inverse_sqrt", "cosine", "constant"]


def compute_lr(step: int, *, schedule: Schedule, peak_lr: float, warmup: int, total_steps: int) -> float:
    """Of update `step`, from 1 on: a straight rise over `warmup` updates to `highest`, then as the schedule says.

    `inverse_sqrt` is equation 3 of the paper, whose highest is width^-0.5 * warmup^-0.5: see `paper_rate`.
    """
    rise = min(1.0, step / max(1, warmup))
    if schedule == "constant":
        return peak_lr * rise
    if schedule == "inverse_sqrt":
        return peak_lr * min(step / max(1, warmup), math.sqrt(max(1, warmup) / step))
    done = min(1.0, max(0, step - warmup) / max(1, total_steps - warmup))
    return peak_lr * rise * 0.5 * (1 + math.cos(math.pi * done))


def compute_paper_lr(width: int, warmup: int) -> float:
    """The highest learning rate of equation 3."""
    return float(width**-0.5 * max(1, warmup) ** -0.5)
