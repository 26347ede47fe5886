"""Fused kernels against several PyTorch operations: norms, activations, losses and dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn import Packing, Residual, Stack, StackConfig, fused, kernels


def grads(out: Tensor, inputs: list[Tensor], direction: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, direction, retain_graph=True)


def agree(ours: Tensor, theirs: Tensor, inputs: list[Tensor], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    direction = torch.randn_like(theirs)
    for actual, expected in zip(grads(ours, inputs, direction), grads(theirs, inputs, direction), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 1, 512), (70, 16)], ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("lacks", [True, False], ids=["bias", ""])
def test_add_and_norm(shape: tuple[int, ...], centred: bool, lacks: bool, device: torch.device) -> None:
    from attent.nn.kernels.add_norm import fused_add_norm

    width = shape[-1]
    x, y = (torch.randn(shape, device=device).requires_grad_() for _ in range(2))
    before, weight, bias = (torch.randn(width, device=device).requires_grad_() for _ in range(3))
    ours, _ = fused_add_norm(x, y, before if lacks else None, weight, bias if centred else None, 1e-5, 0.0)
    total = x + y + before if lacks else x + y
    theirs = F.layer_norm(total, (width,), weight, bias) if centred else F.rms_norm(total, (width,), weight, 1e-5)
    agree(ours, theirs, [x, y, weight, *([before] if lacks else []), *([bias] if centred else [])])


def test_add_and_norm_drops_the_sub_layer_and_not_the_residual(device: torch.device) -> None:
    from attent.nn.kernels.add_norm import _add_norm_backward, add_norm

    x, y, before = (
        torch.randn(64, 32, device=device),
        torch.randn(64, 32, device=device),
        torch.randn(32, device=device),
    )
    ones, seed = torch.ones(32, device=device), torch.tensor([3, 9], dtype=torch.int32, device=device)
    _, _, total, moments = add_norm(x, y, before, ones, ones, 1e-5, 0.25, seed, False)
    is_kept = total != x
    assert 0.7 < is_kept.float().mean() < 0.8
    torch.testing.assert_close(total, torch.where(is_kept, x + (y + before) / 0.75, x))
    of_x, of_y, sums = _add_norm_backward(torch.randn_like(x), None, total, moments, ones, True, 0.25, seed)
    torch.testing.assert_close(of_y, torch.where(is_kept, of_x / 0.75, 0))
    torch.testing.assert_close(sums[2], of_y.sum(0))


def test_a_residual_in_one_pass(device: torch.device) -> None:
    residual = Residual(StackConfig(width=32, dropout=0.0)).to(device)
    last = nn.Linear(16, 32).to(device)
    x, y = (torch.randn(2, 7, n, device=device).requires_grad_() for n in (32, 16))
    inputs = [x, y, *residual.parameters(), *last.parameters()]
    theirs = residual(x, lambda _: last(y))
    ours, same = fused.apply_add_norm(residual, x, y, last, duplicate=False)
    assert same is ours
    agree(ours, theirs, inputs)
    ours, twin = fused.apply_add_norm(residual, x, y, last)
    assert torch.equal(ours, twin)
    agree(ours + twin.sin(), theirs + theirs.sin(), inputs)


@pytest.mark.parametrize("rows", [1, 37])
def test_relu_with_its_product(rows: int, device: torch.device) -> None:
    from attent.nn.kernels.linear_relu import linear_relu

    x = torch.randn(2, rows, 16, device=device).requires_grad_()
    weight, bias = (torch.randn(*shape, device=device).requires_grad_() for shape in ((48, 16), (48,)))
    agree(linear_relu(x, weight, bias), F.linear(x, weight, bias).relu(), [x, weight, bias], 1e-4)


@pytest.mark.parametrize(("words", "more"), [(50, 14), (64, 0), (64, 64), (5000, 40), (8192, 0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_its_gradient(words: int, more: int, smoothing: float, device: torch.device) -> None:
    from attent.nn.kernels.cross_entropy import cross_entropy_inplace

    logits = 5 * torch.randn(6, words + more, device=device)
    targets = torch.randint(0, words, (6,), device=device)
    real = torch.tensor([True, True, False, True, True, True], device=device)
    logits[2] = float("nan")
    exact = logits[:, :words].double().nan_to_num().requires_grad_()
    smoothed, plain = (F.cross_entropy(exact, targets, reduction="none", label_smoothing=s) for s in (smoothing, 0.0))
    (expected_gradient,) = torch.autograd.grad((smoothed * real).sum(), exact)
    losses = cross_entropy_inplace(logits, targets, real, words, smoothing)
    torch.testing.assert_close(
        losses.double(), torch.stack([smoothed * real, plain * real]).detach(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(logits[:, :words].double(), expected_gradient, rtol=1e-4, atol=1e-6)
    assert not logits[:, words:].any()


@pytest.mark.parametrize(("words", "more"), [(50, 14), (5000, 40), (8192, 0)])
@pytest.mark.parametrize("alpha", [0.0, 5.0])
def test_rdrop_and_its_gradient(words: int, more: int, alpha: float, device: torch.device) -> None:
    from attent.nn.kernels.cross_entropy import rdrop_inplace

    logits = 5 * torch.randn(2, 6, words + more, device=device)
    targets = torch.randint(0, words, (6,), device=device)
    real = torch.tensor([True, True, False, True, True, True], device=device)
    logits[:, 2] = float("nan")
    exact = logits[..., :words].double().nan_to_num().requires_grad_()
    smoothed, plain = (
        sum(F.cross_entropy(part, targets, reduction="none", label_smoothing=s) for part in exact) / 2
        for s in (0.1, 0.0)
    )
    p, q = exact.log_softmax(-1)
    loss = smoothed + alpha / 4 * ((p.exp() - q.exp()) * (p - q)).sum(-1)
    (expected_gradient,) = torch.autograd.grad((loss * real).sum(), exact)
    losses = rdrop_inplace(logits, targets, real, words, 0.1, alpha)
    torch.testing.assert_close(losses.double(), torch.stack([loss * real, plain * real]).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[..., :words].double(), expected_gradient, rtol=1e-3, atol=1e-5)
    assert not logits[..., words:].any()


def test_filler_and_targets_may_lie_apart_in_memory(device: torch.device) -> None:
    from attent.nn.kernels.cross_entropy import cross_entropy_inplace

    logits, targets = torch.randn(6, 64, device=device), torch.randint(0, 64, (6, 3), device=device)
    real = torch.rand(6, 2, device=device) < 0.5
    strided, contiguous = logits.clone(), logits.clone()
    losses = cross_entropy_inplace(strided, targets[:, 1], real[:, 1], 64, 0.1)
    expected = cross_entropy_inplace(contiguous, targets[:, 1].clone(), real[:, 1].clone(), 64, 0.1)
    assert torch.equal(losses, expected)
    assert torch.equal(strided, contiguous)


def test_a_loss_of_no_token_has_a_gradient_of_zeros(device: torch.device) -> None:
    from attent.training.loss import linear_cross_entropy

    states, weight = torch.zeros(0, 16, device=device), torch.randn(50, 16, device=device).requires_grad_()
    loss, _ = linear_cross_entropy(states, weight, None, torch.zeros(0, dtype=torch.int64, device=device), None, 0.1)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert torch.equal(gradient, torch.zeros_like(weight))


@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
def test_half_precision_comes_near(centred: bool, device: torch.device, dtype_of: torch.dtype) -> None:
    """Products, norms and the loss in bfloat16 and sums in float32, as in training. The error of so many roundings has
    no useful bound, so it is compared with the error of PyTorch's own operations."""
    from attent.nn.kernels.add_norm import fused_add_norm
    from attent.nn.kernels.linear_relu import linear_relu
    from attent.training.loss import linear_cross_entropy

    rows, width, words = 500, 32, 64
    x, y = (torch.randn(rows, width, device=device, dtype=dtype_of).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(width, device=device).requires_grad_() for _ in range(2))
    matrix = (0.2 * torch.randn(words, width, device=device)).to(dtype_of).requires_grad_()
    offset = torch.randn(words, device=device, dtype=dtype_of).requires_grad_()
    targets, real = torch.randint(0, words, (rows,), device=device), torch.rand(rows, device=device) < 0.9
    leaves = [x, y, weight, matrix, offset, *([bias] if centred else [])]

    def by_kernels() -> Tensor:
        normed, _ = fused_add_norm(x, y, None, weight, bias if centred else None, 1e-5, 0.0)
        return linear_cross_entropy(linear_relu(normed, matrix, offset) @ matrix, matrix, None, targets, real, 0.1)[0]

    def by_torch(dtype: torch.dtype, sums: torch.dtype) -> Tensor:
        total, around = (x.to(dtype) + y.to(dtype)).to(sums), matrix.to(dtype)
        shift, scale = (bias.to(sums) if centred else None), weight.to(sums)
        normed = F.layer_norm(total, (width,), scale, shift) if centred else F.rms_norm(total, (width,), scale, 1e-5)
        inner = F.linear(normed.to(dtype), around, offset.to(dtype)).relu()
        logits = F.linear(inner @ around, around).to(sums)
        return F.cross_entropy(logits[real], targets[real], reduction="sum", label_smoothing=0.1)

    def relative_errors(loss: Tensor) -> list[float]:
        pairs = zip([loss, *torch.autograd.grad(loss, leaves)], exact, strict=True)
        return [((actual.double() - expected).norm() / expected.norm()).item() for actual, expected in pairs]

    loss = by_torch(torch.float64, torch.float64)
    exact = [loss, *(gradient.double() for gradient in torch.autograd.grad(loss, leaves))]
    for ours, usual in zip(
        relative_errors(by_kernels()), relative_errors(by_torch(dtype_of, torch.float32)), strict=True
    ):
        assert ours < max(1e-5, torch.finfo(dtype_of).eps / 4) + 2 * usual


