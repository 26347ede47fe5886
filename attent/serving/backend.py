"""Run the models of a server: in this process, or in worker processes that are replaced when they crash.

The HTTP front end imports no torch: with `WorkerPool`, the models are in other processes. A worker that dies fails no
request that another one can still answer: its requests are sent once more. When a model folder changes, a new worker
loads it before the old one ends.
"""

import asyncio
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from attent.decoding.options import DeviceOptions
from attent.serving.limits import ApiError, Limits, ServeError, make_internal_error, make_unavailable_error
from attent.serving.messages import CallContext, Languages, ServiceInfo
from attent.storage.errors import FolderError
from attent.storage.manifest import MANIFEST_FILE, read_manifest

if TYPE_CHECKING:
    from attent.serving.service import TranslationService

Method = Literal["translate", "stream", "detect", "suggest", "translate_file", "complete", "look", "look_page"]

NUM_THREADS = 320  # requests that a worker works on at once, more than are admitted; their searches share batches
MAX_ATTEMPTS = 2  # a request whose worker died is sent to another one once
MAX_WORKER_WAIT = 20.0  # seconds that a request waits for a worker that is being started
PING_SECONDS = 10.0  # between pings to a worker
MAX_UNANSWERED_PINGS = 6  # in a row, then a worker is replaced
MAX_FAILED_STARTS = 3  # in a row, then no worker is started any more until the models change
WATCH_SECONDS = 2.0  # how often the model folders are looked at
START_TIMEOUT = 600.0  # seconds to load the models
SWITCH_INTERVAL = 5e-4  # seconds until Python switches threads: a request passes six, with the usual 5 ms each

log = logging.getLogger("attent.serving")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """The models, device and limits of a worker."""

    folders: tuple[Path, ...]
    device: DeviceOptions = DeviceOptions()  # noqa: RUF009 - frozen
    languages: Languages = (None, None)  # of models whose folders do not say them
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    adapters: tuple[tuple[str, Path], ...] = ()  # (name, folder)

    def load(self, notify: Callable[[str], None] | None = None) -> "TranslationService":
        from attent.serving.service import TranslationService  # imports torch

        return TranslationService(self, notify)


class RunningCalls:
    """The calls that a service works on, each in a thread."""

    def __init__(self, service: Any, send: Callable[[tuple[Any, ...]], None], num_threads: int = NUM_THREADS) -> None:
        """`send` gets (call id, "item" | "done", value) and (call id, "error", exception)."""
        self._service = service
        self._send = send
        self._cancelled: dict[int, threading.Event] = {}
        self._waiting: SimpleQueue[tuple[int, Method, Any, str]] = SimpleQueue()
        self._num_threads, self._num_started = num_threads, 0

    @property
    def is_idle(self) -> bool:
        return not self._cancelled

    def handle(self, call_id: int, method: Method | None, request: Any, client: str) -> None:
        """Start a call; without a method, cancel it."""
        if method is None:
            if event := self._cancelled.get(call_id):
                event.set()
            return
        self._cancelled[call_id] = threading.Event()
        self._waiting.put((call_id, method, request, client))
        if self._num_started < min(len(self._cancelled), self._num_threads):
            # Daemons, so that work that ignores `should_stop` does not keep the process alive.
            threading.Thread(target=self._run_thread, name="attent request", daemon=True).start()
            self._num_started += 1

    def close(self) -> None:
        for event in list(self._cancelled.values()):
            event.set()

    def _run_thread(self) -> None:
        while True:
            self._run(*self._waiting.get())

    def _run(self, call_id: int, method: Method, request: Any, client: str) -> None:
        should_stop = self._cancelled[call_id].is_set
        try:
            if should_stop():
                return
            context = CallContext(
                client=client, should_stop=should_stop, send_item=lambda item: self._send((call_id, "item", item))
            )
            self._send((call_id, "done", getattr(self._service, method)(request, context)))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited; a SystemExit too
            if not should_stop():
                self._send((call_id, "error", to_api_error(error)))
        finally:
            del self._cancelled[call_id]


