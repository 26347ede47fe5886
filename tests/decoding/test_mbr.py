"""Minimum Bayes risk: chrF against sacreBLEU, and selections that are obvious."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.chrf import CHRF

from attent.decoding import quality

TEXTS = [
    "the cat sat on the mat",
    "The cat sat on a mat.",
    "a dog",
    "a",
    "",
    "   ",
    "aaaaaaaaaaaa",
    "aaaa aaaa aa",
    "完全に違う文です",
    "e\u0301 👩‍👧 \ud83d",
]


def select_best(texts: list[str], weights: list[float] | None = None) -> int:
    expected = quality.compute_expected_chrf(texts, weights)
    return int(np.flatnonzero(expected >= expected.max() - 1e-9)[0])  # sums are rounded


def compute_with_sacrebleu(texts: list[str]) -> list[list[float]]:
    metric = CHRF()
    return [[metric.sentence_score(text, [other]).score for other in texts] for text in texts]


def test_pairwise_chrf_matches_sacrebleu() -> None:
    np.testing.assert_allclose(quality.compute_pairwise_chrf(TEXTS), compute_with_sacrebleu(TEXTS), rtol=0, atol=1e-9)


@given(st.lists(st.text("ab c", max_size=20), min_size=1, max_size=6))
@settings(deadline=None, max_examples=150)
def test_chrf_of_random_texts_matches_sacrebleu(texts: list[str]) -> None:
    np.testing.assert_allclose(quality.compute_pairwise_chrf(texts), compute_with_sacrebleu(texts), rtol=0, atol=1e-9)


def test_expected_chrf_is_the_weighted_mean() -> None:
    texts = [TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2]]
    weights = [1.0, 2.0, 3.0, 4.0]
    expected = np.array(compute_with_sacrebleu(texts)) @ np.array(weights) / 10
    np.testing.assert_allclose(quality.compute_expected_chrf(texts, weights), expected, atol=1e-9)
    np.testing.assert_allclose(
        quality.compute_expected_chrf(texts), np.array(compute_with_sacrebleu(texts)).mean(1), atol=1e-9
    )


def test_the_candidate_closest_to_the_others_is_selected() -> None:
    assert select_best(["something else", "a red house", "a red horse", "a dead horse"]) == 2
    assert select_best(["one", "two words", "two words"]) == 1


def test_weights_change_the_selection() -> None:
    texts = ["a red house", "a red horse", "nothing"]
    assert select_best(texts, [0.1, 0.1, 5.0]) == 2
    assert select_best(texts, quality.normalize_log_probs([-100.0, -1.0, -50.0])) == 1


def test_the_first_of_equal_candidates_is_selected() -> None:
    assert select_best(["abc", "xyz"]) == 0
    assert select_best(["xyz", "abc", "abc", "xyz"]) == 0
    mirrored = ["abcd efgh", "efgh ijkl", "ijkl abcd"]
    assert select_best(mirrored) == 0
    assert select_best(["only"]) == 0
    assert select_best(["", ""]) == 0


def test_tiny_probabilities_stay_finite() -> None:
    np.testing.assert_allclose(quality.normalize_log_probs([-2000.0, -2000.0 + np.log(3)]), [0.25, 0.75])


def test_the_selection_does_not_depend_on_the_order() -> None:
    rng = random.Random(1)
    words = "the a red blue house horse runs stands on under hill".split()
    texts = [" ".join(rng.choices(words, k=6)) for _ in range(30)]
    chosen = texts[select_best(texts)]
    for _ in range(5):
        rng.shuffle(texts)
        assert texts[select_best(texts)] == chosen
