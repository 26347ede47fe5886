"""Attention weights in the layout of an image's patches, for figures and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def get_key_image(document: Mapping[str, Any], layer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the image of a layer's key side, if it has one."""
    image: Mapping[str, Any] | None = document["sides"][layer["keys"]].get("image")
    return image


def describe_patch_queries(image: Mapping[str, Any]) -> str:
    return "attention of the class token" if image.get("num_prefix_tokens", 0) else "mean attention of all patches"


def reshape_to_patches(weights: Tensor, image: Mapping[str, Any]) -> Tensor:
    """(Tq, Tk) -> (rows, columns): weights of the class token on each patch; without one, the mean of all queries."""
    num_prefix_tokens = image.get("num_prefix_tokens", 0)
    query_weights = weights[0] if num_prefix_tokens else weights.mean(0)
    return query_weights[num_prefix_tokens:].view(image["rows"], image["columns"])
