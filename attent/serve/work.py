"""One model, one request at a time: work in a thread beside the event loop, and a short line of those who wait.

A model that is silenced for one request must not translate for another, so work never overlaps, not even with work
that was told to stop and has not done so yet. What the work is, and what the waiting are told, is left to others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
Stop = Callable[[], bool]  # True once nobody wants the answer any more: look at each step, and end


class Busy(Exception):
    """As many wait as may."""


class Desk:
    """Where requests wait for the model. Belongs to one event loop."""

    def __init__(self, waiting: int) -> None:
        self._most = 1 + waiting
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Lock()
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def inside(self) -> int:
        return len(self._tasks)

    async def do(self, work: Callable[[Stop], T]) -> T:
        """What `work(stop)` returns or raises, in its turn. Cancelled, it leaves the line or is told to stop."""
        if self.inside >= self._most:
            raise Busy
        job = Job(work)
        task = asyncio.create_task(self._in_turn(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            job.stopped.set()
            if not job.begun:
                task.cancel()
            raise
        return job.result()

    async def idle(self, seconds: float) -> bool:
        """Waits until no work is left, so long at most; False if there is some yet."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)
        return not self._tasks

    async def _in_turn(self, job: Job[T]) -> None:
        async with self._free:
            job.begun = True
            loop = asyncio.get_running_loop()
            done = loop.create_future()
            self._start()
            self._jobs.put(lambda: job.run(loop, done))
            await done

    def _start(self) -> None:
        # One thread for all jobs (a new one would set up torch's thread pool each time), and a daemon: work that does
        # not heed `stop` must not keep the program from ending.
        if self._thread is None:
            self._thread = threading.Thread(target=_toil, args=(self._jobs,), name="attent model", daemon=True)
            self._thread.start()


class Job(Generic[T]):
    """A piece of work, whether it is still wanted, and how it ended."""

    def __init__(self, work: Callable[[Stop], T]) -> None:
        self.begun = False
        self.stopped = threading.Event()
        self._work = work
        self._value: list[T] = []
        self._error: Exception | None = None

    def run(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        """In the model's thread."""
        try:
            self._value.append(self._work(self.stopped.is_set))
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
            self._error = error
        except BaseException as error:  # noqa: BLE001 - a SystemExit of the work's must not end the server
            self._error = RuntimeError(f"the work ended by {type(error).__name__}")
        with suppress(RuntimeError):  # the loop is closed: the server has ended without us
            loop.call_soon_threadsafe(_settle, done)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _toil(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()
