"""Ports, readiness and shutdown of the server."""

from __future__ import annotations

import asyncio
import builtins
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from attent.serving import run
from attent.serving.app import create_app
from attent.serving.limits import Limits, ServeError
from attent.serving.run import reserve_port
from tests.serving.toy import Client, Model, make_app, post_bytes, serve_in_thread, start_test_server, wait_until

pytest.importorskip("starlette", reason="needs Starlette: pip install 'attent[serve]'")
pytest.importorskip("granian", reason="needs granian: pip install 'attent[serve]'")

PROGRAM = """
import sys, time
from attent.serving.app import create_app
from attent.serving.run import serve_app

def handle(request, should_stop):
    while request.text == "wait" and not should_stop():
        time.sleep(0.01)
    time.sleep(60 if request.text == "stubborn" else 0)
    return {"title": request.text}

app = create_app(page="page", handler=handle, csp="default-src 'self'")
serve_app(app, port=0, on_ready=lambda url: print(url, flush=True))
print("ended", flush=True)
"""


@contextmanager
def program() -> Iterator[tuple[subprocess.Popen[str], Client]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, Client(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
@pytest.mark.parametrize(
    ("name", "started"),
    [("SIGINT", item) for item in ("nothing", "wait", "stubborn", "half a head", "half a body")]
    + [("SIGTERM", "wait")],
)
def test_signal_stops_the_server_within_two_seconds(name: str, started: str) -> None:
    arguments = {"nothing": b"", "half a head": b"GET / HT", "half a body": post_bytes(b"{", length=9)}
    with program() as (process, client), client.open(arguments.get(started, post_bytes({"text": started}))):
        assert client.get("/health").status == 200
        time.sleep(0.1)
        begin = time.monotonic()
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=10)
        took = time.monotonic() - begin
    assert (process.returncode, out, err) == (0, "ended\n", "")
    assert took < 2


def test_a_start_that_is_cancelled_announces_no_address(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    app, urls, stop = make_app(model), list[str](), run.StopEvents()

    async def load_forever() -> None:
        stop.set_next()
        await asyncio.sleep(60)

    monkeypatch.setattr(app, "start", load_forever)
    with reserve_port("127.0.0.1", 0) as reserved:
        asyncio.run(run.run_server(app, reserved, stop, urls.append))
    assert urls == []


def test_waiting_clients_are_told_of_the_shutdown(model: Model) -> None:
    with start_test_server(model) as client:
        connection = client.open(post_bytes({"text": "wait"}))
        assert model.busy.wait(10)
    answer = connection.recv(4000)
    connection.close()
    assert b"503 Service Unavailable" in answer
    assert b"the server is stopping" in answer
    assert wait_until(lambda: model.stopped == ["wait"])


def test_port_is_free_after_shutdown(model: Model) -> None:
    with serve_in_thread(make_app(model)) as url:
        port = Client(url).port
        with pytest.raises(ServeError, match=f"port {port} of 127.0.0.1 cannot be used .Address already in use"):
            reserve_port("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    with serve_in_thread(make_app(model), port=port) as url:
        assert Client(url).get("/health").status == 200


def test_port_is_not_shared(model: Model) -> None:
    """granian sets SO_REUSEPORT; the reserved socket must still detect it."""
    with (
        start_test_server(model) as client,
        pytest.raises(ServeError, match="Address already in use"),
        serve_in_thread(make_app(model), port=client.port),
    ):
        pass


def test_next_free_port_is_chosen() -> None:
    with reserve_port("127.0.0.1", None) as first, reserve_port("127.0.0.1", None) as second:
        ports = [item.getsockname()[1] for item in (first, second)]
    assert ports[0] != ports[1]
    assert all(run.FIRST_PORT <= port < run.FIRST_PORT + run.MAX_PORT_ATTEMPTS for port in ports)


def test_any_port_is_chosen_if_all_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_PORT_ATTEMPTS", 0)
    with reserve_port("127.0.0.1", None) as held:
        assert held.getsockname()[1] > 0


def test_invalid_host_or_port_is_rejected() -> None:
    with pytest.raises(ServeError, match="`port` must be 0 to 65535, but is 70000"):
        reserve_port("127.0.0.1", 70_000)
    with pytest.raises(ServeError, match="`host` must be an address of this machine, but is 'no such host!'"):
        reserve_port("no such host!", 0)
    with pytest.raises(ServeError, match=r"port 0 of 192\.0\.2\.1 cannot be used"):
        reserve_port("192.0.2.1", 0)


@pytest.mark.parametrize("number", [errno.EADDRINUSE, errno.EACCES, errno.EIO])
def test_the_reason_for_a_refused_port_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_server", fail)
    reason = rf"of localhost cannot be used \({os.strerror(number)}\); give another, or 0 for any"
    with pytest.raises(ServeError, match=f"port 80 {reason}"):
        reserve_port("localhost", 80)
    with pytest.raises(ServeError, match=f"port 0 {reason}"):
        reserve_port("localhost", None)  # the last attempt is any free port


def test_a_port_of_another_program_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserve_port("127.0.0.1", 0) as held, reserve_port("127.0.0.1", 0) as other:
        ports = [item.getsockname()[1] for item in (held, other)]
        monkeypatch.setattr(run, "FIRST_PORT", ports[0])
        monkeypatch.setattr(run, "MAX_PORT_ATTEMPTS", 1)
        with reserve_port("127.0.0.1", None) as chosen:
            assert chosen.getsockname()[1] not in ports


def test_settings_of_the_server() -> None:
    with reserve_port("127.0.0.1", 0) as held:
        created = run._create_server(make_app(Model()), held)
    assert created.backpressure == 4096
    assert (created.websockets, created.log_enabled) == (False, False)
    assert (created.interface.value, created.http.value) == ("asginl", "1")
    settings = created.http1_settings
    assert (settings.header_read_timeout, settings.max_buffer_size) == (5_000, 262_144)
    assert run.SHUTDOWN_TIMEOUT == 0.7
    assert (run.FIRST_PORT, run.MAX_PORT_ATTEMPTS) == (8017, 20)


def test_a_server_that_stops_by_itself_is_reported(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    create, created = run._create_server, list[Any]()

    def keep_created(*arguments: Any) -> Any:
        created.append(create(*arguments))
        return created[-1]

    monkeypatch.setattr(run, "_create_server", keep_created)
    with reserve_port("127.0.0.1", 0) as reserved, pytest.raises(ServeError, match="stopped unexpectedly; start it"):
        asyncio.run(run.run_server(make_app(model), reserved, run.StopEvents(), lambda url: created[0].stop()))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of open files")
def test_as_many_files_as_possible_may_be_open() -> None:
    code = "import resource as r; limit = r.RLIMIT_NOFILE; r.setrlimit(limit, (64, 99)); "
    code += "from attent.serving.run import raise_file_limit; raise_file_limit(); print(r.getrlimit(limit))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "(99, 99)\n"


def test_signals_reach_the_callback_and_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def wait_for_signals() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            event = asyncio.Event()
            with run._handle_signals(asyncio.get_running_loop(), event.set):
                signal.raise_signal(number)
                await asyncio.wait_for(event.wait(), 5)

    asyncio.run(wait_for_signals())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_several_servers(model: Model) -> None:
    with start_test_server(model) as entry, start_test_server(Model(), Limits(max_queued=0)) as two:
        assert entry.port != two.port
        assert entry.post({"text": "a"}).json["title"] == two.post({"text": "a"}).json["title"]
    for _ in range(3):
        with start_test_server(model) as again:
            assert again.get("/health").status == 200
    assert not [thread for thread in threading.enumerate() if thread.name == "attent server"]


def test_incomplete_request_heads_are_closed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HEADER_TIMEOUT", 1)
    with start_test_server(model) as client:
        sockets = [client.open(b"GET / HTTP/1.1\r\nHost: loc") for _ in range(50)]
        started = time.monotonic()
        assert client.get("/health").status == 200
        assert time.monotonic() - started < 1
        assert [half_open.recv(100) for half_open in sockets] == [b""] * 50
        for half_open in sockets:
            half_open.close()


def test_localhost_and_ipv6(model: Model) -> None:
    with serve_in_thread(make_app(model), host="localhost") as url:
        assert Client(url).get("/health").status == 200
    try:
        reserve_port("::1", 0).close()
    except ServeError:
        pytest.skip("this machine has no IPv6")
    with serve_in_thread(make_app(model), host="::1") as url:
        assert url.startswith("http://[::1]:")


@pytest.mark.parametrize(("absent", "sentence"), [("granian", "needs granian")])
def test_missing_extra_is_reported(model: Model, monkeypatch: pytest.MonkeyPatch, absent: str, sentence: str) -> None:
    real = builtins.__import__

    def import_without_granian(name: str, *rest: object) -> object:
        if name.partition(".")[0] == absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", import_without_granian)
    output = pytest.raises((ImportError, ServeError), match=rf"{sentence}.*pip install 'attent\[serve\]'")
    with output, serve_in_thread(create_app(page="", handler=model.look, csp="")):
        pass


def test_import_is_light() -> None:
    code = (
        "import sys, attent.serving; sys.exit(any(name in sys.modules for name in ('torch', 'starlette', 'granian')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_the_front_end_imports_no_torch() -> None:
    """With it, a full garbage collection takes 80 ms, in which no request is answered."""
    code = "import sys, attent.serving.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
