"""The request queue by itself: order, capacity, cancellation and closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from attent.serving.request_queue import QueueFull, RequestQueue


class Job:
    """Blocks the model's thread until it is released, or cancelled if it is obedient."""

    def __init__(self, *, obedient: bool = True) -> None:
        self.obedient, self.started, self.released = obedient, threading.Event(), threading.Event()
        self.saw_stop = False

    def __call__(self, should_stop: Callable[[], bool]) -> str:
        self.started.set()
        while not self.released.wait(0.001):
            if self.obedient and should_stop():
                break
        self.saw_stop = should_stop()
        return "done"


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


async def begin(queue: RequestQueue, job: Job) -> asyncio.Task[str]:
    task = asyncio.create_task(queue.submit(job))
    await asyncio.to_thread(job.started.wait, 10)
    return task


def test_cancelling_a_running_job_signals_it_and_keeps_its_place() -> None:
    async def main() -> None:
        queue, stubborn = RequestQueue(1), Job(obedient=False)
        task = await begin(queue, stubborn)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queue.num_pending == 1  # it still holds the model
        after = Job()
        following = asyncio.create_task(queue.submit(after))
        await asyncio.sleep(0.02)
        assert not after.started.is_set()
        with pytest.raises(QueueFull):
            await queue.submit(Job())
        stubborn.released.set()
        await asyncio.to_thread(after.started.wait, 10)
        assert stubborn.saw_stop
        after.released.set()
        assert await following == "done"
        assert not after.saw_stop
        await asyncio.sleep(0)
        assert queue.num_pending == 0

    run(main())


def test_cancelled_running_job_that_polls_ends_at_once() -> None:
    async def main() -> None:
        queue, job = RequestQueue(0), Job()
        (await begin(queue, job)).cancel()
        assert await queue.close(10)
        assert job.saw_stop

    run(main())


def test_cancelled_queued_job_never_runs() -> None:
    async def main() -> None:
        queue, first, second = RequestQueue(1), Job(), Job()
        task = await begin(queue, first)
        waiting = asyncio.create_task(queue.submit(second))
        await asyncio.sleep(0.02)
        assert queue.num_pending == 2
        waiting.cancel()
        await asyncio.sleep(0.02)
        assert queue.num_pending == 1
        first.released.set()
        assert await task == "done"
        assert await queue.submit(lambda should_stop: 7) == 7
        assert not second.started.is_set()

    run(main())


@pytest.mark.parametrize("max_queued", [0, 1, 3])
def test_capacity_is_one_running_and_max_queued_jobs(max_queued: int) -> None:
    async def main() -> None:
        queue, jobs = RequestQueue(max_queued), [Job() for _ in range(max_queued + 1)]
        tasks = [asyncio.create_task(queue.submit(job)) for job in jobs]
        await asyncio.sleep(0.02)
        assert queue.num_pending == max_queued + 1
        with pytest.raises(QueueFull):
            await queue.submit(Job())
        for job in jobs:
            job.released.set()
        assert await asyncio.gather(*tasks) == ["done"] * len(jobs)

    run(main())


def test_errors_reach_the_caller_and_the_next_job_runs() -> None:
    def fail(error: BaseException) -> Callable[[Any], None]:
        def raise_error(should_stop: Any) -> None:
            raise error

        return raise_error

    async def main() -> None:
        queue = RequestQueue(0)
        with pytest.raises(KeyError, match="lost"):
            await queue.submit(fail(KeyError("lost")))
        with pytest.raises(RuntimeError, match="the job raised SystemExit"):
            await queue.submit(fail(SystemExit(3)))
        assert await queue.submit(lambda should_stop: should_stop()) is False

    run(main())


def test_close_reports_whether_the_jobs_ended(caplog: pytest.LogCaptureFixture) -> None:
    stubborn = Job(obedient=False)

    async def main() -> None:
        queue = RequestQueue(0)
        assert await queue.close(0.01)
        task = await begin(queue, stubborn)
        assert not await queue.close(0.01)
        task.cancel()

    run(main())
    stubborn.released.set()  # after the event loop is closed
    assert caplog.text == ""
