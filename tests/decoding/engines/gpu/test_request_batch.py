"""Requests as arrays, and arrays as hypotheses."""

from __future__ import annotations

import numpy as np

from attent.decoding.engines.gpu.request_batch import (
    HypothesisBatch,
    RequestBatch,
    Unavailable,
    search_in_batches,
    sort_by_length,
)
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest

REQUESTS = [
    SearchRequest(source_ids=[5, 6, 2], max_length=4),
    SearchRequest(source_ids=[7, 2], max_length=9, forbid_loops=True),
    SearchRequest(source_ids=[8, 9, 10, 2], max_length=4),
    SearchRequest(source_ids=[2], max_length=9),
]


def test_requests_are_sorted_by_target_length_and_tokens_by_source_length() -> None:
    order = sort_by_length(REQUESTS)
    assert order == [1, 3, 2, 0]
    batch = RequestBatch.from_requests([REQUESTS[index] for index in order])
    assert len(batch) == 4
    assert batch.token_ids.tolist() == [8, 9, 10, 2, 5, 6, 2, 7, 2, 2]
    assert batch.max_target_lengths.tolist() == [9, 9, 4, 4]
    assert batch.forbid_loops.tolist() == [1, 0, 0, 0]
    assert batch.encoder_order_lengths.tolist() == [4, 3, 2, 1]
    spans = zip(batch.decoder_order_offsets, batch.decoder_order_lengths, strict=True)
    assert [batch.token_ids[a : a + n].tolist() for a, n in spans] == [REQUESTS[index].source_ids for index in order]


def make_hypotheses(batch: RequestBatch) -> HypothesisBatch:
    """The last token of each source."""
    last, zeros = batch.token_ids[batch.decoder_order_offsets + batch.decoder_order_lengths - 1], np.zeros(len(batch))
    return HypothesisBatch(
        token_ids=last[:, None], token_counts=zeros.astype(int) + 1, lengths=zeros, log_probs=zeros, scores=zeros
    )


def test_a_batch_that_does_not_fit_is_halved() -> None:
    requests = [SearchRequest(source_ids=[number], max_length=9 - number) for number in range(9)]
    batches: list[list[int]] = []

    def search_batch(batch: RequestBatch) -> HypothesisBatch | Unavailable:
        batches.append(batch.token_ids[batch.decoder_order_offsets].tolist())
        return make_hypotheses(batch) if len(batch) <= 2 else Unavailable.OUT_OF_MEMORY

    results = dict(search_in_batches(requests, SearchOptions(), search_batch))
    assert {index: best[0].token_ids for index, best in results.items()} == {number: (number,) for number in range(9)}
    assert [len(batch) for batch in batches] == [9, 4, 2, 2, 5, 2, 3, 1, 2]
    assert batches[2] == [0, 1]
    assert not list(search_in_batches([], SearchOptions(), search_batch))


def test_an_unsupported_search_leaves_the_rest() -> None:
    answers: list[HypothesisBatch | Unavailable] = [
        Unavailable.OUT_OF_MEMORY,
        make_hypotheses(RequestBatch.from_requests(REQUESTS[:2])),
        Unavailable.UNSUPPORTED,
    ]
    results = dict(search_in_batches(REQUESTS, SearchOptions(), lambda _: answers.pop(0)))
    assert sorted(results) == [1, 3]
    assert not answers


def test_arrays_become_hypotheses() -> None:
    """Two for each source, but the second has only one, which was truncated."""
    batch = HypothesisBatch(
        token_ids=np.array([[5, 6, 9], [5, 0, 0], [7, 8, 9], [0, 0, 0]]),
        token_counts=np.array([2, 1, 3, 0]),
        lengths=np.array([3, 2, 3, 0]),
        log_probs=np.array([-1.0, -2.0, -3.0, -np.inf]),
        scores=np.array([-0.5, -1.0, -1.5, -np.inf]),
    )
    assert batch.to_hypotheses(2) == [
        [
            Hypothesis(token_ids=(5, 6), log_prob=-1.0, score=-0.5, is_finished=True),
            Hypothesis(token_ids=(5,), log_prob=-2.0, score=-1.0, is_finished=True),
        ],
        [Hypothesis(token_ids=(7, 8, 9), log_prob=-3.0, score=-1.5, is_finished=False)],
    ]
