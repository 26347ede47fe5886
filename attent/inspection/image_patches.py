"""Weights laid out as the picture is whose patches they are of, for plots and for the terminal. The page does the same
by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def get_key_image(document: Mapping[str, Any], layer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The picture that a layer looks at, if it is one."""
    image: Mapping[str, Any] | None = document["sides"][layer["keys"]].get("image")
    return image


def describe_patch_queries(image: Mapping[str, Any]) -> str:
    return "what the class token looks at" if image.get("before", 0) else "what all patches together look at"


def reshape_to_patches(weights: Tensor, image: Mapping[str, Any]) -> Tensor:
    """(Tq, Tk) -> (rows, columns): how much each patch is looked at by the class token; where there is none, by all of
    them on average."""
    before = image.get("before", 0)
    looks = weights[0] if before else weights.mean(0)
    return looks[before:].view(image["rows"], image["columns"])
