"""The app: a page, and `POST /api/look` which asks the model. Built from plain parts, so that it needs no torch.

What a request may be is decided in `question.py`, how much of it and from whom in `limits.py`, whose turn it is in
`work.py`; what the model says, by the function `look` that the caller gives. `run.py` puts it on a port.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attent.serve.limits import (
    LOCAL_HOSTS,
    Asgi,
    Guard,
    Limits,
    Receive,
    Refusal,
    Scope,
    Send,
    come_back,
    failed,
    header,
)
from attent.serve.question import Question, read_question
from attent.serve.work import Busy, Desk, Stop

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Look = Callable[[Question, Stop], Mapping[str, Any]]


class Site:
    """The whole as an ASGI app, and how to end it."""

    def __init__(self, guard: Guard, desk: Desk) -> None:
        self._guard = guard
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    @property
    def inside(self) -> int:
        """How many requests are with the model or in line for it."""
        return self._desk.inside

    async def close(self, seconds: float) -> bool:
        """Answers those who wait that the server ends, stops the work; False if it goes on after so many seconds."""
        self._guard.close()
        return await self._desk.idle(seconds)


def make_app(
    *,
    page: str,
    look: Look,
    csp: str,
    limits: Limits | None = None,
    hosts: Sequence[str] = LOCAL_HOSTS,
    about: Mapping[str, Any] | None = None,
) -> Site:
    """The app that shows `page` and answers questions by `look(question, stop)`.

    `look` runs in a thread, one call at a time. It returns a document; a ValueError of its is a sentence for the
    person who asked; it should end soon, no matter how, once `stop()` is True. `csp` is the page's
    Content-Security-Policy, `hosts` are the names the server may be called by, `about` is what /api/model tells.
    """
    limits = limits or Limits()
    desk = Desk(limits.waiting)
    return Site(Guard(_routes(page, csp, about, _asking(look, desk, limits)), limits=limits, hosts=hosts), desk)


def _asking(look: Look, desk: Desk, limits: Limits) -> Callable[[Request], Any]:
    async def ask(request: Request) -> Response:
        _check_type(request.scope)
        question = read_question(await request.body(), limits)
        try:
            return _json_bytes(await desk.do(lambda stop: _answer(look, question, stop)))
        except Busy:
            raise come_back("the model is busy with others; ask again in a moment") from None

    return ask


def _answer(look: Look, question: Question, stop: Stop) -> bytes:
    """In the model's thread; so is the writing of the JSON, which may be megabytes."""
    try:
        document = look(question, stop)
    except ValueError as error:
        if stop():
            raise
        raise Refusal(422, str(error) or "the model cannot do this; ask for something else") from error
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:  # our mistake, not the asker's
        raise RuntimeError("the document cannot be written as JSON") from error


def _check_type(scope: Scope) -> None:
    kind, _, parameters = header(scope, "content-type").partition(";")
    if kind.strip().lower() != "application/json":
        named = ascii(kind.strip()[:80]) if kind.strip() else "absent"
        raise Refusal(415, f"`Content-Type` must be application/json, but is {named}; send JSON and say so")
    if "charset" in parameters.lower() and "utf-8" not in parameters.lower():
        raise Refusal(415, "the charset must be UTF-8, but is another; encode the request so")
    if header(scope, "content-encoding").lower() not in ("", "identity"):
        raise Refusal(415, "the request must not be compressed, but is; send it plain")


# Routes.


def _routes(page: str, csp: str, about: Mapping[str, Any] | None, ask: Callable[[Request], Any]) -> Asgi:
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
        Route("/health", _telling({"status": "ok"}), methods=["GET"]),
        Route("/api/look", ask, methods=["POST"]),
    ]
    if about is not None:
        routes.append(Route("/api/model", _telling(about), methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_here, Refusal: _refused, Exception: _failed})
    app.router.redirect_slashes = False
    return app


def _telling(facts: Mapping[str, Any]) -> Callable[[Request], Any]:
    body = json.dumps(facts, allow_nan=False).encode()

    async def tell(request: Request) -> Response:
        return _json_bytes(body)

    return tell


def _json_bytes(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(body, status, headers=dict(headers or {}), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _json_bytes(error.body(), error.status, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return await _refused(request, failed())  # Starlette raises the error once more, and the guard logs it


async def _not_here(request: Request, error: Any) -> Response:
    """Starlette's own errors: 404, and 405 with the methods that would do."""
    path = ascii(request.url.path[:80])
    sentences = {
        404: f"there is nothing at {path}; the page is at /",
        405: f"{path} does not take {request.method[:20]!a}; it takes {(error.headers or {}).get('Allow', '')}",
    }
    sentence = sentences.get(error.status_code, str(error.detail))
    return await _refused(request, Refusal(error.status_code, sentence, error.headers))
