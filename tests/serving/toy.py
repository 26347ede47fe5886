"""A server on 127.0.0.1 with a plain function as the model, and low-level clients."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp

from attent.serving.app import HttpApp, create_app
from attent.serving.endpoints import LookRequest
from attent.serving.limits import Limits
from attent.serving.run import StopEvents, reserve_port, run_server

CSP = "default-src 'self'; script-src 'sha256-abc'"
PAGE = "<!doctype html><title>look</title><p>Ein Hund läuft.</p>"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert list(self.json) == ["error"]
        sentence = self.json["error"]
        assert isinstance(sentence, str)
        return sentence


@dataclass
class Client:
    """Opens a new connection for each request."""

    url: str

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80

    def get(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Reply:
        return self.send(method, path, None, headers or {})

    def post(self, body: object, headers: dict[str, str] | None = None, path: str = "/api/look") -> Reply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, content, {"Content-Type": "application/json"} | (headers or {}))

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, headers)
            return read_reply(connection.getresponse())
        finally:
            connection.close()

    def open(self, content: bytes) -> socket.socket:
        """Open a socket and send bytes."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(content)
        return connection

    def raw(self, content: bytes) -> Reply:
        with self.open(content) as connection:
            response = http.client.HTTPResponse(connection)
            response.begin()
            return read_reply(response)


def read_reply(response: http.client.HTTPResponse) -> Reply:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Reply(response.status, headers, response.read())


def post_bytes(body: object, length: int | None = None) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = "POST /api/look HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content) if length is None else length}\r\n\r\n".encode() + content


@dataclass
class Model:
    """Echoes requests; some texts change its behavior.

    `wait` blocks until `let_go` or cancellation; `stubborn` ignores cancellation.
    """

    requests: list[LookRequest] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    overlaps: int = 0
    busy: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)
    _inside: int = 0

    def look(self, question: LookRequest, stop: Callable[[], bool]) -> dict[str, Any]:
        self._inside += 1
        self.overlaps += self._inside > 1
        self.requests.append(question)
        try:
            return self._look(question, stop)
        finally:
            self._inside -= 1

    def _look(self, question: LookRequest, stop: Callable[[], bool]) -> dict[str, Any]:
        text = question.text
        if text.startswith(("wait", "stubborn")):
            self.busy.set()
            while not self.let_go.is_set() and not (stop() and text.startswith("wait")):
                time.sleep(0.005)
            if stop():
                self.stopped.append(text)
        if text == "wrong":
            raise ValueError("`masked_parts` must name a part of the model")
        if text == "broken":
            raise KeyError("a secret of the inside")
        if text == "exit":
            raise SystemExit(3)
        if text == "nan":
            return {"weight": float("nan")}
        return {"title": text, "beam_size": question.beam_size, "prefix": list(question.prefix)}


class Switch:
    """A model that can be replaced."""

    model: Model

    def look(self, question: LookRequest, stop: Callable[[], bool]) -> dict[str, Any]:
        return self.model.look(question, stop)


@contextmanager
def serve_in_thread(app: HttpApp, *, host: str = "127.0.0.1", port: int | None = 0) -> Iterator[str]:
    """Serve in a thread inside the `with` block; yields the URL."""
    started: Future[tuple[str, Callable[[], object]]] = Future()

    async def main(reserved: socket.socket) -> None:
        stop = StopEvents()
        end = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set_next)
        await run_server(app, reserved, stop, lambda url: started.set_result((url, end)))

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


def http_scope(path: str) -> dict[str, Any]:
    headers = [(b"host", b"localhost")]
    return {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}


async def exchange(app: ASGIApp, scope: dict[str, Any], *messages: dict[str, Any]) -> list[Any]:
    """Send messages to an app in this event loop; return its messages."""
    sent: list[Any] = []
    waiting = list(messages)

    async def receive() -> Any:
        return waiting.pop(0) if waiting else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


def make_app(model: Model | Switch, limits: Limits | None = None) -> HttpApp:
    return create_app(page=PAGE, handler=model.look, csp=CSP, limits=limits)


@contextmanager
def start_test_server(model: Model | Switch, limits: Limits | None = None) -> Iterator[Client]:
    with serve_in_thread(make_app(model, limits)) as url:
        yield Client(url)


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())
