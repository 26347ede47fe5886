"""Trace documents of `attent look`, for the live page and the translation server."""

from collections.abc import Sequence
from typing import Any

from attent.decoding.options import SearchOptions, StopCheck
from attent.inspection.ablate import ModelPart, find_part
from attent.inspection.html_page import render_page
from attent.inspection.inspectors.base import InputTooLongError, InspectionRequest, Inspector
from attent.inspection.inspectors.seq2seq import TranslationInspector
from attent.serving.endpoints import LookRequest
from attent.serving.limits import ApiError, Limits

DEFAULT_BEAM_SIZE = SearchOptions.beam_size


def render_look_page(inspector: Inspector[Any], *, to: str | None = None, examples: Sequence[str] = ()) -> str:
    languages: list[str] = []
    if isinstance(inspector, TranslationInspector) and not to:
        languages = list(inspector.translator.tokenizer.source.tags)
    document = inspector.build_model_document("")
    return render_page(document | {"live": True, "examples": list(examples), "languages": languages})


def build_look_document(
    inspector: Inspector[Any],
    request: LookRequest,
    should_stop: StopCheck,
    limits: Limits,
    *,
    to: str | None = None,
    beam_size: int = DEFAULT_BEAM_SIZE,
) -> dict[str, Any]:
    """Inspect the text of a request; `to` and `beam_size` are used where the request has none."""
    beams = request.beam_size or beam_size
    max_tokens = min(limits.max_tokens, limits.max_search_tokens // beams)
    parts = tuple(map(ModelPart.parse, request.masked_parts))
    for part in parts:
        find_part(inspector.model, part)
    inspection_request = InspectionRequest(
        text=request.text,
        to=request.to or to,
        search=SearchOptions(beam_size=beams),
        prefix=tuple(request.prefix),
        masked_parts=parts,
        max_tokens=max_tokens,
    )
    try:
        return inspector.inspect(inspection_request, should_stop=should_stop) | {"live": True}
    except InputTooLongError as error:
        advice = "" if max_tokens == limits.max_tokens else ", or lower `beam_size`"
        raise ApiError(413, f"{error}{advice}") from error
