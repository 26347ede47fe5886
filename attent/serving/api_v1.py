"""attent's own API: `POST /v1/translate` with all that the search can do, suggestions, attention, state of the server.

The search options are fields of the request, derived from their declaration in `attent.decoding.options`.
"""

from collections.abc import AsyncIterator
from dataclasses import asdict, fields
from typing import Any, get_type_hints

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import Field, create_model
from starlette.responses import Response

from attent.decoding.options import PhraseConstraints, SamplingOptions, SearchOptions
from attent.serving.endpoints import Call, Endpoint, StrictBody, SuggestRequest, make_event_response
from attent.serving.gateway import count_characters
from attent.serving.limits import ApiError
from attent.serving.messages import AUTO, TextTranslation, TranslateRequest


class TranslateFields(StrictBody):
    """A request to translate, without the search options."""

    text: str | list[str] = Field(description="one text or several; lines are translated one by one")
    source: str = Field(AUTO, description="language of the texts, or auto", max_length=40)
    target: str = Field("", description="may be left out if there is one for the source", max_length=40)
    model: str | None = Field(None, description="name of a model; by default the first for the languages")
    sample: bool = Field(False, description="sample instead of searching; implied by the options of sampling")
    prefix: str = Field("", description="start of the translation")
    require: list[str] = Field([], description="phrases that must occur", max_length=32)
    ban: list[str] = Field([], description="phrases that must not occur", max_length=32)
    glossary: dict[str, str] = Field(
        {}, description="terms and their translations, separated by |, of which one is required", max_length=500
    )
    alignment: bool = Field(False, description="also return the word alignment")
    mbr_candidates: int = Field(0, ge=0, description="choose among so many by minimum Bayes risk")
    split_sentences: bool = Field(False, description="split every line into sentences, not only long ones")
    stream: bool = Field(False, description="send each sentence as a server-sent event; for one text")


def derive_fields(options: type) -> dict[str, Any]:
    """Return a field of a request body for each declared option; None is its default."""
    hints = get_type_hints(options)
    return {
        field.name: (hints[field.name] | None, Field(None, description=field.metadata["option"].help))
        for field in fields(options)
        if "option" in field.metadata
    }


SEARCH_FIELDS, SAMPLING_FIELDS = derive_fields(SearchOptions), derive_fields(SamplingOptions)
TranslateBody: Any = create_model("TranslateBody", __base__=TranslateFields, **SEARCH_FIELDS, **SAMPLING_FIELDS)


def build_translate_request(body: Any) -> TranslateRequest:
    """Return the request of a body; raise 400 for options that do not fit together."""
    texts = (body.text,) if isinstance(body.text, str) else tuple(body.text)
    search_values, sampling_values = (
        body.model_dump(include=set(names), exclude_none=True) for names in (SEARCH_FIELDS, SAMPLING_FIELDS)
    )
    try:
        sampling = SamplingOptions(**sampling_values) if body.sample or sampling_values else None
        if sampling is None:
            search_values.setdefault("beam_size", max(SearchOptions.beam_size, search_values.get("n_best", 1)))
        search = SearchOptions(**search_values, sampling=sampling)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    same_names = {"target", "model", "alignment", "mbr_candidates", "split_sentences"}
    return TranslateRequest(
        texts=texts,
        source=body.source or AUTO,
        search=search,
        constraints=PhraseConstraints(prefix=body.prefix, require=tuple(body.require), ban=tuple(body.ban)),
        glossary=tuple(body.glossary.items()),
        **body.model_dump(include=same_names),
    )


async def translate(call: Call[Any]) -> Response | dict[str, Any]:
    request = build_translate_request(call.body)
    if call.body.stream:
        return await stream_translation(call, request)
    translations = await call.gateway.translate(request, call.client)
    return {"translations": [to_document(each) for each in translations]}


def to_document(translation: TextTranslation) -> dict[str, Any]:
    document = asdict(translation)
    if len(translation.n_best) <= 1:
        del document["n_best"]
    return {name: value for name, value in document.items() if value is not None}


async def stream_translation(call: Call[Any], request: TranslateRequest) -> Response:
    if len(request.texts) != 1 or request.search.n_best > 1 or request.alignment or request.mbr_candidates:
        raise ApiError(400, "`stream` is for one text without `n_best`, `alignment` and `mbr_candidates`")
    call.gateway.check_sizes(request)

    async def list_events() -> AsyncIterator[dict[str, Any]]:
        async for piece in call.gateway.stream("stream", request, call.client, characters=count_characters(request)):
            if piece:
                yield {"text": piece}
        yield {"done": True}

    return await make_event_response(list_events())


async def suggest(call: Call[SuggestRequest]) -> dict[str, Any]:
    body = call.body
    call.gateway.check_sizes(TranslateRequest(texts=(body.text + body.prefix,)))
    suggestions = await call.gateway.call("suggest", body, call.client, characters=len(body.text) * body.count + 1)
    return {"suggestions": [asdict(each) for each in suggestions]}


async def list_models(call: Call[None]) -> dict[str, Any]:
    info, limits = call.gateway.backend.info, call.gateway.limits
    return {
        "models": list(info.models),
        "directions": [asdict(direction) for direction in info.directions],
        "languages": info.language_names,
        "file_suffixes": list(info.file_suffixes),
        "limits": {"characters": limits.max_characters, "file_bytes": limits.max_file_bytes},
    }


async def show_health(call: Call[None]) -> dict[str, Any]:
    if not call.gateway.backend.is_alive:
        raise ApiError(503, "no worker can load the models; restart the server")
    return {"status": "ok"}


async def show_readiness(call: Call[None]) -> dict[str, Any]:
    if not call.gateway.backend.is_ready:
        raise ApiError(503, "no model is ready", {"retry-after": "2"})
    return {"status": "ready"}


async def show_metrics(call: Call[None]) -> Response:
    return Response(generate_latest(call.gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)


Documents = list[dict[str, Any]]
Status = create_model("Status", status=str)
ModelsResult: Any = create_model("ModelsResult", models=Documents, directions=Documents, languages=dict[str, str],
                                 file_suffixes=list[str], limits=dict[str, int])  # fmt: skip
ENDPOINTS = (
    Endpoint("POST", "/v1/translate", translate, "Translate texts, with all options of the search.",
             body=TranslateBody, response=create_model("TranslateResult", translations=Documents), can_stream=True),
    Endpoint("POST", "/v1/suggest", suggest, "Return translations that begin with a prefix and continue differently.",
             body=SuggestRequest, response=create_model("SuggestResult", suggestions=Documents)),
    Endpoint("GET", "/v1/info", list_models, "List models, language pairs and file formats.", response=ModelsResult),
    Endpoint("GET", "/health", show_health, "Tell whether the server is alive.", response=Status, is_public=True),
    Endpoint("GET", "/ready", show_readiness, "Tell whether a model is ready.", response=Status, is_public=True),
    Endpoint("GET", "/metrics", show_metrics, "Metrics for Prometheus.", media_type="text/plain"),
)  # fmt: skip
