"""A batch in pieces: what goes through the model at once, and what each of several processes takes.

The gradient of a batch is the sum of those of its pieces, so cutting changes memory and speed and not the result. The
cut does not depend on how many processes there are, as long as there are enough pieces for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attent.training.tasks.base import TrainBatch


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch; its weight is 0 where a process has none left and only keeps step with the others."""

    index: int
    start: int
    stop: int
    weight: float = 1.0

    def select_rows(self, batch: TrainBatch) -> TrainBatch:
        return batch.slice_rows(self.start, self.stop)


def split_batch(batch: TrainBatch, max_tokens: int | None, world_size: int) -> list[MicroBatch]:
    """Even pieces of at most `tokens` a side, filler included, unless a row alone has more; None: in one piece."""
    rows = len(batch)
    count = 1 if max_tokens is None else -(-batch.num_padded_tokens // max_tokens)
    count = max(1, min(rows, max(count, world_size)))
    edges = [rows * i // count for i in range(count + 1)]
    return [MicroBatch(i, edges[i], edges[i + 1]) for i in range(count)]


def assign_to_rank(micro_batches: list[MicroBatch], rank: int, world_size: int) -> Iterator[MicroBatch]:
    """Those of one process: every process takes equally many, for their steps must meet."""
    for turn in range(0, len(micro_batches), world_size):
        mine = turn + rank
        yield (
            micro_batches[mine]
            if mine < len(micro_batches)
            else MicroBatch(micro_batches[0].index, micro_batches[0].start, micro_batches[0].stop, 0.0)
        )
