"""Beam search of whole batches of ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.search import (
    HypothesisTensors,
    SearchContext,
    State,
    StepModel,
    make_suppressed_tensor,
    search_requests,
)


@torch.no_grad()
def beam_search(
    model: StepModel[State],
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    start_id: int,
    end_id: int,
    max_length: int,
    options: SearchOptions | None = None,
    suppressed_tokens: Sequence[int] = (),
) -> HypothesisTensors:
    """Search the best targets of sources (B, Ts), or those of another front-end, without `suppressed_tokens`."""
    context = SearchContext(
        options=SearchOptions() if options is None else options,
        start_id=start_id,
        end_id=end_id,
        suppressed_tokens=make_suppressed_tensor(start_id, end_id, suppressed_tokens, source.device),
    )
    requests = [SearchRequest(source_ids=(), rng_key=i, max_length=max_length) for i in range(len(source))]
    return search_requests(model, source, lengths, requests, context)
