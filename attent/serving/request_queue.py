"""A bounded queue that runs one request at a time in the model's thread.

A model with masked parts must not serve another request, so jobs never overlap, not even with a cancelled job that has
not returned yet.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
StopCheck = Callable[[], bool]  # True once the request is cancelled: poll it at each step


class QueueFull(Exception):
    """The queue is full."""


class RequestQueue:
    """Runs jobs in order; belongs to one event loop."""

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
        """Return the result of `work(should_stop)`. Cancelling removes a queued job and signals a running one."""
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
        """Wait for all jobs; return whether they finished within the timeout."""
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
        # One thread for all jobs, since each new thread would set up torch's thread pool; a daemon, so that work that
        # ignores `should_stop` does not keep the process alive.
        if self._thread is None:
            self._thread = threading.Thread(target=_run_worker, args=(self._jobs,), name="attent model", daemon=True)
            self._thread.start()


class QueuedJob(Generic[T]):
    """A job with its cancellation flag and result."""

    def __init__(self, work: Callable[[StopCheck], T]) -> None:
        self.started = False
        self.cancelled = threading.Event()
        self._work = work
        self._value: list[T] = []
        self._error: Exception | None = None

    def run(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        """Run in the model's thread."""
        try:
            self._value.append(self._work(self.cancelled.is_set))
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            self._error = error
        except BaseException as error:  # noqa: BLE001 - a SystemExit must not end the server
            self._error = RuntimeError(f"the job raised {type(error).__name__}")
        with suppress(RuntimeError):  # the loop is closed
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
