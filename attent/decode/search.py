"""Search over what a model may write. It knows no architecture: only `begin` from a source, and `step` by a token."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")  # whatever the model keeps between steps


class Writer(Protocol[State]):
    """What search asks of a model: begin from a source, then logits (B, T, V) behind the next tokens, step by step."""

    def begin(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int) -> State: ...

    def step(self, target: Tensor, state: State, /) -> Tensor: ...


@torch.no_grad()
def greedy(
    model: Writer[State], source: Tensor, lengths: Tensor | None = None, *, start: int, end: int, max_length: int
) -> Tensor:
    """The likeliest next token, again and again: (B, Ts) -> (B, max_length).

    A finished row is filled up with `end`. Nothing is copied to the host, so every row runs to `max_length`.
    """
    if max_length < 1:
        raise ValueError(f"`max_length` must be 1 or more tokens, but is {max_length}")
    if end < 0:
        raise ValueError(f"`end` must be the id of a token, 0 or more, but is {end}")
    state = model.begin(source, lengths, capacity=max_length)
    token = source.new_full((source.shape[0], 1), start)
    finished = torch.zeros_like(token, dtype=torch.bool)
    written = []
    for _ in range(max_length):
        logits = model.step(token, state)[:, -1:]
        if start != end:  # no target holds the start, yet published Marian models would often write it
            logits[..., start] = float("-inf")
        token = logits.argmax(-1).masked_fill(finished, end)
        finished = finished | (token == end)
        written.append(token)
    return torch.cat(written, 1)
