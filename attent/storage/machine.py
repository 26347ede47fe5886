"""Cores and memory that this process may use, also in a container."""

import re
from collections.abc import Iterator
from pathlib import Path


def count_usable_cores() -> int:
    """Cores that this process may use: CPU affinity (taskset) and the container's quota."""
    import psutil

    process = psutil.Process()
    cores = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count() or 1
    for folder in _list_cgroups("cpu"):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def measure_memory() -> tuple[int, int]:
    """Return (total, free): the minimum of the machine's memory and of the cgroup limits, which psutil ignores."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for folder in _list_cgroups("memory"):
        limit, used = read_cgroup_memory(folder)
        if limit is not None:
            total = min(total, limit)
            free = free if used is None else min(free, max(0, limit - used))
    return total, free


def read_cgroup_memory(folder: Path) -> tuple[int | None, int | None]:
    """Return (limit, used) of a cgroup, version 2 or 1; reclaimable file cache does not count as used."""
    limit = _read_int(folder / "memory.max") or _read_int(folder / "memory.limit_in_bytes")
    used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes")
    cached = re.search(r"^(?:total_)?inactive_file (\d+)", read_text(folder / "memory.stat"), re.MULTILINE)
    if used is not None and cached:
        used = max(0, used - int(cached[1]))
    return limit, used


def _list_cgroups(controller: str) -> Iterator[Path]:
    """Yield the cgroups of this process, innermost first; the limits of parents apply as well."""
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd") or controller in controllers.split(","):
            root = Path("/sys/fs/cgroup", controller if controllers else "")
            inner = root / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _read_int(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None  # "max" means no limit


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
