"""Jobs as arrays, and arrays as hypotheses."""

from __future__ import annotations

import numpy as np

from attent.decoding.engines.gpu.request_batch import (
    HypothesisBatch,
    RequestBatch,
    Unavailable,
    get_request_lengths,
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


def test_the_longest_targets_come_first_and_the_tokens_of_long_sources() -> None:
    order = sort_by_length(*get_request_lengths(REQUESTS))
    assert order == [1, 3, 2, 0]
    lot = RequestBatch.from_requests([REQUESTS[place] for place in order], forbid_loops=False)
    assert len(lot) == 4
    assert lot.token_ids.tolist() == [8, 9, 10, 2, 5, 6, 2, 7, 2, 2]
    assert lot.max_target_lengths.tolist() == [9, 9, 4, 4]
    assert lot.forbid_loops.tolist() == [1, 0, 0, 0]
    assert lot.source_lengths.tolist() == [4, 3, 2, 1]
    assert [lot.token_ids[a : a + n].tolist() for a, n in zip(lot.memory_offsets, lot.memory_lengths, strict=True)] == [
        REQUESTS[place].source_ids for place in order
    ]
    assert RequestBatch.from_requests(REQUESTS, forbid_loops=True).forbid_loops.all()


def make_hypotheses(lot: RequestBatch) -> HypothesisBatch:
    """The last token of each source."""
    last, none = lot.token_ids[lot.memory_offsets + lot.memory_lengths - 1], np.zeros(len(lot))
    return HypothesisBatch(
        token_ids=last[:, None], token_counts=none.astype(int) + 1, lengths=none, log_probs=none, scores=none
    )


def test_what_has_no_room_is_halved_until_it_has() -> None:
    some = [SearchRequest(source_ids=[number], max_length=9 - number) for number in range(9)]
    asked: list[list[int]] = []

    def ask(lot: RequestBatch) -> HypothesisBatch | Unavailable:
        asked.append(lot.token_ids[lot.memory_offsets].tolist())
        return make_hypotheses(lot) if len(lot) <= 2 else Unavailable.OUT_OF_MEMORY

    found = dict(search_in_batches(some, SearchOptions(), ask))
    assert {place: best[0].token_ids for place, best in found.items()} == {number: (number,) for number in range(9)}
    assert [len(one) for one in asked] == [9, 4, 2, 2, 5, 2, 3, 1, 2]
    assert asked[2] == [0, 1]
    assert not list(search_in_batches([], SearchOptions(), ask))


def test_what_has_no_lane_is_left() -> None:
    answers: list[HypothesisBatch | Unavailable] = [
        Unavailable.OUT_OF_MEMORY,
        make_hypotheses(RequestBatch.from_requests(REQUESTS[:2], False)),
        Unavailable.UNSUPPORTED,
    ]
    found = dict(search_in_batches(REQUESTS, SearchOptions(), lambda lot: answers.pop(0)))
    assert sorted(found) == [1, 3]
    assert not answers


def test_what_was_found_becomes_hypotheses() -> None:
    """Two for each source, but the second has only one; the first of it was cut."""
    found = HypothesisBatch(
        token_ids=np.array([[5, 6, 9], [5, 0, 0], [7, 8, 9], [0, 0, 0]]),
        token_counts=np.array([2, 1, 3, 0]),
        lengths=np.array([3, 2, 3, 0]),
        log_probs=np.array([-1.0, -2.0, -3.0, -np.inf]),
        scores=np.array([-0.5, -1.0, -1.5, -np.inf]),
    )
    assert found.to_hypotheses(2) == [
        [
            Hypothesis(token_ids=(5, 6), log_prob=-1.0, score=-0.5, is_finished=True),
            Hypothesis(token_ids=(5,), log_prob=-2.0, score=-1.0, is_finished=True),
        ],
        [Hypothesis(token_ids=(7, 8, 9), log_prob=-3.0, score=-1.5, is_finished=False)],
    ]
