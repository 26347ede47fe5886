"""`attent doctor`: check the machine and the installation. Nothing is installed or changed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.text import Text

from attent import __version__
from attent.formatting import format_count
from attent.storage.machine import count_usable_cores, measure_memory, read_text

EXTRAS = ("serve", "hf", "export", "viz", "images", "audio", "moses", "rouge", "ray")
GIB = 2**30
MIN_FREE_DISK = 2 * GIB  # a base-sized model with its checkpoints has about 1 GiB
MIN_FREE_MEMORY = 2 * GIB  # torch, a small model and its optimizer
PACKAGE_HEADINGS = ("extra", "package", "version, or how to install it")


def doctor() -> int:
    """Check whether this machine is ready, and what is installed."""
    machine, torch, packages = get_system_info(), get_torch_info(), list_packages()
    console = Console(highlight=False)
    console.print(*render_report(machine, torch, packages), sep="\n", soft_wrap=not console.is_terminal)
    return 1 if any(find_problems(torch, packages)) else 0


def find_problems(torch: TorchInfo, installed: tuple[Package, ...]) -> Iterator[str]:
    """Yield what prevents attent from working."""
    if torch.error and any(package.name == "torch" and package.version for package in installed):
        yield torch.error  # installed, but broken
    if not installed:
        yield "attent is not installed but runs from its source tree: pip install -e ."
    for package in installed:
        if not package.extra and not package.is_compatible:
            yield f"{_describe_mismatch(package)}: pip install '{package.name}{package.required}'"


def find_advice(machine: SystemInfo, torch: TorchInfo, installed: tuple[Package, ...]) -> Iterator[str]:
    """Yield what could be better, though attent works."""
    if machine.nvidia_driver and torch.build == "CPU only":
        yield "an NVIDIA driver is installed, but this torch is a CPU build: see https://pytorch.org/get-started"
    if machine.nvidia_driver and (torch.build or "").startswith("CUDA") and not torch.devices:
        yield f"torch is built for {torch.build} but sees no GPU: check the driver with nvidia-smi"
    if machine.disk_free < MIN_FREE_DISK:
        yield f"only {_format_size(machine.disk_free)} of disk space is free in this folder: save models elsewhere"
    if machine.memory_free < MIN_FREE_MEMORY:
        yield f"only {_format_size(machine.memory_free)} of memory is free: use small models"
    for package in installed:
        if package.extra and package.version and not package.is_compatible:
            yield f"{_describe_mismatch(package)}: {pip_command(package.extra)}"


def _describe_mismatch(package: Package) -> str:
    have = f"is {package.version}" if package.version else "is not installed"
    return f"{package.name} {have}, but must be {package.required}"


def _list_torch_rows(torch: TorchInfo) -> list[tuple[str, str]]:
    if torch.error:
        return [("torch", "not usable")]
    devices = [
        (f"device {i}", f"{d.name} ({d.kind}), {_format_size(d.memory_free)} free of {_format_size(d.memory_total)}")
        for i, d in enumerate(torch.devices)
    ]
    speed = "fast" if torch.is_bf16_fast else "slow here, float32 is better"
    bf16 = "not available" if torch.bf16_speedup is None else f"{speed} (measured at {torch.bf16_speedup:.1f}x float32)"
    return [
        ("torch", f"{torch.version}, {torch.build}, {format_count(torch.threads or 1, 'CPU thread')}"),
        *(devices or [("device", "CPU (torch sees no GPU)")]),
        ("bfloat16", bf16),
    ]


def list_package_rows(packages: tuple[Package, ...]) -> list[tuple[tuple[str, str], ...]]:
    """(extra, package, version or how to add it), each with its style; an extra is named on its first row."""
    rows: list[tuple[tuple[str, str], ...]] = []
    above = None
    for package in packages:
        title = "" if package.extra == above else package.extra or "core"
        if package.version is None:
            version, style = pip_command(package.extra), "yellow" if package.extra else "red"
        elif package.is_compatible:
            version, style = package.version, "green"
        else:
            version, style = f"{package.version}, not {package.required}", "red"
        rows.append(((title, "cyan"), (package.name, ""), (version, style)))
        above = package.extra
    return rows


def render_report(machine: SystemInfo, torch: TorchInfo, packages: tuple[Package, ...]) -> list[Text]:
    """Return the lines for a terminal, a pipe or a log, the verdict last; colors only show at a terminal."""
    problems, threads = "; ".join(find_problems(torch, packages)), format_count(torch.threads or 1, "thread")
    device = torch.devices[0].name if torch.devices else f"CPU, {threads}"
    ready = f"ready: {device}, {'bfloat16' if torch.is_bf16_fast else 'float32'}"
    rows = [
        ("attent", __version__),
        ("python", f"{machine.python}, {machine.system}"),
        *_list_torch_rows(torch),
        ("processor", machine.processor),
        ("cores", f"{machine.cores_usable} of {machine.cores} usable"),
        ("memory", f"{_format_size(machine.memory_free)} free of {_format_size(machine.memory_total)}"),
        ("disk", f"{_format_size(machine.disk_free)} free in this folder"),
    ]
    headings = tuple((heading, "dim") for heading in PACKAGE_HEADINGS)
    return [
        *_align_columns([((name, "cyan"), (value, "")) for name, value in rows]),
        Text(),
        *_align_columns([headings, *list_package_rows(packages)]),
        Text(),
        *(Text.assemble(("advice: ", "yellow"), line) for line in find_advice(machine, torch, packages)),
        Text(f"not ready: {problems}", "bold red") if problems else Text(ready, "bold green"),
    ]


def _align_columns(rows: Sequence[Sequence[tuple[str, str]]]) -> Iterator[Text]:
    widths = [max(len(text) for text, _ in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [(text.ljust(width + 2), style) for (text, style), width in zip(row, widths, strict=True)]
        line = Text.assemble(*cells)
        line.rstrip()
        yield line


def _format_size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


# ---- facts; what cannot be determined is None ------------------------------------------------------------------------


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
