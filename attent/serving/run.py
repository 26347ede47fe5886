"""Serve models: `attent serve` and `attent.serve`, with granian's embedded server in this process.

Handles the port, readiness and shutdown (Ctrl-C, SIGTERM or the caller). granian closes connections whose request head
does not arrive within `HEADER_TIMEOUT`.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from attent.decoding.options import DeviceOptions
from attent.serving.app import HttpApp
from attent.serving.backend import ServiceConfig, WorkerPool
from attent.serving.gateway import ServerOptions
from attent.serving.limits import LOCAL_HOSTS, ServeError
from attent.serving.translation_app import TranslationApp
from attent.storage.hub import locate_model

PUBLIC_HOSTS = ("0.0.0.0", "::")


def serve(
    models: str | Path | Sequence[str | Path],
    *,
    adapters: Mapping[str, str | Path] = MappingProxyType({}),
    host: str = "127.0.0.1",
    port: int | None = None,
    src: str | None = None,
    tgt: str | None = None,
    workers: int | None = None,
    devices: Sequence[str] = (),
    replicas: int | tuple[int, int] | None = None,
    device: DeviceOptions = DeviceOptions(),  # noqa: B008 - frozen
    options: ServerOptions = ServerOptions(),  # noqa: B008 - frozen
    allow_public: bool = False,
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serve models over HTTP until Ctrl-C or SIGTERM: a page, attent's API, and those of LibreTranslate and others.

    >>> attent.serve("runs/en-de", src="en", tgt="de", port=0, on_ready=print_and_stop)  # default: serve until Ctrl-C
    http://127.0.0.1:...

    models        folders of translators and language models
    adapters      folders of adapters by name; a request names one as its model
    port          None: the first free port from 8017; 0: any free port
    src, tgt      languages of a model whose folder does not say them
    workers       processes with all models; by default one per device
    devices       such as cuda:0 and cuda:1; by default the fastest
    replicas      processes with all models on a Ray cluster, or their minimum and maximum; None: without Ray
    allow_public  accept connections from other machines without an API key
    on_ready      gets the address; by default it is printed
    """
    names = [models] if isinstance(models, str | Path) else models
    config = ServiceConfig(
        folders=tuple(locate_model(name).expanduser() for name in names),
        device=device,
        languages=(src, tgt),
        limits=options.limits,
        adapters=tuple((name, Path(folder).expanduser()) for name, folder in adapters.items()),
    )
    check_host(host, options, allow_public)
    for folder in (*config.folders, *dict(config.adapters).values()):
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise ServeError(f"{folder}: must be a model folder, but {problem}; train one with attent train")
    if host not in (*LOCAL_HOSTS, "::1") and options.hosts == LOCAL_HOSTS:
        options = replace(options, hosts=("*",) if host in PUBLIC_HOSTS else (*LOCAL_HOSTS, host))
    if replicas is not None:
        from attent.serving.ray_serve import serve_on_ray

        folders = tuple(folder.absolute() for folder in config.folders)  # a replica has another working directory
        adapter_folders = tuple((name, folder.absolute()) for name, folder in config.adapters)
        device = replace(device, threads=device.threads or 1)
        config = replace(config, folders=folders, adapters=adapter_folders, device=device)
        options = replace(options, suggestions=options.suggestions and options.suggestions.expanduser().absolute())
        with reserve_port(host, port) as reserved:
            port = reserved.getsockname()[1]
        serve_on_ray(config, options, replicas, host, port, on_ready)
        return
    pool = WorkerPool(share_devices(config, workers, devices), drain_timeout=options.drain_timeout)
    serve_app(TranslationApp(pool, options), host=host, port=port, on_ready=on_ready)


def check_host(host: str, options: ServerOptions, allow_public: bool) -> None:
    """Refuse to serve other machines without a key, unless it is allowed explicitly."""
    if host not in (*LOCAL_HOSTS, "::1") and not options.keys and not allow_public:
        raise ServeError(
            f"`host` {host} accepts requests from other machines, so there must be an API key, but there is none; "
            f"set one with --api-key, or allow everybody with --allow-public"
        )


