"""Greedy search in its readable form, which a beam of one must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attent.decoding.search import make_suppressed_tensor


@torch.no_grad()
def greedy_search(
    model: Any,
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    start_id: int,
    end_id: int,
    max_length: int,
    suppressed_tokens: Sequence[int] = (),
) -> Tensor:
    """Take the most probable token at each step: (B, Ts) -> (B, max_length), padded with `end_id`."""
    state = model.init_decoder_state(source, lengths, capacity=max_length)
    token = torch.full((source.shape[0], 1), start_id, device=source.device)
    suppressed = make_suppressed_tensor(start_id, end_id, suppressed_tokens, source.device)
    finished = torch.zeros_like(token, dtype=torch.bool)
    tokens: list[Tensor] = []
    while len(tokens) < max_length and not finished.all():
        logits = model.step(token, state)[:, -1:].index_fill_(-1, suppressed, float("-inf"))
        token = logits.argmax(-1).masked_fill(finished, end_id)
        finished = finished | (token == end_id)
        tokens.append(token)
    return F.pad(torch.cat(tokens, 1), (0, max_length - len(tokens)), value=end_id)
