"""The translation server with real models: equal to `Translator`, requests with their own options, workers that die,
changed models, overload, draining."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from attent.decoding.options import SamplingOptions, SearchOptions
from attent.decoding.translator import Translator
from attent.serving import backend as backends
from attent.serving.api_v1 import TranslateBody, build_translate_request
from attent.serving.backend import LocalBackend, ModelBackend, ServiceConfig, WorkerPool
from attent.serving.endpoints import SuggestRequest
from attent.serving.gateway import ServerOptions, TranslationCache
from attent.serving.limits import Limits, ServeError
from attent.serving.messages import (
    AUTO,
    CallContext,
    Direction,
    ServiceInfo,
    TextTranslation,
    TranslateRequest,
)
from attent.serving.run import check_host, share_devices
from attent.serving.run import serve as serve_models
from attent.serving.service import TranslationService
from attent.serving.translation_app import TranslationApp, list_endpoints
from tests.serving.toy import Client, Reply, serve_in_thread, wait_until

pytest.importorskip("granian", reason="needs granian: pip install 'attent[serve]'")

MODEL = Path(__file__).parent.parent / "models" / "saved_model"
LANGUAGES = ("en", "de")
WORDS = "one two three four five six seven eight nine ten".split()


def make_sentences(count: int, seed: int = 1, longest: int = 30) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for _ in range(count)]


@pytest.fixture(scope="module")
def service() -> TranslationService:
    return TranslationService(ServiceConfig(folders=(MODEL,), languages=LANGUAGES))


@contextmanager
def serve(backend: ModelBackend, **options: Any) -> Iterator[Client]:
    with serve_in_thread(TranslationApp(backend, ServerOptions(**options))) as url:
        yield Client(url)


@pytest.fixture(scope="module")
def client(service: TranslationService) -> Iterator[Client]:
    with serve(LocalBackend(service)) as client:
        yield client


def post(client: Client, path: str = "/v1/translate", headers: dict[str, str] | None = None, **body: Any) -> Reply:
    return client.post(body, headers, path)


def translate(client: Client, text: str, **options: Any) -> str:
    reply = post(client, text=text, source="en", target="de", **options)
    assert reply.status == 200, reply.body
    (translation,) = reply.json["translations"]
    return str(translation["text"])


# --- equal to the translator -----------------------------------------------------------------------------------------


def test_concurrent_clients_get_what_the_translator_gives(client: Client) -> None:
    sentences = make_sentences(200)
    options = [SearchOptions(), SearchOptions(beam_size=1), SearchOptions(length_penalty=1.0)]
    translator = Translator.load(MODEL)
    expected = [translator.translate(sentences, each) for each in options]
    fields: list[dict[str, Any]] = [{}, {"beam_size": 1}, {"length_penalty": 1.0}]

    def send(index: int) -> tuple[str, float]:
        reply = post(client, text=sentences[index % 200], source="en", target="de", **fields[index % 3])
        (translation,) = reply.json["translations"]
        return translation["text"], translation["score"]

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(send, range(600)))
    own = [expected[index % 3][index % 200] for index in range(600)]
    different = [(answer, item) for answer, item in zip(answers, own, strict=True) if answer[0] != item.text]
    # The last bits of CTranslate2's scores depend on the padding of a batch.
    assert all(score == pytest.approx(item.score, abs=0.01) for (_, score), item in different)
    assert len(different) <= 6


def test_searches_share_batches(service: TranslationService, client: Client) -> None:
    batches = service.translators["saved_model"].batcher.batch_sizes
    batches.clear()
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda text: translate(client, text), make_sentences(64, seed=2)))
    assert sum(size * count for size, count in batches.items()) >= 60
    assert max(batches) > 1


def test_every_option_reaches_the_search(service: TranslationService, client: Client) -> None:
    text, translator = "one two three four", service.translators["saved_model"]
    expected = translator.translate([text], SearchOptions(beam_size=6, n_best=3), alignment=True)[0]
    (answer,) = post(client, text=text, source="en", beam_size=6, n_best=3, alignment=True).json["translations"]
    assert [item["text"] for item in answer["n_best"]] == [item.text for item in expected.n_best]
    assert [item["score"] for item in answer["n_best"]] == pytest.approx(
        [item.score for item in expected.n_best], rel=1e-3
    )
    assert expected.alignment is not None
    assert answer["alignment"] == [list(link) for link in expected.alignment.links]
    assert 0 < answer["confidence"] <= 1
    sampled = translator.translate([text], SearchOptions(beam_size=1, sampling=SamplingOptions(seed=5, top_k=3)))
    assert translate(client, text, seed=5, top_k=3, beam_size=1) == sampled[0].text
    assert "sieben" in translate(client, text, require=["sieben"])
    assert translate(client, text, prefix="neun").startswith("neun")
    best = translate(client, text).split()[0]
    assert best not in translate(client, text, ban=[best]).split()
    assert "sieben" in translate(client, text, glossary={"two": "sieben"})
    assert len(translate(client, text, max_length=2).split()) <= 2


def test_lines_keep_their_layout(service: TranslationService, client: Client) -> None:
    translator = service.translators["saved_model"]
    one, two = (item.text for item in translator.translate(["one two", "three"]))
    assert translate(client, "  one two\n\n\tthree ") == f"  {one}\n\n\t{two} "
    assert translate(client, "") == ""
    (answer,) = post(client, text="one two\nthree", source="en", alignment=True, n_best=2).json["translations"]
    assert {source for source, _ in answer["alignment"]} <= {0, 1, 2}
    assert [item["text"].count("\n") for item in answer["n_best"]] == [1, 1]


def test_a_stream_is_the_same_text_in_pieces(service: TranslationService, client: Client) -> None:
    text = "One two three. Four five.\n Six seven. "
    reply = post(client, text=text, source="en", stream=True, split_sentences=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in reply.body.decode().split("\n\n") if line]
    assert events[-1] == {"done": True}
    pieces = [event["text"] for event in events[:-1]]
    assert len([piece for piece in pieces if piece.strip()]) == 3
    assert "".join(pieces) == translate(client, text, split_sentences=True)
    sampling = TranslateRequest(
        texts=(text * 3,),
        source="en",
        search=SearchOptions(beam_size=1, sampling=SamplingOptions(seed=3, temperature=2.0), prevent_loops=False),
    )
    (sampled,) = service.translate(sampling, CallContext())
    sampled_pieces = list[str]()
    service.stream(sampling, CallContext(send_item=sampled_pieces.append))
    assert "".join(sampled_pieces) == sampled.text
    assert post(client, text=["one", "two"], stream=True).status == 400
    assert post(client, text="x" * 10_001, stream=True).status == 413


def test_suggestions_differ_in_the_next_word(client: Client) -> None:
    best = translate(client, "one two three").split()
    reply = post(client, "/v1/suggest", text="one two three", prefix=best[0], count=4)
    texts = [item["text"] for item in reply.json["suggestions"]]
    assert all(text.startswith(best[0]) for text in texts)
    assert len(set(texts)) == len(texts) > 1
    assert post(client, "/v1/suggest", text="one", prefix="ei\0ns").status == 400
    assert post(client, "/v1/suggest", text="eins", prefix="", source="de", target="de").json == {"suggestions": []}


def test_suggestions_of_a_multilingual_model_are_in_the_target_language(
    service: TranslationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[str | None] = []

    def record_target(text: str, prefix: str, count: int, *, to: str | None = None, should_stop: object) -> list[Any]:
        targets.append(to)
        return []

    directions = tuple(Direction(source="en", target=tag, model="saved_model", tag=tag) for tag in ("de", "fr"))
    monkeypatch.setattr(service, "directions", directions)
    monkeypatch.setattr(service.translators["saved_model"], "suggest_continuations", record_target)
    assert service.suggest(SuggestRequest(text="one", prefix="", source="en", target="fr"), CallContext()) == []
    assert targets == ["fr"]


def test_attention_of_a_sentence(client: Client) -> None:
    page = client.get("/look/saved_model/")
    assert page.status == 200
    assert b"attent look" in page.body
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    for path in ("/v1/look", "/look/saved_model/api/look"):
        document = post(client, path, text="one two", masked_parts=["decoder.blocks.0.cross_attn:0"]).json
        assert document["format"] == "attent-trace"
    assert client.get("/look/nothing/").status == 404
    assert post(client, "/v1/look", text="one", beam_size=1000).status == 400


# --- the state of the server -----------------------------------------------------------------------------------------


def test_info_health_metrics_and_documentation(client: Client) -> None:
    info = client.get("/v1/info").json
    assert info["directions"] == [{"source": "en", "target": "de", "model": "saved_model", "tag": None}]
    assert info["languages"] == {"de": "German", "en": "English"}
    assert {".txt", ".po", ".md"} <= set(info["file_suffixes"])
    assert client.get("/health").json == {"status": "ok"}
    assert client.get("/ready").json == {"status": "ready"}
    metrics = client.get("/metrics").body.decode()
    assert 'attent_requests_total{path="/v1/info",status="200"}' in metrics
    assert "attent_pending_requests 0" in metrics
    description = client.get("/openapi.json")
    assert description.status == 200
    document = description.json
    assert {group for path in document["paths"].values() for each in path.values() for group in each["tags"]} == {
        "attent", "LibreTranslate", "DeepL", "Apertium", "OpenAI"
    }  # fmt: skip
    properties = document["components"]["schemas"]["TranslateBody"]["properties"]
    assert all(field.get("description") for field in properties.values())
    query = document["paths"]["/translate"]["get"]["parameters"]
    assert {each["name"]: each["required"] for each in query} == {"q": True, "langpair": True, "key": False}
    assert {"text", "beam_size", "length_penalty", "top_p", "glossary", "stream"} <= set(properties)
    assert "greedy search" in properties["beam_size"]["description"]
    page = client.get("/docs")
    assert b"/v1/translate" in page.body
    assert b"<script" not in page.body


VALID_REQUESTS: list[tuple[str, dict[str, Any] | None]] = [  # and the body of a POST
    *((path, None) for path in (
        "/languages", "/v2/languages?type=target", "/v2/glossary-language-pairs", "/v2/glossaries", "/listPairs",
        "/translate?langpair=en|de&q=one", "/v1/models", "/v1/info", "/health", "/ready",
    )),
    ("/translate", {"q": "one", "target": "de", "alternatives": 2}),
    ("/v2/glossaries", {"name": "a", "source_lang": "en", "target_lang": "de", "entries": "one\teins"}),
    ("/v2/translate", {"text": "one", "target_lang": "de"}), ("/v1/translate", {"text": "one"}),
    ("/v1/chat/completions", {"model": "auto", "messages": [{"role": "user", "content": "one"}]}),
    ("/v1/suggest", {"text": "one", "prefix": "e"}),
]  # fmt: skip


@pytest.mark.parametrize(("address", "body"), VALID_REQUESTS)
def test_responses_have_the_documented_fields(client: Client, address: str, body: dict[str, Any] | None) -> None:
    key = ("GET" if body is None else "POST", address.partition("?")[0])
    endpoint = next(each for each in list_endpoints() if (each.method, each.path) == key)
    reply = client.get(address) if body is None else client.post(body, path=address)
    assert reply.status == endpoint.status
    kinds = get_args(endpoint.response) or [endpoint.response]
    values = reply.json if isinstance(reply.json, list) else [reply.json]
    assert all(value.keys() <= kinds[0].model_fields.keys() for value in values)
    TypeAdapter(endpoint.response).validate_python(reply.json)


def test_only_a_likely_language_is_copied(service: TranslationService, monkeypatch: pytest.MonkeyPatch) -> None:
    for confidence, source in ((0.5, "de"), (0.49, "en")):
        monkeypatch.setattr(service, "detect", lambda texts, confidence=confidence: [(("de", confidence),)])
        direction, detected = service.choose_direction(AUTO, "de", None, "")
        assert (direction.source, detected) == (source, confidence if source == "de" else 0.0)


@pytest.mark.parametrize(
    ("body", "status", "noun"),
    [
        ({"text": 5}, 400, "`text`"),
        ({}, 400, "`text`"),
        ({"text": "a", "target": "xx"}, 400, "`target`"),
        ({"text": "a", "source": "xx"}, 400, "`source`"),
        ({"text": "a", "model": "nothing"}, 404, "`model`"),
        ({"text": "a", "beam_size": 0}, 400, "`beam_size`"),
        ({"text": "a", "beam_size": 65}, 400, "`beam_size`"),
        ({"text": "a", "n_best": 65, "sample": True}, 400, "`n_best`"),
        ({"text": "a", "temperature": -1}, 400, "`temperature`"),
        ({"text": "a", "max_length": 513}, 400, "`max_length`"),
        ({"text": "a", "min_length": 513}, 400, "`min_length`"),
        ({"text": "a", "min_length": 129, "beam_size": 32}, 400, "`min_length` must be at most 128"),
        ({"text": "a", "min_length": 65, "n_best": 64, "sample": True}, 400, "`min_length` must be at most 64"),
        ({"text": "a", "mbr_candidates": 65}, 400, "`mbr_candidates`"),
        ({"text": "a", "prefix": "x" * 10_001}, 400, "`prefix`"),
        ({"text": "a", "require": ["x" * 250, "y" * 251]}, 400, "`require`"),
        ({"text": "a", "ban": ["x" * 501]}, 400, "`ban`"),
        ({"text": "a", "glossary": {"a": "x" * 501}}, 400, "`glossary`"),
        ({"text": "one", "require": ["x" * 450], "source": "en"}, 400, "must fit into max_length"),
        ({"text": "a", "beam": 3}, 400, "did you mean `beam_size`?"),
        ({"text": "a\0b"}, 400, "NUL"),
        ({"text": "\ud800"}, 400, "surrogate"),
        ({"text": ["a"] * 129}, 413, "128 texts"),
        ({"text": "a" * 10_001}, 413, "10000 characters, but has 10001"),
        ({"text": "a" * 626, "beam_size": 64}, 413, "625 characters, but has 626; with fewer beams or samples than 64"),
        ({"text": "a" * 1_251, "n_best": 32, "sample": True}, 413, "1250 characters"),
        ({"text": "a" * 2_501, "mbr_candidates": 16}, 413, "2500 characters"),
        ({"text": "a", "require": ["x"], "ban": ["x"]}, 400, "banned"),
    ],
)
def test_wrong_requests_get_one_sentence(client: Client, body: dict[str, Any], status: int, noun: str) -> None:
    reply = client.post(body, path="/v1/translate")
    assert reply.status == status
    assert noun in reply.error
    assert len(reply.body) < 400


def test_fields_have_the_defaults_of_the_request() -> None:
    assert build_translate_request(TranslateBody(text="one")) == TranslateRequest(texts=("one",))


def test_limits_are_met_exactly(client: Client) -> None:
    assert post(client, text=["one"] * 128, source="en").status == 200
    assert post(client, text="one " + " " * 621, source="en", beam_size=64).status == 200
    assert post(client, text="one", source="en", beam_size=64, min_length=64).status == 200


def test_request_ids_are_echoed_or_made(client: Client) -> None:
    assert client.get("/health", headers={"X-Request-ID": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for given in ("", "a b", "x" * 65):
        made = client.get("/health", headers={"X-Request-ID": given}).headers["x-request-id"]
        assert len(made) == 32


def test_keys_guard_everything_but_health(service: TranslationService) -> None:
    with serve(LocalBackend(service), keys=frozenset({"secret"})) as client:
        assert client.get("/health").status == client.get("/ready").status == client.get("/").status == 200
        assert client.get("/look/saved_model/").status == 200
        for path in ("/look/saved_model/api/look", "/v1/look"):
            assert post(client, path, text="one").status == 403
        for path in ("/v1/info", "/metrics"):
            assert client.get(path).status == 403
            assert client.get(path, headers={"Authorization": "Bearer secret"}).status == 200
            assert client.get(f"{path}?api_key=secret").status == 200
        assert post(client, text="one", source="en").status == 403
        assert post(client, text="one", source="en", api_key="wrong").status == 403
        assert post(client, text="one", source="en", api_key="secret").status == 200


def test_wrong_keys_are_counted(service: TranslationService) -> None:
    options = {"keys": frozenset({"secret"}), "limits": Limits(requests_per_minute=3)}
    with serve(LocalBackend(service), **options) as client:
        assert [client.get("/v1/info").status for _ in range(5)] == [403, 403, 403, 429, 429]
        assert client.get("/v1/info", headers={"Authorization": "Bearer secret"}).status == 200


def test_headers_of_proxies_are_not_trusted_by_default(service: TranslationService) -> None:
    with serve(LocalBackend(service), limits=Limits(requests_per_minute=1)) as client:
        replies = [client.get("/v1/info", headers={"X-Forwarded-For": f"6.6.6.{number}"}) for number in range(2)]
        assert [reply.status for reply in replies] == [200, 429]


def test_the_last_proxy_names_the_client(service: TranslationService) -> None:
    with serve(LocalBackend(service), trust_proxy=True, limits=Limits(requests_per_minute=2)) as client:
        head = (
            b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 6.6.6.%d\r\nX-Forwarded-For: 9.9.9.9\r\n\r\n"
        )
        assert [client.raw(head % number).status for number in range(4)] == [200, 200, 429, 429]


def test_the_cache_counts_all_that_it_keeps() -> None:
    cache = TranslationCache(10_000)
    translation = TextTranslation(text="", score=0.0, source="en", target="de", model="", confidence=1.0)
    for number in range(100):
        request = TranslateRequest(texts=(str(number),), glossary=(("a", "x" * 3_000),))
        cache.add(0, request, translation)
        assert cache.get(0, request) is translation
    assert len(cache._entries) == 2


def test_the_cache_answers_repeated_texts(service: TranslationService) -> None:
    batches = service.translators["saved_model"].batcher.batch_sizes
    for characters, num_searches in ((4_000_000, 1), (0, 3)):
        with serve(LocalBackend(service), cached_characters=characters) as client:
            batches.clear()
            assert len({translate(client, "five six seven") for _ in range(3)}) == 1
            assert batches.total() == num_searches
            assert translate(client, "five six seven", beam_size=2) is not None


def test_other_sites_are_refused_unless_allowed(service: TranslationService) -> None:
    origin = {"Origin": "https://example.org"}
    with serve(LocalBackend(service)) as client:
        assert post(client, headers=origin, text="one", source="en").status == 403
        assert client.get("/health", headers={"Host": "example.org"}).status == 421
        foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}
        assert client.get("/v1/info", headers=foreign).status == client.get("/v1/info", headers=origin).status == 403
        assert client.get("/", headers=foreign | {"Sec-Fetch-Dest": "document"}).status == 200  # a link to the page
    with serve(LocalBackend(service), origins=("https://example.org",), hosts=("*",)) as client:
        reply = post(client, headers=origin, text="one", source="en")
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "https://example.org")
        assert post(client, headers={"Origin": "https://other.org"}, text="one", source="en").status == 403
        assert client.get("/health", headers={"Host": "example.org"}).status == 200


def test_overload_is_refused_at_once_and_others_are_served(service: TranslationService) -> None:
    limits = Limits(max_queued=7, response_timeout=30.0, requests_per_minute=0)
    with serve(LocalBackend(service), limits=limits, cached_characters=0, keys=frozenset({"a", "b"})) as client:
        texts = make_sentences(60, seed=3, longest=80)

        def flood(text: str) -> tuple[int, float]:
            begin = time.monotonic()
            reply = post(client, text=text, source="en", api_key="a", beam_size=16)
            assert reply.status == 200 or int(reply.headers["retry-after"]) >= 1
            return reply.status, time.monotonic() - begin

        with ThreadPoolExecutor(30) as threads:
            answers = threads.map(flood, texts)
            served = [post(client, text="one", source="en", api_key="b").status for _ in range(5)]
            statuses = [status for status, _ in answers]
    assert served == [200] * 5
    assert set(statuses) == {200, 429}


# --- worker processes ------------------------------------------------------------------------------------------------


CONFIG = ServiceConfig(folders=(MODEL,), languages=LANGUAGES)


@asynccontextmanager
async def start_pool(*configs: ServiceConfig) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(configs or (CONFIG,))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def translate_text(pool: ModelBackend, text: str) -> str:
    (translation,) = await pool.call("translate", TranslateRequest(texts=(text,), source="en"))
    assert isinstance(translation, TextTranslation)
    return translation.text


def get_process_ids(pool: WorkerPool) -> list[int]:
    return [worker.process.pid or 0 for worker in pool.usable_workers]


async def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_killed_worker_is_replaced_and_its_requests_are_answered(service: TranslationService) -> None:
    sentences = make_sentences(40, seed=4)
    request = TranslateRequest(texts=tuple(sentences), source="en")
    expected = [item.text for item in service.translate(request, CallContext())]

    async def run() -> None:
        async with start_pool(CONFIG, CONFIG) as pool:
            assert isinstance(pool.info, ServiceInfo)
            first, second = get_process_ids(pool)
            calls = [asyncio.create_task(translate_text(pool, text)) for text in sentences]
            await asyncio.sleep(0)
            os.kill(first, signal.SIGKILL)
            assert await asyncio.gather(*calls) == expected
            assert pool.is_ready
            await wait_for(lambda: len(get_process_ids(pool)) == 2)
            assert first not in get_process_ids(pool)
            assert second in get_process_ids(pool)
            assert await translate_text(pool, sentences[0]) == expected[0]

    asyncio.run(run())


@pytest.mark.slow
def test_requests_wait_for_a_worker_that_is_being_started() -> None:
    async def run() -> None:
        async with start_pool() as pool:
            (process_id,) = get_process_ids(pool)
            call = asyncio.create_task(translate_text(pool, "one"))
            await asyncio.sleep(0)
            os.kill(process_id, signal.SIGKILL)
            assert await call
            (process_id,) = get_process_ids(pool)
            os.kill(process_id, signal.SIGKILL)
            await wait_for(lambda: not pool.is_ready)
            assert await translate_text(pool, "one")

    asyncio.run(run())


def test_a_changed_model_is_loaded_without_losing_a_request(
    service: TranslationService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "WATCH_SECONDS", 0.05)
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    expected = service.translate(TranslateRequest(texts=("one two",), source="en"), CallContext())[0].text

    async def run() -> None:
        async with start_pool(ServiceConfig(folders=(folder,), languages=LANGUAGES)) as pool:
            (old,) = get_process_ids(pool)
            (folder / "manifest.json").write_text("{ damaged")
            await asyncio.sleep(1.0)
            assert await translate_text(pool, "one two") == expected
            shutil.copy(MODEL / "manifest.json", folder / "manifest.json")
            answers = []
            async with asyncio.timeout(60):
                while pool.version == 0:
                    answers.append(await translate_text(pool, "one two"))
                    await asyncio.sleep(0.01)
            assert set(answers) == {expected}
            assert old not in get_process_ids(pool)
            assert await translate_text(pool, "one two") == expected

    asyncio.run(run())


@pytest.mark.parametrize(
    ("damage", "problem"), [("missing", "does not exist|config.json"), ("weights", "checksum|damaged|hash|size")]
)
def test_a_model_that_cannot_be_loaded_is_an_error_at_the_start(tmp_path: Path, damage: str, problem: str) -> None:
    folder = tmp_path / "model"
    if damage == "weights":
        shutil.copytree(MODEL, folder)
        with (folder / "model.safetensors").open("r+b") as weights:
            weights.seek(-1, 2)
            weights.write(b"\xff")

    async def run() -> None:
        with pytest.raises(ServeError, match=problem):
            async with start_pool(ServiceConfig(folders=(folder,), languages=LANGUAGES)):
                pass

    asyncio.run(run())


def test_a_call_that_is_cancelled_stops_its_work(service: TranslationService) -> None:
    async def run() -> None:
        backend = LocalBackend(service)
        await backend.start()
        long = TranslateRequest(
            texts=tuple(make_sentences(100, seed=6)), source="en", search=SearchOptions(beam_size=32)
        )
        call = asyncio.create_task(backend.call("translate", long))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        begin = time.monotonic()
        await translate_text(backend, "one")
        assert time.monotonic() - begin < 10

    asyncio.run(run())


# --- the command -----------------------------------------------------------------------------------------------------


@contextmanager
def run_command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "attent", "serve", str(MODEL), "--src", "en", "--tgt", "de", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process, Client(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups that get SIGTERM")
def test_sigterm_lets_running_requests_finish() -> None:
    with run_command("--max-characters", "100000") as (process, client), ThreadPoolExecutor(9) as threads:
        assert client.get("/ready").status == 200
        texts = ["\n".join(make_sentences(30, seed=number, longest=60)) for number in range(8)]
        replies = [threads.submit(post, client, text=text, source="en", beam_size=32) for text in texts]
        assert wait_until(lambda: "attent_pending_requests 8" in client.get("/metrics").body.decode())
        os.killpg(process.pid, signal.SIGTERM)  # as systemd does
        assert [reply.result(60).status for reply in replies] == [200] * 8
        assert process.wait(20) == 0


def test_malformed_forms_are_not_logged() -> None:
    with run_command() as (process, client):
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        assert client.send("POST", "/translate", b"malformed", headers).status == 400
        process.terminate()
        assert process.stderr is not None
        assert len(process.stderr.read().splitlines()) == 2  # "loading ..." and "open it in a browser ..."


def test_a_server_for_other_machines_needs_a_key() -> None:
    with pytest.raises(ServeError, match="--api-key"):
        check_host("0.0.0.0", ServerOptions(), allow_public=False)
    check_host("0.0.0.0", ServerOptions(), allow_public=True)
    check_host("0.0.0.0", ServerOptions(keys=frozenset({"a"})), allow_public=False)
    check_host("127.0.0.1", ServerOptions(), allow_public=False)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_model_must_be_a_folder(tmp_path: Path, is_file: bool) -> None:
    (tmp_path / "model.txt").write_text("")
    model, problem = ("model.txt", "is a file") if is_file else ("nowhere", "does not exist")
    with pytest.raises(ServeError, match=f"{model}: must be a model folder, but {problem}"):
        serve_models(tmp_path / model)


def test_workers_share_cores_and_devices() -> None:
    from attent.decoding.options import DeviceOptions

    config = ServiceConfig(folders=(MODEL,), device=DeviceOptions(threads=2))
    configs = share_devices(config, 3, ["cuda:0", "cuda:1"])
    assert [config.device.device for config in configs] == ["cuda:0", "cuda:1", "cuda:0"]
    assert {config.device.threads for config in configs} == {2}
    (single,) = share_devices(ServiceConfig(folders=(MODEL,)), None, [])
    assert single.device.threads == os.cpu_count()
