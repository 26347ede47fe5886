"""Request batches for the GPU engine: a few NumPy arrays, cheap to build and to send from a worker process."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Self

import numpy as np

from attent.data.arrays import Array
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest


@dataclass(frozen=True, eq=False)
class RequestBatch:
    """Sources sorted by maximum target length, longest first; their ids concatenated by decreasing *source* length."""

    token_ids: Array  # all sources, concatenated
    encoder_order_offsets: Array  # start of each source in `token_ids`, in encoder order
    encoder_order_lengths: Array  # in encoder order
    decoder_order_offsets: Array  # start of each source in `token_ids`, in decoder order
    decoder_order_lengths: Array  # in decoder order
    max_target_lengths: Array
    forbid_loops: Array  # 1 where loops are forbidden (`NoLoops`)

    @classmethod
    def from_requests(cls, requests: Sequence[SearchRequest]) -> Self:
        """`requests` are sorted by `sort_by_length`."""
        decoder_order_lengths, max_target_lengths = get_request_lengths(requests)
        order = np.argsort(-decoder_order_lengths, kind="stable")
        encoder_order_lengths = decoder_order_lengths[order]
        encoder_order_offsets = exclusive_cumsum(encoder_order_lengths)
        decoder_order_offsets = np.empty_like(encoder_order_offsets)
        decoder_order_offsets[order] = encoder_order_offsets
        token_ids = chain.from_iterable(requests[index].source_ids for index in order)
        return cls(
            token_ids=np.fromiter(token_ids, np.int32, int(encoder_order_lengths.sum())),
            encoder_order_offsets=encoder_order_offsets,
            encoder_order_lengths=encoder_order_lengths,
            decoder_order_offsets=decoder_order_offsets,
            decoder_order_lengths=decoder_order_lengths,
            max_target_lengths=max_target_lengths,
            forbid_loops=np.array([request.forbid_loops for request in requests], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.max_target_lengths)


@dataclass(frozen=True, eq=False)
class HypothesisBatch:
    """The n best hypotheses of each request, in one array; a missing one has score -inf."""

    token_ids: Array  # (hypotheses, max length)
    token_counts: Array  # real tokens of each
    lengths: Array  # with the end token, if there is one
    log_probs: Array
    scores: Array

    def to_hypotheses(self, n_best: int) -> list[list[Hypothesis]]:
        columns = (x.tolist() for x in (self.token_counts, self.lengths, self.log_probs, self.scores))
        hypotheses = [
            Hypothesis(
                token_ids=tuple(ids[:count].tolist()), log_prob=log_prob, score=score, is_finished=length > count
            )
            for ids, count, length, log_prob, score in zip(self.token_ids, *columns, strict=True)
        ]
        groups = (hypotheses[i : i + n_best] for i in range(0, len(hypotheses), n_best))
        return [[hypothesis for hypothesis in group if hypothesis.score > float("-inf")] for group in groups]


def get_request_lengths(requests: Sequence[SearchRequest]) -> tuple[Array, Array]:
    source_lengths = np.fromiter((len(request.source_ids) for request in requests), np.int64, len(requests))
    return source_lengths, np.fromiter((request.max_length for request in requests), np.int64, len(requests))


def sort_by_length(requests: Sequence[SearchRequest]) -> list[int]:
    """Return indices, the longest targets first, and among equal ones the longest sources."""
    source_lengths, max_target_lengths = get_request_lengths(requests)
    order: list[int] = np.lexsort((-source_lengths, -max_target_lengths)).tolist()
    return order


class Unavailable(Enum):
    UNSUPPORTED = "the search options are not supported by this engine"
    OUT_OF_MEMORY = "not enough device memory; retry with fewer requests"


def search_in_batches(
    requests: Sequence[SearchRequest],
    options: SearchOptions,
    search_batch: Callable[[RequestBatch], HypothesisBatch | Unavailable],
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Yield (request index, hypotheses); halve batches that do not fit in memory. Unsupported options: nothing."""
    pending = deque([sort_by_length(requests)])
    while pending and pending[0]:
        indices = pending.popleft()
        result = search_batch(RequestBatch.from_requests([requests[i] for i in indices]))
        if result is Unavailable.UNSUPPORTED:
            return
        if isinstance(result, HypothesisBatch):
            yield from zip(indices, result.to_hypotheses(options.n_best), strict=True)
        else:
            middle = len(indices) // 2
            pending.extendleft((indices[middle:], indices[:middle]))


def exclusive_cumsum(values: Array) -> Array:
    return np.cumsum(values) - values
