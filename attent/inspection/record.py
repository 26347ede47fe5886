"""Record attention without a flag in the model: while a recording lasts, each attention layer has a tap.

    with attent.record(model) as trace:
        model(source, target)
    trace["decoder.blocks.3.cross_attn"]     # the weights of that layer, one tensor (B, H, Tq, Tk) per call

Only the tapped layers write their weights down (by the explicit equation, beside the fast kernel, so the output stays
the same to the bit), and of them only the heads that are asked for; drawing them is others' business.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn

from attent.inspection.attention_trace import AttentionKind, Trace, get_attention_kind, get_layer_index
from attent.nn import AttentionRecord, Stack, attention_layers
from attent.nn.attention import COMPILED_PREFIX, Attention


@contextmanager
def record(
    model: nn.Module,
    pattern: str = "*",
    *,
    kind: AttentionKind | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    qkv: bool = False,
    hidden_states: bool = False,
) -> Iterator[Trace]:
    """Record each attention of a model until the block ends.

    Every call of the model meanwhile is recorded, also of another thread; recordings do not disturb each other.

    only     module paths that match this, such as "decoder.*.cross_attn"
    kind     "self" or "cross" alone
    layers   of each stack these alone, from 0; heads: of each layer these alone, from 0
    vectors  keep queries, keys and values too: `trace.vectors`
    states   keep the residual stream too: `trace.states`
    """
    trace = Trace()
    chosen = select_attention_layers(model, pattern, kind, layers, heads)
    with ExitStack() as stack:
        stack.enter_context(attach_taps(chosen, {path: trace.make_tap(path, heads, qkv) for path in chosen}))
        if hidden_states:
            stack.enter_context(record_hidden_states(model, trace.hidden_states))
        yield trace


def select_attention_layers(
    model: nn.Module,
    pattern: str,
    kind: AttentionKind | None,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
) -> dict[str, Attention]:
    """The layers to tap, by path; none is a mistake."""
    every = attention_layers(model)
    if not every:
        raise ValueError(f"`model` must have an attention layer of attent.nn, but this {type(model).__name__} has none")
    if kind not in (None, *get_args(AttentionKind)):
        raise ValueError(f"`kind` must be self or cross, but is {kind!r}")
    named = {path: layer for path, layer in every.items() if fnmatch.fnmatch(path, pattern)}
    if not named:
        raise ValueError(f"`only` must match an attention layer, but {pattern!r} matches none of: {', '.join(every)}")
    chosen = {
        path: layer
        for path, layer in named.items()
        if (kind is None or kind == get_attention_kind(path)) and (layers is None or get_layer_index(path) in layers)
    }
    if not chosen:
        asked = ", ".join(
            f"{name} {value}" for name, value in (("kind", kind), ("layers", layers)) if value is not None
        )
        raise ValueError(f"{asked} must leave an attention layer, but leave none of: {', '.join(named)}")
    for path, layer in chosen.items():
        for head in heads or ():
            if not 0 <= head < layer.heads:
                raise ValueError(f"`heads` must be from 0 to {layer.heads - 1} at {path}, but one is {head}")
    return chosen


@contextmanager
def attach_taps(
    layers: Mapping[str, Attention], taps: Mapping[str, Callable[[AttentionRecord], None]]
) -> Iterator[None]:
    """Each layer shows its tap what it does until the block ends."""
    for path, layer in layers.items():
        layer.taps.append(taps[path])
    try:
        yield
    finally:
        for path, layer in layers.items():
            layer.taps.remove(taps[path])


@contextmanager
def record_hidden_states(model: nn.Module, hidden_states: dict[str, list[Tensor]]) -> Iterator[None]:
    """The residual stream before the first block of each stack and behind every block."""

    def entering(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, given: hidden_states.setdefault(path, []).append(given[0].detach())

    def leaving(path: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        return lambda _, __, made: hidden_states.setdefault(path, []).append(made.detach())

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for name, module in model.named_modules():
        if isinstance(module, Stack):
            path = name.replace(COMPILED_PREFIX, "") or "stack"
            handles.append(module.blocks[0].register_forward_pre_hook(entering(path)))
            for i, block in enumerate(module.blocks):
                handles.append(block.register_forward_hook(leaving(f"{path}.blocks.{i}")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
