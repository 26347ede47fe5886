"""The API of LibreTranslate 1.9: texts, detection of languages, files and suggestions."""

import asyncio
import json
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from io import FileIO
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import Field, create_model
from starlette.responses import Response

from attent.decoding.options import SearchOptions
from attent.serving.endpoints import BODY_TYPES, EVENT_TYPE, Body, Call, Endpoint, FileField, make_event_response
from attent.serving.limits import ApiError, make_unavailable_error
from attent.serving.messages import AUTO, FileRequest, TranslateRequest

MAX_SUGGESTIONS_BYTES = 64 * 2**20  # of the file

log = logging.getLogger("attent.serving")
_suggestions_lock = threading.Lock()


class KeyedBody(Body):
    api_key: str | None = Field(None, description="needed if the server has keys")


class LibreTranslateBody(KeyedBody):
    q: str | list[str] = Field(description="one text or several; lines are translated one by one")
    source: str = Field(AUTO, description="language of the texts, or auto", max_length=40)
    target: str = Field(max_length=40)
    format: Literal["text", "html"] = Field("text", description="html keeps the tags; alternatives are of text only")
    alternatives: int = Field(0, ge=0, le=20, description="how many other translations to return")


DetectedLanguage: Any = create_model("DetectedLanguage", confidence=Annotated[float, Field(ge=0, le=100)], language=str)
SupportedLanguage: Any = create_model("SupportedLanguage", code=str, name=str, targets=list[str])
LibreTranslateResult: Any = create_model(  # the values are lists if `q` is a list
    "LibreTranslateResult",
    translatedText=str | list[str],
    alternatives=(list[str] | list[list[str]], Field([], description="if requested")),
    detectedLanguage=(DetectedLanguage | list[DetectedLanguage] | None, Field(None, description="if source is auto")),
)


async def translate(call: Call[LibreTranslateBody]) -> Any:
    body, n_best = call.body, 1 + call.body.alternatives
    search = SearchOptions(beam_size=max(SearchOptions.beam_size, n_best), n_best=n_best)
    is_html = body.format == "html"
    texts = (body.q if isinstance(body.q, list) else [body.q]) if is_html else split_texts(body.q)
    request = TranslateRequest(
        texts=tuple(texts), source=body.source or AUTO, target=body.target, search=search, is_html=is_html
    )
    translations = await call.gateway.translate(request, call.client)
    result: dict[str, list[Any]] = {"translatedText": [each.text for each in translations]}
    if body.alternatives:
        ranked = [dict.fromkeys(each.text for each in (best, *best.n_best)) for best in translations]
        result["alternatives"] = [list(texts)[1:] for texts in ranked]
    if request.source == AUTO:
        result["detectedLanguage"] = [describe_language(each.source, each.detected or 0.0) for each in translations]
    return {name: values[0] for name, values in result.items()} if isinstance(body.q, str) else result


def split_texts(value: str | list[str]) -> tuple[str, ...]:
    """Return the texts of a field; forms end lines with CR LF."""
    return tuple(text.replace("\r\n", "\n") for text in ([value] if isinstance(value, str) else value))


def describe_language(tag: str, confidence: float) -> dict[str, Any]:
    return {"confidence": round(100 * confidence, 1), "language": tag}


class DetectBody(KeyedBody):
    q: str | list[str]


async def detect(call: Call[DetectBody]) -> Any:
    texts = split_texts(call.body.q)
    call.gateway.check_sizes(TranslateRequest(texts=texts))
    characters = sum(map(len, texts)) // 100 + 1  # detection is much faster than translation
    detections = await call.gateway.call("detect", texts, call.client, characters=characters)
    results = [[describe_language(*pair) for pair in pairs] for pairs in detections]
    return results[0] if isinstance(call.body.q, str) else results


async def list_languages(call: Call[KeyedBody]) -> Any:
    info = call.gateway.backend.info
    pairs = info.language_pairs
    return [
        {"code": tag, "name": name, "targets": [target for source, target in pairs if source == tag]}
        for tag, name in info.language_names.items()
    ]


async def show_settings(call: Call[None]) -> Any:
    gateway, info = call.gateway, call.gateway.backend.info
    target = next((each.target for each in info.directions), "")
    return {
        "apiKeys": gateway.needs_key,
        "keyRequired": gateway.needs_key,
        "charLimit": gateway.limits.max_characters,
        "frontendTimeout": 500,  # milliseconds after a key press, as on LibreTranslate's page
        "suggestions": gateway.options.suggestions is not None,
        "filesTranslation": bool(info.directions),
        "supportedFilesFormat": list(info.file_suffixes),
        "language": {
            "source": {"code": AUTO, "name": "Auto Detect"},
            "target": {"code": target, "name": info.language_names.get(target, "")},
        },
    }


