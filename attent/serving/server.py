"""An app on a port, in this process: granian's embedded server, so that the model is loaded once and never forked.

Which port, when it is ready, and how it ends (Ctrl-C, SIGTERM, or the caller) are settled here; the app and its limits
are others'. Half-sent heads and silent connections are granian's: it closes them after `HEADER_SECONDS`.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Protocol

from attent.serving.limits import Receive, Scope, Send

FIRST_PORT = 8017  # and the next ones, where it is taken
MAX_PORT_ATTEMPTS = 20
HEADER_TIMEOUT = 5
MAX_HEADER_BYTES = 64 * 1024
MAX_CONNECTIONS = 512
STARTUP_TIMEOUT = 20.0
SHUTDOWN_TIMEOUT = 0.7  # for answers under way, once the server is told to stop
SETTLE_SECONDS = 0.1


class ServeError(ValueError):
    """The server cannot run; the message says why and what to do."""


class ServableApp(Protocol):
    """An ASGI app that can be ended: `close` stops what is under way, within so many seconds."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self, timeout: float) -> bool: ...


def serve_app(
    app: ServableApp,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves until Ctrl-C or SIGTERM, then returns. Calls `ready(url)` once the first request would be answered.

    `port` is that very one, 0 any free one, None the first free one from 8017 on. To be called in the main thread.
    """
    with reserve_port(host, port) as held:

        async def main() -> None:
            ending = asyncio.Event()
            with _handle_signals(asyncio.get_running_loop(), ending.set):
                await _run_server(app, held, ending, on_ready)

        asyncio.run(main())


@contextmanager
def serve_in_thread(app: ServableApp, *, host: str = "127.0.0.1", port: int | None = 0) -> Iterator[str]:
    """The same beside the caller, in a thread: gives the address, and ends with the `with` block."""
    started: Future[tuple[str, Callable[[], object]]] = Future()

    async def main(held: socket.socket) -> None:
        ending = asyncio.Event()
        end = partial(asyncio.get_running_loop().call_soon_threadsafe, ending.set)
        await _run_server(app, held, ending, lambda url: started.set_result((url, end)))

    def run(held: socket.socket) -> None:
        try:
            asyncio.run(main(held))
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    with reserve_port(host, port) as held:
        thread = threading.Thread(target=run, args=(held,), name="attent server", daemon=True)
        thread.start()
        url, end = started.result()
        try:
            yield url
        finally:
            with suppress(RuntimeError):  # it has ended by itself
                end()
            thread.join()


# The port.


def reserve_port(host: str, port: int | None) -> socket.socket:
    """A listening socket on a port that was free, so that nobody else takes it before the server does."""
    family, address = _resolve_host(host)
    wanted = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + MAX_PORT_ATTEMPTS), 0]
    for each in wanted:
        try:
            return _open_socket(family, address, each)
        except OSError as error:
            if port is None and error.errno in (errno.EADDRINUSE, errno.EACCES) and each != 0:
                continue
            raise ServeError(_describe_bind_error(host, each, error)) from error
        except OverflowError as error:
            raise ServeError(
                f"`port` must be 0 to 65535, but is {each}; give another, or 0 for any free one"
            ) from error
    raise AssertionError("the list of ports ends with one that returns or raises")


def _resolve_host(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, *_, sockaddr = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ServeError(f"`host` must be an address of this machine, but is {host!r}; try 127.0.0.1") from error
    return family, str(sockaddr[0])


def _open_socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there it would let two servers share the port
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, port))
        held.listen()
    except BaseException:
        held.close()
        raise
    return held


def _describe_bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} must be free, but another program has it; give another, or 0 for any free one"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} of {host} must be open to you, but is not; give one from 1024 on, or 0 for any free one"
    return f"port {port} of {host} cannot be used: {error.strerror}; give another host or port"


def _format_url(reserved: socket.socket) -> str:
    address, port = reserved.getsockname()[:2]
    known = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://[{known}]:{port}" if ":" in known else f"http://{known}:{port}"


# The server.


async def _run_server(
    app: ServableApp, reserved: socket.socket, stop_event: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    address, port = reserved.getsockname()[:2]
    url = _format_url(reserved)
    server = _create_server(app, address, port)
    _share_port(reserved)
    serving = asyncio.create_task(server.serve())
    ended = asyncio.create_task(stop_event.wait())
    try:
        await _wait_until_ready(serving, url)
        reserved.close()
        on_ready(url)
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            raise ServeError(f"the server at {url} ended by itself; start it again")
    finally:
        ended.cancel()
        server.stop()
        await asyncio.gather(app.close(SHUTDOWN_TIMEOUT), asyncio.wait({serving}, timeout=SHUTDOWN_TIMEOUT))
        # granian would wait for connections that are open and say nothing, as a browser's are.
        serving.cancel()
        await asyncio.wait({serving})
        # Its threads let go of Python's objects last. One that does so while Python ends takes the process down with it
        # (seen in 5 of 24 runs without this pause, in none of 175 with it).
        await asyncio.sleep(SETTLE_SECONDS)


def _create_server(app: ServableApp, address: str, port: int) -> Any:
    try:
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings
        from granian.server.embed import Server
    except ModuleNotFoundError as error:
        raise ServeError(
            "the live page must have a server, but granian is absent; run pip install 'attent[serve]'"
        ) from error
    return Server(
        app,
        address=address,
        port=port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        backpressure=MAX_CONNECTIONS,
        http1_settings=HTTP1Settings(header_read_timeout=1000 * HEADER_TIMEOUT, max_buffer_size=MAX_HEADER_BYTES),
        log_enabled=False,  # failures of the app are logged by the app
    )


def _share_port(reserved: socket.socket) -> None:
    """Lets granian onto the held port. Linux allows it beside us, and beside no one else; elsewhere we step aside."""
    if sys.platform == "linux":
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    else:
        reserved.close()


async def _wait_until_ready(server_task: asyncio.Task[None], url: str) -> None:
    """Knocks until granian answers; while the port is shared, some knocks reach the held socket and stay unanswered."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STARTUP_TIMEOUT):
            patience = 0.02
            while not server_task.done():
                if await _is_responding(url, patience):
                    return
                patience = min(1.0, 1.5 * patience)
    failure = server_task.exception() if server_task.done() else None
    raise ServeError(f"the server at {url} must start, but did not; give another port") from failure


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
    """While it lasts, Ctrl-C and SIGTERM call `then` and do nothing else; afterwards they do what they did."""

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(callback)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
