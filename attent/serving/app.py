"""ASGI apps: endpoints behind a guard, with request ids, metrics and an access log; and the app of the live page.

It imports no torch: models are behind a backend. Requests are validated in `endpoints` and `request`, limited in
`limits` and `admission`; `run` runs it.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attent.decoding.options import StopCheck
from attent.serving.api_v1 import show_health
from attent.serving.backend import LocalBackend
from attent.serving.endpoints import Call, Endpoint, LookRequest, build_routes
from attent.serving.gateway import Gateway, ServerOptions
from attent.serving.limits import ApiError, Limits, RequestGuard, format_error, get_header
from attent.serving.messages import CallContext

LookHandler = Callable[[LookRequest, StopCheck], Mapping[str, Any]]

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
        file_paths: Sequence[str] = (),
    ) -> None:
        """`routes` are further ones, without a key; `file_paths` have the limits of files."""
        self.gateway, options = gateway, gateway.options
        self._endpoints = [(compile_path(endpoint.path)[0], endpoint) for endpoint in endpoints]
        self._router = Router([*build_routes(endpoints, gateway), *routes], redirect_slashes=False)
        self._guard = RequestGuard(
            self._route,
            limits=options.limits,
            hosts=options.hosts,
            origins=options.origins,
            file_paths=file_paths,
            format_error=self._format_error,
        )
        self._app: ASGIApp = self._guard
        if options.origins:
            self._app = CORSMiddleware(
                self._guard, allow_origins=options.origins, allow_methods=["*"], allow_headers=["*"]
            )
        self._num_running = 0

    async def start(self) -> None:
        await self.gateway.backend.start()

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones."""
        self._guard.drain()
        end = time.monotonic() + self.gateway.options.drain_timeout
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
            await self._app(scope, receive, record.send)
        finally:
            self._num_running -= 1
            path = next((each.path for _, each in self._endpoints if each.path == scope["path"]), "other")
            seconds = time.monotonic() - record.began
            self.gateway.metrics.requests.labels(path, str(record.status)).inc()
            self.gateway.metrics.seconds.labels(path).observe(seconds)
            log.info("%s %s %s %.0f ms %s", scope["method"], path, record.status, 1000 * seconds, record.request_id)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._router({**scope, "app": self}, receive, send)  # with an app, it raises its errors
        except HTTPException as error:
            problem, headers = "does not exist; the page is at /", error.headers or {}
            if error.status_code == 405:
                problem = f"does not accept {scope['method'][:20]!a}; it accepts {headers['Allow']}"
            raise ApiError(error.status_code, f"{scope['path'][:80]!a} {problem}", headers) from None

    def _format_error(self, scope: Scope, message: str, status: int) -> Mapping[str, Any]:
        """Return the body of an error in the form of the API that has the path."""
        matching = [endpoint for pattern, endpoint in self._endpoints if pattern.match(scope["path"])]
        matching.sort(key=lambda endpoint: endpoint.method != scope["method"])
        return matching[0].format_error(message, status) if matching else format_error(message, status)


class RequestRecord:
    """Notes the status of a response, and adds the request id to its headers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.began = time.monotonic()
        self.status = 499  # the client left before the response
        header = get_header(scope, "x-request-id")
        self.request_id = header if REQUEST_ID.fullmatch(header) else uuid.uuid4().hex
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)


# --- the live page ---------------------------------------------------------------------------------------------------


def create_app(
    *,
    page: str,
    handler: LookHandler,
    csp: str,
    limits: Limits | None = None,
) -> HttpApp:
    """Create the app that serves `page` and answers requests with `handler(request, should_stop)`.

    `handler` runs in a thread, one call at a time, and returns a document. Its ValueErrors are sent to the client. It
    should return or raise soon after `should_stop()` becomes True. `csp` is the page's Content-Security-Policy.
    """
    # The page has one user, who waits for every answer.
    limits = replace(limits or Limits(), requests_per_minute=0, max_client_share=1.0, max_queue_seconds=3600.0)
    options = ServerOptions(limits=limits, drain_timeout=0.0)

    def encode_document(request: LookRequest, context: CallContext) -> bytes:
        """Call the handler in the model's thread, including the JSON encoding, which may be megabytes."""
        document = handler(request, context.should_stop)
        try:
            return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        except ValueError as error:  # a bug, not a bad request
            raise RuntimeError("the document cannot be written as JSON") from error

    gateway = Gateway(LocalBackend(SimpleNamespace(look=encode_document), num_threads=1), options)

    async def show_page(call: Call[None]) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": csp})

    async def look(call: Call[LookRequest]) -> Response:
        call.body.check_limits(limits)
        body = await gateway.call("look", call.body, call.client, characters=1)
        return Response(body, media_type="application/json")

    endpoints = [
        Endpoint("GET", "/", show_page, "The page.", media_type="text/html"),
        Endpoint("GET", "/health", show_health, "Tell whether the server is alive."),
        Endpoint("POST", "/api/look", look, "Inspect a text.", LookRequest),
    ]
    return HttpApp(gateway, endpoints)
