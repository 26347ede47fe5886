"""Work for several processes, whose results come in the order of the tasks.

Processes are spawned, not forked: a fork of a process in which torch runs threads can hang. Three habits of spawned
processes are put right here: they would run the caller's script again from its top, print a traceback each
at Ctrl-C, and live on when the caller is killed.
"""

from __future__ import annotations

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

Result = TypeVar("Result")
QUEUED_PER_WORKER = 2  # tasks for each process beyond the one that is waited for


def map_in_order(function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Result]:
    """`work(*task)` for every task. `work` goes to each process once; it and the tasks must be picklable."""
    waiting: deque[Future[Result]] = deque()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_init_worker, initargs=(function,))
    try:
        for task in tasks:
            with hide_main_script():
                waiting.append(pool.submit(_run_task, *task))
            if len(waiting) > QUEUED_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def hide_main_script() -> Iterator[None]:
    """A process started meanwhile does not import the caller's script, so that the script needs no guard."""
    main = sys.modules["__main__"]
    kept: dict[str, Any] = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(kept)


@contextmanager
def block_sigint() -> Iterator[None]:
    """What is started meanwhile does not hear Ctrl-C before it can say what to do then."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it starts with the first process, and would listen again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the processes ------------------------------------------------------------------------------------------------

_worker_function: Callable[..., Any]


def _init_worker(function: Callable[..., Any]) -> None:
    global _worker_function
    _worker_function = function
    bind_to_parent()


def bind_to_parent() -> None:
    """The caller hears Ctrl-C, and stops us; without it we are nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_task(*task: Any) -> Any:
    return _worker_function(*task)
