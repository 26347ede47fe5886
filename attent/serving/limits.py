"""An ASGI middleware that enforces limits and turns errors into JSON, in the form of the API that was called.

It checks host, origin, body size and body time before the app runs, and cancels the app on a timeout, when the client
disconnects and when the server stops.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attent.storage.errors import AttentError

Result = TypeVar("Result")

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_ERROR_LENGTH = 600  # bytes; too short to echo a request
RETRY_AFTER_SECONDS = 2
FORM_BYTES = 16 * 1024  # of a form besides the content of its file

# On every response; a page's own content security policy replaces the first.
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
    max_head_bytes: int = 32 * 1024  # of the address and the headers
    max_headers: int = 64
    max_body_bytes: int = 256 * 1024  # 10,000 characters take up to 120 kB in JSON
    body_timeout: float = 10.0
    response_timeout: float = 60.0  # from the end of the body to the start of the response
    max_queued: int = 8  # further requests get 503
    max_characters: int = 10_000
    max_tokens: int = 512  # of the text: 10,000 characters would hold the model for minutes and take gigabytes
    max_beam_size: int = 64
    max_search_tokens: int = 4_096  # tokens of the text times beam size
    max_prefix_tokens: int = 1_024
    max_masked_parts: int = 2_048
    max_texts: int = 128  # of a request to translate
    max_file_bytes: int = 2**20
    max_files: int = 4  # that are translated at once; further ones get 503
    file_timeout: float = 600.0  # from the end of the body to the start of the response
    max_queue_seconds: float = 20.0  # of work: beyond it, requests get 503
    max_client_share: float = 0.5  # of the queue that one client may fill; beyond it, its requests get 429
    requests_per_minute: int = 3_000  # of a client; 0: any number

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            can_be_zero = name in ("max_queued", "requests_per_minute")
            if not (value > 0 or (can_be_zero and value == 0)):
                raise ValueError(f"`{name}` must be {'0 or more' if can_be_zero else 'more than 0'}, but is {value}")


class ServeError(AttentError):
    """The server cannot run."""


class ApiError(AttentError):
    """An error response: HTTP status and message."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:  # between processes
        return ApiError, (self.status, str(self), self.headers)

    @property
    def clipped_message(self) -> str:
        sentence = str(self).encode("utf-8", "replace")
        if len(sentence) > MAX_ERROR_LENGTH:
            sentence = sentence[: MAX_ERROR_LENGTH - 3] + b"..."
        return sentence.decode("utf-8", "ignore")


def make_unavailable_error(message: str) -> ApiError:
    return ApiError(503, message, {"retry-after": str(RETRY_AFTER_SECONDS)})


def make_internal_error() -> ApiError:
    return ApiError(500, "internal server error; see the server's log")


def format_error(message: str, status: int) -> dict[str, Any]:
    """Return the body of an error response, where an API has no form of its own."""
    return {"error": message}


def _make_stopping_error() -> ApiError:
    return make_unavailable_error("the server is stopping; retry later")


class ClientDisconnected(Exception):
    """The client closed the connection."""


