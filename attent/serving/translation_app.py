"""The translation server as an ASGI app: endpoints, page, request ids, access log. It imports no torch."""

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from attent.serving import apertium, api_v1, deepl, libretranslate, openai
from attent.serving.app import HttpApp
from attent.serving.backend import ModelBackend
from attent.serving.endpoints import Call, Endpoint, LookRequest
from attent.serving.gateway import Gateway, ServerOptions
from attent.serving.limits import ApiError

PAGE_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DOCUMENTATION_CSP = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}


class TranslationApp(HttpApp):
    """The app of a translation server."""

    def __init__(self, backend: ModelBackend, options: ServerOptions = ServerOptions()) -> None:  # noqa: B008 - frozen
        endpoints = list_endpoints()
        routes = [Route(path, serve_page_file) for path in ("/", "/assets/{name}")] + build_documentation_routes(
            endpoints
        )
        super().__init__(Gateway(backend, options), endpoints, routes=routes, file_paths=["/translate_file"])


def list_endpoints() -> list[Endpoint]:
    apis = (libretranslate, deepl, openai, apertium, api_v1)
    return [*(endpoint for api in apis for endpoint in api.ENDPOINTS), *LOOK_ENDPOINTS]


def build_documentation_routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    document = build_openapi(endpoints, version="1")
    page = render_documentation(endpoints, document)

    async def show_document(request: Request) -> Response:
        return JSONResponse(document)

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": DOCUMENTATION_CSP})

    return [Route("/openapi.json", show_document), Route("/docs", show_page)]


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


async def look(call: Call[LookRequest]) -> Any:
    info, limits = call.gateway.backend.info, call.gateway.limits
    named = call.request.path_params.get("model") or call.body.model
    request = call.body.model_copy(update={"model": named or next((each.model for each in info.directions), "")})
    request.check_limits(limits)
    characters = 10 * len(request.text) + 1  # all weights of all layers take longer than a translation
    return await call.gateway.call("look", request, call.client, characters=characters)


LOOK_SUMMARY = "Translate a sentence and return the attention of every head."
LOOK_ENDPOINTS = (
    Endpoint("GET", "/look/{model}/", show_look_page, "The page that shows attention.", media_type="text/html",
             is_public=True),  # without attention, which its requests get
    Endpoint("POST", "/look/{model}/api/look", look, LOOK_SUMMARY, body=LookRequest, response=dict[str, Any]),
    Endpoint("POST", "/v1/look", look, LOOK_SUMMARY, body=LookRequest, response=dict[str, Any]),
)  # fmt: skip


ERROR_STATUSES = {
    400: "The request is not valid.",
    401: "The API key is missing or not valid (OpenAI's API).",
    403: "The API key is missing or not valid (other APIs), or the request comes from another site.",
    404: "Not found.",
    405: "The method is not allowed.",
    408: "The body did not arrive in time.",
    413: "The text or the file is too long.",
    415: "The content type is not supported.",
    421: "The host name is not served.",
    429: "The client sent too many requests; see the header Retry-After.",
    431: "The headers are too long.",
    503: "The server is busy or stopping, and has the header Retry-After; without it, the text takes too long.",
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.4 ui-monospace, monospace; } pre { overflow: auto; padding: .7rem; background: #8881; }
summary { cursor: pointer; padding: .3rem 0; } summary code { font-weight: 600; } h2 { margin-top: 2rem; }
@media (prefers-color-scheme: dark) { body { background: #16181d; color: #e6e6e6; } a { color: #8ab4f8; } }
"""


def build_openapi(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, Any]:
    kinds = {(i, side): getattr(each, side) for i, each in enumerate(endpoints) for side in ("body", "response")}
    adapters: Any = [(key, "validation", TypeAdapter(kind)) for key, kind in kinds.items() if kind is not None]
    schemas, definitions = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for index, endpoint in enumerate(endpoints):
        body, response = (schemas.get(((index, side), "validation"), {}) for side in ("body", "response"))
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = build_operation(endpoint, body, response)
    return {
        "openapi": "3.1.0",
        "info": {"title": "attent", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def build_operation(endpoint: Endpoint, body: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    path_names = [part.strip("{}") for part in endpoint.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path_names
    ]
    content = {} if endpoint.status == 204 else {endpoint.media_type: {"schema": response}}
    content |= {"text/event-stream": {}} if endpoint.can_stream else {}
    errors = {str(status): {"description": text} for status, text in ERROR_STATUSES.items()}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "operationId": f"{endpoint.method.lower()}{endpoint.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "parameters": parameters,
        "responses": {str(endpoint.status): {"description": "Success.", "content": content}, **errors},
    }
    if endpoint.body is not None and endpoint.method == "GET":
        schema = endpoint.body.model_json_schema()
        parameters += [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}
            for name, field in schema["properties"].items()
        ]
    elif endpoint.body is not None:
        contents = {kind: {"schema": body} for kind in endpoint.content_types}
        operation["requestBody"] = {"required": True, "content": contents}
    return operation


def render_documentation(endpoints: Sequence[Endpoint], document: dict[str, Any]) -> str:
    """Return a page that lists the endpoints by API; it has no scripts and loads nothing."""
    sections: dict[str, list[str]] = {}
    for endpoint in endpoints:
        parts = [f"<p>{html.escape(endpoint.summary)}</p>"]
        if endpoint.body is not None:
            schema = document["components"]["schemas"][endpoint.body.__name__]
            text = json.dumps(schema.get("properties", {}), indent=2, ensure_ascii=False)
            parts.append(f"<p>{'Query' if endpoint.method == 'GET' else 'Body'}</p><pre>{html.escape(text)}</pre>")
        title = f"<summary><code>{endpoint.method} {html.escape(endpoint.path)}</code></summary>"
        sections.setdefault(endpoint.tag, []).append(f"<details>{title}{''.join(parts)}</details>")
    body = "".join(f"<h2>{html.escape(tag)}</h2>{''.join(items)}" for tag, items in sections.items())
    intro = '<p>The machine-readable description is <a href="openapi.json">openapi.json</a>.</p>'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>attent API</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>attent API</h1>{intro}{body}</body></html>'