def to_api_error(error: BaseException) -> ApiError:
    """Return the response for an error of a service; bugs and failures of the machine are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverflowError):
        return ApiError(400, "a number of the request is too large to compute with")
    if isinstance(error, ValueError):
        return ApiError(400, str(error) or "the model cannot process this request")
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        log.error("out of memory: %s", error)
        return ApiError(503, "the model ran out of memory; send a shorter text")
    if type(error).__name__ == "SearchCancelled":
        return make_unavailable_error("the server is stopping; retry later")
    log.error("a request failed: %s", "".join(traceback.format_exception(error)))
    return make_internal_error()


class WorkerDied(Exception):
    """A worker process ended before it answered."""


class Channel:
    """Sends calls to a service, and its results to whoever awaits them. Belongs to one event loop."""

    _ids = itertools.count()

    def __init__(self, send: Callable[[int, Method | None, Any, str], None]) -> None:
        """`send` gets the arguments of `RunningCalls.handle`."""
        self.send = send
        self.pending: dict[int, asyncio.Queue[tuple[str, Any]]] = {}  # call id -> its results
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def begin(self, method: Method, request: Any, client: str) -> Iterator[asyncio.Queue[tuple[str, Any]]]:
        """Begin a call; yield its results: (kind, value). An error inside of the `with` block cancels it."""
        call_id, results = next(self._ids), asyncio.Queue[tuple[str, Any]]()
        self.pending[call_id] = results
        self.send(call_id, method, request, client)
        try:
            yield results
        except BaseException:
            self.send(call_id, None, None, "")
            raise
        finally:
            del self.pending[call_id]

    def receive(self, *messages: tuple[int, str, Any]) -> None:
        """Handle results; called in any thread."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._deliver, messages)

    def _deliver(self, messages: Iterable[tuple[int, str, Any]]) -> None:
        for call_id, *result in messages:
            if results := self.pending.get(call_id):
                results.put_nowait(tuple(result))


class ModelBackend:
    """Runs the methods of a `TranslationService`. Cancelling a call cancels its work."""

    info: ServiceInfo
    version = 0  # changes when the models change

    @property
    def is_ready(self) -> bool:
        """Whether a request would be answered now."""
        return True

    @property
    def is_alive(self) -> bool:
        """Whether it is ready, or becomes ready without a restart."""
        return True

    async def start(self) -> None:
        """Start in the running event loop; raise an error if the models cannot be loaded."""
        raise NotImplementedError

    async def close(self, timeout: float) -> bool:
        """Cancel all calls; return whether the models are idle within the timeout."""
        raise NotImplementedError

    async def _choose_channel(self) -> Channel:
        raise NotImplementedError

    async def call(self, method: Method, request: Any, client: str = "") -> Any:
        (result,) = [result async for result in self.stream(method, request, client)]
        return result

    async def stream(self, method: Method, request: Any, client: str = "") -> AsyncIterator[Any]:
        """Yield the results of a method. A call whose worker dies is sent once more, except a stream that has begun."""
        for attempt in itertools.count(1):
            channel = await self._choose_channel()
            kind, num_yielded = "item", 0
            try:
                with channel.begin(method, request, client) as results:
                    while kind == "item":
                        kind, value = await results.get()
                        if kind == "error":
                            raise value
                        if kind == "item" or value is not None:
                            yield value
                            num_yielded += 1
                return
            except WorkerDied:
                if attempt == MAX_ATTEMPTS or (num_yielded and method == "stream"):  # else it is only the progress
                    raise make_unavailable_error("the model stopped unexpectedly; try again") from None


class LocalBackend(ModelBackend):
    """Runs a service in threads of this process. The service can be used again after the backend is closed."""

    def __init__(self, service: Any, num_threads: int = NUM_THREADS) -> None:
        """`service` is a `TranslationService`, or has some of its methods."""
        self._calls = RunningCalls(service, lambda message: self._channel.receive(message), num_threads)
        self.info = getattr(service, "info", ServiceInfo())

    async def start(self) -> None:
        self._channel = Channel(self._calls.handle)

    async def close(self, timeout: float = 1.0) -> bool:
        end = time.monotonic() + timeout
        while not self._calls.is_idle and time.monotonic() < end:
            self._calls.close()
            await asyncio.sleep(0.005)
        return self._calls.is_idle

    async def _choose_channel(self) -> Channel:
        return self._channel


# --- worker processes ------------------------------------------------------------------------------------------------


