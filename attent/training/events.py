"""Events of a training run. Times are seconds of training, summed over all sessions of a resumed run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Note:
    text: str
    level: Literal["info", "warning"] = "info"
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Started:
    step: int  # 0, or that of the checkpoint
    steps: int  # maximum
    steps_per_epoch: float
    parameters: int
    trainable_parameters: int
    device: str  # "NVIDIA H200, bfloat16, compiled" or "CPU, 2 threads, float32"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Means since the last progress event."""

    step: int
    epoch: float
    loss: float  # with label smoothing, per target (token, masked token, text, image), in nats
    perplexity: float  # exp of the cross-entropy, without label smoothing
    lr: float
    grad_norm: float
    tokens_per_second: float  # of source and target, without padding
    seconds: float
    seconds_left: float | None
    targets_per_second: float | None = None
    gpu_busy: float | None = None  # fraction of the time that the GPU spent in training steps, if known
    peak_memory: int | None = None  # bytes on the GPU, at most, since training started or was last validated


@dataclass(frozen=True, kw_only=True)
class ValidationSample:
    source: str
    reference: str
    output: str


@dataclass(frozen=True, kw_only=True)
class Validated:
    step: int
    epoch: float
    loss: float  # cross-entropy per target, without label smoothing
    best: bool  # so far
    validations_since_best: int
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
    step: int
    reason: Literal["steps", "patience", "stopped"]
    seconds: float


Event = Note | Started | Progress | Validated | Saved | Ended
EventHandler = Callable[[Event], None]
