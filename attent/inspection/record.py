"""Record attention weights of any model by observers of its attention layers.

An observed layer computes its weights explicitly in addition to the fast kernel, so that outputs stay bit-identical.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from attent.inspection.attention_trace import AttentionKind, Trace, get_attention_kind, get_layer_index
from attent.nn import AttentionRecord, Stack, get_attention_layers
from attent.nn.attention import COMPILED_PREFIX, Attention
from attent.storage.errors import AttentError


@contextmanager
def record(
    model: nn.Module,
    pattern: str = "*",
    *,
    kind: AttentionKind | None = None,
    layers: Sequence[int] | None = None,
    qkv: bool = False,
    hidden_states: bool = False,
) -> Iterator[Trace]:
    """Record every attention layer of a model inside the `with` block.

    Calls from other threads are recorded too; recordings may be nested or overlap.

    pattern        glob of module paths, such as "decoder.*.cross_attn"
    kind           "self" or "cross"
    layers         only these layers of each stack, from 0
    qkv            also record queries, keys and values: `trace.qkv`
    hidden_states  also record the residual stream: `trace.hidden_states`

    >>> model = attent.build(attent.presets.tiny(vocab=100)).eval()
    >>> with attent.record(model, "decoder.*.cross_attn") as trace:
    ...     logits = model(torch.tensor([[5, 6, 7, 2]]), torch.tensor([[1, 8, 9]]))
    >>> trace["decoder.blocks.3.cross_attn"][0].shape  # of the first call: (B, H, Tq, Tk)
    torch.Size([1, 4, 3, 4])
    >>> trace.to_frame().columns.tolist()
    ['path', 'call', 'row', 'head', 'query', 'key', 'weight']
    """
    if not isinstance(model, nn.Module):
        raise AttentError(f"`model` must be a model, but is of type {type(model).__name__}; see `attent.load`")
    trace = Trace()
    chosen = select_attention_layers(model, pattern, kind, layers)
    observers = {path: trace.make_observer(path, qkv) for path in chosen}
    states = record_hidden_states(model, trace.hidden_states) if hidden_states else nullcontext()
    with attach_observers(chosen, observers), states:
        yield trace


def select_attention_layers(
    model: nn.Module, pattern: str, kind: AttentionKind | None, layers: Sequence[int] | None
) -> dict[str, Attention]:
    """Return the selected attention layers by path; raise if there are none."""
    all_layers = get_attention_layers(model)
    if not all_layers:
        raise AttentError(
            f"`model` must have an attention layer of attent.nn, but this {type(model).__name__} has none"
        )
    if kind not in (None, *get_args(AttentionKind)):
        raise AttentError(f"`kind` must be self or cross, but is {kind!r}")
    matching = {path: layer for path, layer in all_layers.items() if fnmatch.fnmatch(path, pattern)}
    if not matching:
        raise AttentError(
            f"`pattern` must match an attention layer, but {pattern!r} matches none of: {', '.join(all_layers)}"
        )
    chosen = {
        path: layer
        for path, layer in matching.items()
        if (kind is None or kind == get_attention_kind(path)) and (layers is None or get_layer_index(path) in layers)
    }
    if not chosen:
        selection = {"kind": kind, "layers": layers}
        filters = ", ".join(f"{name} {value}" for name, value in selection.items() if value is not None)
        raise AttentError(f"{filters} must select an attention layer, but select none of: {', '.join(matching)}")
    return chosen


@contextmanager
def attach_observers(
    layers: Mapping[str, Attention], observers: Mapping[str, Callable[[AttentionRecord], None]]
) -> Iterator[None]:
    for path, layer in layers.items():
        layer.observers.append(observers[path])
    try:
        yield
    finally:
        for path, layer in layers.items():
            layer.observers.remove(observers[path])


@contextmanager
def record_hidden_states(model: nn.Module, hidden_states: dict[str, list[Tensor]]) -> Iterator[None]:
    """Record the input of each stack and the output of every block."""

    def store(path: str, _: nn.Module, inputs: tuple[Any, ...], output: Tensor | None = None) -> None:
        hidden_states.setdefault(path, []).append((inputs[0] if output is None else output).detach())

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for name, module in model.named_modules():
        if isinstance(module, Stack):
            path = name.replace(COMPILED_PREFIX, "") or "stack"
            handles.append(module.blocks[0].register_forward_pre_hook(partial(store, path)))
            for i, block in enumerate(module.blocks):
                handles.append(block.register_forward_hook(partial(store, f"{path}.blocks.{i}")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
