"""Hostile requests to every endpoint: no response is an internal error, undocumented or long.

`make fuzz-server` generates thousands more from the OpenAPI document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from attent.serving.endpoints import FORM_TYPES, Endpoint
from attent.serving.translation_app import ServerOptions, build_openapi, list_endpoints
from tests.serving.toy import Client, Reply
from tests.serving.translation_server import start_translation_server

ENDPOINTS = list_endpoints()
DOCUMENT = build_openapi(ENDPOINTS, version="1")
MAX_ERROR_BYTES = 2_048
JSON, URLENCODED, MULTIPART = "application/json", FORM_TYPES[0], "multipart/form-data; boundary=b"
HUGE = 10**400

VALID = {  # values that are valid somewhere, so that requests reach the models
    "text": "one", "q": "one", "source": "en", "target": "de", "target_lang": "de", "prompt": "one", "model": "numbers",
    "langpair": "en|de", "messages": [{"role": "user", "content": "one"}], "prefix": "", "name": "x", "s": "eins",
    "source_lang": "en", "entries": "one\teins", "count": 1, "max_tokens": 4,
}  # fmt: skip
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, -1, HUGE, -HUGE, 1e308, 2**63, "", "\0", "\ud800", "\U0010ffff", "\u202e" * 50, "x" * 5_000, "%00",
    "../../etc/passwd", "🦜" * 50, [], [None], ["\ud800"], [[]], ["x"] * 1_001, {}, {"": ""}, {"x": {"y": []}},
)  # fmt: skip
HOSTILE_BODIES = (
    b"", b"\0", b"\xff\xfe", b"null", b"[]", b'"x"', b"{", b"{}", b'{"q":NaN}', b'{"q":Infinity}', b'{"q":1e999}',
    b"[" * 100_000, b'{"q":' * 100_000, b'{"q":"\\ud800"}', b'{"q":"\xff"}', b'{"q":"a","q":"b"}', b"1" * 5_000,
    b'\xef\xbb\xbf{"q":"x"}', b"q=%ff&source=%00&target=%ed%a0%80", b"q&q&&&=&=x", b"&" * 2_000, b"--b", b"--b--",
    b"--b\r\n\r\nx\r\n--b--", b'--b\r\nContent-Disposition: form-data; name="q"\r\n\r\n\xff\r\n--b--',
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="\xff\0.txt"\r\n\r\nx\r\n--b--',
    b'--b\r\nContent-Disposition: form-data; name="target"; filename="x"\r\n\r\nde\r\n--b--' * 3,
)  # fmt: skip
CONTENT_TYPES = (
    JSON,
    URLENCODED,
    MULTIPART,
    "multipart/form-data",
    "text/plain",
    "application/json; charset=x",
    "\xff",
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("models")
    options = ServerOptions(suggestions=folder / "suggestions.jsonl")
    with start_translation_server(folder, options, generator=True) as client:
        yield client


def check_reply(endpoint: Endpoint, reply: Reply, sent: object) -> None:
    documented = DOCUMENT["paths"][endpoint.path][endpoint.method.lower()]["responses"]
    assert str(reply.status) in documented, (reply.status, str(sent)[:300], reply.body[:300])
    if reply.status >= 400:
        assert len(reply.body) <= MAX_ERROR_BYTES, (str(sent)[:300], reply.body[:300])
        assert not reply.body or reply.json


@pytest.fixture(params=ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    assert isinstance(request.param, Endpoint)
    return request.param


@pytest.fixture
def path(endpoint: Endpoint) -> str:
    return endpoint.path.replace("{model}", "numbers").replace("{name}", "x%00%ff").replace("{glossary_id}", "x%00%ff")


def test_hostile_bodies(endpoint: Endpoint, path: str, client: Client) -> None:
    for content_type in CONTENT_TYPES if endpoint.body else (JSON, URLENCODED):
        for body in HOSTILE_BODIES:
            reply = client.send(endpoint.method, path, body, {"Content-Type": content_type})
            check_reply(endpoint, reply, (content_type, body))


def test_hostile_fields(endpoint: Endpoint, path: str, client: Client) -> None:
    fields = endpoint.body.model_fields if endpoint.body else {}
    valid = {name: value for name, value in VALID.items() if name in fields}
    for name in fields:
        for value in HOSTILE_VALUES:
            sent = json.dumps(valid | {name: value}).encode()
            check_reply(endpoint, client.send(endpoint.method, path, sent, {"Content-Type": JSON}), sent)


def test_hostile_queries(endpoint: Endpoint, path: str, client: Client) -> None:
    queries = ("q=%ff&langpair=%00|%00", "api_key=%ff", "&&=&q", "q=a&q=b&langpair=en|de", "type=%ed%a0%80", "q=%00")
    for query in queries:
        for method in (endpoint.method, "PATCH"):
            check_reply(endpoint, client.get(f"{path}?{query}", method=method), (method, query))
        assert client.get(f"{path}?{query}", method="HEAD").status < 500


def test_a_server_error_is_no_documented_status() -> None:
    statuses = {status for path in DOCUMENT["paths"].values() for each in path.values() for status in each["responses"]}
    assert {status for status in statuses if status >= "5"} == {"503"}
