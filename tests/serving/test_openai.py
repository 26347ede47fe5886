"""The APIs of OpenAI and Apertium, with the requests that Weblate and OmegaT send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from attent.serving.gateway import ServerOptions
from tests.serving.toy import Client
from tests.serving.translation_server import start_translation_server

HEADERS = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    options = ServerOptions(keys=frozenset(["secret"]))
    with start_translation_server(tmp_path_factory.mktemp("models"), options, generator=True) as client:
        yield client


def complete(client: Client, **fields: Any) -> Any:
    return client.post({"model": "letters", "prompt": "A man", **fields}, HEADERS, path="/v1/completions").json


def chat(client: Client, content: Any, model: str = "en-de", **fields: Any) -> Any:
    messages = [{"role": "system", "content": fields.pop("system", "Translate.")}, {"role": "user", "content": content}]
    return client.post({"model": model, "messages": messages, **fields}, HEADERS, path="/v1/chat/completions").json


def test_models(client: Client) -> None:
    result = client.get("/v1/models", headers=HEADERS).json
    assert [model["id"] for model in result["data"]] == ["numbers", "letters", "en-de"]
    assert result["object"] == "list"
    assert all(model["object"] == "model" for model in result["data"])
    reply = client.get("/v1/models")
    assert reply.status == 401
    error = reply.json["error"]
    assert "API key" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}


def test_completions(client: Client) -> None:
    result = complete(client, max_tokens=4, seed=1)
    assert result["object"] == "text_completion"
    assert result["usage"]["completion_tokens"] <= 4
    assert result["usage"]["total_tokens"] == result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"]
    assert complete(client, max_tokens=4, seed=1)["choices"] == result["choices"]
    several = complete(client, prompt=["A man", "A dog"], n=2, max_tokens=3, temperature=1.5, top_p=0.9, stop=["x"])
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in several["choices"]} <= {"stop", "length"}
    greedy = [complete(client, max_tokens=5, temperature=0, n=None, stop=None)["choices"] for _ in range(2)]
    assert greedy[0] == greedy[1]


def test_wrong_completions(client: Client) -> None:
    assert "`model`" in complete(client, model="numbers")["error"]["message"]
    assert "`max_tokens`" in complete(client, max_tokens=10**6)["error"]["message"]
    assert "`n` must be 1" in complete(client, temperature=0, n=2)["error"]["message"]
    assert "`stop`" in complete(client, stop="")["error"]["message"]
    assert "`stop`" in complete(client, stop=["x"] * 17)["error"]["message"]


def test_chat(client: Client) -> None:
    result = chat(client, "seven", temperature=0, frequency_penalty=0, presence_penalty=0)
    assert result["object"] == "chat.completion"
    assert result["choices"][0]["message"] == {"role": "assistant", "content": "sieben"}
    assert result["usage"] == {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    for model in ("numbers", "auto"):
        assert chat(client, "seven", model)["choices"][0]["message"]["content"] == "sieben"
    assert chat(client, [{"type": "text", "text": "two\nten"}])["choices"][0]["message"]["content"] == "zwei\nzehn"


def test_wrong_chats(client: Client) -> None:
    assert "see /v1/models" in chat(client, "seven", "gpt-5")["error"]["message"]
    body = {"model": "en-de", "messages": [{"role": "system", "content": "x"}]}
    assert client.post(body, HEADERS, path="/v1/chat/completions").status == 400
    assert client.post(body | {"messages": []}, HEADERS, path="/v1/chat/completions").status == 400
    assert client.post(body, path="/v1/chat/completions").status == 401


def test_streams(client: Client) -> None:
    body = {"model": "en-de", "messages": [{"role": "user", "content": "seven"}], "stream": True}
    reply = client.post(body, HEADERS, path="/v1/chat/completions")
    assert reply.headers["content-type"].startswith("text/event-stream")
    first, end = reply.body.decode().removesuffix("\n\n").split("\n\n")
    chunk = json.loads(first.removeprefix("data: "))
    assert (chunk["object"], chunk["choices"][0]["delta"]["content"]) == ("chat.completion.chunk", "sieben")
    assert end == "data: [DONE]"
    reply = client.post({"model": "letters", "prompt": "A", "stream": True}, HEADERS, path="/v1/completions")
    assert "text" in json.loads(reply.body.decode().partition("\n")[0].removeprefix("data: "))["choices"][0]


def test_weblate_sends_json(client: Client) -> None:
    """As current versions do; the glossary was an object once, and is a list now."""
    strings = [
        {"source": "one", "parts": [{"type": "text", "text": "one"}], "context": "x"},
        {"source": "two", "translation": "zwo"},
    ]
    data: dict[str, Any] = {"source_language": "en", "target_language": "de", "glossary": [], "strings": strings}
    for model in ("en-de", "numbers", "auto"):
        content = chat(client, json.dumps(data), model)["choices"][0]["message"]["content"]
        assert json.loads(content) == ["eins", "zwei"]
    terms = [{"source": "one", "target": "acht", "flags": ["terminology"]}]
    for glossary in (terms, {"one": "acht"}):
        content = chat(client, json.dumps(data | {"glossary": glossary}))["choices"][0]["message"]["content"]
        assert "acht" in json.loads(content)[0]
    wrong = chat(client, json.dumps(data | {"target_language": "fr"}))
    assert "`target` must be a language" in wrong["error"]["message"]


def test_weblate_separates_texts(client: Client) -> None:
    """As older versions do."""
    system = (
        "You are a translation assistant, adept at translating text\nfrom language 'en'\nto language '{}'\nwith care."
    )
    message = "one\n==WEBLATE_PART==\ntwo"
    content = chat(client, message, "auto", system=system.format("de_AT"))["choices"][0]["message"]["content"]
    assert content.split("\n==WEBLATE_PART==\n") == ["eins", "zwei"]
    assert "`target`" in chat(client, message, "numbers", system=system.format("fr"))["error"]["message"]


def test_placeholders_stay(client: Client) -> None:
    data = {"source_language": "en", "target_language": "de", "strings": [{"source": "one @@PH3@@"}]}
    content = chat(client, json.dumps(data))["choices"][0]["message"]["content"]
    assert "@@PH3@@" in json.loads(content)[0]


def test_apertium_as_omegat_sends_it(client: Client) -> None:
    """OmegaT does not escape the `|`, and sends region codes with `_`."""
    for pair in ("en|de", "en_US|de_AT"):
        query = f"q=one%0Atwo&markUnknown=no&langpair={pair}&key=secret"
        reply = client.raw(f"GET /translate?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        expected = {"responseData": {"translatedText": "eins\nzwei"}, "responseDetails": None, "responseStatus": 200}
        assert reply.json == expected
    reply = client.get("/translate?q=one&langpair=en%7Cfr&key=secret")
    assert (reply.status, reply.json["responseStatus"]) == (400, 400)
    assert "`target`" in reply.json["responseDetails"]
    assert client.get("/translate?q=one&langpair=en&key=secret").status == 400
    assert client.get("/translate?q=one&langpair=en%7Cde&key=wrong").json["responseStatus"] == 403


def test_apertium_as_weblate_uses_it(client: Client) -> None:
    pairs = client.get("/listPairs").json
    assert pairs["responseData"] == [{"sourceLanguage": "en", "targetLanguage": "de"}]
    assert pairs["responseStatus"] == 200
