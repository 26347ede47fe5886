"""Chance that is fair, and the same for the same seed, row and place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attent.decoding import sampling
from attent.decoding.options import SamplingOptions
from attent.decoding.sampling import filter_logits, sample_tokens

NEVER = float("-inf")
MANY = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, NEVER, 0.2, -3.0, 1.5])


def draws(logits: Tensor, sampling: SamplingOptions, rows: int = MANY, place: int = 0) -> Tensor:
    """(rows,) each of another row."""
    numbers = torch.arange(rows)[:, None]
    return sample_tokens(logits.expand(rows, 1, -1), sampling, numbers, torch.full((rows,), place))[:, 0]


def surprise(tokens: Tensor, chances: Tensor) -> float:
    """Chi-square of the counts, over its expectation: about 1 where the chances are right."""
    expected = len(tokens) * chances
    counts = tokens.bincount(minlength=len(chances))
    assert counts[expected == 0].sum() == 0
    real = expected > 0
    return float((((counts - expected) ** 2)[real] / expected[real]).sum() / (real.sum() - 1))


@pytest.mark.parametrize("seed", [0, 1, -5, 2**62])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability_says(seed: int, temperature: float) -> None:
    tokens = draws(LOGITS, SamplingOptions(seed=seed, temperature=temperature))
    assert surprise(tokens, (LOGITS / temperature).softmax(-1)) < 3.2  # one in a thousand is above
    assert surprise(tokens, (LOGITS / temperature * 1.1).softmax(-1)) > 5


def test_places_beams_and_seeds_draw_independently() -> None:
    """Of two draws, all pairs come as often as if one knew nothing of the other."""
    logits = torch.tensor([0.5, 0.0, -0.5, 1.0])
    pairs = torch.outer(logits.softmax(-1), logits.softmax(-1)).flatten()
    one = draws(logits, SamplingOptions(seed=3))
    others = [draws(logits, SamplingOptions(seed=3), place=1), draws(logits, SamplingOptions(seed=4)), one.roll(1)]
    for other in others:
        assert surprise(4 * one + other, pairs) < 2.6
    assert surprise(4 * one + one, pairs) > 100


def test_a_draw_depends_on_nothing_but_seed_row_and_place() -> None:
    logits = torch.randn(6, 3, 50)
    rows, places = torch.arange(18).view(6, 3), torch.tensor([0, 5, 2, 2, 9, 1])
    together = sample_tokens(logits, SamplingOptions(), rows, places)
    order = torch.tensor([4, 0, 5])
    assert torch.equal(sample_tokens(logits[order], SamplingOptions(), rows[order], places[order]), together[order])
    assert torch.equal(sample_tokens(logits[:, 1:2], SamplingOptions(), rows[:, 1:2], places), together[:, 1:2])
    for changed in (
        sample_tokens(logits, SamplingOptions(seed=2), rows, places),
        sample_tokens(logits, SamplingOptions(), rows + 100, places),
        sample_tokens(logits, SamplingOptions(), rows, places + 1),
    ):
        assert (changed != together).sum() > 6


def test_however_many_tokens_there_are_none_is_drawn_that_has_no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The greatest number that chance can give must not outweigh everything."""
    monkeypatch.setattr(sampling, "mix_bits", lambda x: torch.full_like(x, -1))
    logits = torch.full((1, 1, 8), -30.0)
    logits[..., 3], logits[..., 5] = 0.0, NEVER
    assert (
        sample_tokens(
            logits, SamplingOptions(), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        )
        == 3
    )
    monkeypatch.setattr(sampling, "mix_bits", torch.zeros_like)
    assert (
        sample_tokens(
            logits, SamplingOptions(), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        )
        == 3
    )


def test_a_sharp_temperature_takes_the_likeliest() -> None:
    logits = torch.randn(200, 1, 30)
    got = sample_tokens(
        logits, SamplingOptions(temperature=1e-4), torch.arange(200)[:, None], torch.zeros(200, dtype=torch.int64)
    )
    assert torch.equal(got, logits.argmax(-1))


# --- among the likely ------------------------------------------------------------------------------------------------


def left(sampling: SamplingOptions, logits: Tensor = LOGITS) -> list[int]:
    got = filter_logits(logits, sampling)
    assert torch.equal(got[got > NEVER], logits[got > NEVER])
    return (got > NEVER).nonzero()[:, 0].tolist()


def test_top_k_leaves_the_likeliest() -> None:
    assert left(SamplingOptions(top_k=1)) == [0]
    assert left(SamplingOptions(top_k=3)) == [0, 1, 9]
    assert left(SamplingOptions(top_k=100)) == left(SamplingOptions()) == [0, 1, 2, 3, 4, 5, 7, 8, 9]


def test_top_p_leaves_the_fewest_that_are_likely_enough() -> None:
    order = LOGITS.argsort(descending=True)
    chances = LOGITS.softmax(-1)[order]
    for p in (0.01, 0.3, 0.6, 0.9, 0.99):
        count = next(n for n in range(1, 11) if chances[:n].sum() >= p)
        assert left(SamplingOptions(top_p=p)) == sorted(order[:count].tolist())
    assert left(SamplingOptions(top_p=0.5), torch.zeros(4)) == [0, 1]


def test_top_p_counts_among_what_top_k_has_left() -> None:
    chances = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert left(SamplingOptions(top_p=0.5), chances.log()) == [0, 1]
    assert left(SamplingOptions(top_p=0.5, top_k=2), chances.log()) == [0]


def test_what_is_left_keeps_its_chances() -> None:
    kept = torch.where(LOGITS >= 1.0, LOGITS, NEVER)
    for options in (SamplingOptions(top_k=3, seed=8), SamplingOptions(top_p=0.75, seed=9)):
        assert left(options) == [0, 1, 9]
        assert surprise(draws(LOGITS, options), kept.softmax(-1)) < 6.9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0.0}, "`temperature` must be greater than 0, but is 0.0"),
        ({"temperature": float("nan")}, "`temperature` must be greater than 0, but is nan"),
        ({"top_k": -1}, "`top_k` must be 1 or more, or 0 for all tokens, but is -1"),
        ({"top_p": 0.0}, "`top_p` must be greater than 0 and at most 1, but is 0.0"),
        ({"top_p": 1.5}, "`top_p` must be greater than 0 and at most 1, but is 1.5"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingOptions(**changes)
