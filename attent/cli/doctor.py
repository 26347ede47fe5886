"""`attent doctor`: check the installation. The facts come from `system_info`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from attent import __version__
from attent.cli.system_info import (
    Package,
    SystemInfo,
    TorchInfo,
    get_system_info,
    get_torch_info,
    list_packages,
    pip_command,
)
from attent.formatting import format_count

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
