"""Dropout on CPU: the rate, the mean, reproducibility from a seed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attent.nn.dropout import NUM_LEVELS, Dropout, apply_dropout, compute_scale_factors


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.999])
def test_values_are_dropped_at_the_rate(rate: float) -> None:
    out = apply_dropout(torch.ones(400, 1001), rate)
    assert float((out == 0).float().mean()) == pytest.approx(rate, abs=0.003)
    remaining = out[out != 0]
    assert torch.equal(remaining, remaining[:1].expand_as(remaining))
    assert float(remaining[0]) == pytest.approx(1 / (1 - rate), rel=1 / NUM_LEVELS / (1 - rate))


@pytest.mark.parametrize("rate", [1e-9, 0.1, 0.5, 1 - 1e-9])
def test_the_dropped_share_of_all_levels_is_the_rate(rate: float) -> None:
    every = torch.arange(-NUM_LEVELS // 2, NUM_LEVELS // 2).to(torch.int16)
    factors = compute_scale_factors(every, rate, torch.float64)
    dropped = int((factors == 0).sum())
    assert dropped == min(round(rate * NUM_LEVELS), NUM_LEVELS - 1)
    assert torch.equal(factors[dropped:], torch.full_like(factors[dropped:], NUM_LEVELS / (NUM_LEVELS - dropped)))
    assert float(factors.mean()) == pytest.approx(1, abs=1e-12)


def test_draws_are_independent() -> None:
    """Four values share one 64-bit draw: neighbours must be uncorrelated."""
    is_kept = (apply_dropout(torch.ones(100_000, 4), 0.5) != 0).float()
    together = torch.corrcoef(is_kept.T) - torch.eye(4)
    assert float(together.abs().max()) < 0.02
    assert (is_kept.mean(0) - 0.5).abs().max() < 0.01


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 7, 9)])
def test_any_shape_is_supported(shape: tuple[int, ...]) -> None:
    assert apply_dropout(torch.ones(shape), 0.5).shape == shape


def test_a_transposed_view_is_supported() -> None:
    x = torch.randn(6, 4, 5).transpose(0, 2)
    out = apply_dropout(x, 0.5)
    assert torch.equal(out[out != 0], (2 * x)[out != 0])


def test_a_seed_gives_reproducible_masks() -> None:
    x = torch.randn(3, 33)
    torch.manual_seed(3)
    first, second = apply_dropout(x, 0.5), apply_dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(apply_dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_the_gradient_has_the_same_mask() -> None:
    x = torch.ones(5, 9, dtype=torch.float64, requires_grad=True)
    out = apply_dropout(x, 0.25)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


def test_rate_zero_or_eval_mode_changes_nothing() -> None:
    x = torch.randn(4)
    assert Dropout(0.0).train()(x) is x
    assert Dropout(0.5).eval()(x) is x


def test_other_dtypes_use_torchs_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "dropout", lambda x, rate: x + 1)
    assert apply_dropout(torch.zeros(1, dtype=torch.bfloat16), 0.5) == 1
    assert apply_dropout(torch.zeros(1), 0.5) == 0
