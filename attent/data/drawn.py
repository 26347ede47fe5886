"""Batches that are drawn: each a pure function of its epoch and step, walked through with some made ahead.

What a batch holds is left to those who inherit; going on where training stopped needs the two numbers and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from attent.data.batches import START, Position
from attent.data.pairs import CorpusError


class Pinnable(Protocol):
    def pinned(self) -> Any: ...


B = TypeVar("B", bound=Pinnable)


class Drawn(Generic[B]):
    """`steps` and `batch` are to be given; `batch` may be called by several threads at once."""

    def steps(self, epoch: int) -> int:
        raise NotImplementedError

    def batch(self, epoch: int, step: int) -> B:
        raise NotImplementedError

    def too_long(self, epoch: int = 0) -> str | None:
        """A sentence about what is left out or cut, if anything is."""
        return None

    def walk(
        self, start: Position = START, *, workers: int = 1, ahead: int = 8, pin: bool = False
    ) -> Iterator[tuple[Position, B]]:
        """All batches from `start` on, epoch after epoch, without end; `workers` threads make up to `ahead` of them
        beforehand. The batches are the same."""

        def make(place: Position) -> B:
            batch = self.batch(*place)
            return batch.pinned() if pin else batch

        if not workers:
            for place in self._places(start):
                yield place, make(place)
            return
        pool = ThreadPoolExecutor(workers)
        waiting: deque[tuple[Position, Future[B]]] = deque()
        try:
            for place in self._places(start):
                waiting.append((place, pool.submit(make, place)))
                if len(waiting) >= max(1, ahead):
                    first, batch = waiting.popleft()
                    yield first, batch.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _places(self, start: Position) -> Iterator[Position]:
        epoch, step = start
        while True:
            steps = self.steps(epoch)
            if not steps:
                raise CorpusError(f"epoch {epoch} has nothing to learn from")
            if not 0 <= step < steps:
                raise IndexError(f"epoch {epoch} has {steps} steps, so that no walk can start at step {step}")
            for at in range(step, steps):
                yield Position(epoch, at)
            epoch, step = epoch + 1, 0
