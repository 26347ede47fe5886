"""The kernel for packed rows equals equation 1, in values and gradients, for random packings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attent.nn import Mask, Packing
from attent.nn.backends import attend
from attent.nn.dot_product import attend_explicit
from attent.nn.fused import FusedQKV, attend_qkv

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def packings(seed: int, rows: int, device: torch.device) -> tuple[Packing, Packing]:
    """Sentences of 0 to 40 tokens on both sides, in rows that are full, half empty, or empty."""
    dice = random.Random(seed)
    source, target = [], []
    for row in range(rows):
        count = 0 if row == 1 else dice.randint(1, 7)
        source.append([dice.choice([0, 1, 5, dice.randint(1, 40)]) for _ in range(count)])
        target.append([dice.choice([0, 1, 5, dice.randint(1, 40)]) for _ in range(count)])
    widths = [max(map(sum, side)) + dice.choice([0, 3, 40]) for side in (source, target)]
    made = [
        Packing.from_lengths(side, max(1, width), 7, device)
        for side, width in zip((source, target), widths, strict=True)
    ]
    return made[0], made[1]


def make_mask(kind: str, seed: int, device: torch.device) -> Mask:
    queries, keys = packings(seed, 3, device)
    if kind == "cross":
        return Mask(packing=(queries, keys))
    return Mask(causal=kind == "causal", packing=(queries, queries))


def assert_near(ours: Tensor, theirs: Tensor, size: float = 1) -> None:
    """Compare relative to `size`: the gradient of a query that sees one key is 0, a difference of two numbers."""
    error = (ours.double() - theirs).norm() / theirs.norm().clamp(min=size)
    assert error < TOLERANCE[ours.dtype], f"off by {error:.1e}"


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", ["full", "causal", "cross"])
def test_the_kernel_equals_equation_1(kind: str, width: int, device: torch.device, dtype_of: torch.dtype) -> None:
    for seed in range(20 if device.type == "cuda" else 1):
        mask = make_mask(kind, seed, device)
        assert mask.packing is not None
        (_, Tq), (_, Tk) = (packing.shape for packing in mask.packing)
        q, k, v = (torch.randn(3, 2, T, width, device=device, dtype=dtype_of).requires_grad_() for T in (Tq, Tk, Tk))
        ours = attend(q, k, v, mask, backend="tiles")
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        theirs = attend_explicit(*exact, mask)[0]
        assert_near(ours, theirs)
        direction = torch.randn_like(ours)
        actual_gradients = torch.autograd.grad(ours, [q, k, v], direction)
        expected_gradients = torch.autograd.grad(theirs, exact, direction.double())
        size = expected_gradients[2].norm().item()
        for actual, expected in zip(actual_gradients, expected_gradients, strict=True):
            assert_near(actual, expected, size)


def fill_with_nan(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make_nan(*arguments: Any, **more: Any) -> Tensor:
        tensor = make(*arguments, **more)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    return make_nan


def test_every_output_element_is_written(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialized memory is NaN here."""
    mask = make_mask("cross", 5, device)
    assert mask.packing is not None
    (_, Tq), (_, Tk) = (packing.shape for packing in mask.packing)
    q, k, v = (torch.randn(3, 2, T, 16, device=device).requires_grad_() for T in (Tq, Tk, Tk))
    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, fill_with_nan(getattr(owner, name)))
    out = attend(q, k, v, mask, backend="tiles")
    gradients = torch.autograd.grad(out.sum(), [q, k, v])
    assert all(x.isfinite().all() for x in (out, *gradients))
    queries, keys = mask.packing
    assert not out.transpose(1, 2)[queries.segments < 0].any(), "padding attends to nothing"
    assert not any(grad.transpose(1, 2)[keys.segments < 0].any() for grad in gradients[1:]), "padding has no gradient"


@pytest.mark.parametrize("lacks", [True, False], ids=["biases", ""])
@pytest.mark.parametrize("kind", ["causal", "cross"])
def test_fused_projections_equal_separate_ones(kind: str, lacks: bool, device: torch.device) -> None:
    mask = make_mask(kind, 3, device)
    assert mask.packing is not None
    (_, Tq), (_, Tk) = (packing.shape for packing in mask.packing)
    shapes = [(3, Tq, 1, 2, 16), (3, Tk, 2, 2, 16)] if kind == "cross" else [(3, Tq, 3, 2, 16)]
    projections = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    biases = [torch.randn(shape[2:], device=device).requires_grad_() for shape in shapes] if lacks else []
    joined = FusedQKV(*((*projections, None)[:2]), *((*biases, None, None)[:2]))
    ours = attend_qkv(joined, mask, 0.25, backend="tiles")
    theirs = attend_qkv(joined, mask, 0.25, backend="explicit")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    direction, leaves = torch.randn_like(ours), [*projections, *biases]
    for actual, expected in zip(
        torch.autograd.grad(ours, leaves, direction), torch.autograd.grad(theirs, leaves, direction), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_backward_uses_the_dropout_mask_of_forward(device: torch.device) -> None:
    """With one-hot values the output is the weights; backward must drop those that forward dropped."""
    packing = Packing.from_lengths([[16]], 16, 1, device)
    mask = Mask(packing=(packing, packing))
    q, k = (torch.randn(1, 4, 16, 16, device=device) for _ in range(2))
    v = torch.eye(16, device=device).expand(1, 4, 16, 16).clone().requires_grad_()
    out = attend(q, k, v, mask, dropout=0.5, backend="tiles")
    weights = attend_explicit(q, k, v, mask)[1]
    is_kept = out != 0
    assert 0.4 < is_kept.float().mean() < 0.6
    torch.testing.assert_close(out, torch.where(is_kept, 2 * weights, 0))
    (of_v,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(of_v, out.detach().sum(-2)[..., None].expand_as(of_v))


def test_the_gradient_under_dropout_is_correct(device: torch.device) -> None:
    packing = Packing.from_lengths([[9, 7]], 16, 2, device)
    mask = Mask(causal=True, packing=(packing, packing))
    q, k, v = (torch.randn(1, 1, 16, 16, device=device).requires_grad_() for _ in range(3))
    torch.manual_seed(1)
    out = attend(q, k, v, mask, dropout=0.3, backend="tiles")
    one_hot = torch.eye(16, device=device)[None, None]
    torch.manual_seed(1)
    is_kept = attend(q, k, one_hot, mask, dropout=0.3, backend="tiles").detach() != 0
    weights = attend_explicit(q, k, v, mask)[1]
    expected = torch.where(is_kept, weights / 0.7, 0) @ v
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    actual_gradients, expected_gradients = (
        torch.autograd.grad(x, [q, k, v], direction, retain_graph=True) for x in (out, expected)
    )
    for actual, expected_gradient in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, expected_gradient, rtol=1e-4, atol=1e-5)


def test_any_memory_layout_is_supported(device: torch.device) -> None:
    single_row = Packing.from_lengths([[9, 7]], 16, 2, device)
    packing = Packing(
        *(x.expand(3, -1) for x in (single_row.segments, single_row.positions, single_row.ends)), single_row.max_length
    )
    mask = Mask(packing=(packing, packing))
    q, k, v = (torch.randn(3, 2, 16, 32, device=device)[..., ::2] for _ in range(3))
    torch.testing.assert_close(
        attend(q, k, v, mask, backend="tiles"), attend_explicit(q, k, v, mask)[0], rtol=1e-4, atol=1e-5
    )
