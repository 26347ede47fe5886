"""Where our kernels are taken, and where not."""

from __future__ import annotations

import pytest
import torch

from attent.nn import kernels

CPU = torch.zeros(1)


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    kernels._works.cache_clear()


def test_a_cpu_runs_them_in_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "INSTALLED", True)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert not kernels.usable(CPU)
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    assert kernels.usable(CPU)
    monkeypatch.setattr(kernels, "INSTALLED", False)
    assert not kernels.usable(CPU)


def test_old_gpus_and_those_of_others_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert not kernels.works(0)
    kernels._works.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not kernels.works(0)


def test_without_a_compiler_all_goes_on_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from attent.nn.kernels import trial

    def fails(device: torch.device) -> bool:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(trial, "runs", fails)
    with pytest.warns(UserWarning, match="cannot be used here, so that all is slower: Failed to find C compiler"):
        assert not kernels.works(0)
    assert not kernels.works(0)


def test_a_compiler_takes_the_answer_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "INSTALLED", True)
    monkeypatch.setattr(kernels, "_works", lambda index: index == 3)

    @torch.compile(backend="eager", fullgraph=True)
    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if kernels.works(3) else x - 1

    assert asked(CPU).item() == 1
