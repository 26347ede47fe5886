"""Facts about the machine and the installation, for `attent doctor` and for the head of a benchmark.

Only looks; never installs, changes or prints. What cannot be found out is None, never a guess. How the facts
are shown, and what follows from them, is doctor's.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

# What each package does for attent, in the order in which doctor shows them. Versions are pyproject.toml's.
PURPOSES: dict[str, str] = {
    "torch": "tensors, training",
    "numpy": "arrays on disk",
    "sentencepiece": "subwords",
    "ctranslate2": "fast CPU engine",
    "sacrebleu": "BLEU, chrF, TER",
    "babel": "languages, dates",
    "backports-zstd": ".zst files",
    "safetensors": "weights on disk",
    "cyclopts": "this command line",
    "rich": "tables, progress",
    "fastapi": "HTTP interface",
    "granian": "HTTP server",
    "huggingface-hub": "published models",
    "tokenizers": "their tokenizers",
    "onnx": "ONNX files",
    "onnxruntime": "run ONNX files",
    "onnxscript": "write ONNX files",
    "matplotlib": "attention as PNG",
    "pillow": "PNG, JPEG images",
}
EXTRAS = ("serve", "hf", "export", "viz", "images")


@dataclass(frozen=True)
class Package:
    """One dependency: `extra` is "" for the core, `version` None where it is not installed."""

    name: str
    extra: str
    wanted: str
    version: str | None

    @property
    def purpose(self) -> str:
        return PURPOSES.get(self.name, "")

    @property
    def fits(self) -> bool:
        """Installed, and of a version that attent works with."""
        return self.version is not None and _within(self.version, self.wanted)


@dataclass(frozen=True)
class Device:
    """An accelerator as torch sees it; bytes."""

    name: str
    kind: str
    memory_total: int | None
    memory_free: int | None


@dataclass(frozen=True)
class Torch:
    """The torch that is installed; `error` says why it could not be imported."""

    version: str | None
    build: str | None
    devices: tuple[Device, ...]
    threads: int | None
    bf16_speedup: float | None  # a bfloat16 matrix product against float32, measured; above 1 is faster
    error: str | None = None


@dataclass(frozen=True)
class Machine:
    """What the program runs on; memory and disk in bytes, memory within the container's limit, if any."""

    python: str
    system: str
    processor: str
    cores: int
    cores_usable: int
    memory_total: int | None
    memory_free: int | None
    disk_free: int
    nvidia_driver: bool


def look_at_machine() -> Machine:
    total, free = memory()
    return Machine(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        cores_usable=usable_cores(),
        memory_total=total,
        memory_free=free,
        disk_free=shutil.disk_usage(".").free,
        nvidia_driver=Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
    )


# ---- processor ---------------------------------------------------------------------------------------------


def processor_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    if sys.platform == "darwin":
        ask = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        told = subprocess.run(ask, capture_output=True, text=True, check=False)
        return told.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine() or "unknown"


def usable_cores() -> int:
    """Cores that this process may use: affinity (taskset) and the container's quota both count."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


# ---- memory ------------------------------------------------------------------------------------------------


def memory() -> tuple[int | None, int | None]:
    """(total, free) bytes; the tightest of the machine and the cgroups around this process."""
    total, free = _physical_memory()
    for folder in _cgroups("memory"):
        limit, used = cgroup_memory(folder)
        if limit is not None and (total is None or limit < total):
            total = limit
        if limit is not None and used is not None:
            left = max(0, limit - used)
            free = left if free is None else min(free, left)
    return total, free


def _physical_memory() -> tuple[int | None, int | None]:
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    sizes = {name: int(value.split()[0]) * 1024 for name, value in fields.items()}
    if "MemTotal" in sizes:
        return sizes["MemTotal"], sizes.get("MemAvailable")
    names = getattr(os, "sysconf_names", {})  # absent on Windows
    if "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    return None, None


def cgroup_memory(folder: Path) -> tuple[int | None, int | None]:
    """(limit, used) of one cgroup, version 2 or 1. File cache that can be dropped does not count as used."""
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    cached = re.search(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
    if used is not None and cached:
        used = max(0, used - int(cached[1]))
    return limit, used


def _cgroups(controller: str) -> Iterator[Path]:
    """The cgroup folders that bind this process, innermost first: a parent's limit counts as well."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd") or controller in controllers.split(","):
            root = Path("/sys/fs/cgroup", controller if controllers else "")
            inner = root / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- torch -------------------------------------------------------------------------------------------------