def share_devices(config: ServiceConfig, workers: int | None, devices: Sequence[str]) -> list[ServiceConfig]:
    """Return the configuration of each worker. They share the CPU's cores, and take the devices in turn."""
    count = workers or max(1, len(devices))
    threads = config.device.threads or max(1, (os.cpu_count() or 1) // count)
    names = [devices[index % len(devices)] if devices else config.device.device for index in range(count)]
    return [replace(config, device=replace(config.device, device=name, threads=threads)) for name in names]


# --- the HTTP server -------------------------------------------------------------------------------------------------


FIRST_PORT = 8017  # or the next free one
MAX_PORT_ATTEMPTS = 20
HEADER_TIMEOUT = 5
MAX_HEAD_BYTES = 256 * 1024  # the app refuses more than `Limits.max_head_bytes`; beyond this, granian does
MAX_CONNECTIONS = 4096
BACKLOG = 1024  # connections that granian has not taken yet
SHUTDOWN_TIMEOUT = 0.7  # for running requests
SETTLE_SECONDS = 0.1


def serve_app(
    app: HttpApp,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; a second one does not wait for running requests. Calls `on_ready(url)` once
    requests are accepted. Call it in the main thread.

    port  None: the first free port from 8017; 0: any free port
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ServeError("models cannot be served from a notebook or a coroutine; run `attent serve` in a terminal")
    raise_file_limit()
    with reserve_port(host, port) as reserved:

        async def main() -> None:
            stop = StopEvents()
            with _handle_signals(asyncio.get_running_loop(), stop.set_next):
                await run_server(app, reserved, stop, on_ready)

        asyncio.run(main())


def raise_file_limit() -> None:
    """Allow as many open files as the system does: by default often 1,024, less than `MAX_CONNECTIONS`."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit; macOS refuses an infinite one
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def reserve_port(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens at a free port."""
    if port is not None and (not isinstance(port, int) or not 0 <= port <= 65535):
        raise ServeError(f"`port` must be 0 to 65535, but is {port!r}; 0 means any free port")
    try:
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ServeError(f"`host` must be an address of this machine, but is {host!r}; try 127.0.0.1") from error
    is_dual = address[0] == "::" and socket.has_dualstack_ipv6()  # accepts IPv4 too
    problem = OSError()
    for candidate in [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + MAX_PORT_ATTEMPTS), 0]:
        try:
            return socket.create_server((address[0], candidate), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
        except OSError as error:
            problem = error
    reason = problem.strerror or problem
    raise ServeError(f"port {port or 0} of {host} cannot be used ({reason}); give another, or 0 for any") from problem


class StopEvents:
    """Requests to stop: the first lets running requests finish, the second does not."""

    def __init__(self) -> None:
        self.stop, self.stop_at_once = asyncio.Event(), asyncio.Event()

    def set_next(self) -> None:
        (self.stop_at_once if self.stop.is_set() else self.stop).set()


async def run_server(app: HttpApp, reserved: socket.socket, stop: StopEvents, on_ready: Callable[[str], None]) -> None:
    address, port = reserved.getsockname()[:2]
    known = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    url = f"http://[{known}]:{port}" if ":" in known else f"http://{known}:{port}"
    await _run_until(app.start(), stop.stop)
    if stop.stop.is_set():
        await app.close(SHUTDOWN_TIMEOUT)
        return
    server = _create_server(app, reserved)
    server_task = asyncio.create_task(server.serve())
    ended = asyncio.create_task(stop.stop.wait())
    try:
        on_ready(url)  # the socket accepts connections before granian takes them
        await asyncio.wait({server_task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if server_task.done():
            raise ServeError(f"the server at {url} stopped unexpectedly; start it again") from server_task.exception()
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


def _create_server(app: HttpApp, listening: socket.socket) -> Any:
    try:
        from granian._granian import SocketHolder
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings
        from granian.server.embed import Server
    except ModuleNotFoundError as error:
        raise ServeError("the server needs granian, which is not installed; run pip install 'attent[serve]'") from error

    class SocketServer(Server):
        def _init_shared_socket(self) -> None:
            """Use the socket that listens already, instead of a new one."""
            listening.setblocking(False)
            holder: Any = SocketHolder
            self._ssp, self._shd = None, holder(listening.detach(), False, BACKLOG)

    return SocketServer(
        app,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        backpressure=MAX_CONNECTIONS,
        http1_settings=HTTP1Settings(header_read_timeout=1000 * HEADER_TIMEOUT, max_buffer_size=MAX_HEAD_BYTES),
        log_enabled=False,  # the app logs its own errors
    )


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
