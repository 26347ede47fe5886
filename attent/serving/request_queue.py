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
StopCheck = Callable[[], bool]  # True once nobody wants the answer any more: look at each step, and end


class QueueFull(Exception):
    """As many wait as may."""


class RequestQueue:
    """Where requests wait for the model. Belongs to one event loop."""

    def __init__(self, max_queued: int) -> None:
        self._capacity = 1 + max_queued
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def num_pending(self) -> int:
        return len(self._tasks)

    async def submit(self, work: Callable[[StopCheck], T]) -> T:
        """What `work(stop)` returns or raises, in its turn. Cancelled, it leaves the line or is told to stop."""
        if self.num_pending >= self._capacity:
            raise QueueFull
        job = QueuedJob(work)
        task = asyncio.create_task(self._run_in_order(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            job.cancelled.set()
            if not job.started:
                task.cancel()
            raise
        return job.result()

    async def wait_until_idle(self, timeout: float) -> bool:
        """Waits until no work is left, so long at most; False if there is some yet."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)
        return not self._tasks

    async def _run_in_order(self, job: QueuedJob[T]) -> None:
        async with self._lock:
            job.started = True
            loop = asyncio.get_running_loop()
            done = loop.create_future()
            self._start_worker()
            self._jobs.put(lambda: job.run(loop, done))
            await done

    def _start_worker(self) -> None:
        # One thread for all jobs (a new one would set up torch's thread pool each time), and a daemon: work that does
        # not heed `stop` must not keep the program from ending.
        if self._thread is None:
            self._thread = threading.Thread(target=_run_worker, args=(self._jobs,), name="attent model", daemon=True)
            self._thread.start()


class QueuedJob(Generic[T]):
    """A piece of work, whether it is still wanted, and how it ended."""

    def __init__(self, work: Callable[[StopCheck], T]) -> None:
        self.started = False
        self.cancelled = threading.Event()
        self._work = work
        self._value: list[T] = []
        self._error: Exception | None = None

    def run(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        """In the model's thread."""
        try:
            self._value.append(self._work(self.cancelled.is_set))
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
            self._error = error
        except BaseException as error:  # noqa: BLE001 - a SystemExit of the work's must not end the server
            self._error = RuntimeError(f"the work ended by {type(error).__name__}")
        with suppress(RuntimeError):  # the loop is closed: the server has ended without us
            loop.call_soon_threadsafe(_resolve_future, done)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


def _resolve_future(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _run_worker(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()