def test_dropout_is_uniform_and_differs_between_neighbours_and_seeds(device: torch.device) -> None:
    from attent.nn.kernels.add_norm import add_norm

    def draw(*seed: int) -> Tensor:
        zeros, ones = torch.zeros(256, 64, device=device), torch.ones(64, device=device)
        seeds = torch.tensor(seed, dtype=torch.int32, device=device)
        total = add_norm(zeros, zeros + 1, None, ones, ones, 1e-5, 0.1, seeds, False)[2]
        return (total == 0).float()

    masks = [draw(1, 2), draw(1, 3), draw(2, 2), draw(-5, 2**31 - 1), draw(0, 0)]
    for dropped in masks:
        assert 0.085 < dropped.mean() < 0.115  # 16,384 draws of 0.1: six deviations are 0.014
        assert dropped.mean(0).max() < 0.25, "a column that is dropped too often"
        both = (dropped[:, 1:] * dropped[:, :-1]).mean(), (dropped[1:] * dropped[:-1]).mean()
        assert all(0.004 < share < 0.017 for share in both), "neighbours are correlated"
    for i, mask in enumerate(masks):
        assert all(0.004 < (mask * other).mean() < 0.017 for other in masks[:i]), "seeds are correlated"
    assert torch.equal(draw(1, 2), masks[0])


