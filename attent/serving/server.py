"""Run an ASGI app in this process with granian's embedded server, so that the model is loaded once and never forked.

Handles the port, readiness and shutdown (Ctrl-C, SIGTERM or the caller). granian closes connections whose request head
does not arrive within `HEADER_TIMEOUT`.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Protocol

from attent.serving.limits import Receive, Scope, Send, ServeError

FIRST_PORT = 8017  # or the next free one
MAX_PORT_ATTEMPTS = 20
HEADER_TIMEOUT = 5
MAX_HEAD_BYTES = 256 * 1024  # the app refuses more than `Limits.max_head_bytes`; beyond this, granian does
MAX_CONNECTIONS = 4096
STARTUP_TIMEOUT = 20.0
SHUTDOWN_TIMEOUT = 0.7  # for running requests
SETTLE_SECONDS = 0.1


class ServedApp(Protocol):
    """An ASGI app that is started before the first request, and drained and closed after the last."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def start(self) -> None: ...

    async def drain(self) -> None: ...

    async def close(self, timeout: float) -> bool: ...


def serve_app(
    app: ServedApp,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; a second one does not wait for running requests. Calls `on_ready(url)` once
    requests are accepted. Call it in the main thread.

    port  None: the first free port from 8017; 0: any free port
    """
    with reserve_port(host, port) as reserved:

        async def main() -> None:
            stop = StopEvents()
            with _handle_signals(asyncio.get_running_loop(), stop.set_next):
                await _run_server(app, reserved, stop, on_ready)

        asyncio.run(main())


@contextmanager
def serve_in_thread(app: ServedApp, *, host: str = "127.0.0.1", port: int | None = 0) -> Iterator[str]:
    """Serve in a thread inside the `with` block; yields the URL."""
    started: Future[tuple[str, Callable[[], object]]] = Future()

    async def main(reserved: socket.socket) -> None:
        stop = StopEvents()
        end = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set_next)
        await _run_server(app, reserved, stop, lambda url: started.set_result((url, end)))

    def run(reserved: socket.socket) -> None:
        try:
            asyncio.run(main(reserved))
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    with reserve_port(host, port) as reserved:
        thread = threading.Thread(target=run, args=(reserved,), name="attent server", daemon=True)
        thread.start()
        url, end = started.result()
        try:
            yield url
        finally:
            with suppress(RuntimeError):  # it has already stopped
                end()
            thread.join()


def reserve_port(host: str, port: int | None) -> socket.socket:
    """Return a listening socket that holds a free port until the server binds it."""
    try:
        family, *_, sockaddr = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ServeError(f"`host` must be an address of this machine, but is {host!r}; try 127.0.0.1") from error
    ports = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + MAX_PORT_ATTEMPTS), 0]
    for candidate in ports:
        try:
            return _open_socket(family, str(sockaddr[0]), candidate)
        except OSError as error:
            if port is None and error.errno in (errno.EADDRINUSE, errno.EACCES) and candidate != 0:
                continue
            raise ServeError(_describe_bind_error(host, candidate, error)) from error
        except OverflowError as error:
            raise ServeError(f"`port` must be 0 to 65535, but is {candidate}; 0 means any free port") from error
    raise AssertionError("unreachable: the last port returns or raises")


def _open_socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # on Windows it would let two servers share the port
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, port))
        reserved.listen()
    except BaseException:
        reserved.close()
        raise
    return reserved


def _describe_bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is used by another program; give another, or 0 for any free port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} of {host} is not permitted; give one from 1024, or 0 for any free port"
    return f"port {port} of {host} cannot be used: {error.strerror}; give another host or port"


class StopEvents:
    """Requests to stop: the first lets running requests finish, the second does not."""

    def __init__(self) -> None:
        self.stop, self.stop_at_once = asyncio.Event(), asyncio.Event()

    def set_next(self) -> None:
        (self.stop_at_once if self.stop.is_set() else self.stop).set()


async def _run_server(
    app: ServedApp, reserved: socket.socket, stop: StopEvents, on_ready: Callable[[str], None]
) -> None:
    address, port = reserved.getsockname()[:2]
    known = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    url = f"http://[{known}]:{port}" if ":" in known else f"http://{known}:{port}"
    await _run_until(app.start(), stop.stop)
    if stop.stop.is_set():
        await app.close(SHUTDOWN_TIMEOUT)
        return
    server = _create_server(app, address, port)
    if sys.platform == "linux":  # granian shares the reserved port; elsewhere, it must be released first
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    else:
        reserved.close()
    server_task = asyncio.create_task(server.serve())
    ended = asyncio.create_task(stop.stop.wait())
    try:
        await _wait_until_ready(server_task, url)
        reserved.close()
        on_ready(url)
        await asyncio.wait({server_task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if server_task.done():
            raise ServeError(f"the server at {url} stopped unexpectedly; start it again")
        await _run_until(app.drain(), stop.stop_at_once)
    finally:
        ended.cancel()
        server.stop()
        await asyncio.gather(app.close(SHUTDOWN_TIMEOUT), asyncio.wait({server_task}, timeout=SHUTDOWN_TIMEOUT))
        # granian would wait for idle keep-alive connections.
        server_task.cancel()
        await asyncio.wait({server_task})
        # granian's threads release Python objects last; doing so during interpreter shutdown crashes the process
        # (5 of 24 runs without this pause, none of 175 with it).
        await asyncio.sleep(SETTLE_SECONDS)


async def _run_until(coroutine: Coroutine[Any, Any, None], event: asyncio.Event) -> None:
    """Await a coroutine, which is cancelled when the event is set."""
    task, waiting = asyncio.create_task(coroutine), asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    else:
        task.cancel()
        await asyncio.wait({task})


def _create_server(app: ServedApp, address: str, port: int) -> Any:
    try:
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings
        from granian.server.embed import Server
    except ModuleNotFoundError as error:
        raise ServeError("the server needs granian, which is not installed; run pip install 'attent[serve]'") from error
    return Server(
        app,
        address=address,
        port=port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        backpressure=MAX_CONNECTIONS,
        http1_settings=HTTP1Settings(header_read_timeout=1000 * HEADER_TIMEOUT, max_buffer_size=MAX_HEAD_BYTES),
        log_enabled=False,  # the app logs its own errors
    )


async def _wait_until_ready(server_task: asyncio.Task[None], url: str) -> None:
    """Poll until granian responds; while the port is shared, some connections reach the reserved socket instead."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STARTUP_TIMEOUT):
            timeout = 0.02
            while not server_task.done():
                if await _is_responding(url, timeout):
                    return
                timeout = min(1.0, 1.5 * timeout)
    failure = server_task.exception() if server_task.done() else None
    raise ServeError(f"the server at {url} did not start; give another port") from failure


async def _is_responding(url: str, timeout: float) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(f"HEAD /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                return (await reader.read(5)).startswith(b"HTTP/")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        await asyncio.sleep(0.01)
        return False


@contextmanager
def _handle_signals(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `callback` inside the `with` block."""

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(callback)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
