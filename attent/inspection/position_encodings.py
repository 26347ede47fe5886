"""Positional encodings as numbers to draw: the values of each position, and pairwise similarities or biases."""

from typing import Any

import torch
from torch import Tensor, nn

from attent.inspection.json_arrays import pack_array
from attent.nn import Stack
from attent.nn.attention import COMPILED_PREFIX
from attent.nn.positions import Angles

DEFAULT_LENGTH = 64  # positions shown


SCHEME_DESCRIPTIONS = {  # formula and note
    "sinusoidal": (
        "PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d))",
        "Waves are added to the embeddings; the dot product of two positions depends only on their distance.",
    ),
    "learned": ("x + P[pos]", "Each position has a learned vector, which is added to the embedding."),
    "rotary": (
        "pair i of the features of a query or key is rotated by the angle pos / base^(2i/d)",
        "Queries and keys are rotated by angles proportional to the position: dot products depend on the distance.",
    ),
    "relative": (
        "score + b[head, bucket(key - query)]",
        "Each head adds a learned bias for each bucket of distances to its scores.",
    ),
    "alibi": (
        "score - slope[head] * |query - key|",
        "Each head subtracts a penalty proportional to the distance, with its own slope.",
    ),
}
UNKNOWN_SCHEME = ("", "A custom scheme.")


def describe_positions(model: nn.Module, length: int = DEFAULT_LENGTH) -> list[dict[str, Any]]:
    """Return the section `positions` of a document: an entry for each stack with a positional encoding."""
    stacks = {path.replace(COMPILED_PREFIX, ""): m for path, m in model.named_modules() if isinstance(m, Stack)}
    entries = []
    for path, stack in stacks.items():
        name = path.rstrip(".") or ("decoder" if stack.config.causal else "encoder")
        entries.append(describe_stack_positions(name, stack, length))
    return [entry for entry in entries if entry is not None]


@torch.no_grad()
def describe_stack_positions(name: str, stack: Stack, length: int) -> dict[str, Any] | None:
    scheme, like = stack.positions, next(stack.parameters())
    positions = torch.arange(min(length, scheme.max_length or length), device=like.device)
    bias, angles = scheme.compute_bias(positions, positions), scheme.compute_angles(positions)
    values: Tensor | None
    if bias is not None:
        applied_as, values, pairwise = "bias", None, bias[0]
    elif angles is not None:
        applied_as, (values, pairwise) = "angles", compute_rotary_similarity(angles)
    else:
        applied_as = "embed"
        values = scheme.embed(like.new_zeros(1, len(positions), stack.config.width), positions)[0].float()
        pairwise = values @ values.T
        if not values.any():
            return None
    kind = stack.config.positions.kind
    formula, note = SCHEME_DESCRIPTIONS.get(kind, UNKNOWN_SCHEME)
    entry: dict[str, Any] = {
        "stack": name,
        "scheme": kind,
        "applied_as": applied_as,
        "formula": formula,
        "note": note,
        "width": stack.config.width if values is None else values.shape[-1],
    }
    if values is not None:
        entry["values"] = pack_array(values, "float16")
    return entry | {"pairwise": pack_array(pairwise, "float16")}


def compute_rotary_similarity(angles: Angles) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (T, D) in feature order, and the normalized dot product (T, T) of a vector of ones
    rotated to two positions: the mean over feature pairs of the cosine of the angle between them."""
    cos, sin = (x.reshape(x.shape[-2:]).float() for x in (angles.cos, angles.sin))  # (T, D / 2)
    ordered = torch.cat([cos, sin], -1) if angles.order == "halves" else torch.stack([cos, sin], -1).flatten(-2)
    return ordered, (cos @ cos.T + sin @ sin.T) / cos.shape[-1]
