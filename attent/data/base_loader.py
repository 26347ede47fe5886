"""Batches that are drawn: each a pure function of its epoch and step, walked through with some made ahead.

What a batch holds is left to those who inherit; going on where training stopped needs the two numbers and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from attent.data.loader import START_POSITION, LoaderPosition
from attent.data.pairs import CorpusError


class Pinnable(Protocol):
    def pin_memory(self) -> Any: ...


BatchT = TypeVar("BatchT", bound=Pinnable)


class PrefetchLoader(Generic[BatchT]):
    """`steps` and `batch` are to be given; `batch` may be called by several threads at once."""

    def num_steps(self, epoch: int) -> int:
        raise NotImplementedError

    def get_batch(self, epoch: int, step: int) -> BatchT:
        raise NotImplementedError

    def describe_too_long(self, epoch: int = 0) -> str | None:
        """A sentence about what is left out or cut, if anything is."""
        return None

    def iter_batches(
        self, start: LoaderPosition = START_POSITION, *, workers: int = 1, prefetch: int = 8, pin_memory: bool = False
    ) -> Iterator[tuple[LoaderPosition, BatchT]]:
        """All batches from `start` on, epoch after epoch, without end; `workers` threads make up to `ahead` of them
        beforehand. The batches are the same."""

        def make(place: LoaderPosition) -> BatchT:
            batch = self.get_batch(*place)
            return batch.pin_memory() if pin_memory else batch

        if not workers:
            for place in self._iter_positions(start):
                yield place, make(place)
            return
        pool = ThreadPoolExecutor(workers)
        waiting: deque[tuple[LoaderPosition, Future[BatchT]]] = deque()
        try:
            for place in self._iter_positions(start):
                waiting.append((place, pool.submit(make, place)))
                if len(waiting) >= max(1, prefetch):
                    first, batch = waiting.popleft()
                    yield first, batch.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _iter_positions(self, start: LoaderPosition) -> Iterator[LoaderPosition]:
        epoch, step = start
        while True:
            steps = self.num_steps(epoch)
            if not steps:
                raise CorpusError(f"epoch {epoch} has nothing to learn from")
            if not 0 <= step < steps:
                raise IndexError(f"epoch {epoch} has {steps} steps, so that no walk can start at step {step}")
            for at in range(step, steps):
                yield LoaderPosition(epoch, at)
            epoch, step = epoch + 1, 0
