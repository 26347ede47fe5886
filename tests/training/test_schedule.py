"""Learning rate schedules: the paper's, and the warmup and decay of the others."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from attent.training.optimizer import Schedule, compute_lr, compute_paper_lr

SCHEDULES: tuple[Schedule, ...] = ("inverse_sqrt", "cosine")


@pytest.mark.parametrize(("width", "warmup"), [(512, 4000), (1024, 4000), (32, 7), (100, 1)])
def test_the_schedule_is_equation_3_of_the_paper(width: int, warmup: int) -> None:
    highest = compute_paper_lr(width, warmup)
    for step in [1, 2, 3, 6, 7, 8, 100, 3999, 4000, 4001, 100_000]:
        ours = compute_lr(step, schedule="inverse_sqrt", peak_lr=highest, warmup=warmup, total_steps=100_000)
        assert math.isclose(ours, width**-0.5 * min(step**-0.5, step * warmup**-1.5), rel_tol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_linear(schedule: Schedule) -> None:
    rates = [compute_lr(n, schedule=schedule, peak_lr=0.5, warmup=10, total_steps=100) for n in range(1, 101)]
    assert rates[:10] == pytest.approx([0.05 * n for n in range(1, 11)], rel=1e-12)
    assert max(rates) == pytest.approx(0.5)
    assert all(after <= before for before, after in pairwise(rates[9:]))


def test_cosine_is_half_in_the_middle_and_zero_at_the_end() -> None:
    def rate(step: int) -> float:
        return compute_lr(step, schedule="cosine", peak_lr=1.0, warmup=20, total_steps=120)

    assert rate(70) == pytest.approx(0.5)
    assert rate(120) == pytest.approx(0.0, abs=1e-15)
    assert rate(500) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warmup_the_schedule_starts_at_the_peak(schedule: Schedule) -> None:
    first = compute_lr(1, schedule=schedule, peak_lr=0.2, warmup=0, total_steps=1000)
    assert first == pytest.approx(0.2, rel=1e-5)
