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
from attent.serve.limits import Limits, Refusal

WHERE = "the request"
MAX_NAME = 200  # characters of a language or of a part of the model
MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Question:
    """A sentence to look at, and how: None and () leave it to the one who answers."""

    text: str
    to: str | None = None
    beam_size: int | None = None
    prefix: tuple[int, ...] = ()  # tokens that the translation must begin with
    silence: tuple[str, ...] = ()  # parts of the model that are off


def read_question(body: bytes, limits: Limits) -> Question:
    """The question that a body holds. Raises `Refusal`: 400 where it is not JSON, 422 where it says something wrong."""
    data = _parse(body)
    _check_sizes(data, limits)
    try:
        question = settings.from_dict(Question, data, WHERE)
    except settings.SettingsError as error:
        raise Refusal(422, str(error)) from error
    _check_values(question, limits)
    return question


def _parse(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8")
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"{WHERE}: must be UTF-8, but byte {error.start} is not; encode it so") from None
    except RecursionError:
        raise Refusal(400, f"{WHERE}: has too many brackets inside each other; send one flat object") from None
    except ValueError as error:
        raise Refusal(400, f"{WHERE}: must be JSON, but is not: {error}") from None
    if not isinstance(data, dict):
        raise Refusal(400, f'{WHERE}: must be a JSON object such as {{"text": "..."}}; put the text into one')
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        if name in data:
            raise ValueError(f"the key {name[:80]!a} stands twice")
        data[name] = value
    return data


def _not_finite(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON's")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _not_finite(digits[:80])


def _check_sizes(data: Mapping[str, Any], limits: Limits) -> None:
    """Before anything else looks at the values: what is too long is not even walked through."""
    sizes = {
        "text": (limits.text_characters, "characters"),
        "to": (MAX_NAME, "characters"),
        "prefix": (limits.prefix_tokens, "tokens"),
        "silence": (limits.silenced_parts, "parts"),
    }
    for name, (most, of_what) in sizes.items():
        value = data.get(name)
        if isinstance(value, str | list) and len(value) > most:
            raise _refuse(name, f"have at most {most} {of_what}", f"has {len(value)}", "shorten it")


def _check_values(question: Question, limits: Limits) -> None:
    if question.beam_size is not None and not 1 <= question.beam_size <= limits.beam_size:
        raise _refuse("beam_size", f"be 1 to {limits.beam_size}", f"is {_short(question.beam_size)}", "4 is usual")
    for index, token in enumerate(question.prefix):
        if not 0 <= token <= MAX_TOKEN:
            advice = "give tokens of the vocabulary"
            raise _refuse(f"prefix[{index}]", f"be 0 to {MAX_TOKEN}", f"is {_short(token)}", advice)
    for index, part in enumerate(question.silence):
        if len(part) > MAX_NAME:
            advice = "name a part such as decoder.blocks.0.cross:2"
            raise _refuse(f"silence[{index}]", f"have at most {MAX_NAME} characters", f"has {len(part)}", advice)
    for name, text in (("text", question.text), ("to", question.to or ""), ("silence", "".join(question.silence))):
        if "\0" in text:
            raise _refuse(name, "be text", "holds the character NUL", "remove it")


def _refuse(name: str, must: str, but: str, advice: str) -> Refusal:
    return Refusal(422, f"{WHERE}: `{name}` must {must}, but {but}; {advice}")


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "a number of more than twenty digits"
