"""The chunked loss equals `F.cross_entropy` on full logits, in value and gradient, and stores no logits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.training.loss import _choose_chunk_size, linear_cross_entropy, pad_vocab_rows, rdrop_loss

N, E, V = 23, 8, 31
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


class LossCase(NamedTuple):
    states: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    real: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in self[:3] if x is not None and x.requires_grad]


def make_case(
    device: torch.device, dtype: torch.dtype = torch.float64, *, bias: bool = True, padding: bool = True
) -> LossCase:
    states, weight = torch.randn(N, E, dtype=dtype), torch.randn(V, E, dtype=dtype)
    leaves = [x.to(device).requires_grad_() for x in (states, weight, torch.randn(V, dtype=dtype))]
    real = (torch.rand(N) < 0.7).to(device) if padding else None
    return LossCase(leaves[0], leaves[1], leaves[2] if bias else None, torch.randint(0, V, (N,)).to(device), real)


def reference(case: LossCase, smoothing: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy on full logits."""
    selection = slice(None) if case.real is None else case.real
    logits, right = F.linear(case.states, case.weight, case.bias)[selection], case.targets[selection]
    smooth = F.cross_entropy(logits, right, label_smoothing=smoothing, reduction="sum")
    return smooth, F.cross_entropy(logits, right, reduction="sum").detach()


def rdrop_reference(case: LossCase, second: Tensor, smoothing: float, alpha: float) -> tuple[Tensor, Tensor]:
    (first_loss, first_plain), (second_loss, second_plain) = (
        reference(case._replace(states=states), smoothing) for states in (case.states, second)
    )
    selection = slice(None) if case.real is None else case.real
    p, q = (F.linear(x, case.weight, case.bias)[selection].log_softmax(-1) for x in (case.states, second))
    divergence = F.kl_div(q, p, log_target=True, reduction="sum") + F.kl_div(p, q, log_target=True, reduction="sum")
    return (first_loss + second_loss) / 2 + alpha / 4 * divergence, (first_plain + second_plain) / 2


