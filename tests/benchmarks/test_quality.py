"""Rank correlation of the figures of quality with sentence chrF."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quality import compute_spearman, measure_correlations, rank


def test_ranks_and_correlations_are_spearmans() -> None:
    assert rank(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert compute_spearman(np.array([1.0, 2.0, 9.0]), np.array([-3.0, 5.0, 6.0])) == pytest.approx(1)
    # scipy.stats.spearmanr([1, 2, 2, 4, 5], [5, 6, 7, 8, 7]).statistic
    assert compute_spearman(np.array([1.0, 2, 2, 4, 5]), np.array([5.0, 6, 7, 8, 7])) == pytest.approx(
        0.763158, abs=1e-5
    )


def test_sentences_without_a_figure_are_left_out() -> None:
    values = np.array([1.0, np.nan, 3.0, 2.0, 5.0, 4.0])
    none = np.full(6, np.nan)
    results = measure_correlations({"score": values, "missing": none}, np.array([1.0, 99.0, 3.0, 2.0, 5.0, 4.0]))
    assert set(results) == {"score"}
    assert results["score"] == pytest.approx((1, 1, 1))
