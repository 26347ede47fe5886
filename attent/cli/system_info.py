"""Facts about the machine and the installation, for `attent doctor`.

Nothing here installs, changes or prints. What cannot be determined is None.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from attent.storage.machine import count_usable_cores, measure_memory, read_text

EXTRAS = ("serve", "hf", "export", "viz", "images", "audio", "moses", "rouge", "ray")


@dataclass(frozen=True)
class Package:
    """A dependency: `extra` is "" for the core, `version` None if it is not installed."""

    name: str
    extra: str
    required: str
    version: str | None

    @property
    def is_compatible(self) -> bool:
        """True if the package is installed in a version that attent works with."""
        from packaging.specifiers import SpecifierSet

        return self.version is not None and SpecifierSet(self.required).contains(self.version, prereleases=True)


@dataclass(frozen=True)
class Accelerator:
    """A GPU as torch sees it; memory in bytes."""

    name: str
    kind: str
    memory_total: int | None
    memory_free: int | None


@dataclass(frozen=True)
class TorchInfo:
    """The installed torch; `error` says why it could not be imported."""

    version: str | None
    build: str | None
    devices: tuple[Accelerator, ...]
    threads: int | None
    bf16_speedup: float | None  # measured, against float32
    error: str | None = None

    @property
    def is_bf16_fast(self) -> bool:
        """False below 1.3x float32, where casts cost more than the matrix products gain."""
        return self.bf16_speedup is not None and self.bf16_speedup >= 1.3


@dataclass(frozen=True)
class SystemInfo:
    """Hardware and Python; sizes in bytes, memory within the container's limit."""

    python: str
    system: str
    processor: str
    cores: int
    cores_usable: int
    memory_total: int
    memory_free: int
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


def get_processor_name() -> str:
    for line in read_text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or platform.machine()
    return platform.processor() or platform.machine() or "unknown"


def get_torch_info() -> TorchInfo:
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library does not load
        return TorchInfo(None, None, (), None, None, error=f"torch cannot be imported: {error}")
    from attent.training.hardware import measure_bf16_speedup

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
        memory = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
        names = [torch.cuda.get_device_name(index) for index in range(len(memory))]
        return tuple(Accelerator(name, "cuda", total, free) for name, (free, total) in zip(names, memory, strict=True))
    if torch.backends.mps.is_available():
        return (Accelerator("Apple GPU", "mps", torch.mps.recommended_max_memory(), None),)
    return ()


def _describe_torch_build() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "CPU and Metal" if torch.backends.mps.is_built() else "CPU only"


@cache
def list_packages() -> tuple[Package, ...]:
    """Return the dependencies of the core and of the extras, as the installed attent declares them."""
    try:
        declared = metadata.requires("attent") or []
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return ()
    packages = [package for package in map(parse_requirement, declared) if package is not None]
    return tuple(sorted(packages, key=lambda package: ("", *EXTRAS).index(package.extra)))


def parse_requirement(text: str) -> Package | None:
    """Parse `fastapi>=1; extra == 'serve'`; None for other extras, Pythons and systems."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    requirement = Requirement(text)
    marker, name = requirement.marker, canonicalize_name(requirement.name)
    for extra in ("", *EXTRAS):
        if marker is None or marker.evaluate({"extra": extra}):
            installed = next((package.version for package in metadata.distributions(name=name)), None)
            return Package(name, extra, str(requirement.specifier), installed)
    return None


def install_command(name: str) -> str | None:
    """Return the pip command that installs a package, or None if attent does not depend on it."""
    canonical = re.sub(r"[-_.]+", "-", name).lower()
    return next((pip_command(package.extra) for package in list_packages() if package.name == canonical), None)


def pip_command(extra: str) -> str:
    return f"pip install 'attent[{extra}]'" if extra else "pip install attent"
