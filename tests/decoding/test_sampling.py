"""Sampling is unbiased, and repeats for the same seed, key and position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attent.decoding import sampling
from attent.decoding.options import SamplingOptions
from attent.decoding.sampling import filter_logits, mix_bits, sample_tokens

NEVER = float("-inf")
MANY = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, NEVER, 0.2, -3.0, 1.5])


def draw_samples(logits: Tensor, sampling: SamplingOptions, rows: int = MANY, position: int = 0) -> Tensor:
    """Return (rows,) samples with distinct keys."""
    numbers = torch.arange(rows)[:, None]
    return sample_tokens(logits.expand(rows, 1, -1), sampling, numbers, torch.full((rows,), position))[:, 0]


def compute_chi_square(tokens: Tensor, chances: Tensor) -> float:
    """Return chi-square over its expectation: about 1 for the right distribution."""
    expected = len(tokens) * chances
    counts = tokens.bincount(minlength=len(chances))
    assert counts[expected == 0].sum() == 0
    real = expected > 0
    return float((((counts - expected) ** 2)[real] / expected[real]).sum() / (real.sum() - 1))


@pytest.mark.parametrize("seed", [0, 1, -5, 2**62])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_probabilities(seed: int, temperature: float) -> None:
    tokens = draw_samples(LOGITS, SamplingOptions(seed=seed, temperature=temperature))
    assert compute_chi_square(tokens, (LOGITS / temperature).softmax(-1)) < 3.2  # one in a thousand is above
    assert compute_chi_square(tokens, (LOGITS / temperature * 1.1).softmax(-1)) > 5


def test_positions_beams_and_seeds_are_independent() -> None:
    """Pairs of samples have the product distribution."""
    logits = torch.tensor([0.5, 0.0, -0.5, 1.0])
    pairs = torch.outer(logits.softmax(-1), logits.softmax(-1)).flatten()
    first = draw_samples(logits, SamplingOptions(seed=3))
    others = [
        draw_samples(logits, SamplingOptions(seed=3), position=1),
        draw_samples(logits, SamplingOptions(seed=4)),
        first.roll(1),
    ]
    for other in others:
        assert compute_chi_square(4 * first + other, pairs) < 2.6
    assert compute_chi_square(4 * first + first, pairs) > 100


def test_the_hash_is_splitmix64() -> None:
    """Published test vectors of the generator: a sample must not change from one version to the next."""
    golden_gamma = 0x9E3779B97F4A7C15
    states = [(golden_gamma * i) % 2**64 for i in range(3)]
    x = torch.tensor([state - 2**64 * (state >= 2**63) for state in states])
    assert [value % 2**64 for value in mix_bits(x).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_a_sample_depends_only_on_seed_key_and_position() -> None:
    logits = torch.randn(6, 3, 50)
    rows, positions = torch.arange(18).view(6, 3), torch.tensor([0, 5, 2, 2, 9, 1])
    together = sample_tokens(logits, SamplingOptions(), rows, positions)
    order = torch.tensor([4, 0, 5])
    assert torch.equal(sample_tokens(logits[order], SamplingOptions(), rows[order], positions[order]), together[order])
    assert torch.equal(sample_tokens(logits[:, 1:2], SamplingOptions(), rows[:, 1:2], positions), together[:, 1:2])
    for changed in (
        sample_tokens(logits, SamplingOptions(seed=2), rows, positions),
        sample_tokens(logits, SamplingOptions(), rows + 100, positions),
        sample_tokens(logits, SamplingOptions(), rows, positions + 1),
    ):
        assert (changed != together).sum() > 6


def test_impossible_tokens_have_no_chance_in_any_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest noise must stay finite."""
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


def test_a_low_temperature_takes_the_most_likely_token() -> None:
    logits = torch.randn(200, 1, 30)
    got = sample_tokens(
        logits, SamplingOptions(temperature=1e-4), torch.arange(200)[:, None], torch.zeros(200, dtype=torch.int64)
    )
    assert torch.equal(got, logits.argmax(-1))


# --- top-k and top-p -------------------------------------------------------------------------------------------------


def list_kept(sampling: SamplingOptions, logits: Tensor = LOGITS) -> list[int]:
    got = filter_logits(logits, sampling)
    assert torch.equal(got[got > NEVER], logits[got > NEVER])
    return (got > NEVER).nonzero()[:, 0].tolist()


def test_top_k_keeps_the_most_likely() -> None:
    assert list_kept(SamplingOptions(top_k=1)) == [0]
    assert list_kept(SamplingOptions(top_k=3)) == [0, 1, 9]
    assert list_kept(SamplingOptions(top_k=100)) == list_kept(SamplingOptions()) == [0, 1, 2, 3, 4, 5, 7, 8, 9]


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    order = LOGITS.argsort(descending=True)
    chances = LOGITS.softmax(-1)[order]
    for p in (0.01, 0.3, 0.6, 0.9, 0.99):
        count = next(n for n in range(1, 11) if chances[:n].sum() >= p)
        assert list_kept(SamplingOptions(top_p=p)) == sorted(order[:count].tolist())
    assert list_kept(SamplingOptions(top_p=0.5), torch.zeros(4)) == [0, 1]


def test_top_p_applies_after_top_k() -> None:
    chances = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert list_kept(SamplingOptions(top_p=0.5), chances.log()) == [0, 1]
    assert list_kept(SamplingOptions(top_p=0.5, top_k=2), chances.log()) == [0]


def test_filtering_keeps_relative_probabilities() -> None:
    filtered = torch.where(LOGITS >= 1.0, LOGITS, NEVER)
    for options in (SamplingOptions(top_k=3, seed=8), SamplingOptions(top_p=0.75, seed=9)):
        assert list_kept(options) == [0, 1, 9]
        assert compute_chi_square(draw_samples(LOGITS, options), filtered.softmax(-1)) < 6.9


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
def test_invalid_options_are_rejected(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingOptions(**changes)
