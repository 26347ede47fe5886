"""The devices on which our kernels are used."""

from __future__ import annotations

import pytest
import torch

from attent.nn import kernels

CPU = torch.zeros(1)


@pytest.fixture(autouse=True)
def clear_cached_answers() -> None:
    kernels._can_run_triton.cache_clear()


def test_kernels_run_on_a_cpu_in_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TRITON_INSTALLED", True)
    monkeypatch.setattr(kernels, "INTERPRETER_MODE", False)
    assert not kernels.can_use_kernels(CPU)
    monkeypatch.setattr(kernels, "INTERPRETER_MODE", True)
    assert kernels.can_use_kernels(CPU)
    monkeypatch.setattr(kernels, "TRITON_INSTALLED", False)
    assert not kernels.can_use_kernels(CPU)


def test_old_and_other_vendors_gpus_do_not_use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert not kernels.can_run_triton(0)
    kernels._can_run_triton.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not kernels.can_run_triton(0)


def test_a_missing_compiler_falls_back_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from attent.nn.kernels import row_reduce

    def fails(device: torch.device) -> bool:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(row_reduce, "run_probe", fails)
    with pytest.warns(
        UserWarning, match="cannot be used; falling back to slower PyTorch code: Failed to find C compiler"
    ):
        assert not kernels.can_run_triton(0)
    assert not kernels.can_run_triton(0)


def test_torch_compile_treats_the_answer_as_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TRITON_INSTALLED", True)
    monkeypatch.setattr(kernels, "_can_run_triton", lambda index: index == 3)

    @torch.compile(backend="eager", fullgraph=True)
    def add_or_subtract(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if kernels.can_run_triton(3) else x - 1

    assert add_or_subtract(CPU).item() == 1
