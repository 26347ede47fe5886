"""ASGI apps: endpoints behind a guard, with request ids, metrics and an access log; and the app of the live page.

It imports no torch: models are behind a backend. Requests are validated in `endpoints` and `request`, limited in
`limits` and `admission`; `server` runs the app.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from attent.decoding.options import StopCheck
from attent.serving.backend import LocalBackend
from attent.serving.endpoints import Call, Endpoint, build_routes, make_json_response
from attent.serving.gateway import Gateway
from attent.serving.limits import (
    LOCAL_HOSTS,
    ApiError,
    AsgiApp,
    Limits,
    Message,
    Receive,
    RequestGuard,
    Scope,
    Send,
    make_internal_error,
)
from attent.serving.request import LookRequest

LookHandler = Callable[[LookRequest, StopCheck], Mapping[str, Any]]

DRAIN_TIMEOUT = 30.0  # seconds that running requests get when the server stops
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger("attent.serving")


class HttpApp:
    """A guarded ASGI app on a backend."""

    def __init__(
        self,
        gateway: Gateway,
        endpoints: Sequence[Endpoint],
        *,
        routes: Sequence[Route] = (),
        hosts: Sequence[str] = LOCAL_HOSTS,
        origins: Sequence[str] = (),
        file_paths: Sequence[str] = (),
        drain_timeout: float = DRAIN_TIMEOUT,
    ) -> None:
        """`routes` are further ones, without a key; the other arguments are those of `RequestGuard`."""
        self.gateway = gateway
        app: AsgiApp = build_starlette([*build_routes(endpoints, gateway), *routes])
        if origins:
            app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        self._guard = RequestGuard(app, limits=gateway.limits, hosts=hosts, origins=origins, file_paths=file_paths)
        self._paths = {endpoint.path for endpoint in endpoints}
        self._drain_timeout = drain_timeout
        self._num_running = 0
        self._draining = False

    @property
    def num_pending(self) -> int:
        """Number of requests that wait for a model."""
        return self.gateway.admission.num_pending

    async def start(self) -> None:
        await self.gateway.backend.start()

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones."""
        self._draining = True
        end = time.monotonic() + self._drain_timeout
        while self._num_running and time.monotonic() < end:
            await asyncio.sleep(0.02)

    async def close(self, timeout: float) -> bool:
        """Cancel all requests; return whether the models are idle within the timeout."""
        self._guard.close()
        return await self.gateway.backend.close(timeout)

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


def build_starlette(routes: Sequence[Route]) -> Starlette:
    """Return an app whose errors are JSON."""
    handlers: Any = {HTTPException: handle_http_exception, ApiError: handle_api_error, Exception: handle_api_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def handle_api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        error = make_internal_error()  # Starlette re-raises the original, and the guard logs it
    return make_json_response({"error": error.clipped_message}, error.status, error.headers)


async def handle_http_exception(request: Request, error: Any) -> Response:
    """Handle Starlette's 404, and 405 with the allowed methods."""
    path = ascii(request.url.path[:80])
    messages = {
        404: f"{path} does not exist; the page is at /",
        405: f"{path} does not accept {request.method[:20]!a}; it accepts {(error.headers or {}).get('Allow', '')}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return await handle_api_error(request, ApiError(error.status_code, message, error.headers))


# --- the live page ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookService:
    """Calls a handler, in the model's thread, including the JSON encoding, which may be megabytes."""

    handler: LookHandler

    def look(self, request: LookRequest, client: str, should_stop: StopCheck) -> bytes:
        document = self.handler(request, should_stop)
        try:
            return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        except ValueError as error:  # a bug, not a bad request
            raise RuntimeError("the document cannot be written as JSON") from error


def create_app(
    *,
    page: str,
    handler: LookHandler,
    csp: str,
    limits: Limits | None = None,
    hosts: Sequence[str] = LOCAL_HOSTS,
    model_info: Mapping[str, Any] | None = None,
) -> HttpApp:
    """Create the app that serves `page` and answers requests with `handler(request, should_stop)`.

    `handler` runs in a thread, one call at a time, and returns a document. Its ValueErrors are sent to the client. It
    should return or raise soon after `should_stop()` becomes True. `csp` is the page's Content-Security-Policy, `hosts`
    are the accepted host names, `model_info` is the response of /api/model.
    """
    # The page has one user, who waits for every answer.
    limits = replace(limits or Limits(), requests_per_minute=0, max_client_share=1.0, max_queue_seconds=3600.0)
    gateway = Gateway(LocalBackend(LookService(handler), num_threads=1), limits=limits)
    info = json.dumps(model_info, allow_nan=False).encode()

    async def show_page(call: Call[None]) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": csp})

    async def show_health(call: Call[None]) -> dict[str, str]:
        return {"status": "ok"}

    async def show_model(call: Call[None]) -> Response:
        return Response(info, media_type="application/json")

    async def look(call: Call[LookRequest]) -> Response:
        call.body.check_limits(limits)
        body = await gateway.call("look", call.body, call.client, characters=1)
        return Response(body, media_type="application/json")

    endpoints = [
        Endpoint("GET", "/", show_page, "The page.", media_type="text/html"),
        Endpoint("GET", "/health", show_health, "Tell that the server runs."),
        Endpoint("POST", "/api/look", look, "Inspect a text.", LookRequest),
    ]
    if model_info is not None:
        endpoints.append(Endpoint("GET", "/api/model", show_model, "The name and the size of the model."))
    return HttpApp(gateway, endpoints, hosts=hosts, drain_timeout=0.0)
