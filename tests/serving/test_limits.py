"""Each limit is exceeded by a client."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from starlette.types import ASGIApp

from attent.cli.serve import KEY_VARIABLE, ServeFlags, build_options
from attent.serving import apertium, backend, batching, openai, run
from attent.serving.app import create_app
from attent.serving.backend import LocalBackend
from attent.serving.endpoints import LookRequest
from attent.serving.gateway import ServerOptions
from attent.serving.limits import MAX_ERROR_LENGTH, ApiError, Limits, RequestGuard
from attent.serving.service import FilePipeline
from attent.serving.translation_app import TranslationApp
from tests.serving.toy import Client, Model, exchange, http_scope, post_bytes, start_test_server

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


BAD_CHUNKS = {
    "no number": b"ZZ\r\n{}\r\n0\r\n\r\n",
    "overflow": b"F" * 20 + b"\r\n{}\r\n0\r\n\r\n",
    "extension": b"2;" + b"a" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    "second": b"2\r\n{}\r\nXX\r\n",
    "no line end": b"2\r\n{}abc\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("chunks", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_malformed_chunks_are_400(client: Client, model: Model, chunks: bytes) -> None:
    reply = client.raw(CHUNKED + chunks)
    assert (reply.status, reply.headers["connection"]) == (400, "close")
    assert reply.error == "the request body is incomplete or malformed"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert model.requests == []
    assert client.post({"text": "next"}).status == 200


def get_bytes(*headers: str, address: str = "/health") -> bytes:
    return "\r\n".join([f"GET {address} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def test_request_head_exactly_at_its_limit_is_accepted(client: Client) -> None:
    limits = Limits()
    size = limits.max_head_bytes - len("/health") - len("Hostlocalhost") - len("X")
    many = [f"X{i}: a" for i in range(limits.max_headers - 1)]
    assert client.raw(get_bytes(f"X: {'a' * size}")).status == 200
    assert client.raw(get_bytes(*many)).status == 200
    for head in (
        get_bytes(f"X: {'a' * (size + 1)}"),
        get_bytes(f"X: {'a' * size}", address="/health?a"),
        get_bytes(*many, "Y: b"),
        get_bytes(f"X: {'a' * 100_000}"),
        get_bytes(address=f"/{'a' * 40_000}"),
    ):
        reply = client.raw(head)
        assert (reply.status, reply.headers["connection"]) == (431, "close")
        assert "must have at most" in reply.error
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_each_size_exactly_at_its_limit_is_accepted() -> None:
    """The largest allowed value and the next one, of each field."""
    limits = Limits(max_characters=7, max_beam_size=5, max_prefix_tokens=3, max_masked_parts=2)
    allowed: dict[str, list[Any]] = {
        "text": ["", "x" * 7],
        "to": ["x" * 200],
        "beam_size": [1, 5],
        "prefix": [[0, 1, 2], [2**31 - 1]],
        "masked_parts": [["a", "b"], ["x" * 200]],
    }
    refused: dict[str, list[Any]] = {
        "text": ["x" * 8],
        "to": ["x" * 201],
        "beam_size": [0, 6],
        "prefix": [[0, 1, 2, 3], [2**31], [-1]],
        "masked_parts": [["a", "b", "c"], ["x" * 201]],
    }
    for name, values in allowed.items():
        for value in values:
            request = LookRequest.model_validate({"text": "", name: value})
            request.check_limits(limits)
            assert getattr(request, name) == value
    for name, values in refused.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                LookRequest.model_validate({"text": "", name: value}).check_limits(limits)


def test_body_exactly_at_its_limit_is_accepted(model: Model) -> None:
    fits = b'{"text": "' + b"x" * 988 + b'"}'
    with start_test_server(model, SMALL) as client:
        assert len(fits) == SMALL.max_body_bytes
        assert client.post(fits).status == 200
        assert client.post(fits + b" ").status == 413
        assert client.raw(CHUNKED + b"3e8\r\n" + fits + b"\r\n0\r\n\r\n").status == 200
        assert client.raw(CHUNKED + b"3e8\r\n" + fits + b"\r\n1\r\n \r\n0\r\n\r\n").status == 413


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
def test_limits_have_a_minimum(name: str) -> None:
    can_be_zero = name in ("max_queued", "requests_per_minute")
    least = 0 if can_be_zero else 0.001
    assert getattr(Limits(**{name: least}), name) == least
    for value in (-0.0005, -1, float("nan"), *([] if can_be_zero else [0])):
        minimum = "0 or more" if can_be_zero else "more than 0"
        with pytest.raises(ValueError, match=f"`{name}` must be {minimum}, but is {value}"):
            Limits(**{name: value})


def test_error_texts_are_clipped() -> None:
    for length in (MAX_ERROR_LENGTH - 1, MAX_ERROR_LENGTH, MAX_ERROR_LENGTH + 1):
        sent = ApiError(400, "x" * length).clipped_message
        assert len(sent) == min(length, MAX_ERROR_LENGTH)
        assert sent.endswith("...") == (length > MAX_ERROR_LENGTH)


def test_foreign_hosts_are_rejected(client: Client) -> None:
    port = client.port
    for host in ("127.0.0.1", f"127.0.0.1:{port}", f"LocalHost:{port}", f"[::1]:{port}"):
        assert client.get("/", headers={"Host": host}).status == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "localhost:evil",
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


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (get_bytes(*[f"X{i}: a" for i in range(101)]), 431),
        (get_bytes("no header"), 400),
        (b"POST /api/look HTTP/1.1\r\nHost: localhost\r\nContent-Length: ten\r\n\r\n{}", 400),
    ],
    ids=["headers", "header", "length"],
)
def test_heads_that_granian_refuses_are_answered_without_a_body(client: Client, head: bytes, status: int) -> None:
    """The app never sees them; the security headers that are absent would protect content."""
    reply = client.raw(head)
    assert (reply.status, reply.headers["connection"], reply.body) == (status, "close", b"")
    assert "content-type" not in reply.headers


# ---- without a server --------------------------------------------------------------------------------------


def talk(guard: ASGIApp, scope: dict[str, Any], *messages: dict[str, Any]) -> list[Any]:
    return asyncio.run(exchange(guard, scope, *messages))


async def failing(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/late":
        await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("a bug")


def test_app_errors_are_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    guard = RequestGuard(failing, limits=Limits())
    empty = {"type": "http.request", "body": b"", "more_body": False}
    assert [message.get("status") for message in talk(guard, http_scope("/"), empty)] == [500, None]
    assert "a bug" in caplog.text
    assert [message.get("status") for message in talk(guard, http_scope("/late"), empty)] == [200]
    talk(guard, http_scope("/" + "x" * 300), empty)
    assert f" GET '/{'x' * 198} failed" in f" {caplog.messages[-1]}"  # clipped


EMPTY_BODY = {"type": "http.request", "body": b"", "more_body": False}


def list_statuses(messages: list[Any]) -> list[tuple[int, bool]]:
    """Return the status of each response, and whether it closes the connection."""
    starts = [message for message in messages if message["type"] == "http.response.start"]
    return [(start["status"], (b"connection", b"close") in start["headers"]) for start in starts]


def test_requests_after_the_shutdown_are_refused() -> None:
    guard = RequestGuard(failing, limits=Limits())
    guard.close()
    refusal, body = talk(guard, http_scope("/"), EMPTY_BODY)
    assert list_statuses([refusal]) == [(503, True)]
    assert b"the server is stopping; retry later" in body["body"]


@pytest.mark.parametrize("messages", [(), (EMPTY_BODY,)])
def test_the_shutdown_cancels_requests_that_are_read_or_answered(messages: tuple[dict[str, Any], ...]) -> None:
    async def answer_never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.get_running_loop().create_future()

    sent, waiting = list[Any](), list(messages)
    guard = RequestGuard(answer_never, limits=Limits())

    async def receive() -> Any:
        return waiting.pop(0) if waiting else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)

    async def close_while_it_waits() -> None:
        task = asyncio.create_task(guard(http_scope("/"), receive, send))
        await asyncio.sleep(0.02)
        assert len(guard._active_tasks) == 1
        guard.close()
        await asyncio.wait_for(task, 5)
        assert guard._active_tasks == set()

    asyncio.run(close_while_it_waits())
    assert list_statuses(sent) == [(503, not messages)]
    assert b"the server is stopping" in sent[-1]["body"]


def test_an_app_that_cancels_itself_is_answered() -> None:
    async def cancel_itself(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    sent = talk(RequestGuard(cancel_itself, limits=Limits()), http_scope("/"), EMPTY_BODY)
    assert list_statuses(sent) == [(503, False)]


def test_a_client_that_leaves_gets_no_answer() -> None:
    async def answer_never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.get_running_loop().create_future()

    guard = RequestGuard(answer_never, limits=Limits(response_timeout=30))
    assert talk(guard, http_scope("/"), EMPTY_BODY, {"type": "http.disconnect"}) == []


def test_a_body_without_a_continuation_is_whole() -> None:
    bodies = list[bytes]()

    async def read_body(scope: Any, receive: Any, send: Any) -> None:
        bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 204, "headers": []})

    whole = {"type": "http.request", "body": b"whole"}
    assert list_statuses(talk(RequestGuard(read_body, limits=Limits()), http_scope("/"), whole)) == [(204, False)]
    assert bodies == [b"whole"]


@pytest.mark.parametrize(("length", "shown"), [(80, 80), (81, 80)])
def test_long_hosts_are_clipped(length: int, shown: int) -> None:
    scope = http_scope("/") | {"headers": [(b"host", b"x" * length)]}
    body = talk(RequestGuard(failing, limits=Limits()), scope, EMPTY_BODY)[-1]["body"].decode()
    assert f"but is '{'x' * shown}'" in body


def test_an_app_accepts_the_hosts_that_it_is_given() -> None:
    app = TranslationApp(LocalBackend(object()), ServerOptions(hosts=("Example.org",)))
    for host, status in ((b"example.org:80", 200), (b"localhost", 421)):
        sent = talk(app, http_scope("/") | {"headers": [(b"host", host)]}, EMPTY_BODY)
        assert list_statuses(sent)[0][0] == status


def test_closing_an_app_refuses_requests() -> None:
    app = create_app(page="page", handler=lambda request, stop: {}, csp="")
    assert asyncio.run(app.close(1.0))
    assert list_statuses(talk(app, http_scope("/"), EMPTY_BODY)) == [(503, True)]


def talk_json(app: ASGIApp, scope: dict[str, Any], *messages: dict[str, Any]) -> tuple[int, Any]:
    sent = talk(app, scope, *messages)
    return sent[0]["status"], json.loads(sent[-1]["body"])


@pytest.mark.parametrize(
    ("method", "path", "form"),
    [
        ("POST", "/v2/translate", lambda text, status: {"message": text}),
        ("DELETE", "/v2/glossaries/some-id", lambda text, status: {"message": text}),
        ("POST", "/v1/chat/completions", openai.format_error),
        ("POST", "/translate", lambda text, status: {"error": text}),
        ("GET", "/translate", lambda text, status: apertium.build_result(None, text, status)),
        ("POST", "/nowhere", lambda text, status: {"error": text}),
    ],
)
def test_refusals_have_the_form_of_the_api(method: str, path: str, form: Callable[[str, int], Any]) -> None:
    limits = Limits(max_body_bytes=10, body_timeout=0.01, requests_per_minute=1)
    app = TranslationApp(LocalBackend(object()), ServerOptions(limits=limits))
    scope = http_scope(path) | {"method": method}
    large = {**scope, "headers": [*scope["headers"], (b"content-length", b"11")]}
    assert talk_json(app, large) == (413, form("the request must have at most 10 bytes", 413))
    assert talk_json(app, scope) == (408, form("the request body must arrive within 0.01 seconds", 408))
    asyncio.run(app.drain())
    assert talk_json(app, scope) == (503, form("the server is stopping; retry later", 503))


def test_a_wrong_method_has_the_form_of_the_api() -> None:
    app = TranslationApp(LocalBackend(object()))
    status, error = talk_json(app, http_scope("/v2/glossaries/x/entries") | {"method": "PUT"}, EMPTY_BODY)
    assert status == 405
    assert error["message"].startswith("'/v2/glossaries/x/entries' does not accept 'PUT'; it accepts ")


RATE_ERROR = {"type": "requests", "param": None, "code": "rate_limit_exceeded"}


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v2/usage", lambda text: {"message": text}),
        ("/v1/models", lambda text: {"error": {"message": text, **RATE_ERROR}}),
    ],
)
def test_rate_limits_have_the_form_of_the_api(path: str, form: Callable[[str], Any]) -> None:
    app = TranslationApp(LocalBackend(object()), ServerOptions(limits=Limits(requests_per_minute=1)))
    replies = [talk_json(app, http_scope(path) | {"client": ("127.0.0.1", 1)}, EMPTY_BODY) for _ in range(2)]
    assert [status for status, _ in replies] == [200, 429]
    assert replies[1][1] == form("more than 1 requests in a minute; retry later")


@pytest.mark.parametrize(
    ("path", "status", "fields"),
    [
        ("/v2/usage", 403, ["message"]),
        ("/v1/models", 401, ["error", "message", "type", "param", "code"]),
        ("/v1/info", 403, ["error"]),
    ],
)
def test_a_wrong_key_and_a_slow_model_have_the_form_of_the_api(path: str, status: int, fields: list[str]) -> None:
    """Also those of origins and hosts, of a response that takes too long, and of a bug."""

    def list_fields(reply: Any) -> list[str]:
        return [name for key, value in reply.items() for name in (key, *(value if isinstance(value, dict) else ()))]

    async def wait(*_: Any) -> None:
        await asyncio.sleep(1)

    async def fail(*_: Any) -> None:
        raise KeyError("a bug")

    app = TranslationApp(
        LocalBackend(object()), ServerOptions(keys=frozenset("k"), limits=Limits(response_timeout=0.01))
    )
    scope = http_scope(path)
    foreign = scope | {"headers": [*scope["headers"], (b"origin", b"https://evil.example")]}
    replies = [talk_json(app, each, EMPTY_BODY) for each in (scope, foreign, scope | {"headers": []})]
    for handler in (wait, fail):
        app._guard._app = handler
        replies.append(talk_json(app, scope, EMPTY_BODY))
    assert [each for each, _ in replies] == [status, 403, 421, 503, 500]
    assert all(list_fields(reply) == fields for _, reply in replies)


@pytest.mark.parametrize(("chunk", "status"), [(b"{", 408), (b"x" * 11, 413)])
def test_a_refused_body_leaves_no_reference_cycle(chunk: bytes, status: int) -> None:
    """granian closes a connection with an unread body when `receive` is freed; only cycles wait for a collection."""

    class HalfBody:
        def __init__(self) -> None:
            self.messages = [{"type": "http.request", "body": chunk, "more_body": True}]

        async def __call__(self) -> Any:
            return self.messages.pop() if self.messages else await asyncio.get_running_loop().create_future()

    async def refuse() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        receive = HalfBody()
        reference = weakref.ref(receive)
        guard = RequestGuard(failing, limits=Limits(body_timeout=0.01, max_body_bytes=10))
        task = asyncio.create_task(guard(http_scope("/"), receive, send))
        del receive
        await task
        del task
        await asyncio.sleep(0)
        assert list_statuses(sent) == [(status, True)]
        assert reference() is None

    gc.disable()
    try:
        asyncio.run(refuse())
    finally:
        gc.enable()


def test_a_cancelled_request_is_not_a_shutdown() -> None:
    async def cancel_while_it_reads() -> None:
        async def receive() -> Any:
            return await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            raise AssertionError("nothing is sent")

        task = asyncio.create_task(RequestGuard(failing, limits=Limits())(http_scope("/"), receive, send))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_while_it_reads())


def test_websockets_are_rejected_and_lifespan_acknowledged() -> None:
    guard = RequestGuard(failing, limits=Limits())
    assert talk(guard, {"type": "websocket"}, {"type": "websocket.connect"}) == [
        {"type": "websocket.close", "code": 1008}
    ]
    phases = talk(guard, {"type": "lifespan"}, {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    assert [phase["type"] for phase in phases] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_documented_numbers() -> None:
    options = ServerOptions()
    limits = options.limits
    assert (limits.max_texts, limits.max_file_bytes, limits.max_files, limits.file_timeout) == (128, 2**20, 4, 600)
    assert (limits.requests_per_minute, limits.max_queued, limits.max_queue_seconds) == (3_000, 256, 20)
    assert (limits.max_client_share, limits.response_timeout, limits.body_timeout) == (0.5, 30, 8)
    assert (options.cached_characters, options.drain_timeout) == (4_000_000, 30)
    assert (options.keys, options.hosts) == (frozenset(), ("127.0.0.1", "localhost", "[::1]"))
    assert (options.trust_proxy, options.log_text, options.suggestions) == (False, False, None)
    assert (backend.MAX_WORKER_WAIT, backend.MAX_ATTEMPTS, backend.WATCH_SECONDS) == (20, 2, 2)
    assert (run.HEADER_TIMEOUT, run.FIRST_PORT, run.MAX_CONNECTIONS) == (5, 8017, 4_096)
    assert (batching.MAX_WAIT, FilePipeline.block_lines) == (1, 128)


def test_flags_have_the_defaults_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert build_options(ServeFlags()) == ServerOptions()
    monkeypatch.setenv(KEY_VARIABLE, "a")
    assert build_options(ServeFlags(api_key=("b",))).keys == {"a", "b"}
    assert build_options(ServeFlags(max_characters=50_000)).limits.max_body_bytes == 600_000


def test_default_limits() -> None:
    """Those that the documentation states."""
    limits = Limits()
    assert (limits.max_head_bytes, limits.max_headers, limits.max_body_bytes) == (32_768, 64, 262_144)
    assert (limits.max_characters, limits.max_tokens, limits.max_search_tokens) == (10_000, 512, 4_096)
    assert (limits.max_beam_size, limits.max_prefix_tokens, limits.max_masked_parts) == (64, 1_024, 2_048)
    assert (limits.body_timeout, limits.response_timeout, limits.max_queued) == (10.0, 60.0, 8)
