"""A process pool whose results come in the order of the tasks.

Processes are spawned, not forked: a fork of a process in which torch runs threads can deadlock. Spawned processes would
import the caller's script again, print a traceback each on Ctrl-C and outlive a killed parent; all this is prevented.
"""

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process, resource_tracker
from typing import Any, TypeVar

from attent.storage.machine import count_usable_cores, measure_memory

Result = TypeVar("Result")
QUEUED_PER_WORKER = 2  # tasks submitted ahead of the one that is awaited
WORKER_BYTES = 2**28  # of memory, ample for a process that encodes


def count_free_workers() -> int:
    """Return the processes, at least 1, that the free cores and half of the memory allow, shared by torchrun's."""
    allowed = min(count_usable_cores() - 2, measure_memory()[1] // 2 // WORKER_BYTES)
    return max(1, allowed // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def map_in_order(function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Result]:
    """Yield `function(*task)` for every task. `function` is sent to each process once; all must be picklable."""
    queue: deque[Future[Result]] = deque()
    pool = start_pool(function, workers)
    try:
        for task in tasks:
            queue.append(submit_task(pool, *task))
            if len(queue) > QUEUED_PER_WORKER * workers:
                yield queue.popleft().result()
        while queue:
            yield queue.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def start_pool(function: Callable[..., Any], workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, get_context("spawn"), initializer=_init_worker, initargs=(function,))


def submit_task(pool: ProcessPoolExecutor, *task: Any) -> Future[Any]:
    with hide_main_script():
        return pool.submit(_run_task, *task)


@contextmanager
def hide_main_script() -> Iterator[None]:
    """Keep processes that start in this block from importing the caller's script, so that it needs no main guard."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


@contextmanager
def block_sigint() -> Iterator[None]:
    """Block Ctrl-C in processes that start in this block until they install their own handler."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it starts with the first process and would unblock the signal
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


# ---- in the workers --------------------------------------------------------------------------------------------------

_worker_function: Callable[..., Any]


def _init_worker(function: Callable[..., Any]) -> None:
    global _worker_function
    _worker_function = function
    bind_to_parent()


def bind_to_parent() -> None:
    """Ignore SIGINT, which the parent handles; exit when the parent process dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent()


def exit_with_parent() -> None:
    """Start a thread that ends this process when the parent process dies."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run_task(*task: Any) -> Any:
    return _worker_function(*task)
