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


def test_memory_is_bounded_by_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_list_cgroups", lambda controller: iter([tmp_path, tmp_path / "parent"]))
    total, _ = machine.measure_memory()
    assert total > 2**20
    (tmp_path / "memory.max").write_text("4000\n")
    assert machine.measure_memory()[0] == 4000
    assert machine.measure_memory()[1] > 4000  # how much of the limit is used is unknown
    (tmp_path / "memory.current").write_text("3000\n")
    assert machine.measure_memory() == (4000, 1000)
    (tmp_path / "memory.current").write_text("5000\n")
    assert machine.measure_memory() == (4000, 0)
    (tmp_path / "memory.stat").write_text("inactive_file 9000\n")
    assert machine.measure_memory() == (4000, 4000)
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "memory.limit_in_bytes").write_text("2000\n")
    (tmp_path / "parent" / "memory.usage_in_bytes").write_text("500\n")
    assert machine.measure_memory() == (2000, 1500)
    (tmp_path / "memory.current").unlink()
    assert machine.read_cgroup_memory(tmp_path) == (4000, None)


def test_unreadable_bytes_and_missing_files_are_no_errors(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_bytes(b"model name: x\xff\n")
    assert machine.read_text(tmp_path / "cpuinfo") == "model name: x\ufffd\n"
    assert machine.read_text(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("0::/a/b\n", ["a/b", "a", "."]),
        ("5:memory:/a\n4:cpu,cpuacct:/b\n", ["memory/a", "memory"]),
        ("4:cpu,memory:/b\n", ["memory/b", "memory"]),
        ("1:name=systemd:/c\n", ["memory/c", "memory"]),
        ("", []),
    ],
)
def test_the_groups_of_a_process_are_innermost_first(
    lines: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "read_text", lambda path: lines if path == "/proc/self/cgroup" else "")
    assert list(machine._list_cgroups("memory")) == [Path("/sys/fs/cgroup", name) for name in expected]


def test_cores_without_an_affinity_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.Process", object)
    monkeypatch.setattr(machine, "_list_cgroups", lambda kind: [])
    for count, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr("psutil.cpu_count", lambda count=count: count)
        assert machine.count_usable_cores() == expected
