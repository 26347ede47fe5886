"""Jobs as arrays, and arrays as hypotheses."""

from __future__ import annotations

import numpy as np

from attent.decode.lots import Found, Lot, No, in_lots, in_order, sizes
from attent.decode.options import Hypothesis, Job, Search

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


def found_for(lot: Lot) -> Found:
    """The last token of each source."""
    last, none = lot.ids[lot.memory + lot.widths - 1], np.zeros(len(lot))
    return Found(tokens=last[:, None], written=none.astype(int) + 1, lengths=none, sums=none, scores=none)


def test_what_has_no_room_is_halved_until_it_has() -> None:
    some = [Job(source=[number], limit=9 - number) for number in range(9)]
    asked: list[list[int]] = []

    def ask(lot: Lot) -> Found | No:
        asked.append(lot.ids[lot.memory].tolist())
        return found_for(lot) if len(lot) <= 2 else No.ROOM

    found = dict(in_lots(some, Search(), ask))
    assert {place: best[0].ids for place, best in found.items()} == {number: (number,) for number in range(9)}
    assert [len(one) for one in asked] == [9, 4, 2, 2, 5, 2, 3, 1, 2]
    assert asked[2] == [0, 1]
    assert not list(in_lots([], Search(), ask))


def test_what_has_no_lane_is_left() -> None:
    answers: list[Found | No] = [No.ROOM, found_for(Lot.of(JOBS[:2], False)), No.LANE]
    found = dict(in_lots(JOBS, Search(), lambda lot: answers.pop(0)))
    assert sorted(found) == [1, 3]
    assert not answers


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
