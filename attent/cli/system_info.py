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
    required: str
    version: str | None

    @property
    def purpose(self) -> str:
        return PURPOSES.get(self.name, "")

    @property
    def is_compatible(self) -> bool:
        """Installed, and of a version that attent works with."""
        return self.version is not None and _satisfies(self.version, self.required)


@dataclass(frozen=True)
class Accelerator:
    """An accelerator as torch sees it; bytes."""

    name: str
    kind: str
    memory_total: int | None
    memory_free: int | None


@dataclass(frozen=True)
class TorchInfo:
    """The torch that is installed; `error` says why it could not be imported."""

    version: str | None
    build: str | None
    devices: tuple[Accelerator, ...]
    threads: int | None
    bf16_speedup: float | None  # a bfloat16 matrix product against float32, measured; above 1 is faster
    error: str | None = None


@dataclass(frozen=True)
class SystemInfo:
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


def get_system_info() -> SystemInfo:
    total, free = measure_memory()
    return SystemInfo(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=get_processor_name(),
        cores=os.cpu_count() or 1,
        cores_usable=count_usable_cores(),
        memory_total=total,
        memory_free=free,
        disk_free=shutil.disk_usage(".").free,
        nvidia_driver=Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
    )


# ---- processor ---------------------------------------------------------------------------------------------


def get_processor_name() -> str:
    for line in _read_text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    if sys.platform == "darwin":
        ask = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        told = subprocess.run(ask, capture_output=True, text=True, check=False)
        return told.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine() or "unknown"


def count_usable_cores() -> int:
    """Cores that this process may use: affinity (taskset) and the container's quota both count."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    for folder in _list_cgroups("cpu"):
        quota, _, period = _read_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


# ---- memory ------------------------------------------------------------------------------------------------


def measure_memory() -> tuple[int | None, int | None]:
    """(total, free) bytes; the tightest of the machine and the cgroups around this process."""
    total, free = _read_physical_memory()
    for folder in _list_cgroups("memory"):
        limit, used = read_cgroup_memory(folder)
        if limit is not None and (total is None or limit < total):
            total = limit
        if limit is not None and used is not None:
            left = max(0, limit - used)
            free = left if free is None else min(free, left)
    return total, free


def _read_physical_memory() -> tuple[int | None, int | None]:
    fields = dict(line.split(":", 1) for line in _read_text("/proc/meminfo").splitlines() if ":" in line)
    sizes = {name: int(value.split()[0]) * 1024 for name, value in fields.items()}
    if "MemTotal" in sizes:
        return sizes["MemTotal"], sizes.get("MemAvailable")
    names = getattr(os, "sysconf_names", {})  # absent on Windows
    if "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    return None, None


def read_cgroup_memory(folder: Path) -> tuple[int | None, int | None]:
    """(limit, used) of one cgroup, version 2 or 1. File cache that can be dropped does not count as used."""
    limit = _read_int(folder / "memory.max") or _read_int(folder / "memory.limit_in_bytes")
    used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes")
    cached = re.search(r"^(?:total_)?inactive_file (\d+)", _read_text(folder / "memory.stat"), re.MULTILINE)
    if used is not None and cached:
        used = max(0, used - int(cached[1]))
    return limit, used


def _list_cgroups(controller: str) -> Iterator[Path]:
    """The cgroup folders that bind this process, innermost first: a parent's limit counts as well."""
    for line in _read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd") or controller in controllers.split(","):
            root = Path("/sys/fs/cgroup", controller if controllers else "")
            inner = root / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _read_int(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- torch -------------------------------------------------------------------------------------------------


def get_torch_info() -> TorchInfo:
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library that does not load
        return TorchInfo(None, None, (), None, None, error=f"torch cannot be imported: {error}")
    from attent.nn.devices import measure_bf16_speedup

    devices = list_accelerators()
    return TorchInfo(
        version=str(torch.__version__),
        build=_describe_torch_build(),
        devices=devices,
        threads=torch.get_num_threads(),
        bf16_speedup=measure_bf16_speedup(devices[0].kind if devices else "cpu"),
    )


def list_accelerators() -> tuple[Accelerator, ...]:
    import torch

    if torch.cuda.is_available():
        return tuple(_get_cuda_device(index) for index in range(torch.cuda.device_count()))
    if torch.backends.mps.is_available():
        return (Accelerator("Apple GPU", "mps", torch.mps.recommended_max_memory(), None),)
    return ()


def _get_cuda_device(index: int) -> Accelerator:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return Accelerator(torch.cuda.get_device_name(index), "cuda", total, free)


def _describe_torch_build() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "CPU and Metal" if torch.backends.mps.is_built() else "CPU only"


# ---- packages ----------------------------------------------------------------------------------------------


@cache
def list_packages() -> tuple[Package, ...]:
    """Every dependency of the core and of the users' extras, as the installed attent declares them."""
    try:
        declared = metadata.requires("attent") or []
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return ()
    needed = filter(_applies_to_this_python, declared)
    found = [package for package in map(parse_requirement, needed) if package.extra in ("", *EXTRAS)]
    order = [*PURPOSES, *(package.name for package in found)]
    return tuple(sorted(found, key=lambda p: (("", *EXTRAS).index(p.extra), order.index(p.name))))


def install_command(name: str) -> str | None:
    """The pip command that adds the package of this name, or None where attent never asks for it."""
    name = _canonicalize(name)
    for package in list_packages():
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
    name = _canonicalize(parts[1])
    return Package(name, extra[1] if extra else "", parts[2].strip(), _get_installed_version(name))


def _applies_to_this_python(requirement: str) -> bool:
    """Some packages bring to an older Python what a newer one has by itself: `python_version < '3.14'`."""
    older = re.search(r"python_version\s*<\s*['\"]3\.(\d+)['\"]", requirement)
    return older is None or sys.version_info < (3, int(older[1]))


def _canonicalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _get_installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(version: str, required: str) -> bool:
    """Whether a version lies in a range such as `>=5,<6`, the only two signs that pyproject.toml uses."""
    have = _parse_version(version)
    for bound in filter(None, required.split(",")):
        sign, limit = re.match(r"\s*([<>=!~]+)\s*(.*)", bound).groups()  # type: ignore[union-attr]
        if (sign == ">=" and have < _parse_version(limit)) or (sign == "<" and have >= _parse_version(limit)):
            return False
    return True


def _parse_version(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0); trailing zeros count for nothing in an order by length."""
    numbers = re.match(r"[\d.]*", version.partition("+")[0])
    parts = [int(part) for part in (numbers[0] if numbers else "").split(".") if part]
    return tuple(parts) + (0,) * (4 - len(parts))