class RequestGuard:
    """Enforces limits around an app."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        hosts: Sequence[str] = LOCAL_HOSTS,
        origins: Sequence[str] = (),
        file_paths: Sequence[str] = (),
        format_error: Callable[[Scope, str, int], Mapping[str, Any]] = lambda scope, *error: format_error(*error),
    ) -> None:
        """
        hosts         accepted host names, without ports; "*": any
        origins       other websites whose scripts may send requests; "*": any
        file_paths    paths with the limits of files
        format_error  gets the scope, the message and the status of an error
        """
        self._app = app
        self._limits = limits
        self._hosts = tuple(host.lower() for host in hosts)
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self._file_paths = file_paths
        self._format_error = format_error
        self._active_tasks: set[asyncio.Future[Any]] = set()
        self._draining, self._closing = False, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _handle_non_http(scope, receive, send)
            return
        reply = ResponseSender(send, partial(self._format_error, scope))
        try:
            if self._closing or (self._draining and scope["path"] != "/health"):
                raise _make_stopping_error()
            self._check_head_size(scope)
            self._check_origin(scope)
            body = await self._read_body(scope, receive)
        except ApiError as refusal:
            await reply.send_error(refusal, close=True)  # the rest of the body is not read
        except ClientDisconnected:  # or a malformed chunk: granian reports both alike and would answer with its own 500
            await reply.send_error(ApiError(400, "the request body is incomplete or malformed"), close=True)
        else:
            await self._respond(scope, body, receive, reply)

    def drain(self) -> None:
        self._draining = True

    def close(self) -> None:
        """Cancel all requests; clients get an error response."""
        self._closing = True
        for task in self._active_tasks:
            task.cancel()

    def _check_head_size(self, scope: Scope) -> None:
        headers, max_bytes = scope["headers"], self._limits.max_head_bytes
        address = len(scope.get("raw_path") or scope["path"].encode()) + len(scope.get("query_string", b""))
        if address + sum(len(name) + len(value) for name, value in headers) > max_bytes:
            raise ApiError(431, f"the address and the headers must have at most {max_bytes} bytes")
        if len(headers) > self._limits.max_headers:
            raise ApiError(431, f"the request must have at most {self._limits.max_headers} headers")

    def _check_origin(self, scope: Scope) -> None:
        """Reject foreign hosts and origins: any website can send requests to 127.0.0.1."""
        named = _get_header_values(scope, "host")
        if len(named) != 1 or not {_strip_port(named[0]), "*"} & set(self._hosts):
            host = ascii(", ".join(named)[:80]) if any(named) else "no host"
            raise ApiError(421, f"the host must be {' or '.join(self._hosts)}, but is {host}")
        if scope["method"] in ("GET", "HEAD") and get_header(scope, "sec-fetch-dest") == "document":
            return  # a link to the page
        origins = {origin.lower() for origin in _get_header_values(scope, "origin")}
        if origins and ("*" in self._origins or origins <= self._origins):
            return
        if not origins <= {f"http://{named[0]}".lower(), f"https://{named[0]}".lower()}:
            raise ApiError(403, "requests must come from the server's own page")
        if any(site not in ("same-origin", "none") for site in _get_header_values(scope, "sec-fetch-site")):
            raise ApiError(403, "requests from other sites are not allowed")

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        is_file = scope["path"] in self._file_paths
        max_bytes = self._limits.max_file_bytes + FORM_BYTES if is_file else self._limits.max_body_bytes
        # The server has validated the header. A body without a length is counted while it arrives.
        lengths = [int(length) for length in _get_header_values(scope, "content-length") if length.isdecimal()]
        seconds = self._limits.body_timeout
        problem = f"the request body must arrive within {seconds:g} seconds"
        return await self._run(_read_chunks(receive, max_bytes, max(lengths, default=0)), seconds, 408, problem)

    async def _respond(self, scope: Scope, body: bytes, receive: Receive, sender: "ResponseSender") -> None:
        is_file = scope["path"] in self._file_paths
        seconds = self._limits.file_timeout if is_file else self._limits.response_timeout
        problem = f"the response took more than {seconds:g} seconds; send a shorter {'file' if is_file else 'text'}"
        try:
            # Without Retry-After: the same text would take as long again.
            await self._run(self._app(scope, _replay_body(body), sender.send), seconds, 503, problem, receive)
        except ApiError as refusal:
            await sender.send_error(refusal)
        except ClientDisconnected:
            return
        except Exception:
            log.exception("%s %s failed", scope["method"], ascii(scope["path"])[:200])
            await sender.send_error(make_internal_error())

    async def _run(
        self, work: Awaitable[Result], seconds: float, status: int, problem: str, receive: Receive | None = None
    ) -> Result:
        """Await `work` until the time is over, the server stops or, with `receive`, the client disconnects.

        `status` and `problem` are the error if the time is over.
        """
        task = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive) if receive else asyncio.Future[None]())
        self._active_tasks.add(task)
        try:
            await asyncio.wait({task, disconnect}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._active_tasks.discard(task)
            unfinished, disconnected = not task.done(), disconnect.done()
            task.cancel()
            disconnect.cancel()
            await asyncio.wait({task, disconnect})
        try:
            if not task.cancelled():
                return task.result()
        finally:
            # Its error has this frame in its traceback. In a reference cycle, `receive` would stay alive until the
            # next garbage collection, and granian keeps a connection with an unread body open as long.
            del task
        if self._closing or not unfinished:
            raise _make_stopping_error()
        if disconnected:
            raise ClientDisconnected
        raise ApiError(status, problem)


class ResponseSender:
    """Sends one response with security headers; errors only if nothing was sent yet."""

    def __init__(self, send: Send, format_error: Callable[[str, int], Mapping[str, Any]] = format_error) -> None:
        self._send = send
        self._format_error = format_error
        self._started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            security = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
            message = {**message, "headers": headers + [pair for pair in security if pair[0] not in present]}
        await self._send(message)

    async def send_error(self, error: ApiError, *, close: bool = False) -> None:
        if self._started:
            return
        body = json.dumps(self._format_error(error.clipped_message, error.status), ensure_ascii=False).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        headers |= {"connection": "close"} if close else {}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": body})


async def _read_chunks(receive: Receive, max_bytes: int, announced_bytes: int) -> bytes:
    body, more = bytearray(), True
    while True:
        if max(announced_bytes, len(body)) > max_bytes:
            raise ApiError(413, f"the request must have at most {max_bytes} bytes")
        if not more:
            return bytes(body)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        more = message.get("more_body", False)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay_body(body: bytes) -> Receive:
    """Return a `receive` that yields the whole body as one message, then blocks."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return receive


async def _handle_non_http(scope: Scope, receive: Receive, send: Send) -> None:
    """Reject WebSockets; acknowledge lifespan events."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


def _get_header_values(scope: Scope, name: str) -> list[str]:
    encoded_name = name.encode()
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key.lower() == encoded_name]


def get_header(scope: Scope, name: str) -> str:
    """Return a header's value, "" if absent; repeated headers are joined by commas."""
    return ", ".join(_get_header_values(scope, name))


def _strip_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
