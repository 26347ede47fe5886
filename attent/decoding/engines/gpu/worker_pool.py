"""Worker processes for text: a GPU finds translations faster than one Python process tokenizes and detokenizes.

A worker has the tokenizer but no weights: it runs a task and sends each search that the task needs back to the main
process. Workers start lazily; the main process runs tasks itself until they are ready, and those of workers that died.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from attent.data.process_pool import bind_to_parent, block_sigint, hide_main_script
from attent.decoding.engines.gpu.eligibility import supports_requests
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, Unavailable, search_in_batches
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest, StopCheck

if TYPE_CHECKING:
    from attent.decoding.translator import Translator

READY = "ready"
JOIN_TIMEOUT = 5  # seconds

Result = TypeVar("Result")


class SearchCall(NamedTuple):
    requested: RequestBatch | list[SearchRequest]
    options: SearchOptions


class TextWorkerPool(Generic[Result]):
    """Runs tasks in idle workers, or in this process if there are none."""

    def __init__(
        self,
        translator: Translator,
        setup: Callable[[RemoteEngine], Callable[[Any], Any]],
        run_in_main_process: Callable[[Any, StopCheck], Result],
        num_workers: int,
    ) -> None:
        """`setup` returns the function that runs one task, in the worker process."""
        self.translator, self.setup, self.run_in_main_process = translator, setup, run_in_main_process
        self.workers_to_start = num_workers
        self.workers: list[TextWorker] = []
        self.starting_workers: list[TextWorker] = []
        self.idle_workers: list[TextWorker] = []
        self.lock = threading.Lock()

    def run(self, task: Any, should_stop: StopCheck, start_workers: bool = True) -> Result:
        """Run one task. The first call with `start_workers` starts the processes."""
        while (worker := self._take_worker(start_workers)) is not None:
            with suppress(OSError, EOFError):  # the worker died: try the next
                result: Result = worker.run(task, should_stop)
                with self.lock:
                    self.idle_workers.append(worker)
                return result
        return self.run_in_main_process(task, should_stop)

    def _take_worker(self, start_workers: bool) -> TextWorker | None:
        with self.lock:
            count = self.workers_to_start if start_workers else 0
            self.workers_to_start -= count
        if count:
            setup = ForkingPickler.dumps(self.setup)
            with suppress(OSError):  # start as many as the system allows
                for _ in range(count):
                    worker = TextWorker(self.translator, setup)
                    with self.lock:
                        self.workers.append(worker)
                        self.starting_workers.append(worker)
        with self.lock:
            ready = [worker for worker in self.starting_workers if worker.try_finish_start()]
            self.starting_workers = [worker for worker in self.starting_workers if worker not in ready]
            self.idle_workers += ready
            return self.idle_workers.pop() if self.idle_workers else None

    def close(self) -> None:
        for worker in self.workers:
            worker.connection.close()
        for worker in self.starting_workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join(JOIN_TIMEOUT)


class TextWorker:
    def __init__(self, translator: Translator, setup: Any) -> None:
        self.translator, self.setup = translator, setup
        context = get_context("spawn")  # a process that uses CUDA cannot be forked
        self.connection, theirs = context.Pipe()
        # The setup is sent later: starting a process blocks until the child has read its arguments.
        self.process = context.Process(target=run_worker, args=(theirs,), name="attent worker", daemon=True)
        try:
            with hide_main_script(), block_sigint():
                self.process.start()
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()

    def try_finish_start(self) -> bool:
        """Send the worker its setup if it has started; return whether it has."""
        with suppress(OSError, EOFError):
            if self.connection.poll() and self.connection.recv() == READY:
                self.connection.send_bytes(self.setup)
                return True
        return False

    def run(self, task: Any, should_stop: StopCheck) -> Any:
        """Send a task and answer the worker's searches until it returns the result."""
        self.connection.send(task)
        while isinstance(reply := self.connection.recv(), SearchCall):
            self.connection.send(self._run_search(reply, should_stop))
        return reply

    def _run_search(self, call: SearchCall, should_stop: StopCheck) -> object:
        try:
            if isinstance(call.requested, RequestBatch):
                return self.translator.search_batch(call.requested, call.options, should_stop)
            return self.translator.search(call.requested, call.options, should_stop)
        except ValueError as error:  # an impossible request: the worker knows which line it belongs to
            return error


# --- in the worker process -----------------------------------------------------------------------------------------


class RemoteEngine:
    """An engine that sends searches to the main process: as request batches, which cost it little, where it can."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.unsupported: set[SearchOptions] = set()  # by the GPU engine

    def search(
        self, requests: Sequence[SearchRequest], options: SearchOptions
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        remaining = set(range(len(requests)))
        if options not in self.unsupported and supports_requests(requests):
            for index, hypotheses in search_in_batches(
                requests, options, lambda batch: self._search_batch(batch, options)
            ):
                remaining.remove(index)
                yield index, hypotheses
        if remaining:
            indices = sorted(remaining)
            results = self._call(SearchCall([requests[index] for index in indices], options))
            yield from zip(indices, results, strict=True)

    def _search_batch(self, batch: RequestBatch, options: SearchOptions) -> HypothesisBatch | Unavailable:
        result: HypothesisBatch | Unavailable = self._call(SearchCall(batch, options))
        if result is Unavailable.UNSUPPORTED:
            self.unsupported.add(options)
        return result

    def _call(self, call: SearchCall) -> Any:
        self.connection.send(call)
        result = self.connection.recv()
        if isinstance(result, ValueError):
            raise result
        return result


def run_worker(connection: Connection) -> None:
    bind_to_parent()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        connection.send(READY)
        handle = connection.recv()(RemoteEngine(connection))
        gc.freeze()  # scanning what stays alive for garbage would take as long as the texts
        while True:
            connection.send(handle(connection.recv()))
