"""The translation server as an ASGI app: endpoints, page, request ids, access log. It imports no torch."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from attent.serving import apertium, api_v1, deepl, libretranslate, openai
from attent.serving.app import HttpApp
from attent.serving.backend import ModelBackend
from attent.serving.endpoints import Call, Endpoint, LookRequest
from attent.serving.gateway import Gateway, ServerOptions
from attent.serving.limits import ApiError
from attent.serving.openapi import build_openapi, render_documentation

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
