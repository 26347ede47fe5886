"""What the server takes from whom: a pure ASGI layer around the app, and the one place where errors are answered.

It looks at the host, the origin and the size and pace of the body before the app sees anything, gives the app only so
long to answer, and stops its work (by cancelling it) when the client has gone or the server ends. What a body means is
left to the app. Every error is JSON, `{"error": "a sentence"}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_ERROR_LENGTH = 600  # characters of an error: enough for a sentence, too little to echo what was sent
RETRY_AFTER_SECONDS = 2

# On every answer. A page of ours is neither framed nor read by another site; the page's own policy replaces the first.
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

log = logging.getLogger("attent.serving")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one request may ask for, and how many may wait."""

    max_body_bytes: int = 256 * 1024  # 10,000 characters in JSON's longest spelling are 120 kB
    body_timeout: float = 10.0
    response_timeout: float = 60.0  # from the last byte of the body to the first of the answer
    max_queued: int = 8  # requests in line for the model; the next one is told to come back
    max_characters: int = 10_000
    max_beam_size: int = 64
    max_prefix_tokens: int = 1_024
    max_masked_parts: int = 2_048

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "max_queued" else 1e-3
            if not value >= least:
                raise ValueError(f"`{name}` must be at least {least:g}, but is {value}; give a greater number")


