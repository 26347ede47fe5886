"""Build trace documents and read back their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attent.inspection.attention_trace import (
    Trace,
    TraceSide,
    build_document,
    build_layer,
    get_layer_info,
    get_side_names,
    pack_qkv,
    unpack_weights,
)
from attent.settings import from_dict


def build_trace_document(
    trace: Trace, sides: Mapping[str, TraceSide], *, title: str = "", row: int = 0
) -> dict[str, Any]:
    """Build the document of one batch row of a trace with queries, keys and values."""
    layers = []
    for path, calls in trace.items():
        queries, keys = get_side_names(path, sides)
        shape = len(sides[queries].tokens), len(sides[keys].tokens)
        weights = calls[-1][row, :, : shape[0], : shape[1]]
        recorded = trace.qkv[path][-1]
        layers.append(
            build_layer(path, (queries, keys), weights, **get_layer_info(recorded)) | pack_qkv(recorded, row, shape)
        )
    return build_document(title, sides, layers)


def read_sides(document: dict[str, Any]) -> dict[str, TraceSide]:
    return {name: from_dict(TraceSide, side, where="the trace") for name, side in document["sides"].items()}


def read_weights(document: dict[str, Any]) -> dict[str, Tensor]:
    """The weights (1, H, Tq, Tk) of each layer."""
    keys = {name: len(side["tokens"]) for name, side in document["sides"].items()}
    return {layer["path"]: unpack_weights(layer, keys[layer["keys"]])[None] for layer in document["layers"]}
