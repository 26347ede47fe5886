"""State of the training loop besides tensors: what checkpoints store, metrics since the last report, random seeds.

The gradient of a batch is the sum over its micro-batches, so splitting it changes memory and speed and not the result;
the split does not depend on the number of ranks, as long as there are enough micro-batches for all. Dropout is a
function of (seed, step, batch, micro-batch) alone: validation, a retry or an interruption changes nothing, and neither
does the number of ranks. So checkpoints need no states of generators.
"""

import hashlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from attent.training.events import Progress
from attent.training.tasks.base import TrainBatch


@dataclass(kw_only=True)
class TrainState:
    """Progress of a run; with the tensors, all that a checkpoint holds."""

    step: int = 0
    epoch: int = 0
    batch_index: int = 0  # of the epoch's next batch
    order_digest: str = ""  # of all examples so far, in order
    tokens: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    best_loss: float | None = None  # of the validation with the best score
    lowest_loss: float | None = None  # of any validation
    best_step: int = 0
    validations_since_best: int = 0
    validations_without_progress: int = 0  # neither score nor loss improved
    last_validated_step: int = 0
    skipped_steps: int = 0  # with a non-finite gradient
    rollbacks: int = 0
    micro_batch_tokens: int | None = None
    next_validation: int = 0  # no validation before this step, so that they take at most `valid_share` of the time
    threads: int | None = None  # of the CPU; the rounding of sums depends on it


@dataclass
class Pauses:
    """Time of validations and checkpoints, between which the loop makes steps."""

    seconds: float = 0.0
    validation_seconds: float = 0.0
    num_validations: int = 0

    def add(self, seconds: float, *, is_validation: bool = False) -> None:
        self.seconds += seconds
        self.validation_seconds += seconds * is_validation
        self.num_validations += is_validation

    @property
    def pause_seconds_per_validation(self) -> float:
        return self.seconds / max(1, self.num_validations)


@dataclass
class StepMetrics:
    """Sums since the last report. They stay on the device, in tensors at fixed addresses, which CUDA graphs add to."""

    device: torch.device
    clock_start: float = field(default_factory=time.monotonic)
    steps: int = 0
    tokens: int = 0  # since `clock_start`, as `num_targets`
    num_targets: int = 0
    local_targets: float = 0.0  # of this rank's micro-batches
    sums: Tensor = field(init=False)  # loss, cross-entropy, gradient norm
    nonfinite_counts: Tensor = field(init=False)  # skipped steps: in a row, in total
    reported_nonfinite: int = 0

    def __post_init__(self) -> None:
        dtype = torch.float64 if self.device.type != "mps" else torch.float32
        self.sums = torch.zeros(3, dtype=dtype, device=self.device)
        self.nonfinite_counts = torch.zeros(2, device=self.device)

    def add_loss(self, loss: Tensor, cross_entropy: Tensor) -> None:
        self.sums[:2] += torch.stack([loss.detach(), cross_entropy.detach()])

    def snapshot(self) -> tuple[Tensor, float]:
        return self.sums.clone(), self.local_targets

    def restore(self, snapshot: tuple[Tensor, float]) -> None:
        self.sums.copy_(snapshot[0])
        self.local_targets = snapshot[1]

    def record_step(self, grad_norm: Tensor, found_inf: Tensor) -> None:
        self.sums[2] += grad_norm.nan_to_num(0.0, 0.0, 0.0)
        in_a_row, total = self.nonfinite_counts.unbind()
        self.nonfinite_counts.copy_(torch.stack([(in_a_row + 1) * found_inf, total + found_inf]))

    def count_batches(self, batches: list[TrainBatch]) -> None:
        self.steps += 1
        self.tokens += sum(batch.num_tokens for batch in batches)
        self.num_targets += sum(batch.num_targets for batch in batches)

    def reset_clock(self) -> None:
        self.clock_start, self.tokens, self.num_targets = time.monotonic(), 0, 0

    def take_sums(self) -> Tensor:
        sums = torch.empty(3, dtype=self.sums.dtype, pin_memory=self.device.type == "cuda")
        sums.copy_(self.sums, non_blocking=True)
        self.sums.zero_()
        self.steps, self.local_targets = 0, 0.0
        self.reset_clock()
        return sums


@dataclass(frozen=True)
class PendingReport:
    sums: Tensor
    copy_event: torch.cuda.Event | None
    steps: int
    num_targets: float
    progress: Progress  # without loss, perplexity and gradient norm

    def is_ready(self) -> bool:
        return self.copy_event is None or self.copy_event.query()


@dataclass(frozen=True)
class MicroBatch:
    """A range of rows. Weight 0: computed only so that all ranks make the same number of backward passes."""

    start: int
    stop: int
    weight: float = 1.0


def split_batch(batch: TrainBatch, max_tokens: int | None, world_size: int) -> list[MicroBatch]:
    """Split evenly into micro-batches of at most `max_tokens` per side with padding (or a row); None: one per rank."""
    rows = len(batch)
    count = 1 if max_tokens is None else -(-batch.num_padded_tokens // max_tokens)
    count = max(1, min(rows, max(count, world_size)))
    edges = [rows * i // count for i in range(count + 1)]
    return [MicroBatch(start, stop) for start, stop in pairwise(edges)]


def assign_to_rank(micro_batches: list[MicroBatch], rank: int, world_size: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank: equally many for each, since gradient synchronization is collective."""
    for first in range(0, len(micro_batches), world_size):
        index = first + rank
        if index < len(micro_batches):
            yield micro_batches[index]
        else:
            yield MicroBatch(micro_batches[0].start, micro_batches[0].stop, 0.0)


def derive_seed(*keys: int) -> int:
    """Hash several integers into one seed of 48 bits."""
    return int.from_bytes(hashlib.blake2b(repr(keys).encode(), digest_size=6).digest(), "big")


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_torch(*keys: int) -> None:
    """Seed torch's generators on every device."""
    torch.manual_seed(derive_seed(*keys))
