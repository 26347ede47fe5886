"""Packed sentences equal separate ones, in values and in gradients of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from attent.nn import Memory, Packing, StackConfig
from tests.laws.helpers import (
    CROSS_DECODERS,
    DECODERS,
    ENCODERS,
    assert_close,
    assert_same_gradients,
    every_stack,
    gradients,
    make_stack,
    noise_like,
    parametrize_in_turn,
    random_states,
)

# Sentence lengths of each row, for inputs and memory; the row width, padding included.
LAYOUTS: dict[str, tuple[list[list[int]], list[list[int]], int, int]] = {
    "rows": ([[3, 5, 1], [4], [2, 2]], [[2, 4, 3], [5], [1, 6]], 11, 10),
    "flat": ([[3, 1, 4]], [[2, 5, 1]], 8, 10),
}


def pack(sentences: list[list[Tensor]], width: int) -> tuple[Tensor, Packing]:
    """Pack sentences into rows padded with noise; return the rows and their packing."""
    rows = []
    for row in sentences:
        text = torch.cat(row)
        rows.append(torch.cat([text, noise_like(text, width - len(text))]))
    lengths = [[len(sentence) for sentence in row] for row in sentences]
    return torch.stack(rows), Packing.from_lengths(lengths, width, device=rows[0].device)


def unpack(x: Tensor, lengths: Sequence[Sequence[int]]) -> list[Tensor]:
    return [piece for row, counts in zip(x, lengths, strict=True) for piece in row[: sum(counts)].split(list(counts))]


@parametrize_in_turn("config, layout", ENCODERS | DECODERS | CROSS_DECODERS, LAYOUTS)
def test_packed_equals_separate(
    config: StackConfig,
    layout: tuple[list[list[int]], list[list[int]], int, int],
    device: torch.device,
) -> None:
    lengths, memory_lengths, width, memory_width = layout
    stack = make_stack(config, device)
    sentences = [[random_states(n, device=device) for n in row] for row in lengths]
    sources = [[random_states(n, device=device) for n in row] for row in memory_lengths]
    pairs = list(zip(chain(*sentences), chain(*sources), strict=True))

    x, packing = pack(sentences, width)
    encoded, memory_packing = pack(sources, memory_width)
    memory = Memory(encoded, packing=memory_packing) if config.cross_attention else None
    together = unpack(stack(x, packing=packing, memory=memory), lengths)
    alone = [stack(x[None], memory=Memory(source[None]) if config.cross_attention else None)[0] for x, source in pairs]
    for actual, expected in zip(together, alone, strict=True):
        assert_close(actual, expected)

    directions = [torch.randn(out.shape).to(out) for out in alone]
    assert_same_gradients(
        gradients(sum((out * d).sum() for out, d in zip(together, directions, strict=True)), stack),
        gradients(sum((out * d).sum() for out, d in zip(alone, directions, strict=True)), stack),
    )


@every_stack
def test_filler_changes_nothing(config: StackConfig, device: torch.device) -> None:
    """The content of padding does not matter, on either side."""
    lengths, memory_lengths, width, memory_width = LAYOUTS["rows"]
    stack = make_stack(config, device)
    sentences = [[random_states(n, device=device) for n in row] for row in lengths]
    sources = [[random_states(n, device=device) for n in row] for row in memory_lengths]
    outs = []
    for _ in range(2):  # `pack` draws new noise each time
        x, packing = pack(sentences, width)
        encoded, memory_packing = pack(sources, memory_width)
        memory = Memory(encoded, packing=memory_packing) if config.cross_attention else None
        out = stack(x, packing=packing, memory=memory)
        assert out.isfinite().all()
        outs.append(unpack(out, lengths))
    for first, second in zip(*outs, strict=True):
        assert_close(first, second)
