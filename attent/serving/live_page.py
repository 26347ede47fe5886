"""The live page of `attent look`: an HTTP app that inspects what is typed into the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attent.decoding.options import SearchOptions, StopCheck
from attent.inspection.head_masking import ModelPart, find_part
from attent.inspection.html_page import build_live_csp, render_page
from attent.inspection.inspectors.base import InputTooLongError, InspectionRequest, Inspector
from attent.inspection.inspectors.translation import TranslationInspector
from attent.serving.app import LookApp, create_app
from attent.serving.limits import ApiError, Limits
from attent.serving.request import LookRequest

RESPONSE_TIMEOUT = 300.0  # seconds: 512 tokens with a wide beam take minutes on a CPU


def create_live_app(
    inspector: Inspector[Any],
    *,
    to: str | None = None,
    beam_size: int = 4,
    examples: Sequence[str] = (),
    limits: Limits = Limits(response_timeout=RESPONSE_TIMEOUT),  # noqa: B008 - frozen
) -> LookApp:
    """Return the app of a model's live page. Without `to`, the page of a multilingual model offers its languages."""
    languages: list[str] = []
    if isinstance(inspector, TranslationInspector) and not to:
        languages = list(inspector.translator.tokenizer.source.tags)
    document = inspector.build_model_document("")
    document |= {"live": True, "examples": list(examples), "languages": languages}
    model_info = {"name": inspector.name, "summary": document["model"]["summary"]}

    def handle(request: LookRequest, should_stop: StopCheck) -> dict[str, Any]:
        beams = request.beam_size or beam_size
        max_tokens = min(limits.max_tokens, limits.max_search_tokens // beams)
        parts = tuple(map(ModelPart.parse, request.masked_parts))
        for part in parts:
            find_part(inspector.model, part)
        inspection_request = InspectionRequest(
            text=request.text,
            to=request.to or to,
            search=SearchOptions(beam_size=beams),
            prefix=request.prefix,
            masked_parts=parts,
            max_tokens=max_tokens,
        )
        try:
            return inspector.inspect(inspection_request, should_stop=should_stop) | {"live": True}
        except InputTooLongError as error:
            advice = "" if max_tokens == limits.max_tokens else ", or lower `beam_size`"
            raise ApiError(413, f"{error}{advice}") from error

    return create_app(
        page=render_page(document), handler=handle, csp=build_live_csp(), model_info=model_info, limits=limits
    )
