"""Record attention weights in addition to the fast kernel, so that outputs stay bit-identical."""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

from torch import nn

from attent.decoding.alignment import attach_observers
from attent.inspection.attention_trace import AttentionKind, Trace, get_attention_kind, get_layer_index
from attent.nn import get_attention_layers
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
    with attach_observers(chosen.values(), [trace.make_observer(path, qkv) for path in chosen]):
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
    chosen = {
        path: layer
        for path, layer in all_layers.items()
        if fnmatch.fnmatch(path, pattern)
        and kind in (None, get_attention_kind(path))
        and (layers is None or get_layer_index(path) in layers)
    }
    if not chosen:
        selection = {"pattern": pattern, "kind": kind, "layers": layers}
        filters = ", ".join(f"{name} {value}" for name, value in selection.items() if value not in (None, "*"))
        raise AttentError(f"{filters} must select an attention layer, but select none of: {', '.join(all_layers)}")
    return chosen
