"""The number of CPU threads is measured, and a busy machine is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

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


PRELOAD = """
import sys
import torch
from attent.training import hardware
print("torch._dynamo" in sys.modules)
for kind in ("cuda", "cpu"):
    hardware.preload_libraries(torch.device(kind)).join()
    print("torch._dynamo" in sys.modules)
"""


def test_libraries_are_loaded_in_a_thread_without_errors() -> None:
    """In a new process, where nothing is imported yet. A device that does not work is reported where it is used."""
    process = subprocess.run([sys.executable, "-c", PRELOAD], capture_output=True, text=True, check=False)
    imported = ["False", str(torch.cuda.is_available()), "True"]
    assert (process.returncode, process.stdout.split()) == (0, imported), process.stderr
    assert "Error" not in process.stderr