class ApiError(ValueError):
    """A request that is not served: the status, and a sentence for the person who sent it."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})

    def to_json(self) -> bytes:
        sentence = str(self).encode("utf-8", "replace").decode("utf-8")
        clipped = sentence if len(sentence) <= MAX_ERROR_LENGTH else sentence[: MAX_ERROR_LENGTH - 3] + "..."
        return json.dumps({"error": clipped}).encode()


def make_unavailable_error(message: str) -> ApiError:
    return ApiError(503, message, {"retry-after": str(RETRY_AFTER_SECONDS)})


def make_internal_error() -> ApiError:
    return ApiError(500, "the server failed at this, and wrote in its log why; try something else")


def _make_stopping_error() -> ApiError:
    return make_unavailable_error("the server is stopping; ask again when it is back")


class ClientDisconnected(Exception):
    """The client closed the connection: nobody is there to be answered."""


class RequestGuard:
    """The app behind its limits. `hosts` are the names, without a port, that the server goes by."""

    def __init__(self, app: AsgiApp, *, limits: Limits, hosts: Sequence[str] = LOCAL_HOSTS) -> None:
        self._app = app
        self._limits = limits
        self._hosts = tuple(host.lower() for host in hosts)
        self._active_tasks: set[asyncio.Future[Any]] = set()
        self._closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _handle_non_http(scope, receive, send)
            return
        reply = ResponseSender(send)
        try:
            self._check_origin(scope)
            body = await self._run_until_closed(self._read_body(scope, receive))
        except ApiError as refusal:
            await reply.send_error(refusal, close=True)  # what is left of the body is not read
        except ClientDisconnected:
            return
        else:
            await self._respond(scope, body, receive, reply)

    def close(self) -> None:
        """Ends what is under way: each client is told, and the work behind it is cancelled."""
        self._closing = True
        for task in self._active_tasks:
            task.cancel()

    def _check_origin(self, scope: Scope) -> None:
        """Who may ask. A page of another site can reach 127.0.0.1 too, so the names in the request must be ours."""
        named = _get_header_values(scope, "host")
        if len(named) != 1 or _strip_port(named[0]) not in self._hosts:
            ours = " or ".join(self._hosts)
            raise ApiError(
                421,
                f"this server must be called {ours}, but the request is for {_format_hosts(named)}; use such a name",
            )
        if scope["method"] in ("GET", "HEAD"):
            return
        if any(not _is_same_origin(origin, named[0]) for origin in _get_header_values(scope, "origin")):
            raise ApiError(403, "this may be asked from the server's own page only; open that page and ask there")
        if any(site not in ("same-origin", "none") for site in _get_header_values(scope, "sec-fetch-site")):
            raise ApiError(403, "another site's page must not ask this; open the server's own page and ask there")

    async def _run_until_closed(self, coroutine: Coroutine[Any, Any, bytes]) -> bytes:
        task = asyncio.create_task(coroutine)
        self._active_tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closing:
                raise _make_stopping_error() from None
            raise
        finally:
            self._active_tasks.discard(task)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        most = self._limits.max_body_bytes
        # The server has checked that these are digits. A body without a length is counted as it comes.
        if any(int(length) > most for length in _get_header_values(scope, "content-length") if length.isdecimal()):
            raise self._make_body_size_error()
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout):
                async for piece in _iter_body(receive):
                    body += piece
                    if len(body) > most:
                        raise self._make_body_size_error()
        except TimeoutError:
            seconds = self._limits.body_timeout
            raise ApiError(
                408, f"the request must arrive within {seconds:g} seconds, but did not; send it again"
            ) from None
        return bytes(body)

    def _make_body_size_error(self) -> ApiError:
        return ApiError(
            413, f"the request must have at most {self._limits.max_body_bytes} bytes, but has more; shorten it"
        )

    async def _respond(self, scope: Scope, body: bytes, receive: Receive, sender: ResponseSender) -> None:
        try:
            await self._run_app(scope, body, receive, sender)
        except ApiError as refusal:
            await sender.send_error(refusal)
        except ClientDisconnected:
            return
        except Exception:
            log.exception("%s %s failed", scope["method"], ascii(scope["path"])[:200])
            await sender.send_error(make_internal_error())

    async def _run_app(self, scope: Scope, body: bytes, receive: Receive, sender: ResponseSender) -> None:
        """The app's answer, unless the client leaves, time runs out or the server ends before it."""
        if self._closing:
            raise _make_stopping_error()
        work = asyncio.ensure_future(self._app(scope, _replay_body(body), sender.send))
        left = asyncio.ensure_future(_wait_for_disconnect(receive))
        self._active_tasks.add(work)
        try:
            seconds = self._limits.response_timeout
            await asyncio.wait({work, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._active_tasks.discard(work)
            late, gone = not work.done(), left.done()
            work.cancel()
            left.cancel()
            await asyncio.wait({work, left})
        if work.cancelled():
            raise self._make_cancellation_error(unfinished=late, disconnected=gone)
        work.result()

    def _make_cancellation_error(self, *, unfinished: bool, disconnected: bool) -> Exception:
        if self._closing or not unfinished:
            return _make_stopping_error()
        if disconnected:
            return ClientDisconnected()
        seconds = self._limits.response_timeout
        return make_unavailable_error(
            f"an answer must take at most {seconds:g} seconds, but this took longer; ask for less"
        )


class ResponseSender:
    """What is sent to one client: each answer with the safe headers, and an error only where nothing was sent yet."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            safe = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
            message = {**message, "headers": headers + [pair for pair in safe if pair[0] not in present]}
        await self._send(message)

    async def send_error(self, error: ApiError, *, close: bool = False) -> None:
        if self._started:
            return
        body = error.to_json()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        headers |= {"connection": "close"} if close else {}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": body})


# Messages in.


async def _iter_body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay_body(body: bytes) -> Receive:
    """The whole body as one message; then nothing, until the app is cancelled."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return receive


async def _handle_non_http(scope: Scope, receive: Receive, send: Send) -> None:
    """Web sockets are not spoken here; and there is nothing to start or to end with the server."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


# Headers.


def _get_header_values(scope: Scope, name: str) -> list[str]:
    wanted = name.encode()
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key.lower() == wanted]


def get_header(scope: Scope, name: str) -> str:
    """A header's value, "" where it is absent; one that stands twice is joined by commas, as HTTP has it."""
    return ", ".join(_get_header_values(scope, name))


def _strip_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _is_same_origin(origin: str, host: str) -> bool:
    """Is it the origin of a page that this very host and port has served?"""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _format_hosts(hosts: Sequence[str]) -> str:
    return ascii(", ".join(hosts)[:80]) if any(hosts) else "no host"
