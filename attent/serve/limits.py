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
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_SENTENCE = 600  # characters of an error: enough for a sentence, too little to echo what was sent
RETRY_SECONDS = 2

# On every answer. A page of ours is neither framed nor read by another site; the page's own policy replaces the first.
SAFE_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

log = logging.getLogger("attent.serve")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one request may ask for, and how many may wait."""

    body_bytes: int = 256 * 1024  # 10,000 characters in JSON's longest spelling are 120 kB
    body_seconds: float = 10.0
    answer_seconds: float = 60.0  # from the last byte of the body to the first of the answer
    waiting: int = 8  # requests in line for the model; the next one is told to come back
    text_characters: int = 10_000
    beam_size: int = 64
    prefix_tokens: int = 1_024
    silenced_parts: int = 2_048

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "waiting" else 1e-3
            if not value >= least:
                raise ValueError(f"`{name}` must be at least {least:g}, but is {value}; give a greater number")


class Refusal(ValueError):
    """A request that is not served: the status, and a sentence for the person who sent it."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        sentence = str(self).encode("utf-8", "replace").decode("utf-8")
        clipped = sentence if len(sentence) <= MAX_SENTENCE else sentence[: MAX_SENTENCE - 3] + "..."
        return json.dumps({"error": clipped}).encode()


def come_back(sentence: str) -> Refusal:
    return Refusal(503, sentence, {"retry-after": str(RETRY_SECONDS)})


def failed() -> Refusal:
    return Refusal(500, "the server failed at this, and wrote in its log why; try something else")


def _stopping() -> Refusal:
    return come_back("the server is stopping; ask again when it is back")


class Gone(Exception):
    """The client closed the connection: nobody is there to be answered."""


class Guard:
    """The app behind its limits. `hosts` are the names, without a port, that the server goes by."""

    def __init__(self, app: Asgi, *, limits: Limits, hosts: Sequence[str] = LOCAL_HOSTS) -> None:
        self._app = app
        self._limits = limits
        self._hosts = tuple(host.lower() for host in hosts)
        self._live: set[asyncio.Future[Any]] = set()
        self._ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _decline(scope, receive, send)
            return
        reply = Reply(send)
        try:
            self._admit(scope)
            body = await self._until_ended(self._read(scope, receive))
        except Refusal as refusal:
            await reply.refuse(refusal, close=True)  # what is left of the body is not read
        except Gone:
            return
        else:
            await self._answer(scope, body, receive, reply)

    def close(self) -> None:
        """Ends what is under way: each client is told, and the work behind it is cancelled."""
        self._ending = True
        for task in self._live:
            task.cancel()

    def _admit(self, scope: Scope) -> None:
        """Who may ask. A page of another site can reach 127.0.0.1 too, so the names in the request must be ours."""
        named = _values(scope, "host")
        if len(named) != 1 or _without_port(named[0]) not in self._hosts:
            ours = " or ".join(self._hosts)
            raise Refusal(
                421, f"this server must be called {ours}, but the request is for {_shown(named)}; use such a name"
            )
        if scope["method"] in ("GET", "HEAD"):
            return
        if any(not _is_ours(origin, named[0]) for origin in _values(scope, "origin")):
            raise Refusal(403, "this may be asked from the server's own page only; open that page and ask there")
        if any(site not in ("same-origin", "none") for site in _values(scope, "sec-fetch-site")):
            raise Refusal(403, "another site's page must not ask this; open the server's own page and ask there")

    async def _until_ended(self, reading: Coroutine[Any, Any, bytes]) -> bytes:
        task = asyncio.create_task(reading)
        self._live.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._ending:
                raise _stopping() from None
            raise
        finally:
            self._live.discard(task)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        most = self._limits.body_bytes
        # The server has checked that these are digits. A body without a length is counted as it comes.
        if any(int(length) > most for length in _values(scope, "content-length") if length.isdecimal()):
            raise self._too_long()
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for piece in _pieces(receive):
                    body += piece
                    if len(body) > most:
                        raise self._too_long()
        except TimeoutError:
            seconds = self._limits.body_seconds
            raise Refusal(
                408, f"the request must arrive within {seconds:g} seconds, but did not; send it again"
            ) from None
        return bytes(body)

    def _too_long(self) -> Refusal:
        return Refusal(413, f"the request must have at most {self._limits.body_bytes} bytes, but has more; shorten it")

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, reply: Reply) -> None:
        try:
            await self._run(scope, body, receive, reply)
        except Refusal as refusal:
            await reply.refuse(refusal)
        except Gone:
            return
        except Exception:
            log.exception("%s %s failed", scope["method"], ascii(scope["path"])[:200])
            await reply.refuse(failed())

    async def _run(self, scope: Scope, body: bytes, receive: Receive, reply: Reply) -> None:
        """The app's answer, unless the client leaves, time runs out or the server ends before it."""
        if self._ending:
            raise _stopping()
        work = asyncio.ensure_future(self._app(scope, _replay(body), reply.send))
        left = asyncio.ensure_future(_until_gone(receive))
        self._live.add(work)
        try:
            seconds = self._limits.answer_seconds
            await asyncio.wait({work, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._live.discard(work)
            late, gone = not work.done(), left.done()
            work.cancel()
            left.cancel()
            await asyncio.wait({work, left})
        if work.cancelled():
            raise self._cut_short(late=late, gone=gone)
        work.result()

    def _cut_short(self, *, late: bool, gone: bool) -> Exception:
        if self._ending or not late:
            return _stopping()
        if gone:
            return Gone()
        seconds = self._limits.answer_seconds
        return come_back(f"an answer must take at most {seconds:g} seconds, but this took longer; ask for less")


class Reply:
    """What is sent to one client: each answer with the safe headers, and an error only where nothing was sent yet."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            safe = [(name.encode(), value.encode()) for name, value in SAFE_HEADERS.items()]
            message = {**message, "headers": headers + [pair for pair in safe if pair[0] not in present]}
        await self._send(message)

    async def refuse(self, refusal: Refusal, *, close: bool = False) -> None:
        if self._started:
            return
        body = refusal.body()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
        headers |= {"connection": "close"} if close else {}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": body})


# Messages in.


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes) -> Receive:
    """The whole body as one message; then nothing, until the app is cancelled."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return receive


async def _decline(scope: Scope, receive: Receive, send: Send) -> None:
    """Web sockets are not spoken here; and there is nothing to start or to end with the server."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


# Headers.


def _values(scope: Scope, name: str) -> list[str]:
    wanted = name.encode()
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key.lower() == wanted]


def header(scope: Scope, name: str) -> str:
    """A header's value, "" where it is absent; one that stands twice is joined by commas, as HTTP has it."""
    return ", ".join(_values(scope, name))


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _is_ours(origin: str, host: str) -> bool:
    """Is it the origin of a page that this very host and port has served?"""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _shown(hosts: Sequence[str]) -> str:
    return ascii(", ".join(hosts)[:80]) if any(hosts) else "no host"
