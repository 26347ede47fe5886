"""Record attention weights in addition to the fast kernel, so that outputs stay bit-identical."""

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

from torch import nn

from attent.inspection.attention_trace import AttentionKind, Trace, get_attention_kind, get_layer_index
from attent.nn import AttentionRecord, get_attention_layers
from attent.nn.attention import Attention
from attent.storage.errors import AttentError


@contextmanager
def record(
    model: nn.Module,
    pattern: str = "*",
    *,
    kind: AttentionKind | None = None,
    layers: Sequence[int] | None = None,
    qkv: bool = False,
) -> Iterator[Trace]:
    """Record every attention layer of a model inside the `with` block.

    Calls from other threads are recorded too; recordings may be nested or overlap.

    pattern  glob of module paths, such as "decoder.*.cross_attn"
    kind     "self" or "cross"
    layers   only these layers of each stack, from 0
    qkv      also record queries, keys and values: `trace.qkv`

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
    with attach_observers(chosen, observers):
        yield trace


def select_attention_layers(
    model: nn.Module, pattern: str, kind: AttentionKind | None, layers: Sequence[int] | None
) -> dict[str, Attention]:
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
