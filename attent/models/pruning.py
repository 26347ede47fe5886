"""Remove layers and heads, and restore heads as zeros for CTranslate2 and Hugging Face, which need equal numbers."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attent.models import build_empty
from attent.models.config import Seq2SeqConfig
from attent.models.seq2seq import Seq2Seq
from attent.models.weights import assign_weights, build_empty_like, collect_tensors
from attent.nn import Attention, get_attention_layers
from attent.storage.errors import AttentError

ROW_TENSORS = ("query.weight", "query.bias", "key.weight", "key.bias", "value.weight", "value.bias", "score_weight")
COLUMN_TENSORS = ("output.weight",)  # its bias belongs to all heads


def remove_heads(model: Seq2Seq, heads: Mapping[str, Collection[int]]) -> Seq2Seq:
    """Return a copy without some heads, `{"decoder.blocks.3.cross_attn": [2]}`, by their indices in `model`."""
    layers = get_attention_layers(model)
    remaining = {
        path: [h for h in range(layer.heads) if h not in heads.get(path, ())] for path, layer in layers.items()
    }
    original_ids = {
        path: tuple(heads if (ids := layers[path].remaining_heads) is None else (ids[head] for head in heads))
        for path, heads in remaining.items()
    }
    tensors = {name: t.detach().clone() for name, t in collect_tensors(model, build_empty_like(model)).items()}
    for path, layer in layers.items():
        if len(remaining[path]) == layer.heads:
            continue
        indices = compute_feature_indices(remaining[path], layer)
        for name, axis in list_head_tensors(path, tensors):
            tensors[name] = tensors[name].index_select(axis, indices).contiguous()
    empty = build_empty(set_remaining_heads(model.config, original_ids))
    return assign_weights(empty, tensors, "the model without some heads")


def remove_layers(model: Seq2Seq, encoder_layers: int | None, decoder_layers: int | None) -> Seq2Seq:
    """Keep evenly spaced layers, to start a distillation (Shleifer and Rush 2020). Tensors are shared with `model`."""
    stacks: dict[str, Any] = dict(zip(("encoder", "decoder"), model.config.stacks, strict=True))
    remaining: dict[str, list[int]] = {}
    for side, count in (("encoder", encoder_layers), ("decoder", decoder_layers)):
        layers = stacks[side].layers
        count = layers if count is None else count
        if not 1 <= count <= layers:
            raise AttentError(f"`{side}_layers` must be from 1 to the model's {layers}, but is {count}")
        remaining[side] = [round(i * (layers - 1) / max(1, count - 1)) for i in range(count)]
        heads = stacks[side].remaining_heads and tuple(stacks[side].remaining_heads[i] for i in remaining[side])
        stacks[side] = replace(stacks[side], layers=count, remaining_heads=heads)
    tensors = collect_tensors(model, build_empty_like(model))
    empty = build_empty(replace(model.config, **stacks))
    names = {
        name: re.sub(
            r"^(\w+)\.blocks\.(\d+)", lambda match: f"{match[1]}.blocks.{remaining[match[1]][int(match[2])]}", name
        )
        for name in empty.state_dict()
    }
    return assign_weights(empty, {new: tensors[old] for new, old in names.items()}, "the model without some layers")


def restore_heads(model: Seq2Seq) -> Seq2Seq:
    """Return an equivalent model with removed heads as zeros. Tensors that were never pruned are shared, not copied."""
    config = model.config
    if all(stack.remaining_heads is None for stack in config.stacks):
        return model
    tensors = dict(collect_tensors(model, build_empty_like(model)))
    stacks = dict(zip(("encoder", "decoder"), config.stacks, strict=True))
    for path, layer in get_attention_layers(model).items():
        if layer.remaining_heads is None:
            continue
        indices = compute_feature_indices(layer.remaining_heads, layer)
        for name, axis in list_head_tensors(path, tensors):
            shape = list(tensors[name].shape)
            shape[axis] = stacks[path.partition(".")[0]].heads * layer.head_width
            tensors[name] = tensors[name].new_zeros(shape).index_copy(axis, indices, tensors[name].detach())
    encoder, decoder = (replace(stack, remaining_heads=None) for stack in stacks.values())
    empty = build_empty(replace(config, encoder=encoder, decoder=decoder))
    return assign_weights(empty, tensors, "the model with all heads")


def set_remaining_heads(config: Seq2SeqConfig, remaining: Mapping[str, tuple[int, ...]]) -> Seq2SeqConfig:
    """Set `remaining_heads` of both stacks; None where no head was removed, so that the config tells a pruned model."""
    stacks: dict[str, Any] = dict(zip(("encoder", "decoder"), config.stacks, strict=True))
    for name, stack in stacks.items():
        sublayers = ("self_attn", "cross_attn") if stack.cross_attention else ("self_attn",)
        table = tuple(tuple(remaining[f"{name}.blocks.{i}.{s}"] for s in sublayers) for i in range(stack.layers))
        complete = all(len(heads) == stack.heads for layer in table for heads in layer)
        stacks[name] = replace(stack, remaining_heads=None if complete else table)
    return replace(config, **stacks)


def compute_feature_indices(heads: Collection[int], layer: Attention) -> Tensor:
    width = layer.head_width
    indices = [head * width + i for head in heads for i in range(width)]
    return torch.tensor(indices, dtype=torch.int64, device=layer.query.weight.device)


def list_head_tensors(path: str, tensors: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """Return the tensors of an attention layer that have a part for each head, and along which axis."""
    names = [(name, 0) for name in ROW_TENSORS] + [(name, 1) for name in COLUMN_TENSORS]
    return [(f"{path}.{name}", axis) for name, axis in names if f"{path}.{name}" in tensors]
