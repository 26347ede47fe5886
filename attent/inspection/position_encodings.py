"""What a model knows of order, as numbers to draw: of each stack the values that stand for positions, and how alike two
positions are.

A scheme is known by what it does, at one of the three places where order enters (`attent.nn.positions`), so that one
that is added there is shown here. Drawing is left to the page and to `plots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attent.inspection.json_arrays import pack_array
from attent.nn import Stack
from attent.nn.attention import COMPILED_PREFIX
from attent.nn.positions import Angles

DEFAULT_LENGTH = 64  # positions that are shown


@dataclass(frozen=True)
class SchemeDescription:
    """What a reader should know of a scheme."""

    formula: str
    note: str


SCHEME_DESCRIPTIONS = {
    "sinusoidal": SchemeDescription(
        "PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d))",
        "Waves of many lengths are added to the embeddings; how alike two places are depends on their distance alone.",
    ),
    "learned": SchemeDescription(
        "x + P[pos]",
        "Each position has a vector of its own, learned in training and added to the embedding.",
    ),
    "rotary": SchemeDescription(
        "pair i of the features of a query or key is turned by the angle pos / base^(2i/d)",
        "Queries and keys are turned by angles that grow with the position, so that their product knows the distance.",
    ),
    "relative": SchemeDescription(
        "score + b[head, bucket(key - query)]",
        "Each head has learned a number for each range of distances and adds it to its scores.",
    ),
    "alibi": SchemeDescription(
        "score - slope[head] * |query - key|",
        "Each head takes off more the farther away a token is, some heads steeply, others hardly.",
    ),
}
UNKNOWN_SCHEME = SchemeDescription("", "A scheme of its own, shown by what it adds.")


def describe_positions(model: nn.Module, length: int = DEFAULT_LENGTH) -> list[dict[str, Any]]:
    """The section `positions` of a document: an entry for each stack of a model in which order enters."""
    if length < 1:
        raise ValueError(f"`length` must be 1 or more positions, but is {length}")
    stacks = {path.replace(COMPILED_PREFIX, ""): m for path, m in model.named_modules() if isinstance(m, Stack)}
    entries = (describe_stack_positions(get_stack_name(path, stack), stack, length) for path, stack in stacks.items())
    return [each for each in entries if each is not None]


def get_stack_name(path: str, stack: Stack) -> str:
    return path.rstrip(".") or ("decoder" if stack.config.causal else "encoder")


@torch.no_grad()
def describe_stack_positions(name: str, stack: Stack, length: int) -> dict[str, Any] | None:
    scheme, like = stack.positions, next(stack.parameters())
    at = torch.arange(min(length, scheme.max_length or length), device=like.device)
    bias, angles = scheme.bias(at, at), scheme.angles(at)
    if bias is not None:
        return build_position_entry(name, stack, "bias", None, bias[0])
    if angles is not None:
        return build_position_entry(name, stack, "angles", *compute_rotary_similarity(angles))
    values = scheme.embed(like.new_zeros(1, len(at), stack.config.width), at)[0].float()
    return build_position_entry(name, stack, "embed", values, values @ values.T) if values.any() else None


def compute_rotary_similarity(angles: Angles) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, D) in the order of the features that they turn; and the dot product of a vector of ones,
    turned to two positions, as a share of its square: the mean over pairs of the cosine between them, (T, T)."""
    cos, sin = (each.reshape(each.shape[-2:]).float() for each in (angles.cos, angles.sin))  # (T, D / 2)
    ordered = torch.cat([cos, sin], -1) if angles.order == "halves" else torch.stack([cos, sin], -1).flatten(-2)
    return ordered, (cos @ cos.T + sin @ sin.T) / cos.shape[-1]


def build_position_entry(
    name: str, stack: Stack, applied_as: Literal["embed", "angles", "bias"], values: Tensor | None, pairwise: Tensor
) -> dict[str, Any]:
    kind = stack.config.positions.kind
    story = SCHEME_DESCRIPTIONS.get(kind, UNKNOWN_SCHEME)
    found: dict[str, Any] = {
        "stack": name,
        "scheme": kind,
        "enters": applied_as,
        "formula": story.formula,
        "note": story.note,
        "width": stack.config.width if values is None else values.shape[-1],
    }
    if values is not None:
        found["values"] = pack_array(values, "float16")
    return found | {"dots": pack_array(pairwise, "float16")}
