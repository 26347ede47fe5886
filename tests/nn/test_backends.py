"""The explicit backend against equation 1 in loops over single numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attent.nn import BACKENDS, AttentionInputs, Mask, attend, attend_explicit, choose_backend, dot_product
from attent.nn.backends import LONG_ROW_TOKENS, rank_backends
from attent.nn.masks import Packing


def attend_by_loops(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor, sees: list[list[bool]]) -> Tensor:
    """softmax(Q K^T scale + bias) V, a number at a time; query head h has key head h // (H / Hkv)."""
    B, H, Tq, D = q.shape
    share, out = H // k.shape[1], torch.zeros(B, H, Tq, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(Tq):
                keys = [j for j in range(k.shape[2]) if sees[i][j]]
                products = [sum(float(q[b, h, i, d] * k[b, h // share, j, d]) for d in range(D)) for j in keys]
                scores = [x * scale + float(bias[b, h, i, j]) for x, j in zip(products, keys, strict=True)]
                total = sum(math.exp(score) for score in scores)
                for j, score in zip(keys, scores, strict=True):
                    out[b, h, i] += math.exp(score) / total * v[b, h // share, j].double()
    return out


@pytest.mark.parametrize("backend", ["explicit", "fused", "auto"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equation_1_by_hand(backend: str, kv_heads: int) -> None:
    q = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 4, 5, dtype=torch.float64)
    bias = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    everything, causal = [[True] * 4] * 3, [[j <= i for j in range(4)] for i in range(3)]
    nothing = torch.zeros_like(bias)
    for mask, sees in ((Mask(), everything), (Mask(causal=True), causal)):
        torch.testing.assert_close(
            attend(q, k, v, mask, backend=backend), attend_by_loops(q, k, v, 5**-0.5, nothing, sees)
        )
        torch.testing.assert_close(
            attend(q, k, v, mask, bias, scale=0.9, backend=backend), attend_by_loops(q, k, v, 0.9, bias, sees)
        )


def make_additive_inputs() -> list[Tensor]:
    """q, k, v with two query heads per key head, and the score weight."""
    shapes = (2, 4, 3, 5), (2, 2, 7, 5), (2, 2, 7, 5), (4, 5)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_additive_scores_by_hand() -> None:
    q, k, v, score_weight = (x.detach() for x in make_additive_inputs())
    out, weights = attend_explicit(q, k, v, Mask(causal=True), None, 1.5, score_weight=score_weight)
    for b, h, i in [(0, 0, 2), (1, 3, 1)]:
        hidden = [[math.tanh(float(q[b, h, i, d] + k[b, h // 2, j, d])) for d in range(5)] for j in range(i + 1)]
        scores = [1.5 * sum(float(score_weight[h, d]) * row[d] for d in range(5)) for row in hidden]
        total = sum(map(math.exp, scores))
        torch.testing.assert_close(
            weights[b, h, i, : i + 1].tolist(), [math.exp(score) / total for score in scores], rtol=1e-12, atol=0
        )
        torch.testing.assert_close(out[b, h, i], weights[b, h, i] @ v[b, h // 2])


def test_additive_scores_in_chunks_have_the_same_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, score_weight = make_additive_inputs()
    results = []
    for limit in (10**9, 2 * 4 * 7 * 5 * 2, 1):  # all queries at once, two, one
        monkeypatch.setattr(dot_product, "MAX_HIDDEN_VALUES", limit)
        out = attend(q, k, v, score_weight=score_weight)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, score_weight))])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_backends_for_dot_products_refuse_additive_scores() -> None:
    q, k, v, score_weight = make_additive_inputs()
    for name in BACKENDS.keys() - {"explicit"}:
        with pytest.raises(ValueError, match=f"`{name}` .* `compatibility` is additive; use explicit or auto"):
            attend(q, k, v, backend=name, score_weight=score_weight)
    with pytest.raises(ValueError, match="did you mean `flex`"):
        attend(q, k, v, backend="flexx", score_weight=score_weight)


def test_weights_are_returned_in_float32_at_least() -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 4).to(torch.bfloat16)
    out, weights = attend_explicit(q, k, v, Mask(causal=True), None, 0.5, 0.0)
    assert (out.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3))
    assert (weights.triu(1) == 0).all()


def test_values_may_have_another_width_than_keys() -> None:
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 7)
    assert attend(q, k, v).shape == (1, 2, 3, 7)


def test_dropped_weights_are_scaled_up() -> None:
    """With values of one, the output is the sum of the remaining weights: one on average."""
    q, k, v = torch.randn(1, 1, 4000, 4), torch.randn(1, 1, 8, 4), torch.ones(1, 1, 8, 4)
    out = attend_explicit(q, k, v, Mask(), None, 0.5, 0.5)[0]
    assert abs(float(out.mean()) - 1) < 0.05
    assert float(out.std()) > 0.1


def test_auto_selects_the_first_supported_backend() -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    assert choose_backend("auto", AttentionInputs(q, k, v, Mask(), None, 0.5, 0.0)).name == "fused"
    for name in ("fused", "flex", "explicit"):
        assert choose_backend(name, AttentionInputs(q, k, v, Mask(), None, 0.5, 0.0)) is BACKENDS[name]


def test_long_packed_rows_use_the_packed_kernel_if_supported() -> None:
    packing = Packing.from_lengths([[LONG_ROW_TOKENS + 1]])
    q, k, v = torch.empty(3, 1, 1, LONG_ROW_TOKENS + 1, 8)
    request = AttentionInputs(q, k, v, Mask(packing=(packing, packing)), None, 1.0, 0.0)
    assert rank_backends(request)[0] == "packed"
    assert choose_backend("auto", request).name == "fused"  # on CPU
