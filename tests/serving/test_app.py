"""The app in a running server: page, requests, errors, queueing."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attent.serving.endpoints import LookRequest, parse_json_object, validate_body
from attent.serving.limits import ApiError, Limits
from tests.serving.toy import (
    CSP,
    PAGE,
    Client,
    Model,
    make_app,
    post_bytes,
    serve_in_thread,
    start_test_server,
    wait_until,
)

pytest.importorskip("starlette", reason="needs Starlette: pip install 'attent[serve]'")
pytest.importorskip("granian", reason="needs granian: pip install 'attent[serve]'")


# ---- responses ---------------------------------------------------------------------------------------------


def test_page_has_its_policy(client: Client) -> None:
    reply = client.get("/")
    assert reply.status == 200
    assert reply.body.decode() == PAGE
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"] == CSP
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-frame-options"] == "DENY"


def test_responses_have_security_headers(client: Client) -> None:
    for reply in (client.get("/health"), client.get("/nowhere"), client.post({"text": "a"}), client.post(b"{")):
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_health(client: Client) -> None:
    assert client.get("/health").json == {"status": "ok"}
    assert client.get("/health", method="HEAD").status == 200


def test_request_reaches_the_handler(client: Client, model: Model) -> None:
    arguments = {
        "text": "Ein “Hund” 𝄞\n",
        "to": "de",
        "beam_size": 3,
        "prefix": [17, 250],
        "masked_parts": ["decoder.blocks.3.cross_attn:2"],
    }
    reply = client.post(arguments, {"Content-Type": "Application/JSON; charset=UTF-8"})
    assert (reply.status, reply.json["title"]) == (200, arguments["text"])
    (question,) = model.requests
    assert question == LookRequest(
        text="Ein “Hund” 𝄞\n", to="de", beam_size=3, prefix=[17, 250], masked_parts=["decoder.blocks.3.cross_attn:2"]
    )


def test_only_text_is_required(client: Client, model: Model) -> None:
    assert client.post({"text": ""}).status == 200
    assert client.post({"text": "a", "to": None, "beam_size": None, "prefix": [], "masked_parts": []}).status == 200
    assert model.requests == [LookRequest(text=""), LookRequest(text="a")]


def test_connection_serves_many_requests(client: Client) -> None:
    with client.open(post_bytes({"text": "a"})) as connection:
        assert b'"title":"a"' in connection.recv(4000)
        connection.sendall(post_bytes(b"nonsense"))
        assert b"400 Bad Request" in connection.recv(4000)
        connection.sendall(post_bytes({"text": "b"}))
        assert b'"title":"b"' in connection.recv(4000)


# ---- errors ------------------------------------------------------------------------------------------------


def test_unknown_path_is_404(client: Client) -> None:
    reply = client.get("/api/loook")
    assert (reply.status, reply.error) == (404, "'/api/loook' does not exist; the page is at /")
    assert client.get("/api/look/").status == 404
    assert client.get("/../../etc/passwd").status == 404
    assert client.post({"text": "a"}, path="/nowhere").status == 404


def test_wrong_method_is_405(client: Client) -> None:
    reply = client.get("/api/look")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert reply.error == "'/api/look' does not accept 'GET'; it accepts POST"
    assert client.send("DELETE", "/", None, {}).headers["allow"] in ("GET, HEAD", "HEAD, GET")


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/json-patch+json"])
def test_other_content_type_is_415(client: Client, kind: str) -> None:
    reply = client.post({"text": "a"}, {"Content-Type": kind})
    assert reply.status == 415
    assert reply.error.startswith("`Content-Type` must be application/json, but is ")


def test_long_or_absent_content_types_are_clipped(client: Client) -> None:
    for kind, text in (("x" * 80, "x" * 80), ("x" * 81, "x" * 80)):
        assert client.post({"text": "a"}, {"Content-Type": kind}).error.endswith(f"but is '{text}'")
    assert "but is absent" in client.post({"text": "a"}, {"Content-Type": ""}).error
    path = "/" + "x" * 80
    assert client.get(path).error == f"'{path[:80]}' does not exist; the page is at /"
    method = "PROPFIND" * 3
    assert f"does not accept '{method[:20]}'; it accepts" in client.get("/health", method=method).error


def test_other_charset_or_compression_is_415(client: Client) -> None:
    reply = client.post({"text": "a"}, {"Content-Type": "application/json; charset=latin1"})
    assert (reply.status, reply.error) == (415, "the charset must be UTF-8")
    reply = client.post({"text": "a"}, {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error) == (415, "the request must not be compressed")


def test_value_error_of_the_handler_is_400(client: Client) -> None:
    reply = client.post({"text": "wrong"})
    assert reply.status == 400
    assert reply.error == "`masked_parts` must name a part of the model"


@pytest.mark.parametrize("text", ["broken", "exit", "nan"])
def test_internal_error_is_500_and_logged(client: Client, text: str, caplog: pytest.LogCaptureFixture) -> None:
    reply = client.post({"text": text})
    assert reply.status == 500
    assert reply.error == "internal server error; see the server's log"
    assert wait_until(lambda: "a request failed" in caplog.text)
    assert text != "broken" or "a secret of the inside" in caplog.text
    assert client.post({"text": "still here"}).status == 200


HOSTILE = {
    "empty": (b"", 400, "must be JSON"),
    "half": (b'{"text": "a"', 400, "must be JSON"),
    "trailing": (b'{"text": "a"} x', 400, "must be JSON"),
    "a list": (b'["a"]', 400, "must be a JSON object"),
    "null": (b"null", 400, "must be a JSON object"),
    "a string": (b'"text"', 400, "must be a JSON object"),
    "a number": (b"1e999", 400, "must be JSON"),
    "nan": (b'{"text": "a", "beam_size": NaN}', 400, "NaN is not a finite number"),
    "infinity": (b'{"text": "a", "beam_size": -Infinity}', 400, "-Infinity is not a finite number"),
    "too great": (b'{"text": "a", "beam_size": 1e400}', 400, "1e400 is not a finite number"),
    "not utf-8": (b'{"text": "\xff"}', 400, "byte 10 is not"),
    "utf-16": ('{"text": "a"}'.encode("utf-16"), 400, "must be UTF-8"),
    "overlong utf-8": (b'{"text": "\xc0\x80"}', 400, "must be UTF-8"),
    "a surrogate in utf-8": (b'{"text": "\xed\xa0\x80"}', 400, "must be UTF-8"),
    "byte order mark": (b'\xef\xbb\xbf{"text": "a"}', 400, "must be JSON"),
    "raw control": (b'{"text": "a\x01"}', 400, "must be JSON"),
    "deep list": (b'{"text": ' + b"[" * 100_000, 400, "nested too deeply"),
    "deep object": (b'{"a": ' * 40_000, 400, "nested too deeply"),
    "deep and closed": (b'{"text": ' + b"[" * 300 + b"]" * 300 + b"}", 400, "`text`"),
    "many digits": (b'{"text": "a", "beam_size": ' + b"9" * 100_000 + b"}", 400, "must be JSON"),
    "thousand digits": (b'{"text": "a", "beam_size": ' + b"9" * 1_000 + b"}", 400, "more than 64 bits"),
    "twice": (b'{"text": "a", "text": "b"}', 400, "duplicate key `text`"),
    "many keys": (b"{" + b",".join(b'"%d":0' % i for i in range(20_000)) + b"}", 400, "`text`"),
    "many keys, one twice": (
        b"{" + b",".join(b'"%d":0' % i for i in range(20_000)) + b',"z":0' * 2 + b"}",
        400,
        "duplicate key `z`",
    ),
    "nothing": (b"{}", 400, "`text`: Field required"),
    "text null": (b'{"text": null}', 400, "`text`"),
    "text number": (b'{"text": 1}', 400, "`text`"),
    "text list": (b'{"text": ["a"]}', 400, "`text`"),
    "text nul": (rb'{"text": "a\u0000b"}', 400, "NUL character"),
    "lone surrogate": (rb'{"text": "\ud800"}', 400, "surrogate"),
    "lone surrogate key": (rb'{"text": "a", "\ud800": 1}', 400, "surrogate"),
    "lone surrogate language": (rb'{"text": "a", "to": "\udfff"}', 400, "surrogate"),
    "too long": (b'{"text": "' + b"x" * 10_001 + b'"}', 413, "at most 10000 characters, but this is 10001"),
    "unknown key": (b'{"text": "a", "beam": 4}', 400, "did you mean `beam_size`?"),
    "a key of the inside": (b'{"text": "a", "__class__": 4}', 400, "unknown field; known are text, model"),
    "beam text": (b'{"text": "a", "beam_size": "4"}', 400, "`beam_size`: Input should be a valid integer"),
    "beam true": (b'{"text": "a", "beam_size": true}', 400, "`beam_size`: Input should be a valid integer"),
    "beam float": (b'{"text": "a", "beam_size": 4.0}', 400, "`beam_size`: Input should be a valid integer"),
    "beam none": (b'{"text": "a", "beam_size": 0}', 400, "`beam_size`: Input should be greater than or equal to 1"),
    "beam many": (b'{"text": "a", "beam_size": 65}', 400, "`beam_size` must be at most 64, but this is 65"),
    "prefix null": (b'{"text": "a", "prefix": null}', 400, "`prefix`"),
    "prefix text": (b'{"text": "a", "prefix": "12"}', 400, "`prefix`"),
    "prefix object": (b'{"text": "a", "prefix": {"0": 1}}', 400, "`prefix`"),
    "prefix of text": (b'{"text": "a", "prefix": [1, "2"]}', 400, "`prefix`"),
    "prefix below": (b'{"text": "a", "prefix": [-1]}', 400, "`prefix`"),
    "prefix above": (b'{"text": "a", "prefix": [2147483648]}', 400, "`prefix`"),
    "prefix long": (b'{"text": "a", "prefix": [' + b"1," * 1024 + b"1]}", 400, "at most 1024 tokens, but this is 1025"),
    "masked parts text": (b'{"text": "a", "masked_parts": "encoder"}', 400, "`masked_parts`"),
    "masked parts of lists": (b'{"text": "a", "masked_parts": [[]]}', 400, "`masked_parts`"),
    "masked parts nul": (rb'{"text": "a", "masked_parts": ["\u0000"]}', 400, "NUL character"),
    "masked parts long": (b'{"text": "a", "masked_parts": ["' + b"x" * 201 + b'"]}', 400, "at most 200 characters"),
    "masked parts many": (b'{"text": "a", "masked_parts": [' + b'"",' * 2048 + b'""]}', 400, "at most 2048 parts"),
    "language number": (b'{"text": "a", "to": 7}', 400, "`to`"),
    "language long": (b'{"text": "a", "to": "' + b"x" * 201 + b'"}', 400, "at most 200 characters"),
}


def test_hostile_bodies_are_rejected(client: Client, model: Model) -> None:
    for name, (body, status, words) in HOSTILE.items():
        reply = client.post(body)
        assert (reply.status, words in reply.error) == (status, True), (name, reply)
        assert len(reply.body) <= 2_000, name
    assert model.requests == []
    assert client.post({"text": "still here"}).status == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(["text", "to", "beam_size", "prefix", "masked_parts", "x", "TEXT"])
SENSIBLE = st.sampled_from(["a", [1, 2], ["encoder.blocks.0"], 4, None, "\0", [-1], 10**40])
BODIES = st.one_of(
    st.binary(max_size=200),
    JSON.map(lambda data: json.dumps(data).encode()),
    st.dictionaries(KEYS, JSON | SENSIBLE, max_size=5).map(lambda data: json.dumps(data | {"text": "a"}).encode()),
    st.dictionaries(KEYS, SENSIBLE, max_size=5).map(lambda data: json.dumps(data).encode()),
)


@settings(max_examples=500, deadline=None)
@given(BODIES)
def test_any_body_is_parsed_or_rejected(body: bytes) -> None:
    question = try_to_parse(body)
    if isinstance(question, ApiError):
        assert question.status in (400, 413)
    else:
        question.text.encode("utf-8")
        assert "\0" not in question.text
        assert question.beam_size is None or 1 <= question.beam_size <= 64


def try_to_parse(body: bytes) -> LookRequest | ApiError:
    try:
        request = validate_body(LookRequest, parse_json_object(body), strict=True)
        assert isinstance(request, LookRequest)
        request.check_limits(Limits())
        return request
    except ApiError as refusal:
        return refusal


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES)
def test_no_body_crashes_the_server(client: Client, body: bytes) -> None:
    reply = client.post(body)
    assert reply.status in (200, 400)
    assert reply.json if reply.status == 200 else reply.error


HEAD = b"POST /api/look HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LINES = st.sampled_from(
    [b"Transfer-Encoding: chunked", b"Content-Length: 13", b"Content-Length: x", b"X: " + b"a" * 33_000, b"Host: b",
     b"Expect: 100-continue", b"Connection: close", b"\xff: \x00", b"Content-Encoding: gzip", b": empty"]
)  # fmt: skip
PARTS = st.sampled_from(
    [
        b'{"text": "a"}',
        b"d\r\n",
        b"\r\n",
        b"0\r\n\r\n",
        b"ZZ\r\n",
        b"FFFFFFFFFFFFFFFFF\r\n",
        b"5;x=" + b"y" * 9_000,
        b"",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(LINES, max_size=4), parts=st.lists(PARTS | st.binary(max_size=9), max_size=6), leaves=st.booleans()
)
def test_no_raw_request_crashes_the_server(
    client: Client, lines: list[bytes], parts: list[bytes], leaves: bool
) -> None:
    """Odd headers, malformed chunks, and clients that leave at any moment; what the app answers has safe headers."""
    statuses = (b"", *(b"HTTP/1.1 %d" % status for status in (100, 200, 400, 413, 415, 421, 431)))
    reply = b""
    with suppress(OSError):  # the server may close the connection while the rest is sent
        content = HEAD + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + b"".join(parts)
        with client.open(content) as connection:
            if not leaves:
                connection.shutdown(socket.SHUT_WR)
                reply = connection.recv(65_536)
    assert reply[:12] in statuses
    assert b"nosniff" in reply or b"{" not in reply
    assert client.get("/health").status == 200


# ---- queueing ----------------------------------------------------------------------------------------------


def test_concurrent_clients_get_their_own_responses(model: Model) -> None:
    with start_test_server(model, Limits(max_queued=32)) as client, ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda i: client.post({"text": f"sentence {i}", "prefix": [i]}), range(100)))
    assert [reply.status for reply in replies] == [200] * 100
    assert [(reply.json["title"], reply.json["prefix"]) for reply in replies] == [
        (f"sentence {i}", [i]) for i in range(100)
    ]
    assert model.overlaps == 0


def test_full_queue_is_503(model: Model) -> None:
    app = make_app(model, Limits(max_queued=2))
    with serve_in_thread(app) as url, ThreadPoolExecutor(3) as pool:
        client = Client(url)
        replies = [pool.submit(client.post, {"text": text}) for text in ("wait", "wait too", "wait as well")]
        assert wait_until(lambda: app.gateway.admission.num_pending == 3)
        reply = client.post({"text": "one too many"})
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.error == "the server is busy; retry later"
        assert client.get("/health").status == 200
        model.let_go.set()
        assert [item.result().status for item in replies] == [200, 200, 200]
        assert client.post({"text": "later"}).status == 200
    assert "one too many" not in [question.text for question in model.requests]
    assert model.overlaps == 0


def test_disconnect_cancels_the_job(client: Client, model: Model) -> None:
    with client.open(post_bytes({"text": "wait for nobody"})):
        assert model.busy.wait(10)
    assert wait_until(lambda: model.stopped == ["wait for nobody"])
    assert client.post({"text": "next"}).json["title"] == "next"
    assert model.overlaps == 0


def test_disconnected_queued_request_never_runs(model: Model) -> None:
    app = make_app(model)
    with serve_in_thread(app) as url, Client(url).open(post_bytes({"text": "wait"})) as first:
        assert model.busy.wait(10)
        second = Client(url).open(post_bytes({"text": "gone before its turn"}))
        assert wait_until(lambda: app.gateway.admission.num_pending == 2)
        second.close()
        assert wait_until(lambda: app.gateway.admission.num_pending == 1)
        model.let_go.set()
        assert b"200 OK" in first.recv(4000)
    assert [question.text for question in model.requests] == ["wait"]


def test_timeout_cancels_the_job(model: Model) -> None:
    with start_test_server(model, Limits(response_timeout=0.2)) as client:
        reply = client.post({"text": "wait for ever"})
        assert (reply.status, "retry-after" in reply.headers) == (503, False)
        assert reply.error == "the response took more than 0.2 seconds; send a shorter text"
        assert wait_until(lambda: model.stopped == ["wait for ever"])
        assert client.post({"text": "next"}).status == 200


def test_uncancellable_job_keeps_the_model_exclusive(model: Model) -> None:
    with start_test_server(model, Limits(response_timeout=0.2)) as client:
        assert client.post({"text": "stubborn"}).status == 503
        assert client.post({"text": "next"}).status == 503
        assert [question.text for question in model.requests] == ["stubborn"]
        model.let_go.set()
        assert wait_until(lambda: client.post({"text": "at last"}).status == 200)
    assert model.overlaps == 0
