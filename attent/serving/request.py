"""Parse and validate the JSON body of `POST /api/look`.

`attent.settings` checks names and types; sizes are checked against the server's limits. Languages, token ids and parts
are checked by the model's handler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attent import settings
from attent.serving.limits import ApiError, Limits

REQUEST_NAME = "the request"
MAX_NAME_LENGTH = 200  # characters of a language or a model part
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class LookRequest:
    """A text to inspect; None and () mean the defaults."""

    text: str
    to: str | None = None
    beam_size: int | None = None
    prefix: tuple[int, ...] = ()  # forced first tokens of the translation
    masked_parts: tuple[str, ...] = ()


def parse_request(body: bytes, limits: Limits) -> LookRequest:
    """Parse a request body; raise `ApiError` 400 for invalid JSON and 422 for invalid values."""
    data = _parse_json(body)
    _check_sizes(data, limits)
    try:
        request = settings.from_dict(LookRequest, data, REQUEST_NAME)
    except settings.SettingsError as error:
        raise ApiError(422, str(error)) from error
    _check_values(request, limits)
    return request


def check_request(request: LookRequest, limits: Limits) -> None:
    """Raise `ApiError` 422 for values beyond the limits."""
    _check_sizes({**vars(request), "prefix": list(request.prefix), "masked_parts": list(request.masked_parts)}, limits)
    _check_values(request, limits)


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        data = settings.decode_strict_json(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"{REQUEST_NAME}: must be UTF-8, but byte {error.start} is not") from None
    except RecursionError:
        raise ApiError(400, f"{REQUEST_NAME}: is nested too deeply; send one flat object") from None
    except ValueError as error:
        raise ApiError(400, f"{REQUEST_NAME}: must be JSON, but is not: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, f'{REQUEST_NAME}: must be a JSON object such as {{"text": "..."}}')
    return data


def _check_sizes(data: Mapping[str, Any], limits: Limits) -> None:
    """Check sizes before anything iterates over the values."""
    sizes = {
        "text": (limits.max_characters, "characters"),
        "to": (MAX_NAME_LENGTH, "characters"),
        "prefix": (limits.max_prefix_tokens, "tokens"),
        "masked_parts": (limits.max_masked_parts, "parts"),
    }
    for name, (max_size, unit) in sizes.items():
        value = data.get(name)
        if isinstance(value, str | list) and len(value) > max_size:
            raise _make_field_error(name, f"have at most {max_size} {unit}", f"has {len(value)}", "shorten it")


def _check_values(request: LookRequest, limits: Limits) -> None:
    if request.beam_size is not None and not 1 <= request.beam_size <= limits.max_beam_size:
        raise _make_field_error(
            "beam_size", f"be 1 to {limits.max_beam_size}", f"is {_format_number(request.beam_size)}", "4 is usual"
        )
    for index, token in enumerate(request.prefix):
        if not 0 <= token <= MAX_TOKEN_ID:
            advice = "give tokens of the vocabulary"
            raise _make_field_error(
                f"prefix[{index}]", f"be 0 to {MAX_TOKEN_ID}", f"is {_format_number(token)}", advice
            )
    for index, part in enumerate(request.masked_parts):
        if len(part) > MAX_NAME_LENGTH:
            advice = "name a part such as decoder.blocks.0.cross_attn:2"
            raise _make_field_error(
                f"masked_parts[{index}]", f"have at most {MAX_NAME_LENGTH} characters", f"has {len(part)}", advice
            )
    texts = {"text": request.text, "to": request.to or "", "masked_parts": "".join(request.masked_parts)}
    for name, text in texts.items():
        if "\0" in text:
            raise _make_field_error(name, "be text", "contains a NUL character", "remove it")


def _make_field_error(name: str, must: str, but: str, advice: str) -> ApiError:
    return ApiError(422, f"{REQUEST_NAME}: `{name}` must {must}, but {but}; {advice}")


def _format_number(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "a number with more than 20 digits"
