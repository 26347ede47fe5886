"""A bounded queue that runs one request at a time in the model's thread.

A model with masked parts must not serve another request, so jobs never overlap, not even with a cancelled job that has
not returned yet.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from attent.decoding.options import StopCheck

T = TypeVar("T")


class QueueFull(Exception):
    """The queue is full."""


class RequestQueue:
    """Runs jobs in order; belongs to one event loop."""

    def __init__(self, max_queued: int) -> None:
        self._capacity = 1 + max_queued
        self._pending: set[asyncio.Future[Any]] = set()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def submit(self, work: Callable[[StopCheck], T]) -> T:
        """Return the result of `work(should_stop)`. Cancelling removes a queued job and signals a running one."""
        if self.num_pending >= self._capacity:
            raise QueueFull
        job, cancelled = Future[T](), threading.Event()
        done = asyncio.wrap_future(job)
        self._pending.add(done)
        done.add_done_callback(self._forget)
        # One thread for all jobs, since each new thread would set up torch's thread pool; a daemon, so that work that
        # ignores `should_stop` does not keep the process alive.
        if self._thread is None:
            self._thread = threading.Thread(target=_run_worker, args=(self._jobs,), name="attent model", daemon=True)
            self._thread.start()
        self._jobs.put((job, lambda: work(cancelled.is_set)))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            cancelled.set()
            job.cancel()  # no effect on a running job
            raise

    async def close(self, timeout: float) -> bool:
        """Wait for all jobs and abandon those that do not finish in time; return whether all finished."""
        unfinished: set[asyncio.Future[Any]] = set()
        if self._pending:
            _, unfinished = await asyncio.wait(set(self._pending), timeout=timeout)
        for done in unfinished:
            done.cancel()  # the event loop may be closed when they finish
        return not unfinished

    def _forget(self, done: asyncio.Future[Any]) -> None:
        self._pending.discard(done)
        with suppress(asyncio.CancelledError):
            done.exception()  # retrieved, so that asyncio does not log the error of a cancelled job


def _run_worker(jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while True:
        job, work = jobs.get()
        if not job.set_running_or_notify_cancel():
            continue
        try:
            job.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            job.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - a SystemExit must not end the server
            job.set_exception(RuntimeError(f"the job raised {type(error).__name__}"))