class WorkerProcess(Channel):
    """A process that has loaded the models."""

    def __init__(self, config: ServiceConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._sender = MessageSender(self._connection)
        super().__init__(lambda *call: self._sender.send(call))
        self._num_unanswered = 0  # pings
        self.started: asyncio.Future[ServiceInfo] = self._loop.create_future()
        self.ended = asyncio.Event()
        self.process = context.Process(target=run_worker, args=(remote, config), name="attent worker", daemon=True)
        self.process.start()
        remote.close()
        threading.Thread(target=self._read, name="attent worker results", daemon=True).start()

    def _read(self) -> None:
        """Receive results until the process ends."""
        with suppress(EOFError, OSError):
            while True:
                self.receive(*receive_messages(self._connection))
        self._sender.close()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._handle_end)

    def _deliver(self, messages: Iterable[tuple[int, str, Any]]) -> None:
        self._num_unanswered = 0
        super()._deliver(messages)
        for _, kind, value in (message for message in messages if message[0] < 0):
            if kind == "note":
                log.log(logging.INFO if self.started.done() else logging.WARNING, "%s", value)
            elif not self.started.done():  # else it is the answer to a ping
                if kind == "error":
                    self.started.set_exception(value)
                else:
                    self.started.set_result(value)

    def _handle_end(self) -> None:
        self.ended.set()
        self._deliver([(-1, "error", ServeError("a worker process ended while it loaded the models"))])
        for results in self.pending.values():
            results.put_nowait(("error", WorkerDied()))

    async def wait_until_ended(self) -> None:
        """Wait for the end of the process, which is killed if it no longer answers pings."""
        while not self.ended.is_set():
            if self._num_unanswered == MAX_UNANSWERED_PINGS:
                log.error("worker %s does not answer; it is killed", self.process.pid)
                self.process.kill()
            self._num_unanswered += 1
            self.send(-1, None, None, "")
            with suppress(TimeoutError):  # `wait_for` of Python 3.11 loses a cancellation at the moment of the end
                async with asyncio.timeout(PING_SECONDS):
                    await self.ended.wait()
        await self.stop()
        log.error("worker %s ended with exit code %s", self.process.pid, self.process.exitcode)

    async def drain(self, timeout: float) -> None:
        try:
            end = time.monotonic() + timeout
            while self.pending and not self.ended.is_set() and time.monotonic() < end:
                await asyncio.sleep(0.02)
        finally:
            await self.stop()

    async def stop(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.join, 5.0)


class MessageSender:
    """Sends messages to another process, in a thread of its own, since one that is stopped or busy blocks it.

    Messages that wait are sent as one list: each call of `Connection.send` lets other threads run first.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue = SimpleQueue[bytes | None]()
        self._thread = threading.Thread(target=self._run, name="attent messages", daemon=True)
        self._thread.start()

    def send(self, message: tuple[Any, ...]) -> None:
        """Queue a message; raise an error if it cannot be pickled."""
        self._queue.put(bytes(ForkingPickler.dumps(message)))

    def close(self) -> None:
        """Send what is in the queue, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):  # the other process has ended, which its reader handles
            while (message := self._queue.get()) is not None:
                messages = [message]
                with suppress(Empty):
                    while (message := self._queue.get_nowait()) is not None:
                        messages.append(message)
                    self._queue.put(None)
                self._connection.send(messages)


def receive_messages(connection: Connection) -> list[Any]:
    """Wait for what a `MessageSender` sends, and return it."""
    return [ForkingPickler.loads(message) for message in connection.recv()]


