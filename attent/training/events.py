"""What training tells while it runs, as frozen facts. Who listens (a display, `log.jsonl`, curves) is not its business.

Times are seconds of training, summed over all the pieces of a run that was interrupted and went on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Note:
    """A sentence for the person: what was chosen and why, what was left out, what went wrong and was mended."""

    text: str
    level: Literal["info", "warning"] = "info"
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Started:
    """The loop begins, or goes on."""

    step: int  # updates already done: 0, or where a resumed run stands
    steps: int  # updates at which it ends at the latest
    steps_per_epoch: float
    parameters: int
    trainable_parameters: int  # parameters that learn; fewer than all when some are frozen
    device: str  # "NVIDIA H200, bfloat16, compiled" or "CPU, 2 threads, float32"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The means since the last one of these."""

    step: int
    epoch: float
    loss: float  # that is minimised, per target token (masked word, text, image), in nats
    perplexity: float  # e to the power of the cross-entropy, without label smoothing
    lr: float
    grad_norm: float
    tokens_per_second: float  # of all that is read, without filler
    seconds: float
    seconds_left: float | None
    targets_per_second: float | None = None  # of the target tokens (masked words, texts, images) among them
    gpu_busy: float | None = None  # the share of the time that a GPU was in an update, where that is known


@dataclass(frozen=True, kw_only=True)
class ValidationSample:
    source: str
    reference: str
    output: str


@dataclass(frozen=True, kw_only=True)
class Validated:
    step: int
    epoch: float
    loss: float  # cross-entropy per target token (masked word, text, image), without label smoothing
    best: bool  # the best so far
    validations_since_best: int  # validations since the best
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # by their names in `attent.scoring.metrics.METRICS`
    samples: tuple[ValidationSample, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Saved:
    step: int
    folder: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The loop is over."""

    step: int
    reason: Literal["steps", "patience", "stopped"]
    seconds: float


Event = Note | Started | Progress | Validated | Saved | Ended
EventHandler = Callable[[Event], None]
