"""The app: a page, and `POST /api/look` which asks the model. Built from plain parts, so that it needs no torch.

What a request may be is decided in `question.py`, how much of it and from whom in `limits.py`, whose turn it is in
`work.py`; what the model says, by the function `look` that the caller gives. `run.py` puts it on a port.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from attent.serving.request_queue import QueueFull, RequestQueue, StopCheck

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LookHandler = Callable[[LookRequest, StopCheck], Mapping[str, Any]]


class LookApp:
    """The whole as an ASGI app, and how to end it."""

    def __init__(self, guard: RequestGuard, queue: RequestQueue) -> None:
        self._guard = guard
        self._queue = queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    @property
    def num_pending(self) -> int:
        """How many requests are with the model or in line for it."""
        return self._queue.num_pending

    async def close(self, timeout: float) -> bool:
        """Answers those who wait that the server ends, stops the work; False if it goes on after so many seconds."""
        self._guard.close()
        return await self._queue.wait_until_idle(timeout)


def create_app(
    *,
    page: str,
    handler: LookHandler,
    csp: str,
    limits: Limits | None = None,
    hosts: Sequence[str] = LOCAL_HOSTS,
    model_info: Mapping[str, Any] | None = None,
) -> LookApp:
    """The app that shows `page` and answers questions by `look(question, stop)`.

    `look` runs in a thread, one call at a time. It returns a document; a ValueError of its is a sentence for the
    person who asked; it should end soon, no matter how, once `stop()` is True. `csp` is the page's
    Content-Security-Policy, `hosts` are the names the server may be called by, `about` is what /api/model tells.
    """
    limits = limits or Limits()
    desk = RequestQueue(limits.max_queued)
    return LookApp(
        RequestGuard(
            _build_routes(page, csp, model_info, _make_look_endpoint(handler, desk, limits)), limits=limits, hosts=hosts
        ),
        desk,
    )


def _make_look_endpoint(handler: LookHandler, queue: RequestQueue, limits: Limits) -> Callable[[Request], Any]:
    async def ask(request: Request) -> Response:
        _check_content_type(request.scope)
        question = parse_request(await request.body(), limits)
        try:
            return _make_json_response(await queue.submit(lambda stop: _run_handler(handler, question, stop)))
        except QueueFull:
            raise make_unavailable_error("the model is busy with others; ask again in a moment") from None

    return ask


def _run_handler(handler: LookHandler, request: LookRequest, should_stop: StopCheck) -> bytes:
    """In the model's thread; so is the writing of the JSON, which may be megabytes."""
    try:
        document = handler(request, should_stop)
    except ValueError as error:
        if should_stop():
            raise
        raise ApiError(422, str(error) or "the model cannot do this; ask for something else") from error
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:  # our mistake, not the asker's
        raise RuntimeError("the document cannot be written as JSON") from error


def _check_content_type(scope: Scope) -> None:
    kind, _, parameters = get_header(scope, "content-type").partition(";")
    if kind.strip().lower() != "application/json":
        named = ascii(kind.strip()[:80]) if kind.strip() else "absent"
        raise ApiError(415, f"`Content-Type` must be application/json, but is {named}; send JSON and say so")
    if "charset" in parameters.lower() and "utf-8" not in parameters.lower():
        raise ApiError(415, "the charset must be UTF-8, but is another; encode the request so")
    if get_header(scope, "content-encoding").lower() not in ("", "identity"):
        raise ApiError(415, "the request must not be compressed, but is; send it plain")


# Routes.


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
        Route("/", show, methods=["GET"]),
        Route("/health", _make_json_endpoint({"status": "ok"}), methods=["GET"]),
        Route("/api/look", endpoint, methods=["POST"]),
    ]
    if model_info is not None:
        routes.append(Route("/api/model", _make_json_endpoint(model_info), methods=["GET"]))
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _handle_http_exception,
            ApiError: _handle_api_error,
            Exception: _handle_exception,
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


async def _handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _make_json_response(error.to_json(), error.status, error.headers)


async def _handle_exception(request: Request, error: Exception) -> Response:
    return await _handle_api_error(
        request, make_internal_error()
    )  # Starlette raises the error once more, and the guard logs it


async def _handle_http_exception(request: Request, error: Any) -> Response:
    """Starlette's own errors: 404, and 405 with the methods that would do."""
    path = ascii(request.url.path[:80])
    sentences = {
        404: f"there is nothing at {path}; the page is at /",
        405: f"{path} does not take {request.method[:20]!a}; it takes {(error.headers or {}).get('Allow', '')}",
    }
    sentence = sentences.get(error.status_code, str(error.detail))
    return await _handle_api_error(request, ApiError(error.status_code, sentence, error.headers))