def run_worker(connection: Connection, config: ServiceConfig) -> None:
    """Load the models and answer calls until the connection closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the whole process group gets them; the front end decides
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL)
    sender = MessageSender(connection)
    send = sender.send
    try:
        service = config.load(lambda text: send((-1, "note", text)))
    except Exception as error:  # noqa: BLE001 - raised in the front end
        is_explained = isinstance(error, (ValueError, OSError, ImportError))
        send((-1, "error", ServeError(str(error) if is_explained else f"{type(error).__name__}: {error}")))
        sender.close()
        return
    send((-1, "done", service.info))
    calls = RunningCalls(service, send)
    with suppress(EOFError, OSError):
        while True:
            for call in receive_messages(connection):
                if call[0] >= 0:
                    calls.handle(*call)
                else:
                    send((-1, "done", None))  # the answer to a ping
    os._exit(0)  # the front end is gone; threads may be inside of a search


class WorkerPool(ModelBackend):
    """Runs a service in processes."""

    def __init__(self, configs: Sequence[ServiceConfig], *, drain_timeout: float = 30.0) -> None:
        """`configs` has one entry per worker: the same models, perhaps on different devices."""
        self._configs = list(configs)
        self._drain_timeout = drain_timeout
        self._old_switch_interval = sys.getswitchinterval()
        self.workers: list[WorkerProcess] = []  # all have loaded the models; some may have ended
        self._tasks: set[asyncio.Task[Any]] = set()
        self._supervisors: list[asyncio.Task[None]] = []  # one per worker; done when it is not started any more

    @property
    def usable_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if not worker.ended.is_set()]

    @property
    def is_ready(self) -> bool:
        return bool(self.usable_workers)

    @property
    def is_alive(self) -> bool:
        return self.is_ready or not all(task.done() for task in self._supervisors)

    async def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        snapshot = self._take_snapshot()  # before it is loaded, so that no change is missed
        try:
            loading = [self._spawn(self._load_worker(config)) for config in self._configs]
            self._install(await asyncio.gather(*loading))
        except BaseException:
            await self.close()
            raise
        self._spawn(self._watch_folders(snapshot))

    async def close(self, timeout: float = 1.0) -> bool:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(worker.stop() for worker in self.workers), return_exceptions=True)
        sys.setswitchinterval(self._old_switch_interval)
        return True

    async def _choose_channel(self) -> Channel:
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_WORKER_WAIT):
                while self.is_alive and not self.is_ready:
                    await asyncio.sleep(0.05)
        if not self.usable_workers:
            raise make_unavailable_error("no model is ready; try again in a moment")
        return min(self.usable_workers, key=lambda worker: len(worker.pending))

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load_worker(self, config: ServiceConfig) -> WorkerProcess:
        worker = WorkerProcess(config)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await worker.started
        except BaseException:
            await worker.stop()
            raise
        return worker

    def _install(self, workers: list[WorkerProcess]) -> None:
        """Use new workers; the old ones finish their calls."""
        for task in self._supervisors:
            task.cancel()
        for worker in self.workers:
            self._spawn(worker.drain(self._drain_timeout))
        self.workers = workers
        self.info = workers[0].started.result()
        self._supervisors = [self._spawn(self._supervise(index)) for index in range(len(workers))]

    async def _supervise(self, index: int) -> None:
        """Replace the worker at an index whenever it ends."""
        failed_starts = 0
        while failed_starts < MAX_FAILED_STARTS:
            try:
                await self.workers[index].wait_until_ended()
                self.workers[index] = await self._load_worker(self._configs[index])
                failed_starts = 0
            except Exception as error:  # noqa: BLE001 - of the new worker
                log.error("the new worker cannot load the models: %s", error)
                failed_starts += 1
                await asyncio.sleep(failed_starts)
        log.error("a worker failed to start %s times; it is not started again", failed_starts)

    # --- changed models ----------------------------------------------------------------------------------------------

    async def _watch_folders(self, loaded: dict[Path, tuple[int, int]]) -> None:
        """Load the models again when their files have changed and then stayed the same."""
        previous = loaded
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            with suppress(OSError, RuntimeError):  # too many open files or threads: look again later
                current = await asyncio.to_thread(self._take_snapshot)
                if current != loaded and current == previous:
                    loaded = current
                    await self._reload()
                previous = current

    def _take_snapshot(self) -> dict[Path, tuple[int, int]]:
        snapshot = {}
        config = self._configs[0]
        folders = (*config.folders, *(folder for _, folder in config.adapters))
        for path in itertools.chain.from_iterable(map(list_model_files, folders)):
            with suppress(OSError):
                status = path.stat()
                snapshot[path] = (status.st_mtime_ns, status.st_size)
        return snapshot

    async def _reload(self) -> None:
        """Replace the workers when all new ones have loaded the models, or none."""
        log.warning("the models have changed; loading them again")
        workers: list[WorkerProcess] = []
        try:
            for config in self._configs:
                workers.append(await self._load_worker(config))
        except BaseException as error:
            await asyncio.gather(*(worker.stop() for worker in workers))
            if not isinstance(error, Exception):
                raise
            log.error("the changed models cannot be loaded, so the old ones stay in use: %s", error)
            return
        self._install(workers)
        self.version += 1
        log.warning("the new models are in use")


def list_model_files(folder: Path) -> list[Path]:
    """Return the files that a manifest lists, with the manifest; of a folder without one, all files."""
    with suppress(FolderError, OSError):
        return [folder / name for name in (MANIFEST_FILE, *read_manifest(folder / MANIFEST_FILE))]
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.is_file()]
    return []
