"""The ASGI app: a page and `POST /api/look`. Needs no torch: the model is behind a handler function.

Requests are parsed in `request`, limited in `limits` and queued in `request_queue`; `server` runs the app.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from attent.decoding.options import StopCheck
from attent.serving.limits import (
    LOCAL_HOSTS,
    ApiError,
    AsgiApp,
    Limits,
    Receive,
    RequestGuard,
    Scope,
    Send,
    get_header,
    make_internal_error,
    make_unavailable_error,
)
from attent.serving.request import LookRequest, parse_request
from attent.serving.request_queue import QueueFull, RequestQueue

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LookHandler = Callable[[LookRequest, StopCheck], Mapping[str, Any]]


@dataclass(frozen=True)
class LookApp:
    """The guarded ASGI app, which can be closed."""

    _guard: RequestGuard
    _queue: RequestQueue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    @property
    def num_pending(self) -> int:
        """Number of running and queued requests."""
        return self._queue.num_pending

    async def start(self) -> None:
        """The model is loaded already."""

    async def drain(self) -> None:
        """The page needs no time to finish."""

    async def close(self, timeout: float) -> bool:
        """Cancel all requests; return whether the model is idle within the timeout."""
        self._guard.close()
        return await self._queue.close(timeout)


def create_app(
    *,
    page: str,
    handler: LookHandler,
    csp: str,
    limits: Limits | None = None,
    hosts: Sequence[str] = LOCAL_HOSTS,
    model_info: Mapping[str, Any] | None = None,
) -> LookApp:
    """Create the app that serves `page` and answers requests with `handler(request, should_stop)`.

    `handler` runs in a thread, one call at a time, and returns a document. Its ValueErrors are sent to the client. It
    should return or raise soon after `should_stop()` becomes True. `csp` is the page's Content-Security-Policy, `hosts`
    are the accepted host names, `model_info` is the response of /api/model.
    """
    limits = limits or Limits()
    queue = RequestQueue(limits.max_queued)

    async def ask(request: Request) -> Response:
        _check_content_type(request.scope)
        look_request = parse_request(await request.body(), limits)
        try:
            body = await queue.submit(partial(_run_handler, handler, look_request))
        except QueueFull:
            raise make_unavailable_error("the model is busy; retry in a moment") from None
        return _make_json_response(body)

    routes = _build_routes(page, csp, model_info, ask)
    return LookApp(RequestGuard(routes, limits=limits, hosts=hosts), queue)


def _run_handler(handler: LookHandler, request: LookRequest, should_stop: StopCheck) -> bytes:
    """Run in the model's thread, including the JSON encoding, which may be megabytes."""
    try:
        document = handler(request, should_stop)
    except ApiError:
        raise
    except ValueError as error:
        if should_stop():
            raise
        raise ApiError(422, str(error) or "the model cannot process this request") from error
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:  # a bug, not a bad request
        raise RuntimeError("the document cannot be written as JSON") from error


def _check_content_type(scope: Scope) -> None:
    kind, _, parameters = get_header(scope, "content-type").partition(";")
    if kind.strip().lower() != "application/json":
        content_type = ascii(kind.strip()[:80]) if kind.strip() else "absent"
        raise ApiError(415, f"`Content-Type` must be application/json, but is {content_type}; send JSON")
    if "charset" in parameters.lower() and "utf-8" not in parameters.lower():
        raise ApiError(415, "the charset must be UTF-8")
    if get_header(scope, "content-encoding").lower() not in ("", "identity"):
        raise ApiError(415, "the request must not be compressed")


def _build_routes(
    page: str, csp: str, model_info: Mapping[str, Any] | None, endpoint: Callable[[Request], Any]
) -> AsgiApp:
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.responses import HTMLResponse
        from starlette.routing import Route
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the live page needs Starlette; run pip install 'attent[serve]'") from error

    html = page.encode()

    async def show(request: Request) -> Response:
        return HTMLResponse(html, headers={"content-security-policy": csp})

    routes = [
        Route("/", show),
        Route("/health", _make_json_endpoint({"status": "ok"})),
        Route("/api/look", endpoint, methods=["POST"]),
    ]
    if model_info is not None:
        routes.append(Route("/api/model", _make_json_endpoint(model_info)))
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: handle_http_exception,
            ApiError: handle_api_error,
            Exception: handle_api_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def _make_json_endpoint(payload: Mapping[str, Any]) -> Callable[[Request], Any]:
    body = json.dumps(payload, allow_nan=False).encode()

    async def tell(request: Request) -> Response:
        return _make_json_response(body)

    return tell


def _make_json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(body, status, headers=dict(headers or {}), media_type="application/json")


async def handle_api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        error = make_internal_error()  # Starlette re-raises the original, and the guard logs it
    return _make_json_response(error.to_json(), error.status, error.headers)


async def handle_http_exception(request: Request, error: Any) -> Response:
    """Handle Starlette's 404, and 405 with the allowed methods."""
    path = ascii(request.url.path[:80])
    messages = {
        404: f"{path} does not exist; the page is at /",
        405: f"{path} does not accept {request.method[:20]!a}; it accepts {(error.headers or {}).get('Allow', '')}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return await handle_api_error(request, ApiError(error.status_code, message, error.headers))
