"""The live page of `attent look`: an HTTP app that inspects what is typed into the page."""

from collections.abc import Sequence
from typing import Any

from attent.decoding.options import StopCheck
from attent.inspection.html_page import build_live_csp
from attent.inspection.inspectors.base import Inspector
from attent.serving.app import HttpApp, create_app
from attent.serving.endpoints import LookRequest
from attent.serving.limits import Limits
from attent.serving.look_document import DEFAULT_BEAM_SIZE, build_look_document, render_look_page

RESPONSE_TIMEOUT = 300.0  # seconds: 512 tokens with a wide beam take minutes on a CPU


def create_live_app(
    inspector: Inspector[Any],
    *,
    to: str | None = None,
    beam_size: int = DEFAULT_BEAM_SIZE,
    examples: Sequence[str] = (),
    limits: Limits = Limits(response_timeout=RESPONSE_TIMEOUT),  # noqa: B008 - frozen
) -> HttpApp:
    """Return the app of a model's live page. Without `to`, the page of a multilingual model offers its languages."""

    def handle(request: LookRequest, should_stop: StopCheck) -> dict[str, Any]:
        return build_look_document(inspector, request, should_stop, limits, to=to, beam_size=beam_size)

    return create_app(
        page=render_look_page(inspector, to=to, examples=examples),
        handler=handle,
        csp=build_live_csp(),
        limits=limits,
    )