class TranslateFileBody(KeyedBody):
    file: FileField
    source: str = Field(AUTO, max_length=40)
    target: str = Field(max_length=40)


async def translate_file(call: Call[TranslateFileBody]) -> Any:
    """Return the address of the translated file; to a client that accepts events, also the progress."""
    body, gateway = call.body, call.gateway
    path, content = PurePath(body.file.name.replace("\\", "/")), body.file.content
    if len(content) > gateway.limits.max_file_bytes:
        raise ApiError(413, f"the file must have at most {gateway.limits.max_file_bytes} bytes")
    request = FileRequest(name=path.name, content=content, source=body.source or AUTO, target=body.target)

    async def list_events() -> AsyncIterator[dict[str, Any]]:
        async for item in gateway.translate_file(request, call.client):
            if isinstance(item, float):
                yield {"progress": item}
                continue
            file = (f"{path.stem}_{body.target}{path.suffix}", item)
            name = gateway.files.add("", file, len(item), path.suffix)  # whoever knows the name may download it
            yield {"translatedFileUrl": gateway.build_url(call.request, f"/download_file/{name}")}

    if EVENT_TYPE in call.request.headers.get("accept", ""):
        return await make_event_response(list_events())
    return [event async for event in list_events()][-1]


async def download_file(call: Call[None]) -> Response:
    item = call.gateway.files.get("", call.request.path_params["name"])
    if item is None:
        raise ApiError(404, "this file does not exist, or is no longer stored; translate it again")
    file_name, content = item
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(file_name, safe='')}"}
    return Response(content, headers=headers, media_type="application/octet-stream")


class SuggestionBody(KeyedBody):
    q: str = Field(min_length=1, max_length=10_000, description="the text")
    s: str = Field(min_length=1, max_length=10_000, description="the suggested translation")
    source: str = Field(min_length=1, max_length=40)
    target: str = Field(min_length=1, max_length=40)


async def store_suggestion(call: Call[SuggestionBody]) -> Any:
    if call.gateway.options.suggestions is None:
        raise ApiError(403, "suggestions are not stored by this server")
    data = call.body.model_dump(exclude={"api_key"}) | {"time": datetime.now(UTC).isoformat(timespec="seconds")}
    line = json.dumps(data, ensure_ascii=False).encode() + b"\n"
    await asyncio.to_thread(append_line, call.gateway.options.suggestions.expanduser(), line)
    return {"success": True}


def append_line(path: Path, line: bytes) -> None:
    """Append a line; if only a part can be written, the file stays as it was."""
    try:
        with _suggestions_lock, FileIO(path, "a") as file:
            size = os.fstat(file.fileno()).st_size
            if size + len(line) > MAX_SUGGESTIONS_BYTES:
                raise ApiError(403, "the server has stored as many suggestions as it can")
            try:
                if file.write(line) != len(line):
                    raise OSError("only part of the line was written; is the disk full?")
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise
    except OSError as error:
        log.error("%s: cannot be written (%s)", path, error.strerror or error)
        raise make_unavailable_error("the suggestion cannot be stored") from None


endpoint: Any = partial(Endpoint, tag="LibreTranslate", content_types=BODY_TYPES)
ENDPOINTS: tuple[Endpoint, ...] = (
    endpoint("POST", "/translate", translate, "Translate texts.", LibreTranslateBody, LibreTranslateResult),
    endpoint("GET", "/languages", list_languages, "List languages and those they are translated into.", KeyedBody,
             list[SupportedLanguage], is_public=True),
    endpoint("POST", "/detect", detect, "Detect the languages of texts.", DetectBody,
             list[DetectedLanguage] | list[list[DetectedLanguage]]),
    endpoint("POST", "/translate_file", translate_file, "Translate a file.", TranslateFileBody,
             create_model("TranslatedFile", translatedFileUrl=str), content_types=BODY_TYPES[-1:],
             can_stream=True),
    endpoint("GET", "/download_file/{name}", download_file, "Download a translated file.", is_public=True,
             media_type="application/octet-stream"),
    endpoint("GET", "/frontend/settings", show_settings, "Limits and defaults.", None, dict[str, Any], is_public=True),
    endpoint("POST", "/suggest", store_suggestion, "Suggest a better translation.", SuggestionBody, dict[str, bool]),
)  # fmt: skip
