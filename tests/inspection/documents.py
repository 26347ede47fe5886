"""Read back the parts of a trace document."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attent.inspection.attention_trace import TraceSide, unpack_weights
from attent.settings import from_dict


def read_sides(document: dict[str, Any]) -> dict[str, TraceSide]:
    return {name: from_dict(TraceSide, side, where="the trace") for name, side in document["sides"].items()}


def read_weights(document: dict[str, Any]) -> dict[str, Tensor]:
    """The weights (1, H, Tq, Tk) of each layer."""
    keys = {name: len(side["tokens"]) for name, side in document["sides"].items()}
    return {layer["path"]: unpack_weights(layer, keys[layer["keys"]])[None] for layer in document["layers"]}
