"""Where our kernels are taken, and where not."""

from __future__ import annotations

import pytest
import torch

from attent.nn import kernels

CPU = torch.zeros(1)


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    kernels._can_run_triton.cache_clear()


def test_a_cpu_runs_them_in_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TRITON_INSTALLED", True)
    monkeypatch.setattr(kernels, "INTERPRETER_MODE", False)
    assert not kernels.can_use_kernels(CPU)
    monkeypatch.setattr(kernels, "INTERPRETER_MODE", True)
    assert kernels.can_use_kernels(CPU)
    monkeypatch.setattr(kernels, "TRITON_INSTALLED", False)
    assert not kernels.can_use_kernels(CPU)


def test_old_gpus_and_those_of_others_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert not kernels.can_run_triton(0)
    kernels._can_run_triton.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not kernels.can_run_triton(0)


def test_without_a_compiler_all_goes_on_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from attent.nn.kernels import probe

    def fails(device: torch.device) -> bool:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(probe, "run_probe", fails)
    with pytest.warns(
        UserWarning, match="cannot be used; falling back to slower PyTorch code: Failed to find C compiler"
    ):
        assert not kernels.can_run_triton(0)
    assert not kernels.can_run_triton(0)


def test_a_compiler_takes_the_answer_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TRITON_INSTALLED", True)
    monkeypatch.setattr(kernels, "_can_run_triton", lambda index: index == 3)

    @torch.compile(backend="eager", fullgraph=True)
    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if kernels.can_run_triton(3) else x - 1

    assert asked(CPU).item() == 1
