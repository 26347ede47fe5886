"""Backends with a toy service that loads no model: threads, and worker processes that hang, die or cannot start."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from attent.decoding.options import StopCheck
from attent.serving.backend import LocalBackend


class BlockingService:
    """Counts the calls that wait in it."""

    def __init__(self) -> None:
        self.num_running = threading.Semaphore(0)
        self.let_go = threading.Event()

    def translate(self, request: Any, client: str, should_stop: StopCheck) -> Any:
        self.num_running.release()
        assert self.let_go.wait(20)
        return request


def test_a_client_with_many_calls_does_not_delay_another() -> None:
    async def run() -> None:
        service = BlockingService()
        backend = LocalBackend(service)
        await backend.start()
        before = threading.active_count()
        calls = [asyncio.create_task(backend.call("translate", index, "a")) for index in range(1, 258)]
        calls.append(asyncio.create_task(backend.call("translate", 258, "b")))
        for _ in calls:
            assert await asyncio.to_thread(service.num_running.acquire, timeout=20)
        service.let_go.set()
        assert await asyncio.gather(*calls) == list(range(1, 259))
        started = threading.active_count()
        assert started > before + 257
        for index in range(100):  # idle threads are used again
            await backend.call("translate", index + 1, "a")
        assert threading.active_count() <= started

    asyncio.run(run())
