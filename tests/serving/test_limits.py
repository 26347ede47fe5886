"""Each limit is exceeded by a client."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from attent.serving import Limits
from attent.serving.limits import RequestGuard
from tests.serving.toy import Client, Model, post_bytes, start_test_server

pytest.importorskip("starlette", reason="needs Starlette: pip install 'attent[serve]'")
pytest.importorskip("granian", reason="needs granian: pip install 'attent[serve]'")

CHUNKED = (
    b"POST /api/look HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
SMALL = Limits(max_body_bytes=1_000)


def test_long_content_length_is_rejected_unread(model: Model) -> None:
    with start_test_server(model, SMALL) as client:
        reply = client.raw(post_bytes(b"", length=1_001))
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert reply.error == "the request must have at most 1000 bytes"
        assert client.raw(post_bytes(b"", length=10**18)).status == 413
        assert client.post(b'{"text": "' + b"x" * 988 + b'"}').status == 200
    assert len(model.requests) == 1


def test_chunked_body_is_rejected_when_too_long(model: Model) -> None:
    with start_test_server(model, SMALL) as client:
        reply = client.raw(CHUNKED + b"3e9\r\n" + b"x" * 1_001)
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert client.raw(CHUNKED + b'd\r\n{"text": "a"}\r\n0\r\n\r\n').status == 200


@pytest.mark.parametrize("head", [post_bytes(b"", length=10**9), CHUNKED + b"3b9aca00\r\n"])
def test_body_after_a_rejection_is_not_read(model: Model, head: bytes) -> None:
    with start_test_server(model, SMALL) as client, client.open(head) as connection:
        sent = 0
        with pytest.raises(OSError, match=r"pipe|reset|abort"):  # noqa: PT012
            while sent < 10**8:
                connection.sendall(b"x" * 65_536)
                sent += 65_536
        assert sent < 2 * 10**7  # the size of socket buffers
        assert client.get("/health").status == 200


def test_slow_body_times_out(model: Model) -> None:
    with start_test_server(model, Limits(body_timeout=0.3)) as client:
        started = time.monotonic()
        reply = client.raw(post_bytes(b'{"text"', length=20))
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert reply.error == "the request body must arrive within 0.3 seconds"
        assert 0.2 < time.monotonic() - started < 5
    assert model.requests == []


def test_interrupted_body_is_dropped(model: Model) -> None:
    with start_test_server(model) as client:
        client.open(post_bytes(b'{"text"', length=20)).close()
        assert client.post({"text": "next"}).status == 200
    assert [question.text for question in model.requests] == ["next"]


def test_foreign_hosts_are_rejected(client: Client) -> None:
    port = client.port
    for host in ("127.0.0.1", f"127.0.0.1:{port}", f"LocalHost:{port}", f"[::1]:{port}"):
        assert client.get("/", headers={"Host": host}).status == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "",
        "[::1",
    ):
        reply = client.get("/", headers={"Host": host})
        assert reply.status == 421
        assert reply.error.startswith("the host must be 127.0.0.1 or localhost or [::1], but is ")


def test_several_or_no_hosts_are_rejected(client: Client) -> None:
    assert client.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n").status == 421
    assert client.raw(b"GET / HTTP/1.1\r\n\r\n").status == 421


def test_foreign_origins_are_rejected(client: Client, model: Model) -> None:
    here = f"127.0.0.1:{client.port}"
    assert client.post({"text": "ours"}, {"Origin": f"http://{here}", "Sec-Fetch-Site": "same-origin"}).status == 200
    others = [
        "null",
        "http://evil.example",
        f"http://evil.example:{client.port}",
        "http://127.0.0.1:1",
        "http://[",
        "file://",
    ]
    for origin in [*others, f"http://{here}.evil.example", f"http://{here}@evil.example"]:
        reply = client.post({"text": "theirs"}, {"Origin": origin})
        assert (reply.status, "own page" in reply.error) == (403, True)
    assert client.post({"text": "theirs"}, {"Sec-Fetch-Site": "cross-site"}).status == 403
    assert [question.text for question in model.requests] == ["ours"]


def test_no_cors_headers(client: Client) -> None:
    arguments = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    for reply in (client.send("OPTIONS", "/api/look", None, arguments), client.get("/", headers=arguments)):
        assert not [name for name in reply.headers if name.startswith("access-control")]
        assert reply.headers["cross-origin-resource-policy"] == "same-origin"


def test_non_http_is_closed(client: Client) -> None:
    for noise in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with client.open(noise + b"\r\n\r\n") as connection:
            assert connection.recv(100)[:12] in (b"HTTP/1.1 400", b"")
    with client.open(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10**6) as connection:
        assert b"431" in connection.recv(100)
    assert client.get("/health").status == 200


def test_invalid_limits_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"`max_body_bytes` must be at least 0\.001, but is 0"):
        Limits(max_body_bytes=0)


# ---- without a server --------------------------------------------------------------------------------------


def talk(guard: RequestGuard, scope: dict[str, Any], *messages: dict[str, Any]) -> list[Any]:
    sent: list[Any] = []
    waiting = list(messages)

    async def receive() -> Any:
        return waiting.pop(0) if waiting else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    return sent


async def failing(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/late":
        await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("a bug")


def http_scope(path: str) -> dict[str, Any]:
    return {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"localhost")]}


def test_app_errors_are_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    guard = RequestGuard(failing, limits=Limits())
    empty = {"type": "http.request", "body": b"", "more_body": False}
    assert [message.get("status") for message in talk(guard, http_scope("/"), empty)] == [500, None]
    assert "a bug" in caplog.text
    assert [message.get("status") for message in talk(guard, http_scope("/late"), empty)] == [200]


def test_websockets_are_rejected_and_lifespan_acknowledged() -> None:
    guard = RequestGuard(failing, limits=Limits())
    assert talk(guard, {"type": "websocket"}, {"type": "websocket.connect"}) == [
        {"type": "websocket.close", "code": 1008}
    ]
    phases = talk(guard, {"type": "lifespan"}, {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    assert [phase["type"] for phase in phases] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
