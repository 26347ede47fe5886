"""The body of requests to inspect a text: `/api/look` of the live page and `/v1/look` of the translation server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from attent.serving.endpoints import StrictBody
from attent.serving.limits import ApiError, Limits

MAX_NAME_LENGTH = 200  # characters of a language or a model part

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
PartName = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]


class LookRequest(StrictBody):
    """A text to inspect; None and [] mean the defaults."""

    text: str
    model: str | None = Field(None, description="by default the first translator")
    to: str | None = Field(None, max_length=MAX_NAME_LENGTH, description="target language of a multilingual model")
    beam_size: int | None = Field(None, ge=1)
    prefix: list[TokenId] = Field([], description="forced first tokens of the translation")
    masked_parts: list[PartName] = Field([], description="heads, sub-layers and layers that are switched off")

    def check_limits(self, limits: Limits) -> None:
        """Raise `ApiError` 413 for a long text, and 400 for other values beyond the limits."""
        sizes = {
            "text": (len(self.text), limits.max_characters, "have at most {} characters"),
            "beam_size": (self.beam_size or 1, limits.max_beam_size, "be at most {}"),
            "prefix": (len(self.prefix), limits.max_prefix_tokens, "have at most {} tokens"),
            "masked_parts": (len(self.masked_parts), limits.max_masked_parts, "have at most {} parts"),
        }
        for name, (size, max_size, limit) in sizes.items():
            if size > max_size:
                status = 413 if name == "text" else 400
                raise ApiError(status, f"`{name}` must {limit.format(max_size)}, but this is {size}")
        if any("\0" in text for text in (self.text, self.to or "", *self.masked_parts)):
            raise ApiError(400, "the request contains a NUL character; remove it")