def test_a_packed_model_learns_the_same_through_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from attent.nn import Memory

    config = StackConfig(layers=1, width=32, heads=2, ffn_width=64, dropout=0.0, causal=True, cross_attention=True)
    stack = Stack(config).to(device)
    mine, theirs = Packing.from_lengths([[3, 4], [5]], 9, 2, device), Packing.from_lengths([[2, 6], [4]], 8, 2, device)
    x, states = torch.randn(2, 9, 32, device=device), torch.randn(2, 8, 32, device=device)

    def compute() -> tuple[Tensor, ...]:
        out = stack(x, packing=mine, memory=Memory(states, packing=theirs))
        real = (mine.segments >= 0)[..., None]
        return out * real, *torch.autograd.grad((out * real).square().sum(), list(stack.parameters()))

    ours = compute()
    monkeypatch.setattr(kernels, "TRITON_INSTALLED", False)
    for actual, expected in zip(ours, compute(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("chunk", [5, None])
@pytest.mark.parametrize("alpha", [None, 0.0, 5.0])
def test_the_whole_loss_is_the_same_through_the_kernel(
    bias: bool, chunk: int | None, alpha: float | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attent.training.loss import VOCAB_ALIGNMENT, linear_cross_entropy, rdrop_loss

    states, weight, offset = (torch.randn(*n, device=device).requires_grad_() for n in ((23, 16), (50, 16), (50,)))
    states.data[3] = 20 * states.data[3]  # probabilities that underflow
    assert len(weight) % VOCAB_ALIGNMENT
    targets, real = torch.randint(0, 50, (23,), device=device), torch.rand(23, device=device) < 0.8
    leaves = [states, weight, *([offset] if bias else [])]
    rest = weight, offset if bias else None, targets, real, 0.1

    def compute() -> tuple[Tensor, ...]:
        if alpha is None:
            loss, plain = linear_cross_entropy(states, *rest, chunk_size=chunk)
        else:
            loss, plain = rdrop_loss(states, states.sin(), *rest, alpha, chunk_size=chunk)
        return loss, plain, *torch.autograd.grad(3 * loss, leaves)

    ours = compute()
    monkeypatch.setattr(kernels, "TRITON_INSTALLED", False)
    for actual, expected in zip(ours, compute(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class Louder(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) + 1


def replace_layer(stack: Stack, name: str) -> None:
    """Replace a layer by a subclass with its own forward, as adapter libraries do."""
    owner, _, leaf = name.rpartition(".")
    old = stack.get_submodule(name)
    new = Louder(old.in_features, old.out_features).to(old.weight.device)
    new.load_state_dict(old.state_dict())
    setattr(stack.get_submodule(owner), leaf, new)


@pytest.mark.parametrize("part", ["self_attn.query", "self_attn.output", "feedforward.expand", "feedforward.contract"])
def test_a_layer_with_a_forward_of_its_own_is_called(
    part: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(StackConfig(layers=1, width=32, heads=2, ffn_width=64, dropout=0.0)).to(device)
    replace_layer(stack, f"blocks.0.{part}")
    packing, x = Packing.from_lengths([[3, 4], [5]], 9, 2, device), torch.randn(2, 9, 32, device=device)
    ours = stack(x, packing=packing)
    monkeypatch.setattr(kernels, "TRITON_INSTALLED", False)
    torch.testing.assert_close(ours, stack(x, packing=packing), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["self_attn_residual", "feedforward_residual.dropout", "feedforward.dropout"])
def test_a_hook_on_a_residual_or_its_dropout_is_called(part: str, device: torch.device) -> None:
    stack = Stack(StackConfig(layers=1, width=32, heads=2, ffn_width=64)).to(device)
    calls: list[nn.Module] = []
    stack.get_submodule(f"blocks.0.{part}").register_forward_hook(lambda module, *_: calls.append(module))
    stack(torch.randn(2, 9, 32, device=device))
    assert len(calls) == 1


def test_hooks_and_other_norms_are_not_passed_by(device: torch.device) -> None:
    block = Stack(StackConfig(layers=1, width=32, heads=2, ffn_width=64)).to(device).blocks[0]
    x = torch.randn(2, 9, 32, device=device)
    assert fused.can_fuse(block, x)
    residual = block.feedforward_residual
    for part in (
        block.self_attn, block.self_attn.value, block.feedforward, residual, residual.norm, residual.dropout
    ):  # fmt: skip
        hook = part.register_forward_hook(lambda *_: None)
        assert not fused.can_fuse(block, x)
        hook.remove()
    hook = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    assert not fused.can_fuse(block, x)
    hook.remove()
    assert fused.can_fuse(block, x)
    for norm in (nn.LayerNorm(32, bias=False), nn.LayerNorm(32, elementwise_affine=False), nn.Identity()):
        block.self_attn_residual.norm = norm
        assert not fused.can_fuse(block, x)
