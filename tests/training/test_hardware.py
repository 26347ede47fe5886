"""The number of CPU threads is measured, and a busy machine is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attent.storage.machine import count_usable_cores
from attent.training import hardware


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({4: 1.0, 2: 1.1, 1: 1.2}, 4),
        ({4: 1.0, 2: 0.95, 1: 0.9}, 4),  # no gain to speak of
        ({4: 1.0, 2: 0.95, 1: 0.89}, 1),
        ({4: 1.0, 2: 0.8, 1: 0.85}, 2),
        ({4: 10.0, 2: 2.0, 1: 1.0}, 1),
    ],
)
def test_fewer_threads_are_used_where_they_are_faster(seconds: dict[int, float], fastest: int) -> None:
    assert hardware.pick_threads(lambda: seconds[torch.get_num_threads()]) == (fastest, seconds)
    assert torch.get_num_threads() == fastest


def test_one_thread_needs_no_comparison() -> None:
    assert hardware.pick_threads(lambda: 1.0) == (1, {1: 1.0})


def test_a_load_above_the_number_of_cores_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = count_usable_cores()
    assert cores >= 1
    monkeypatch.setattr(os, "getloadavg", lambda: (float(cores), 99.0, 99.0))
    assert hardware.describe_load() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (cores + 0.5, 0.0, 0.0))
    assert f"the machine is busy: load average {cores + 0.5:.1f} with {cores} core" in (hardware.describe_load() or "")


@pytest.mark.parametrize(
    ("speedup", "precision"), [(None, "float32"), (1.29, "float32"), (1.3, "bfloat16"), (9.0, "bfloat16")]
)
def test_bfloat16_must_be_faster(speedup: float | None, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "measure_bf16_speedup", lambda kind: speedup)
    assert hardware.pick_precision(torch.device("cpu")) == precision


def test_the_speed_of_bfloat16_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = list[torch.Tensor]()

    def time_matmul(matrix: torch.Tensor) -> float:
        timed.append(matrix)
        return 3.0 if matrix.dtype == torch.float32 else 2.0

    assert hardware._time_matmul(torch.eye(2)) > 0
    monkeypatch.setattr(hardware, "_time_matmul", time_matmul)
    assert hardware.measure_bf16_speedup("cpu") == 1.5
    assert [(tuple(matrix.shape), matrix.dtype) for matrix in timed] == [
        ((512, 512), torch.float32),
        ((512, 512), torch.bfloat16),
    ]

    def refuse(matrix: torch.Tensor) -> float:
        raise RuntimeError("not implemented for bfloat16")

    monkeypatch.setattr(hardware, "_time_matmul", refuse)
    assert hardware.measure_bf16_speedup("cpu") is None


def test_devices_are_described() -> None:
    assert hardware.get_device_name(torch.device("cpu")) == f"CPU, {torch.get_num_threads()} thread" + (
        "s" if torch.get_num_threads() > 1 else ""
    )
    assert hardware.describe_device(torch.device("mps"), "float32", False) == "Apple GPU, float32"
    assert hardware.describe_device(torch.device("mps"), "bfloat16", True) == "Apple GPU, bfloat16, compiled"
    assert hardware.activate_device("cpu") == torch.device("cpu")


def test_the_compile_cache_survives_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hardware.INDUCTOR_CACHE_ENV, str(tmp_path / "own"))
    hardware.persist_compile_cache()
    assert os.environ[hardware.INDUCTOR_CACHE_ENV] == str(tmp_path / "own")
    monkeypatch.delenv(hardware.INDUCTOR_CACHE_ENV)
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "a" / "cache"))
    hardware.persist_compile_cache()
    assert os.environ[hardware.INDUCTOR_CACHE_ENV] == str(tmp_path / "a" / "cache" / "compiled")
    monkeypatch.delenv(hardware.INDUCTOR_CACHE_ENV)
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "file"))
    hardware.persist_compile_cache()
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "b"))
    hardware.persist_compile_cache()
    assert hardware.INDUCTOR_CACHE_ENV not in os.environ


PRELOAD = """
import sys
import torch
from attent.training import hardware
print("torch._dynamo" in sys.modules)
for kind in ("cuda", "cpu"):
    hardware.preload_libraries(torch.device(kind)).join()
    print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_libraries_are_loaded_in_a_thread_without_errors() -> None:
    """In a new process, where nothing is imported yet. A device that does not work is reported where it is used."""
    process = subprocess.run([sys.executable, "-c", PRELOAD], capture_output=True, text=True, check=False)
    imported = ["False", str(torch.cuda.is_available()), "True"]
    assert (process.returncode, process.stdout.split()) == (0, imported), process.stderr
    assert "Error" not in process.stderr
