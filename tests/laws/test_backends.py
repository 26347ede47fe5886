"""Every backend agrees with equation 1, in values and gradients, or says why it does not support a request."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attent.nn import BACKENDS, AttentionInputs, Mask, Packing, StackConfig, attend, attend_explicit, set_backend
from tests.conftest import DTYPES
from tests.laws.helpers import (
    CROSS_DECODERS,
    DECODERS,
    TOLERANCE,
    assert_close,
    make_memory,
    make_stack,
    make_tensor,
    parametrize_all,
    random_states,
)

B, H, D = 3, 4, 16
Case = tuple[Mask, int, int]  # with the lengths of queries and keys
Window = tuple[int | None, int | None] | None


def packings(device: torch.device) -> tuple[Packing, Packing]:
    """Row 0 has padding on both sides; in row 1 one sentence is empty for the queries and one for the keys."""
    return (
        Packing.from_lengths([[3, 4], [2, 0, 4], [8]], 9, device=device),
        Packing.from_lengths([[2, 5], [0, 4, 3], [6]], 8, device=device),
    )


def packed_self(device: torch.device, causal: bool = False, window: Window = None) -> Case:
    own, _ = packings(device)
    return Mask(causal=causal, window=window, packing=(own, own)), 9, 9


def packed_across(device: torch.device, causal: bool = False) -> Case:
    return Mask(causal=causal, packing=packings(device)), 9, 8


def starts(device: torch.device) -> Tensor:
    return make_tensor(4, 0, 2, device=device)


def lengths(device: torch.device) -> Tensor:
    return make_tensor(7, 3, 0, device=device)


MASKS: dict[str, Callable[[torch.device], Case]] = {
    "everything": lambda device: (Mask(), 5, 7),
    "causal": lambda device: (Mask(causal=True), 7, 7),
    "causal-fewer-keys": lambda device: (Mask(causal=True), 7, 5),
    "causal-more-keys": lambda device: (Mask(causal=True), 4, 7),
    "causal-one-query-in-a-cache": lambda device: (Mask(causal=True, q_start=6), 1, 7),
    "causal-first-query-in-a-cache": lambda device: (Mask(causal=True), 1, 7),
    "causal-behind-a-cache": lambda device: (Mask(causal=True, q_start=4), 3, 7),
    "causal-ragged-cache": lambda device: (Mask(causal=True, q_start=starts(device)), 3, 7),
    "window": lambda device: (Mask(window=(2, 1)), 7, 7),
    "window-one-sided": lambda device: (Mask(window=(None, 1)), 7, 5),
    "window-causal": lambda device: (Mask(causal=True, window=(3, 0)), 7, 7),
    "window-causal-ragged-cache": lambda device: (Mask(True, (2, None), starts(device)), 3, 7),
    "window-past-the-keys": lambda device: (Mask(window=(1, 0), q_start=4), 4, 6),
    "lengths": lambda device: (Mask(key_lengths=lengths(device)), 5, 7),
    "lengths-causal": lambda device: (Mask(causal=True, key_lengths=lengths(device)), 7, 7),
    "lengths-window": lambda device: (Mask(window=(1, 1), key_lengths=lengths(device)), 7, 7),
    "packed": packed_self,
    "packed-causal": lambda device: packed_self(device, causal=True),
    "packed-window": lambda device: packed_self(device, window=(1, 2)),
    "packed-causal-window": lambda device: packed_self(device, causal=True, window=(2, None)),
    "packed-across": packed_across,
    "packed-across-causal": lambda device: packed_across(device, causal=True),
}
EMPTY_ROWS = {"window-past-the-keys", "lengths", "lengths-causal", "lengths-window"} | {
    name for name in MASKS if name.startswith("packed")
}

# (key/value heads, dimensions that the bias broadcasts over, scale)
SHAPES: dict[str, tuple[int, tuple[int, ...] | None, float | None]] = {
    "plain": (4, None, None),
    "grouped": (2, None, None),
    "onekey-scale1": (1, None, 1.0),
    "bias": (4, (), 0.7),
    "bias-grouped": (2, (0,), None),
    "bias-onekey": (1, (0, 1), None),
}

# FlexAttention is compiled for each case: on CPU every mask with one shape and dtype; on an accelerator, where it
# takes seconds, only cases that need different kernels.
COMPILED = (
    "everything",
    "causal-ragged-cache",
    "window-past-the-keys",
    "lengths",
    "packed-causal-window",
    "packed-across",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mask_name" not in metafunc.fixturenames:
        return
    kind = metafunc.config.getoption("--device")
    compiled, formats = MASKS if kind == "cpu" else COMPILED, DTYPES[kind]
    cases = [
        pytest.param(backend, mask, shape, format_, marks=marks, id=f"{backend}-{mask}-{shape}-{format_}")
        for i, mask in enumerate(MASKS)
        for j, shape in enumerate(SHAPES)
        for backend in BACKENDS
        for format_ in (formats if backend != "flex" or kind != "cpu" else formats[i % 2 :][:1])
        if backend != "flex" or (mask in compiled and (i + j) % len(SHAPES) == 0)
        # On CPU each backend, mask and shape with one of the dtypes; with the other it is slow.
        for marks in [() if kind != "cpu" or backend == "flex" or format_ == formats[(i + j) % 2] else pytest.mark.slow]
    ]
    metafunc.parametrize(("backend", "mask_name", "shape", "format_"), cases)


def make_request(mask_name: str, shape: str, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
    kv_heads, flat, scale = SHAPES[shape]
    mask, Tq, Tk = MASKS[mask_name](device)
    bias = None
    if flat is not None:
        bias = torch.randn([1 if i in flat else n for i, n in enumerate((B, H, Tq, Tk))])
    q, k, v = torch.randn(B, H, Tq, D), torch.randn(B, kv_heads, Tk, D), torch.randn(B, kv_heads, Tk, D)
    q, k, v, bias = (x if x is None else x.to(device, dtype).requires_grad_() for x in (q, k, v, bias))
    return AttentionInputs(q, k, v, mask, bias, D**-0.5 if scale is None else scale, 0.0)


def expect_refusal(backend: str, request: AttentionInputs) -> str | None:
    """The expected error message, or None; a backend that refuses more than this is wrong."""
    mask, on_cpu = request.mask, request.q.device.type == "cpu"
    if backend == "flex" and on_cpu and request.q.requires_grad:
        return "no backward pass on CPU"
    if backend not in ("packed", "tiles"):
        return None
    if mask.packing is None:
        return "not packed"
    if on_cpu:
        return "CUDA only, and the tensors are on cpu"
    return expect_flash_refusal(request) if backend == "packed" else expect_tiles_refusal(request)


def expect_tiles_refusal(request: AttentionInputs) -> str | None:
    mask = request.mask
    if request.bias is not None:
        return "no bias"
    if mask.window is not None:
        return "no window"
    if mask.causal and mask.packing is not None and mask.packing[0] is not mask.packing[1]:
        return "causal mask between two different packings"
    return None


def expect_flash_refusal(request: AttentionInputs) -> str | None:
    mask = request.mask
    assert mask.packing is not None
    if request.q.dtype == torch.float32:
        return "takes bfloat16 and float16, not torch.float32"
    if request.bias is not None:
        return "no bias"
    if mask.causal and mask.packing[0] is not mask.packing[1]:
        return "aligns causal masks and windows of two different packings"
    return None


def run(backend: str, request: AttentionInputs) -> Tensor:
    q, k, v, mask, bias, scale, dropout = request
    return attend(q, k, v, mask, bias, scale, dropout, backend)


def without_gradients(request: AttentionInputs) -> AttentionInputs:
    return AttentionInputs(*(x.detach() if isinstance(x, Tensor) else x for x in request))


def oracle(request: AttentionInputs) -> tuple[Tensor, AttentionInputs]:
    """Equation 1 in float64, from the same inputs."""
    exact = AttentionInputs(*(x.detach().double().requires_grad_() if isinstance(x, Tensor) else x for x in request))
    return attend_explicit(*exact)[0], exact


def assert_near(actual: Tensor, expected: Tensor, name: str) -> None:
    """Compare with float64; gradients of shared key heads are sums of several, hence the factor."""
    tolerance = TOLERANCE[actual.dtype] * (2 if name == "values" else 4)
    torch.testing.assert_close(
        actual.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def test_every_backend_agrees_with_equation_1(
    backend: str, mask_name: str, shape: str, format_: torch.dtype, device: torch.device
) -> None:
    if backend == "flex":
        torch._dynamo.reset()  # dynamo stops after eight recompilations; there are more cases
    request = make_request(mask_name, shape, device, format_)
    expected_refusal = expect_refusal(backend, request)
    if expected_refusal is not None:
        with pytest.raises(ValueError, match=re.escape(expected_refusal)) as refusal:
            run(backend, request)
        assert f"backend `{backend}` does not support these inputs" in str(refusal.value)
        assert "use fused" in str(refusal.value)
        request = without_gradients(request)
        if expect_refusal(backend, request) is not None:
            return

    expected, exact = oracle(request)
    actual = run(backend, request)
    assert actual.dtype == format_
    assert_near(actual, expected, "values")

    Tq, Tk = request.q.shape[2], request.k.shape[2]
    blind = ~request.mask.to_dense(B, Tq, Tk, device).expand(B, H, Tq, Tk).any(-1)
    assert bool(blind.any()) == (mask_name in EMPTY_ROWS)
    assert (actual[blind] == 0).all(), "a query without visible keys gives zeros"

    if not request.q.requires_grad:
        return
    direction = torch.randn(actual.shape).to(actual)
    names = ["q", "k", "v"] + (["bias"] if request.bias is not None else [])
    actual_gradients = torch.autograd.grad(actual, [getattr(request, name) for name in names], direction)
    expected_gradients = torch.autograd.grad(expected, [getattr(exact, name) for name in names], direction.double())
    for name, ours, theirs in zip(names, actual_gradients, expected_gradients, strict=True):
        assert_near(ours, theirs, f"gradient of {name}")


def test_auto_selects_a_backend_that_supports_the_request(device: torch.device, dtype: torch.dtype) -> None:
    for name in MASKS:
        for shape in ("grouped", "bias"):
            request = make_request(name, shape, device, dtype)
            assert_near(run("auto", request), oracle(request)[0], "values")


@parametrize_all("config", DECODERS | CROSS_DECODERS)
def test_a_stack_gives_the_same_with_the_explicit_backend(config: StackConfig, device: torch.device) -> None:
    stack, x, memory = make_stack(config, device), random_states(3, 6, device=device), make_memory(config, 3, device)
    expected = stack(x, memory=memory)
    set_backend(stack, "explicit")
    assert_close(stack(x, memory=memory), expected)


@parametrize_all("config", {name: CROSS_DECODERS[name] for name in list(CROSS_DECODERS)[:3]})
def test_a_stack_gives_the_same_with_the_flex_backend(config: StackConfig, device: torch.device) -> None:
    torch._dynamo.reset()
    stack, x, memory = make_stack(config, device), random_states(3, 6, device=device), make_memory(config, 3, device)
    with torch.no_grad():
        expected = stack(x, memory=memory)
        set_backend(stack, "flex")
        assert_close(stack(x, memory=memory), expected)
