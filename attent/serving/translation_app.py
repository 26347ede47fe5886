"""The translation server as an ASGI app: endpoints, page, request ids, access log. It imports no torch."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import attent
from attent.serving import apertium, api_v1, deepl, libretranslate, openai
from attent.serving.app import handle_api_error, handle_http_exception
from attent.serving.backend import Backend
from attent.serving.endpoints import Body, Call, Endpoint, build_routes, make_json_response
from attent.serving.gateway import CACHED_CHARACTERS, Gateway
from attent.serving.limits import LOCAL_HOSTS, ApiError, Limits, Message, Receive, RequestGuard, Scope, Send
from attent.serving.messages import ModelLookRequest
from attent.serving.openapi import build_openapi, render_documentation
from attent.serving.request import MAX_NAME_LENGTH, LookRequest, check_request

DRAIN_TIMEOUT = 30.0  # seconds that running requests get when the server stops
PAGE_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DOCUMENTATION_CSP = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger("attent.serving")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a translation server treats its clients."""

    limits: Limits = Limits(max_queued=256, response_timeout=30.0)  # noqa: RUF009 - frozen
    keys: frozenset[str] = frozenset()  # API keys; none: everybody may use it
    hosts: tuple[str, ...] = LOCAL_HOSTS  # accepted host names; "*": any
    origins: tuple[str, ...] = ()  # other websites whose scripts may use it; "*": any
    cached_characters: int = CACHED_CHARACTERS
    trust_proxy: bool = False
    suggestions: Path | None = None  # file that gets the translations that users suggest
    drain_timeout: float = DRAIN_TIMEOUT


class TranslationApp:
    """The guarded ASGI app of a backend."""

    def __init__(self, backend: Backend, options: ServerOptions = ServerOptions()) -> None:  # noqa: B008 - frozen
        self.options = options
        self.backend = backend
        self.gateway = Gateway(
            backend,
            limits=options.limits,
            keys=options.keys,
            cached_characters=options.cached_characters,
            trust_proxy=options.trust_proxy,
            suggestions=options.suggestions,
        )
        endpoints = list_endpoints(options)
        app: Any = build_starlette(endpoints, self.gateway)
        self._paths = {endpoint.path for endpoint in endpoints}
        if options.origins:
            app = CORSMiddleware(app, allow_origins=options.origins, allow_methods=["*"], allow_headers=["*"])
        file_paths = {"/translate_file": options.limits.max_file_bytes, "/v2/document": options.limits.max_file_bytes}
        self._guard = RequestGuard(
            app, limits=options.limits, hosts=options.hosts, origins=options.origins, body_limits=file_paths
        )
        self._num_running = 0
        self._draining = False

    async def start(self) -> None:
        await self.backend.start()

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones."""
        self._draining = True
        end = time.monotonic() + self.options.drain_timeout
        while self._num_running and time.monotonic() < end:
            await asyncio.sleep(0.02)

    async def close(self, timeout: float) -> bool:
        self._guard.close()
        await self.backend.close()
        return not self._num_running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._guard(scope, receive, send)
            return
        record = RequestRecord(scope, send)
        self._num_running += 1
        try:
            if self._draining and scope["path"] != "/health":
                await record.refuse("the server is stopping; retry later")
            else:
                await self._guard(scope, receive, record.send)
        finally:
            self._num_running -= 1
            path = scope["path"] if scope["path"] in self._paths else "other"
            seconds = time.monotonic() - record.began
            self.gateway.metrics.requests.labels(path, str(record.status)).inc()
            self.gateway.metrics.seconds.labels(path).observe(seconds)
            log.info("%s %s %s %.0f ms %s", scope["method"], path, record.status, 1000 * seconds, record.request_id)


class RequestRecord:
    """Notes the status of a response, and adds the request id to its headers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.began = time.monotonic()
        self.status = 499  # the client left before the response
        given = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"x-request-id"]
        self.request_id = given[0] if given and REQUEST_ID.fullmatch(given[0]) else uuid.uuid4().hex
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    async def refuse(self, problem: str) -> None:
        error = ApiError(503, problem)
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"2"), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": error.to_json()})


def list_endpoints(options: ServerOptions) -> list[Endpoint]:
    apis = (libretranslate, deepl, openai, apertium, api_v1)
    return [*(endpoint for api in apis for endpoint in api.ENDPOINTS), *LOOK_ENDPOINTS]


def build_starlette(endpoints: Sequence[Endpoint], gateway: Gateway) -> Starlette:
    document = build_openapi(endpoints, version=attent.__version__)
    documentation = render_documentation(endpoints, document)

    async def show_document(request: Request) -> Response:
        return make_json_response(document)

    async def show_documentation(request: Request) -> Response:
        return HTMLResponse(documentation, headers={"content-security-policy": DOCUMENTATION_CSP})

    app = Starlette(
        routes=[
            *build_routes(endpoints, gateway),
            Route("/openapi.json", show_document),
            Route("/docs", show_documentation),
            Route("/", serve_page_file),
            Route("/assets/{name}", serve_page_file),
        ],
        exception_handlers={
            HTTPException: handle_http_exception,
            ApiError: handle_api_error,
            Exception: handle_api_error,
        },
    )
    app.router.redirect_slashes = False
    return app


async def serve_page_file(request: Request) -> Response:
    """Return a file of the page, which is plain ES modules and style sheets."""
    name = request.path_params.get("name", "index.html")
    path = files("attent.serving") / "page" / name
    suffix = Path(name).suffix
    if "/" in name or suffix not in MEDIA_TYPES or not path.is_file():
        raise ApiError(404, "this file does not exist; the page is at /")
    headers = {"content-security-policy": PAGE_CSP, "cache-control": "no-cache"}
    return Response(path.read_bytes(), headers=headers, media_type=MEDIA_TYPES[suffix])


# --- attention -------------------------------------------------------------------------------------------------------


async def show_look_page(call: Call[None]) -> Response:
    model = call.request.path_params["model"]
    page, csp = await call.gateway.call("look_page", model, call.client, characters=1)
    return HTMLResponse(page, headers={"content-security-policy": csp})


class LookBody(Body):
    text: str
    model: str | None = Field(None, description="by default the first translator")
    to: str | None = Field(None, max_length=MAX_NAME_LENGTH)
    beam_size: int | None = None
    prefix: list[int] = Field([], description="forced first tokens of the translation")
    masked_parts: list[str] = Field([])


async def look(call: Call[LookBody]) -> Response:
    body, info = call.body, call.gateway.backend.info
    model = call.request.path_params.get("model") or body.model or next((each.model for each in info.directions), "")
    request = LookRequest(
        text=body.text,
        to=body.to,
        beam_size=body.beam_size,
        prefix=tuple(body.prefix),
        masked_parts=tuple(body.masked_parts),
    )
    check_request(request, call.gateway.limits)
    document = await call.gateway.call(
        "look", ModelLookRequest(model=model, request=request), call.client, characters=10 * len(body.text) + 1
    )
    return make_json_response(document)


LOOK_SUMMARY = "Translate a sentence and return the attention of every head."
LOOK_ENDPOINTS = (
    Endpoint("GET", "/look/{model}/", show_look_page, "The page that shows attention.", media_type="text/html"),
    Endpoint("POST", "/look/{model}/api/look", look, LOOK_SUMMARY, body=LookBody, response=dict[str, Any]),
    Endpoint("POST", "/v1/look", look, LOOK_SUMMARY, body=LookBody, response=dict[str, Any]),
)
