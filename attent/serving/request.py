"""What may be asked of `POST /api/look`: JSON from anyone, checked by hand, into a `Question` that can be trusted.

Types and names are checked by `attent.settings`, sizes against the server's limits. Whether the model knows such a
language, token or part is left to those who answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from attent import settings
from attent.serving.limits import ApiError, Limits

REQUEST_NAME = "the request"
MAX_NAME_LENGTH = 200  # characters of a language or of a part of the model
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class LookRequest:
    """A sentence to look at, and how: None and () leave it to the one who answers."""

    text: str
    to: str | None = None
    beam_size: int | None = None
    prefix: tuple[int, ...] = ()  # tokens that the translation must begin with
    masked_parts: tuple[str, ...] = ()  # parts of the model that are off


def parse_request(body: bytes, limits: Limits) -> LookRequest:
    """The question that a body holds. Raises `Refusal`: 400 where it is not JSON, 422 where it says something wrong."""
    data = _parse_json(body)
    _check_sizes(data, limits)
    try:
        question = settings.from_dict(LookRequest, data, REQUEST_NAME)
    except settings.SettingsError as error:
        raise ApiError(422, str(error)) from error
    _check_values(question, limits)
    return question


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8")
        data = json.loads(
            text,
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite_float,
        )
    except UnicodeDecodeError as error:
        raise ApiError(400, f"{REQUEST_NAME}: must be UTF-8, but byte {error.start} is not; encode it so") from None
    except RecursionError:
        raise ApiError(400, f"{REQUEST_NAME}: has too many brackets inside each other; send one flat object") from None
    except ValueError as error:
        raise ApiError(400, f"{REQUEST_NAME}: must be JSON, but is not: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, f'{REQUEST_NAME}: must be a JSON object such as {{"text": "..."}}; put the text into one')
    return data


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        if name in data:
            raise ValueError(f"the key {name[:80]!a} stands twice")
        data[name] = value
    return data


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON's")


def _parse_finite_float(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _reject_constant(digits[:80])


def _check_sizes(data: Mapping[str, Any], limits: Limits) -> None:
    """Before anything else looks at the values: what is too long is not even walked through."""
    sizes = {
        "text": (limits.max_characters, "characters"),
        "to": (MAX_NAME_LENGTH, "characters"),
        "prefix": (limits.max_prefix_tokens, "tokens"),
        "masked_parts": (limits.max_masked_parts, "parts"),
    }
    for name, (most, of_what) in sizes.items():
        value = data.get(name)
        if isinstance(value, str | list) and len(value) > most:
            raise _make_field_error(name, f"have at most {most} {of_what}", f"has {len(value)}", "shorten it")


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
    for name, text in (
        ("text", request.text),
        ("to", request.to or ""),
        ("masked_parts", "".join(request.masked_parts)),
    ):
        if "\0" in text:
            raise _make_field_error(name, "be text", "holds the character NUL", "remove it")


def _make_field_error(name: str, must: str, but: str, advice: str) -> ApiError:
    return ApiError(422, f"{REQUEST_NAME}: `{name}` must {must}, but {but}; {advice}")


def _format_number(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "a number of more than twenty digits"
