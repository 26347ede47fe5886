"""Jobs as arrays, and arrays as hypotheses."""

from __future__ import annotations

import numpy as np

from attent.decode.lots import Found, Lot, in_order, parted, sizes
from attent.decode.options import Hypothesis, Job

JOBS = [
    Job(source=[5, 6, 2], limit=4),
    Job(source=[7, 2], limit=9, no_loops=True),
    Job(source=[8, 9, 10, 2], limit=4),
    Job(source=[2], limit=9),
]


def test_the_longest_targets_come_first_and_the_tokens_of_long_sources() -> None:
    order = in_order(*sizes(JOBS))
    assert order == [1, 3, 2, 0]
    lot = Lot.of([JOBS[place] for place in order], no_loops=False)
    assert len(lot) == 4
    assert lot.ids.tolist() == [8, 9, 10, 2, 5, 6, 2, 7, 2, 2]
    assert lot.limits.tolist() == [9, 9, 4, 4]
    assert lot.no_loops.tolist() == [1, 0, 0, 0]
    assert lot.lengths.tolist() == [4, 3, 2, 1]
    assert [lot.ids[a : a + n].tolist() for a, n in zip(lot.memory, lot.widths, strict=True)] == [
        JOBS[place].source for place in order
    ]
    assert Lot.of(JOBS, no_loops=True).no_loops.all()


def test_a_lot_has_as_many_sources_as_memory_has_room_for() -> None:
    some = [Job(source=[5] * length, limit=1) for length in (3, 9, 1, 4, 4)]
    assert list(parted([1, 3, 4, 0, 2], some, 9, 9)) == [[1], [3, 4], [0, 2]]
    assert list(parted([1, 3, 4, 0, 2], some, 99, 2)) == [[1, 3], [4, 0], [2]]
    assert list(parted([0], some, 1, 0)) == [[0]]


def test_what_was_found_becomes_hypotheses() -> None:
    """Two for each source, but the second has only one; the first of it was cut."""
    found = Found(
        tokens=np.array([[5, 6, 9], [5, 0, 0], [7, 8, 9], [0, 0, 0]]),
        written=np.array([2, 1, 3, 0]),
        lengths=np.array([3, 2, 3, 0]),
        sums=np.array([-1.0, -2.0, -3.0, -np.inf]),
        scores=np.array([-0.5, -1.0, -1.5, -np.inf]),
    )
    assert found.hypotheses(2) == [
        [
            Hypothesis(ids=(5, 6), log_prob=-1.0, score=-0.5, ended=True),
            Hypothesis(ids=(5,), log_prob=-2.0, score=-1.0, ended=True),
        ],
        [Hypothesis(ids=(7, 8, 9), log_prob=-3.0, score=-1.5, ended=False)],
    ]
