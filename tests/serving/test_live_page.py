"""The live page with a model: its limits, and cancellation that reaches every stage of an inspection."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import SearchOptions
from attent.inspection.ablate import ModelPart
from attent.inspection.inspectors.base import InspectionRequest, Inspector
from attent.inspection.inspectors.seq2seq import TranslationInspector
from attent.inspection.inspectors.text import CausalLMInspector, EncoderInspector
from attent.serving.limits import Limits
from attent.serving.live_page import create_live_app
from tests.inspection import models
from tests.inspection.toy_translator import TEXT, translator
from tests.serving.toy import Client, post_bytes, serve_in_thread, wait_until

pytest.importorskip("starlette", reason="needs Starlette: pip install 'attent[serve]'")
pytest.importorskip("granian", reason="needs granian: pip install 'attent[serve]'")

INSPECTORS: dict[str, Callable[[], Inspector[Any]]] = {
    "translator": lambda: TranslationInspector(translator()),
    "causal": lambda: CausalLMInspector(models.causal(), models.tokenizer().source),
    "encoder": lambda: EncoderInspector(models.encoder(), models.tokenizer()),
}


@pytest.mark.parametrize("name", INSPECTORS)
def test_texts_are_limited_by_tokens(name: str) -> None:
    inspector = INSPECTORS[name]()
    document = inspector.inspect(InspectionRequest(text=TEXT))
    count = len(next(iter(document["sides"].values()))["tokens"])
    for limit, status in ((count, 200), (count - 1, 413)):
        with serve_in_thread(create_live_app(inspector, limits=Limits(max_tokens=limit))) as url:
            reply = Client(url).post({"text": TEXT})
            assert reply.status == status
            if status == 413:
                assert f"must have at most {limit} tokens for this page, but has {count}; shorten it" in reply.error


def test_wide_beams_allow_fewer_tokens() -> None:
    inspector = INSPECTORS["translator"]()
    count = len(inspector.inspect(InspectionRequest(text=TEXT))["sides"]["source"]["tokens"])
    with serve_in_thread(create_live_app(inspector, limits=Limits(max_search_tokens=3 * count))) as url:
        assert Client(url).post({"text": TEXT, "beam_size": 3}).status == 200
        reply = Client(url).post({"text": TEXT, "beam_size": 4})
        assert (reply.status, reply.error.endswith("shorten it, or lower `beam_size`")) == (413, True)


def test_requests_reach_the_inspector(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector = INSPECTORS["translator"]()
    requests: list[InspectionRequest] = []

    def keep_request(request: InspectionRequest, should_stop: Callable[[], bool]) -> dict[str, Any]:
        requests.append(request)
        return {"title": request.text}

    monkeypatch.setattr(inspector, "inspect", keep_request)
    part = "decoder.blocks.1.cross_attn:1"
    with serve_in_thread(create_live_app(inspector, to="de", beam_size=3)) as url:
        client = Client(url)
        assert client.post({"text": "a"}).json == {"title": "a", "live": True}
        client.post({"text": "b", "to": "pt-BR", "beam_size": 9, "prefix": [5], "masked_parts": [part]})
        reply = client.post({"text": "c", "masked_parts": ["decoder.blocks.9"]})
        assert (reply.status, "has no part 'decoder.blocks.9'" in reply.error) == (400, True)
        assert client.post({"text": "d", "beam_size": 65}).status == 400
    first = InspectionRequest(text="a", to="de", search=SearchOptions(beam_size=3), max_tokens=512)
    assert requests == [
        first,
        replace(
            first,
            text="b",
            to="pt-BR",
            search=SearchOptions(beam_size=9),
            prefix=(5,),
            masked_parts=(ModelPart.parse(part),),
            max_tokens=455,
        ),
    ]


def test_the_page_has_examples_and_languages() -> None:
    inspector = INSPECTORS["translator"]()
    for to, languages in ((None, '["de","pt-BR"]'), ("de", "[]")):
        with serve_in_thread(create_live_app(inspector, to=to, examples=["A dog."])) as url:
            page = Client(url).get("/").body.decode().replace(", ", ",").replace(": ", ":")
            assert '"examples":["A dog."]' in page
            assert f'"languages":{languages}' in page


def test_long_inspections_have_five_minutes() -> None:
    parameters = inspect.signature(create_live_app).parameters
    assert parameters["limits"].default == Limits(response_timeout=300.0)
    assert parameters["beam_size"].default == 4


@pytest.mark.parametrize("name", INSPECTORS)
def test_cancellation_reaches_every_stage(name: str) -> None:
    """An inspection polls `should_stop` at each step of its search and at each layer, and ends at the first True."""
    inspector, polls = INSPECTORS[name](), 0

    def count_polls() -> bool:
        nonlocal polls
        polls += 1
        return False

    inspector.inspect(InspectionRequest(text=TEXT), should_stop=count_polls)
    assert polls >= (3 if name == "encoder" else 4)  # the encoder has no search: two layers, and the end
    for last in {1, 2, polls // 2, polls - 1, polls}:
        calls: list[int] = []

        def stop_at_last(calls: list[int] = calls, last: int = last) -> bool:
            calls.append(len(calls))
            return len(calls) == last

        with pytest.raises(SearchCancelled):
            inspector.inspect(InspectionRequest(text=TEXT), should_stop=stop_at_last)
        assert len(calls) == last


def test_client_that_leaves_frees_the_model_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector, searching, ended = INSPECTORS["translator"](), threading.Event(), threading.Event()
    inspect_once = inspector.inspect

    def inspect_for_ever(request: InspectionRequest, should_stop: Callable[[], bool]) -> dict[str, Any]:
        """Search the sentence again and again until one search is cancelled."""
        try:
            while request.text == "for ever":
                inspect_once(InspectionRequest(text=TEXT), should_stop=should_stop)
                searching.set()
        finally:
            ended.set()
        return inspect_once(request, should_stop=should_stop)

    monkeypatch.setattr(inspector, "inspect", inspect_for_ever)
    app = create_live_app(inspector)
    with serve_in_thread(app) as url:
        with Client(url).open(post_bytes({"text": "for ever"})):
            assert searching.wait(20)
        assert wait_until(ended.is_set)
        started = time.monotonic()
        assert Client(url).post({"text": TEXT}).status == 200
        assert wait_until(lambda: app.gateway.admission.num_pending == 0)
        assert time.monotonic() - started < 10
