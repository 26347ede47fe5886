"""Cores and memory are bounded by the machine and by the container."""

from __future__ import annotations

from pathlib import Path

import pytest

from attent.storage import machine


def test_cores_are_bounded_by_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_list_cgroups", lambda controller: iter([tmp_path]))
    usable = {}
    for quota in ("max 100000", "100000 100000", "199999 100000", "50000 100000", "900000000 100000"):
        (tmp_path / "cpu.max").write_text(quota)
        usable[quota] = machine.count_usable_cores()
    assert usable["100000 100000"] == usable["199999 100000"] == usable["50000 100000"] == 1
    assert usable["max 100000"] == usable["900000000 100000"] >= 1


def test_a_container_limit_counts_and_its_droppable_cache_does_not(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 1200\n")
    assert machine.read_cgroup_memory(tmp_path) == (4000, 1800)


def test_a_container_without_a_limit_has_none(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.read_cgroup_memory(tmp_path)[0] is None
