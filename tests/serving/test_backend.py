"""Backends with a toy service that loads no model: threads, and worker processes that hang, die or cannot start."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attent.serving import backend as backends
from attent.serving.backend import LocalBackend, ServiceConfig, WorkerPool
from attent.serving.limits import ApiError
from attent.serving.messages import CallContext, ServiceInfo
from attent.serving.translation_app import TranslationApp
from attent.storage.manifest import hash_file, write_manifest
from tests.serving.toy import exchange, http_scope

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")


class BlockingService:
    """Counts the calls that wait in it."""

    def __init__(self) -> None:
        self.num_running = threading.Semaphore(0)
        self.let_go = threading.Event()

    def translate(self, request: Any, context: CallContext) -> Any:
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


# --- worker processes ------------------------------------------------------------------------------------------------


@dataclass
class EchoService:
    model: str
    info: ServiceInfo = ServiceInfo()  # noqa: RUF009 - frozen

    def translate(self, request: Any, context: CallContext) -> tuple[str, int]:
        return self.model, len(request)

    def suggest(self, request: Any, context: CallContext) -> Any:
        return lambda: None  # cannot be sent to another process

    def translate_file(self, request: Any, context: CallContext) -> bytes:
        context.send_item(0.5)
        if not request.exists():
            request.touch()
            self.die()
        return b"done"

    def stream(self, request: Any, context: CallContext) -> None:
        context.send_item("begun")
        self.die()

    def die(self) -> None:
        time.sleep(0.1)  # until the item is sent
        os._exit(3)


@dataclass(frozen=True, kw_only=True)
class EchoConfig(ServiceConfig):
    """The model is the text of manifest.json. A worker whose name it contains cannot load it."""

    name: str

    def load(self, notify: Callable[[str], None] | None = None) -> Any:
        model = (self.folders[0] / "manifest.json").read_text()
        if self.name in model:
            raise ValueError("damaged")
        if notify is not None:
            notify("using the torch engine, which is slower")
        return EchoService(model)


@asynccontextmanager
async def start_pool(folder: Path, names: str) -> AsyncIterator[WorkerPool]:
    (folder / "manifest.json").write_text("1")
    pool = WorkerPool([EchoConfig(folders=(folder,), name=name) for name in names])
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
        assert not multiprocessing.active_children()


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def send_signal(pool: WorkerPool, number: int) -> int:
    """Send a signal to the first worker; return its id."""
    process_id = pool.workers[0].process.pid
    assert process_id
    os.kill(process_id, number)
    return process_id


def test_an_answer_that_cannot_be_sent_fails_alone(tmp_path: Path) -> None:
    async def run() -> None:
        async with start_pool(tmp_path, "a") as pool:
            with pytest.raises(ApiError) as failed:
                await pool.call("suggest", "text")
            assert failed.value.status == 500
            assert await pool.call("translate", "text") == ("1", 4)

    asyncio.run(run())


@needs_signals
def test_a_worker_that_hangs_blocks_nothing_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.MAX_UNANSWERED_PINGS * backends.PING_SECONDS == 60  # as documented
    monkeypatch.setattr(backends, "PING_SECONDS", 0.3)

    async def run() -> None:
        async with start_pool(tmp_path, "a") as pool:
            await asyncio.sleep(0.6)
            stopped = send_signal(pool, signal.SIGSTOP)
            call = asyncio.create_task(pool.call("translate", b"a" * 4_000_000))
            begin = time.monotonic()
            await asyncio.sleep(0.05)
            assert time.monotonic() - begin < 1
            assert await call == ("1", 4_000_000)
            assert pool.workers[0].process.pid != stopped

    asyncio.run(run())


@needs_signals
def test_workers_ignore_sigterm(tmp_path: Path) -> None:
    async def run() -> None:
        async with start_pool(tmp_path, "a") as pool:
            process_id = send_signal(pool, signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert await pool.call("translate", "text") == ("1", 4)
            assert pool.workers[0].process.pid == process_id

    asyncio.run(run())


async def get_states(app: TranslationApp) -> list[int]:
    """Return the status of /health and of /ready."""
    body = {"type": "http.request", "body": b""}
    return [(await exchange(app, http_scope(path), body))[0]["status"] for path in ("/health", "/ready")]


def test_without_workers_requests_get_503_until_the_models_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(backends, "MAX_FAILED_STARTS", 1)

    async def run() -> None:
        async with start_pool(tmp_path, "a") as pool:
            app = TranslationApp(pool)
            assert await get_states(app) == [200, 200]
            (tmp_path / "manifest.json").write_text("damaged for a")
            pool.workers[0].process.kill()
            await wait_for(lambda: not pool.is_ready)
            assert await get_states(app) == [200, 503]  # a new worker is being started
            with pytest.raises(ApiError, match="no model is ready") as caught:
                await pool.call("translate", "text")
            assert caught.value.status == 503
            assert "retry-after" in caught.value.headers
            begin = time.monotonic()
            with pytest.raises(ApiError, match="no model is ready"):
                await pool.call("translate", "text")
            assert time.monotonic() - begin < 1
            assert await get_states(app) == [503, 503]
            (tmp_path / "manifest.json").write_text("22")
            await wait_for(lambda: pool.is_ready)
            assert await get_states(app) == [200, 200]
            assert await pool.call("translate", "text") == ("22", 4)
            pool.workers[0].process.kill()  # the new worker is supervised again
            await wait_for(lambda: not pool.is_ready)
            assert await pool.call("translate", "text") == ("22", 4)

    asyncio.run(run())


def test_all_files_of_a_model_are_watched(tmp_path: Path) -> None:
    pool = WorkerPool([ServiceConfig(folders=(tmp_path,))])
    for name in ("tokenizer.model", "card.md", "events.log"):
        (tmp_path / name).write_text("1")
    assert {path.name for path in pool._take_snapshot()} == {"tokenizer.model", "card.md", "events.log"}
    entries = {name: hash_file(tmp_path / name) for name in ("tokenizer.model", "card.md")}
    write_manifest(tmp_path / "manifest.json", entries)
    before = pool._take_snapshot()
    assert {path.name for path in before} == {"manifest.json", "tokenizer.model", "card.md"}
    (tmp_path / "events.log").write_text("22")
    assert pool._take_snapshot() == before
    (tmp_path / "tokenizer.model").write_text("22")
    assert pool._take_snapshot() != before
    assert WorkerPool([ServiceConfig(folders=(tmp_path / "missing",))])._take_snapshot() == {}


def test_too_many_open_files_end_neither_the_watch_nor_the_supervision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "WATCH_SECONDS", 0.05)
    take_snapshot, stop, num_calls = WorkerPool._take_snapshot, backends.WorkerProcess.stop, 0

    def fail_at_first(pool: WorkerPool) -> Any:
        nonlocal num_calls
        num_calls += 1
        if 1 < num_calls < 4:  # the first is taken at the start
            raise OSError(errno.EMFILE, "Too many open files")
        return take_snapshot(pool)

    async def fail_to_stop(worker: backends.WorkerProcess) -> None:
        monkeypatch.setattr(backends.WorkerProcess, "stop", stop)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(WorkerPool, "_take_snapshot", fail_at_first)

    async def run() -> None:
        async with start_pool(tmp_path, "a") as pool:
            await wait_for(lambda: num_calls >= 4)
            (tmp_path / "manifest.json").write_text("22")
            await wait_for(lambda: pool.version == 1)
            await wait_for(lambda: len(multiprocessing.active_children()) == 1)
            monkeypatch.setattr(backends.WorkerProcess, "stop", fail_to_stop)
            pool.workers[0].process.kill()
            await wait_for(lambda: not pool.is_ready)
            assert await pool.call("translate", "text") == ("22", 4)

    asyncio.run(run())


def test_a_slower_engine_is_a_warning_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with start_pool(tmp_path, "a"):
            assert [record.message for record in caplog.records] == ["using the torch engine, which is slower"]

    asyncio.run(run())


def test_progress_does_not_prevent_a_second_attempt(tmp_path: Path) -> None:
    async def run() -> None:
        async with start_pool(tmp_path, "a") as pool:
            items = []
            async for item in pool.stream("translate_file", tmp_path / "attempt"):
                items.append(item)
            assert items == [0.5, 0.5, b"done"]
            with pytest.raises(ApiError, match="the model stopped unexpectedly"):
                [item async for item in pool.stream("stream", None)]

    asyncio.run(run())


def test_changed_models_are_used_by_all_workers_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "WATCH_SECONDS", 0.05)

    async def run() -> None:
        async with start_pool(tmp_path, "ab") as pool:
            old = list(pool.workers)
            (tmp_path / "manifest.json").write_text("b")
            await wait_for(lambda: "the old ones stay in use" in caplog.text)
            assert pool.workers == pool.usable_workers == old
            assert pool.version == 0
            await wait_for(lambda: len(multiprocessing.active_children()) == 2)
            (tmp_path / "manifest.json").write_text("22")
            await wait_for(lambda: len(multiprocessing.active_children()) == 3)
            old[1].process.kill()  # while the new models are loaded
            await wait_for(lambda: pool.version == 1)
            assert "the new models are in use" in caplog.text
            await wait_for(lambda: len(multiprocessing.active_children()) == 2)
            assert not {*old} & {*pool.workers}
            answers = await asyncio.gather(*(pool.call("translate", "text") for _ in range(4)))
            assert answers == [("22", 4)] * 4

    asyncio.run(run())
