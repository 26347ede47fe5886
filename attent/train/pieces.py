"""A batch in pieces: what goes through the model at once, and what each of several processes takes.

The gradient of a batch is the sum of those of its pieces, so cutting changes memory and speed and not the result. The
cut does not depend on how many processes there are, as long as there are enough pieces for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attent.train.task import Batch


@dataclass(frozen=True)
class Piece:
    """Rows of a batch; its weight is 0 where a process has none left and only keeps step with the others."""

    number: int
    start: int
    stop: int
    weight: float = 1.0

    def of(self, batch: Batch) -> Batch:
        return batch.rows(self.start, self.stop)


def cut(batch: Batch, tokens: int | None, ranks: int) -> list[Piece]:
    """Even pieces of at most `tokens` a side, filler included, unless a row alone has more; None: in one piece."""
    rows = len(batch)
    count = 1 if tokens is None else -(-batch.slots // tokens)
    count = max(1, min(rows, max(count, ranks)))
    edges = [rows * i // count for i in range(count + 1)]
    return [Piece(i, edges[i], edges[i + 1]) for i in range(count)]


def share(pieces: list[Piece], rank: int, ranks: int) -> Iterator[Piece]:
    """Those of one process: every process takes equally many, for their steps must meet."""
    for turn in range(0, len(pieces), ranks):
        mine = turn + rank
        yield pieces[mine] if mine < len(pieces) else Piece(pieces[0].number, pieces[0].start, pieces[0].stop, 0.0)
