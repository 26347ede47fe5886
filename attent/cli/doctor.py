"""`attent doctor`: check the machine and the installation. Nothing is installed or changed."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.text import Text

from attent import __version__
from attent.formatting import format_bytes, format_count
from attent.storage.machine import count_usable_cores, measure_memory, read_text

EXTRAS = ("serve", "hf", "viz", "images", "audio", "moses", "rouge", "ray")


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


@dataclass
class Examination:
    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # that prevent attent from working
    advice: list[str] = field(default_factory=list)  # what could be better, though attent works
    device: str = ""  # "CPU, 4 threads, float32"


def doctor() -> int:
    """Check whether this machine is ready, and what is installed."""
    packages, result = list_packages(), Examination([("attent", __version__)])
    has_driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    check_torch(result, has_driver)
    check_machine(result)
    check_packages(result, packages)
    console = Console(highlight=False)
    for line in render_report(result, packages):
        console.print(line, soft_wrap=not console.is_terminal)
    return 1 if result.problems else 0


def render_report(result: Examination, packages: tuple[Package, ...]) -> Iterator[Text]:
    yield from (Text(f"{name:<11}{value}") for name, value in result.rows)
    yield Text()
    names = max((len(package.name) for package in packages), default=0) + 2
    for package in packages:
        version, style = package.version or pip_command(package.extra), "green" if package.is_compatible else "yellow"
        if package.version and not package.is_compatible:
            version, style = f"{version}, not {package.required}", "red"
        yield Text.assemble(f"{package.extra or 'core':<8}{package.name:<{names}}", (version, style))
    yield Text()
    yield from (Text(f"advice: {line}", "yellow") for line in result.advice)
    problems = "; ".join(result.problems)
    yield Text(f"not ready: {problems}", "bold red") if problems else Text(f"ready: {result.device}", "bold green")


def check_machine(result: Examination) -> None:
    (total, free), disk = measure_memory(), shutil.disk_usage(".").free
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    result.rows += [
        ("python", f"{platform.python_version()} ({platform.python_implementation()}), {system}"),
        ("processor", get_processor_name()),
        ("cores", f"{count_usable_cores()} of {os.cpu_count() or 1} usable"),
        ("memory", f"{format_bytes(free)} free of {format_bytes(total)}"),
        ("disk", f"{format_bytes(disk)} free in this folder"),
    ]


def get_processor_name() -> str:
    for line in read_text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine() or "unknown"


def check_torch(result: Examination, has_driver: bool) -> None:
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library does not load
        result.rows.append(("torch", "not usable"))
        result.problems.append(f"torch cannot be imported: {error}")
        return
    from attent.training.hardware import pick_precision

    kind, devices, threads = "cpu", [], format_count(torch.get_num_threads(), "thread")
    build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    if not (torch.version.hip or torch.version.cuda):
        build = "CPU and Metal" if torch.backends.mps.is_built() else "CPU only"
    if torch.cuda.is_available():
        kind, devices = "cuda", [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    elif torch.backends.mps.is_available():
        kind, devices = "mps", ["Apple GPU"]
    result.rows.append(("torch", f"{torch.__version__}, {build}, {threads}"))
    for index, name in enumerate(devices):
        memory = ""
        if kind == "cuda":
            free, total = torch.cuda.mem_get_info(index)
            memory = f", {format_bytes(free)} free of {format_bytes(total)}"
        result.rows.append((f"device {index}", f"{name} ({kind}){memory}"))
    precision = pick_precision(torch.device(kind))
    result.device = f"{devices[0] if devices else f'CPU, {threads}'}, {precision}"
    if has_driver and build == "CPU only":
        advice = "an NVIDIA driver is installed, but this torch is a CPU build: see https://pytorch.org/get-started"
        result.advice.append(advice)
    elif has_driver and not devices:
        result.advice.append(f"torch is built for {build} but sees no GPU: check the driver with nvidia-smi")


def check_packages(result: Examination, packages: tuple[Package, ...]) -> None:
    if not packages:
        result.problems.append("attent is not installed but runs from its source tree: pip install -e .")
    for package in packages:
        if not package.extra and not package.is_compatible:
            have = f"is {package.version}" if package.version else "is not installed"
            requirement = f"{package.name}{package.required}"
            problem = f"{package.name} {have}, but must be {package.required}: pip install '{requirement}'"
            result.problems.append(problem)


@cache
def list_packages() -> tuple[Package, ...]:
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
