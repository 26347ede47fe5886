"""Micro-batches: rows of a batch that go through the model at once, and their assignment to ranks.

The gradient of a batch is the sum over its micro-batches, so splitting changes memory and speed and not the result.
The split does not depend on the number of ranks, as long as there are enough micro-batches for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from attent.training.tasks.base import TrainBatch


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
