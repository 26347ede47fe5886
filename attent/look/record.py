"""Record attention without a flag in the model: while a recording lasts, each attention layer has a tap.

    with attent.record(model) as trace:
        model(source, target)
    trace["decoder.blocks.3.cross"]     # the weights of that layer, one tensor (B, H, Tq, Tk) per call

Only the tapped layers write their weights down (by the explicit equation, beside the fast kernel, so the output stays
the same to the bit); drawing them is others' business.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from attent.nn import Look, attention_layers


class Trace(Mapping[str, list[Tensor]]):
    """Attention weights by module path, in the order of the calls."""

    def __init__(self) -> None:
        self._weights: dict[str, list[Tensor]] = {}

    def __getitem__(self, path: str) -> list[Tensor]:
        if path not in self._weights:
            raise KeyError(f"no attention was recorded at {path!r}; recorded: {', '.join(self._weights) or 'nothing'}")
        return self._weights[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def tap(self, path: str) -> Callable[[Look], None]:
        def keep(look: Look) -> None:
            self._weights.setdefault(path, []).append(look.weights)

        return keep


@contextmanager
def record(model: nn.Module, only: str = "*") -> Iterator[Trace]:
    """Record each attention whose module path matches `only` ("decoder.*.cross") until the block ends.

    Every call of the model meanwhile is recorded, also of another thread; recordings do not disturb each other.
    """
    every = attention_layers(model)
    if not every:
        raise ValueError(f"`model` must have an attention layer of attent.nn, but this {type(model).__name__} has none")
    layers = {path: layer for path, layer in every.items() if fnmatch.fnmatch(path, only)}
    if not layers:
        raise ValueError(f"`only` must match an attention layer, but {only!r} matches none of: {', '.join(every)}")
    trace = Trace()
    taps = {path: trace.tap(path) for path in layers}
    for path, layer in layers.items():
        layer.taps.append(taps[path])
    try:
        yield trace
    finally:
        for path, layer in layers.items():
            layer.taps.remove(taps[path])