def look_at_torch() -> Torch:
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library that does not load
        return Torch(None, None, (), None, None, error=f"torch cannot be imported: {error}")
    from attent.train.speed import measure_bf16

    devices = accelerators()
    return Torch(
        version=str(torch.__version__),
        build=_build_of_torch(),
        devices=devices,
        threads=torch.get_num_threads(),
        bf16_speedup=measure_bf16(devices[0].kind if devices else "cpu"),
    )


def accelerators() -> tuple[Device, ...]:
    import torch

    if torch.cuda.is_available():
        return tuple(_cuda_device(index) for index in range(torch.cuda.device_count()))
    if torch.backends.mps.is_available():
        return (Device("Apple GPU", "mps", torch.mps.recommended_max_memory(), None),)
    return ()


def _cuda_device(index: int) -> Device:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return Device(torch.cuda.get_device_name(index), "cuda", total, free)


def _build_of_torch() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "CPU and Metal" if torch.backends.mps.is_built() else "CPU only"


# ---- packages ----------------------------------------------------------------------------------------------


@cache
def packages() -> tuple[Package, ...]:
    """Every dependency of the core and of the users' extras, as the installed attent declares them."""
    try:
        declared = metadata.requires("attent") or []
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return ()
    needed = filter(_needed_here, declared)
    found = [package for package in map(parse_requirement, needed) if package.extra in ("", *EXTRAS)]
    order = [*PURPOSES, *(package.name for package in found)]
    return tuple(sorted(found, key=lambda p: (("", *EXTRAS).index(p.extra), order.index(p.name))))


def install_command(name: str) -> str | None:
    """The pip command that adds the package of this name, or None where attent never asks for it."""
    name = _canonical(name)
    for package in packages():
        if package.name == name:
            return pip_command(package.extra)
    return None


def pip_command(extra: str) -> str:
    return f"pip install 'attent[{extra}]'" if extra else "pip install attent"


def parse_requirement(requirement: str) -> Package:
    """`fastapi>=1; extra == 'serve'` -> Package("fastapi", "serve", ">=1", installed version)."""
    wanted, _, marker = requirement.partition(";")
    parts = re.match(r"\s*([\w.-]+)(?:\[.*\])?\s*(.*)", wanted)
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
    assert parts, f"requirement that cannot be read: {requirement}"
    name = _canonical(parts[1])
    return Package(name, extra[1] if extra else "", parts[2].strip(), _installed_version(name))


def _needed_here(requirement: str) -> bool:
    """Some packages bring to an older Python what a newer one has by itself: `python_version < '3.14'`."""
    older = re.search(r"python_version\s*<\s*['\"]3\.(\d+)['\"]", requirement)
    return older is None or sys.version_info < (3, int(older[1]))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _within(version: str, wanted: str) -> bool:
    """Whether a version lies in a range such as `>=5,<6`, the only two signs that pyproject.toml uses."""
    have = _release(version)
    for bound in filter(None, wanted.split(",")):
        sign, limit = re.match(r"\s*([<>=!~]+)\s*(.*)", bound).groups()  # type: ignore[union-attr]
        if (sign == ">=" and have < _release(limit)) or (sign == "<" and have >= _release(limit)):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0); trailing zeros count for nothing in an order by length."""
    numbers = re.match(r"[\d.]*", version.partition("+")[0])
    parts = [int(part) for part in (numbers[0] if numbers else "").split(".") if part]
    return tuple(parts) + (0,) * (4 - len(parts))
