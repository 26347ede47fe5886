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
from attent.models.store import fill, tensors_of
from attent.nn import Attention, StackConfig, attention_layers

Kept = tuple[tuple[tuple[int, ...], ...], ...]
ROWS = ("query.weight", "query.bias", "key.weight", "key.bias", "value.weight", "value.bias")
COLUMNS = ("output.weight",)  # its bias is of all heads together, and stays


def without(model: Seq2Seq, heads: Mapping[str, Collection[int]]) -> Seq2Seq:
    """A copy without some heads: `{"decoder.blocks.3.cross": [2]}`, numbered as they are in `model`."""
    layers = attention_layers(model)
    left = {path: [h for h in range(layer.heads) if h not in heads.get(path, ())] for path, layer in layers.items()}
    config = with_kept(model.config, {path: numbers(layers[path], left[path]) for path in layers})
    tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(model, empty(model.config)).items()}
    for path, layer in layers.items():
        if len(left[path]) == layer.heads:
            continue
        places = places_of(left[path], layer.head_width).to(layer.query.weight.device)
        for name, axis in axes(path, tensors):
            tensors[name] = tensors[name].index_select(axis, places).contiguous()
    return fill(empty(config), tensors, "the model without some heads")


def unpruned(model: Seq2Seq) -> Seq2Seq:
    """The same model with all the heads that it once had; those that were removed are zeros, and do nothing. It
    computes the same and is no quicker; tensors of what was never pruned are shared, not copied."""
    if model.config.encoder.kept is None and model.config.decoder.kept is None:
        return model
    tensors = dict(tensors_of(model, empty(model.config)))
    stacks = {"encoder": model.config.encoder, "decoder": model.config.decoder}
    for path, layer in attention_layers(model).items():
        if layer.kept is None:
            continue
        places = places_of(layer.kept, layer.head_width).to(layer.query.weight.device)
        full = stacks[path.partition(".")[0]].heads * layer.head_width
        for name, axis in axes(path, tensors):
            shape = list(tensors[name].shape)
            shape[axis] = full
            tensors[name] = tensors[name].new_zeros(shape).index_copy(axis, places, tensors[name].detach())
    config = replace(
        model.config,
        encoder=replace(model.config.encoder, kept=None),
        decoder=replace(model.config.decoder, kept=None),
    )
    return fill(empty(config), tensors, "the model with all heads")


def empty(config: Seq2SeqConfig) -> Seq2Seq:
    with torch.device("meta"):
        return Seq2Seq(config)


def with_kept(config: Seq2SeqConfig, kept: Mapping[str, tuple[int, ...]]) -> Seq2SeqConfig:
    encoder, decoder = (stack_with_kept(getattr(config, name), name, kept) for name in ("encoder", "decoder"))
    return replace(config, encoder=encoder, decoder=decoder)


def stack_with_kept(stack: StackConfig, name: str, kept: Mapping[str, tuple[int, ...]]) -> StackConfig:
    """None where nothing was removed, so that a model is told from a pruned one by its config."""
    uses = ("own", "cross") if stack.cross else ("own",)
    table: Kept = tuple(tuple(kept[f"{name}.blocks.{i}.{use}"] for use in uses) for i in range(stack.layers))
    all_there = all(len(heads) == stack.heads for layer in table for heads in layer)
    return replace(stack, kept=None if all_there else table)


def numbers(layer: Attention, left: Collection[int]) -> tuple[int, ...]:
    """What heads of a layer are called in a config: by their place among all that there ever were."""
    return tuple(left if layer.kept is None else (layer.kept[head] for head in left))


def places_of(heads: Collection[int], width: int) -> Tensor:
    """The features of these heads among those of all, side by side."""
    return torch.tensor([head * width + i for head in heads for i in range(width)], dtype=torch.int64)


def axes(path: str, tensors: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """The tensors of an attention that have a part for each head, and along which axis."""
    names = [(name, 0) for name in ROWS] + [(name, 1) for name in COLUMNS]
    return [(f"{path}.{name}", axis) for name, axis in names if f"{path}.{name}" in tensors]