def assert_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE.get(dtype, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("chunk", [1, 5, N, 1000, None])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("number", [torch.float64, torch.float32])
def test_value_and_gradients_are_those_of_cross_entropy(
    smoothing: float, chunk: int | None, bias: bool, padding: bool, number: torch.dtype, device: torch.device
) -> None:
    case = make_case(device, number, bias=bias, padding=padding)
    ours, plain = linear_cross_entropy(*case, smoothing, chunk_size=chunk)
    theirs, their_plain = reference(case, smoothing)
    assert_close(ours, theirs, number)
    assert_close(plain, their_plain, number)
    grads = (torch.autograd.grad(0.3 * loss, case.leaves) for loss in (ours, theirs))
    for our_grad, their_grad in zip(*grads, strict=True):
        assert_close(our_grad, their_grad, number)


@pytest.mark.parametrize("chunk", [5, None])
@pytest.mark.parametrize("alpha", [0.0, 5.0])
@pytest.mark.parametrize("bias", [True, False])
def test_rdrop_equals_its_formula(chunk: int | None, alpha: float, bias: bool, device: torch.device) -> None:
    case = make_case(device, bias=bias)
    second = torch.randn(N, E, dtype=torch.float64, device=device, requires_grad=True)
    ours, plain = rdrop_loss(case.states, second, *case[1:], 0.1, alpha, chunk_size=chunk)
    theirs, their_plain = rdrop_reference(case, second, 0.1, alpha)
    assert_close(ours, theirs, torch.float64)
    assert_close(plain, their_plain, torch.float64)
    leaves = [second, *case.leaves]
    for grads in zip(*(torch.autograd.grad(3 * loss, leaves) for loss in (ours, theirs)), strict=True):
        assert_close(*grads, torch.float64)


@pytest.mark.parametrize("alpha", [None, 5.0])
def test_padding_that_is_not_removed_changes_nothing(alpha: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU padding is not removed, since the number of tokens would need a synchronization."""

    def compute() -> tuple[Tensor, ...]:
        if alpha is None:
            loss, plain = linear_cross_entropy(*case, 0.1, chunk_size=4)
        else:
            loss, plain = rdrop_loss(case.states, case.states.sin(), *case[1:], 0.1, alpha, chunk_size=4)
        return loss, plain, *torch.autograd.grad(loss, case.leaves)

    case = make_case(torch.device("cpu"))
    expected = compute()
    monkeypatch.setattr("attent.training.loss._can_drop_padding", lambda states: False)
    for ours, theirs in zip(compute(), expected, strict=True):
        assert_close(ours, theirs, torch.float64)


def test_rdrop_of_equal_passes_is_the_cross_entropy() -> None:
    case = make_case(torch.device("cpu"))
    assert_close(rdrop_loss(case.states, *case, 0.1, 5.0)[0], linear_cross_entropy(*case, 0.1)[0], torch.float64)


def test_gradcheck() -> None:
    """Numerical gradients, on logits that are large, small and equal."""
    states = (torch.randn(4, 3, dtype=torch.float64) * torch.tensor([[0.0], [1], [5], [10]])).requires_grad_()
    weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (5,)))
    second = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    targets, real = torch.tensor([0, 4, 2, 2]), torch.tensor([True, True, False, True])

    def cross_entropy(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(states, weight, bias, targets, real, 0.1, chunk_size=3)[0]

    def rdrop(states: Tensor, second: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return rdrop_loss(states, second, weight, bias, targets, real, 0.1, 2.0, chunk_size=3)[0]

    assert torch.autograd.gradcheck(cross_entropy, (states, weight, bias))
    assert torch.autograd.gradcheck(rdrop, (states, second, weight, bias))


def test_a_very_unlikely_token_has_a_finite_loss() -> None:
    states, weight = torch.tensor([[1.0]]), torch.tensor([[500.0], [-500.0]])
    loss, plain = linear_cross_entropy(states, weight, None, torch.tensor([1]), None, 0.0)
    assert float(loss) == float(plain) == 1000


@pytest.mark.parametrize("with_second", [False, True])
@pytest.mark.parametrize("may_count", [False, True])
def test_values_in_padding_are_ignored(
    with_second: bool, may_count: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attent.training.loss._can_drop_padding", lambda states: may_count)
    case = make_case(device)
    assert case.real is not None

    def grads(states: Tensor) -> tuple[Tensor, ...]:
        states = states.detach().requires_grad_()
        if with_second:
            loss, plain = rdrop_loss(states, 2 * states, *case[1:], 0.1, 1.0, chunk_size=4)
        else:
            loss, plain = linear_cross_entropy(states, *case[1:], 0.1, chunk_size=4)
        return loss, plain, *torch.autograd.grad(loss, (states, *case.leaves[1:]))

    gradients = grads(case.states.masked_fill(~case.real[:, None], float("nan")))
    for ours, expected in zip(gradients, grads(case.states), strict=True):
        assert torch.equal(ours, expected)
    assert not gradients[2][~case.real].any()


@pytest.mark.parametrize("real", [0, N])
def test_only_padding_gives_zero_loss_and_zero_gradients(real: int, device: torch.device) -> None:
    case = make_case(device)._replace(real=torch.zeros(N, dtype=torch.bool, device=device))
    if not real:
        case = case._replace(states=case.states[:0], targets=case.targets[:0], real=None)
    loss, plain = linear_cross_entropy(*case, 0.1)
    assert float(loss.detach()) == float(plain) == 0
    assert all(not grad.any() for grad in torch.autograd.grad(loss, (case.states, *case.leaves[1:])))


def test_a_tied_weight_accumulates_both_gradients() -> None:
    case = make_case(torch.device("cpu"), bias=False)

    def grad(loss_of: object) -> Tensor:
        tied = case._replace(states=F.embedding(case.targets, case.weight).tanh())
        loss = linear_cross_entropy(*tied, 0.1)[0] if loss_of == "ours" else reference(tied, 0.1)[0]
        return torch.autograd.grad(loss, case.weight)[0]

    assert_close(grad("ours"), grad("theirs"), torch.float64)


def test_a_frozen_weight_has_no_gradient_but_the_states_do() -> None:
    case = make_case(torch.device("cpu"))
    frozen = case._replace(weight=case.weight.detach(), bias=None)
    loss, theirs = linear_cross_entropy(*frozen, 0.1)[0], reference(frozen, 0.1)[0]
    saved = [x for x in loss.grad_fn.saved_tensors if x is not None]  # type: ignore[union-attr]
    assert [x.shape[-2:] for x in saved] == [(int(frozen.real.sum()), E)]  # type: ignore[union-attr]
    assert_close(*(torch.autograd.grad(x, frozen.states)[0] for x in (loss, theirs)), torch.float64)


def test_no_gradients_are_computed_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    case = make_case(torch.device("cpu"))
    expected = reference(case, 0.1)
    monkeypatch.setattr("attent.training.loss._compute_logit_gradients", fail)
    with torch.no_grad():
        loss, plain = linear_cross_entropy(*case, 0.1)
    assert not loss.requires_grad
    assert_close(loss, expected[0], torch.float64)
    assert_close(plain, expected[1], torch.float64)
    with pytest.raises(AssertionError):  # the patch is in effect
        linear_cross_entropy(*case, 0.1)


def test_the_plain_cross_entropy_has_no_gradient() -> None:
    loss, plain = linear_cross_entropy(*make_case(torch.device("cpu")), 0.1)
    assert loss.requires_grad
    assert not plain.requires_grad


def test_backward_can_be_called_twice() -> None:
    case = make_case(torch.device("cpu"))
    loss = linear_cross_entropy(*case, 0.1)[0]
    first = torch.autograd.grad(loss, case.leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, case.leaves), strict=True))


def test_bfloat16_is_close_and_accumulates_in_float32(device: torch.device) -> None:
    case = make_case(device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        ours, plain = linear_cross_entropy(*case, 0.1, chunk_size=7)
    theirs, their_plain = reference(case, 0.1)
    assert ours.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0)
    torch.testing.assert_close(plain, their_plain, rtol=0.01, atol=0)
    for a, b in zip(*(torch.autograd.grad(x, case.leaves) for x in (ours, theirs)), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.02


def test_a_bfloat16_model_gets_bfloat16_gradients(device: torch.device) -> None:
    case = make_case(device, torch.bfloat16)
    loss, _ = linear_cross_entropy(*case, 0.1, chunk_size=7)
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in case.leaves)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the largest number of elements of any new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


@pytest.mark.parametrize("rdrop", [False, True])
def test_no_tensor_ever_holds_the_logits_of_all_tokens(rdrop: bool) -> None:
    tokens, words, chunk = 300, 200, 16
    states, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(words, 4, requires_grad=True)
    targets = torch.randint(0, words, (tokens,))
    saved_sizes: list[int] = []
    with (
        LargestTensor() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: (saved_sizes.append(x.numel()), x)[1], lambda x: x),
    ):
        if rdrop:
            loss, _ = rdrop_loss(states, 2 * states, weight, None, targets, None, 0.1, 1.0, chunk_size=chunk)
        else:
            loss, _ = linear_cross_entropy(states, weight, None, targets, None, 0.1, chunk_size=chunk)
        loss.backward()
    assert chunk * words <= largest.numbers <= (2 if rdrop else 1) * chunk * words
    assert saved_sizes
    assert max(saved_sizes) <= 2 * tokens * 4


def test_chunk_memory_does_not_depend_on_the_vocabulary() -> None:
    from attent.training.loss import LOGITS_PER_CHUNK, _choose_chunk_size

    states = torch.zeros(1, 9, 2)
    assert _choose_chunk_size(torch.zeros(8000, 2), states) == LOGITS_PER_CHUNK["cpu"] // 8000
    assert _choose_chunk_size(torch.zeros(8000, 2), torch.zeros(2, 9, 2)) == LOGITS_PER_CHUNK["cpu"] // 16000
    assert _choose_chunk_size(torch.zeros(LOGITS_PER_CHUNK["cpu"] + 1, 1), states) == 1


@pytest.mark.slow
def test_torch_compile_falls_back_to_eager() -> None:
    case = make_case(torch.device("cpu"))

    @torch.compile(backend="eager")
    def compute_loss(states: Tensor) -> Tensor:
        return 2 * linear_cross_entropy(states.tanh(), *case[1:], 0.1)[0]

    assert_close(
        compute_loss(case.states), 2 * reference(case._replace(states=case.states.tanh()), 0.1)[0], torch.float64
    )


@pytest.mark.parametrize(("rows", "padded"), [(1, 64), (63, 64), (64, 64), (65, 128)])
def test_vocabularies_are_padded_with_zeros_to_a_multiple_of_64(rows: int, padded: int) -> None:
    for values in (torch.ones(rows, 3), torch.ones(rows)):
        result = pad_vocab_rows(values)
        assert result.shape == (padded, *values.shape[1:])
        assert torch.equal(result[:rows], values)
        assert not result[rows:].any()


def test_chunks_have_two_million_logits_on_a_cpu() -> None:
    states = torch.empty(1, 5, 2)
    assert _choose_chunk_size(torch.empty(2**11, 2), states) == 2**10
    assert _choose_chunk_size(torch.empty(2**11, 2), torch.empty(2, 5, 2)) == 2**9
    assert _choose_chunk_size(torch.empty(2**22, 1), states) == 1
