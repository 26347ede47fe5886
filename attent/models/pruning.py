"""Heads taken out of a model and put back: the same model with other tensors. Which heads to take out is for others to
say (`attent.look.prune`); whoever knows only models with all their heads, as CTranslate2 and Hugging Face do, is given
the `unpruned` one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attent.models.config import Seq2SeqConfig
from attent.models.seq2seq import Seq2Seq
from attent.models.weights import assign_weights, collect_tensors
from attent.nn import Attention, StackConfig, attention_layers

RemainingHeads = tuple[tuple[tuple[int, ...], ...], ...]
ROW_TENSORS = ("query.weight", "query.bias", "key.weight", "key.bias", "value.weight", "value.bias")
COLUMN_TENSORS = ("output.weight",)  # its bias is of all heads together, and stays


def remove_heads(model: Seq2Seq, heads: Mapping[str, Collection[int]]) -> Seq2Seq:
    """A copy without some heads: `{"decoder.blocks.3.cross_attn": [2]}`, numbered as they are in `model`."""
    layers = attention_layers(model)
    left = {path: [h for h in range(layer.heads) if h not in heads.get(path, ())] for path, layer in layers.items()}
    config = set_remaining_heads(
        model.config, {path: get_original_head_ids(layers[path], left[path]) for path in layers}
    )
    tensors = {
        name: tensor.detach().clone()
        for name, tensor in collect_tensors(model, build_empty_seq2seq(model.config)).items()
    }
    for path, layer in layers.items():
        if len(left[path]) == layer.heads:
            continue
        places = compute_feature_indices(left[path], layer.head_width).to(layer.query.weight.device)
        for name, axis in list_head_tensors(path, tensors):
            tensors[name] = tensors[name].index_select(axis, places).contiguous()
    return assign_weights(build_empty_seq2seq(config), tensors, "the model without some heads")


def restore_heads(model: Seq2Seq) -> Seq2Seq:
    """The same model with all the heads that it once had; those that were removed are zeros, and do nothing. It
    computes the same and is no quicker; tensors of what was never pruned are shared, not copied."""
    if model.config.encoder.remaining_heads is None and model.config.decoder.remaining_heads is None:
        return model
    tensors = dict(collect_tensors(model, build_empty_seq2seq(model.config)))
    stacks = {"encoder": model.config.encoder, "decoder": model.config.decoder}
    for path, layer in attention_layers(model).items():
        if layer.remaining_heads is None:
            continue
        places = compute_feature_indices(layer.remaining_heads, layer.head_width).to(layer.query.weight.device)
        full = stacks[path.partition(".")[0]].heads * layer.head_width
        for name, axis in list_head_tensors(path, tensors):
            shape = list(tensors[name].shape)
            shape[axis] = full
            tensors[name] = tensors[name].new_zeros(shape).index_copy(axis, places, tensors[name].detach())
    config = replace(
        model.config,
        encoder=replace(model.config.encoder, remaining_heads=None),
        decoder=replace(model.config.decoder, remaining_heads=None),
    )
    return assign_weights(build_empty_seq2seq(config), tensors, "the model with all heads")


def build_empty_seq2seq(config: Seq2SeqConfig) -> Seq2Seq:
    with torch.device("meta"):
        return Seq2Seq(config)


def set_remaining_heads(config: Seq2SeqConfig, remaining: Mapping[str, tuple[int, ...]]) -> Seq2SeqConfig:
    encoder, decoder = (
        set_stack_remaining_heads(getattr(config, name), name, remaining) for name in ("encoder", "decoder")
    )
    return replace(config, encoder=encoder, decoder=decoder)


def set_stack_remaining_heads(stack: StackConfig, name: str, remaining: Mapping[str, tuple[int, ...]]) -> StackConfig:
    """None where nothing was removed, so that a model is told from a pruned one by its config."""
    uses = ("self_attn", "cross_attn") if stack.cross_attention else ("self_attn",)
    table: RemainingHeads = tuple(
        tuple(remaining[f"{name}.blocks.{i}.{use}"] for use in uses) for i in range(stack.layers)
    )
    all_there = all(len(heads) == stack.heads for layer in table for heads in layer)
    return replace(stack, remaining_heads=None if all_there else table)


def get_original_head_ids(layer: Attention, remaining: Collection[int]) -> tuple[int, ...]:
    """What heads of a layer are called in a config: by their place among all that there ever were."""
    return tuple(remaining if layer.remaining_heads is None else (layer.remaining_heads[head] for head in remaining))


def compute_feature_indices(heads: Collection[int], head_width: int) -> Tensor:
    """The features of these heads among those of all, side by side."""
    return torch.tensor([head * head_width + i for head in heads for i in range(head_width)], dtype=torch.int64)


def list_head_tensors(path: str, tensors: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """The tensors of an attention that have a part for each head, and along which axis."""
    names = [(name, 0) for name in ROW_TENSORS] + [(name, 1) for name in COLUMN_TENSORS]
    return [(f"{path}.{name}", axis) for name, axis in names if f"{path}.{name}" in tensors]
