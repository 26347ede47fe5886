"""`attent doctor`: check the installation, as text or JSON. The facts come from `system_info`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attent import __version__
from attent.cli.system_info import (
    Accelerator,
    Package,
    SystemInfo,
    TorchInfo,
    get_system_info,
    get_torch_info,
    list_packages,
    pip_command,
)

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30
MIN_FREE_DISK = 2 * GIB  # a base-sized model with its checkpoints has about 1 GiB
MIN_FREE_MEMORY = 2 * GIB  # torch, a small model and its optimizer
PACKAGE_HEADINGS = ("extra", "package", "version, or how to install it", "for")


@dataclass(frozen=True)
class DoctorReport:
    """Facts and findings: `problems` prevent attent from working, `advice` does not."""

    machine: SystemInfo
    torch: TorchInfo
    packages: tuple[Package, ...]
    problems: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def verdict(self) -> str:
        if self.problems:
            return "not ready: " + "; ".join(self.problems)
        return f"ready: {_describe_device(self.torch)}"


def doctor(*, json: bool = False) -> int:
    """Check whether this machine is ready, and what is installed.

    Parameters
    ----------
    json
        Print the findings as JSON.
    """
    report = run_checks()
    if json:
        print(format_json(report))
    elif sys.stdout.isatty():
        _print_at_terminal(report)
    else:
        print(format_text(report))
    return 1 if report.problems else 0


def run_checks() -> DoctorReport:
    machine, torch, installed = get_system_info(), get_torch_info(), list_packages()
    problems = tuple(find_problems(torch, installed))
    return DoctorReport(machine, torch, installed, problems, tuple(find_advice(machine, torch, installed)))


# ---- findings ----------------------------------------------------------------------------------------------


def find_problems(torch: TorchInfo, installed: tuple[Package, ...]) -> Iterator[str]:
    if torch.error and any(package.name == "torch" and package.version for package in installed):
        yield torch.error  # installed, but broken
    if not installed:
        yield "attent is not installed but runs from its source tree: pip install -e ."
    for package in installed:
        if not package.extra and not package.is_compatible:
            yield f"{_describe_mismatch(package)}: pip install '{package.name}{package.required}'"


def find_advice(machine: SystemInfo, torch: TorchInfo, installed: tuple[Package, ...]) -> Iterator[str]:
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


def _describe_device(torch: TorchInfo) -> str:
    dtype = "bfloat16" if _bf16_is_fast(torch) else "float32"
    if torch.devices:
        return f"{torch.devices[0].name}, {dtype}"
    threads = torch.threads or 1
    return f"CPU, {threads} {'thread' if threads == 1 else 'threads'}, {dtype}"


def _bf16_is_fast(torch: TorchInfo) -> bool:
    # Below this, casts cost more than the matrix products gain.
    return torch.bf16_speedup is not None and torch.bf16_speedup >= 1.3


# ---- table rows ----------------------------------------------------------------------------


def machine_rows(report: DoctorReport) -> list[tuple[str, str]]:
    machine, torch = report.machine, report.torch
    return [
        ("attent", __version__),
        ("python", f"{machine.python}, {machine.system}"),
        *_torch_rows(torch),
        ("processor", machine.processor),
        ("cores", f"{machine.cores_usable} of {machine.cores} usable"),
        ("memory", f"{_format_size(machine.memory_free)} free of {_format_size(machine.memory_total)}"),
        ("disk", f"{_format_size(machine.disk_free)} free in this folder"),
    ]


def _torch_rows(torch: TorchInfo) -> list[tuple[str, str]]:
    if torch.error:
        return [("torch", "not usable")]
    threads = f"{torch.threads} CPU {'thread' if torch.threads == 1 else 'threads'}"
    return [
        ("torch", f"{torch.version}, {torch.build}, {threads}"),
        *_device_rows(torch.devices),
        ("bfloat16", _describe_bf16(torch)),
    ]


def _device_rows(devices: tuple[Accelerator, ...]) -> list[tuple[str, str]]:
    if not devices:
        return [("device", "CPU (torch sees no GPU)")]
    return [
        (f"device {i}", f"{d.name} ({d.kind}), {_format_size(d.memory_free)} free of {_format_size(d.memory_total)}")
        for i, d in enumerate(devices)
    ]


def _describe_bf16(torch: TorchInfo) -> str:
    if torch.bf16_speedup is None:
        return "not available"
    judgement = "fast" if _bf16_is_fast(torch) else "slow here, float32 is better"
    return f"{judgement} (measured at {torch.bf16_speedup:.1f}x float32)"


def package_rows(report: DoctorReport) -> list[tuple[str, str, str, str]]:
    """(extra, package, version or how to add it, purpose); an extra's name on its first row only."""
    rows, above = [], None
    for package in report.packages:
        title = "" if package.extra == above else package.extra or "core"
        rows.append((title, package.name, _describe_version(package), package.purpose))
        above = package.extra
    return rows


def _describe_version(package: Package) -> str:
    if package.version is None:
        return pip_command(package.extra)
    return package.version if package.is_compatible else f"{package.version}, not {package.required}"


def _format_size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


# ---- views -------------------------------------------------------------------------------------------------


def format_json(report: DoctorReport) -> str:
    facts = {
        "attent": __version__,
        "ready": not report.problems,
        "verdict": report.verdict,
        "problems": report.problems,
        "advice": report.advice,
        "machine": asdict(report.machine) | {"folder": str(Path.cwd())},
        "torch": asdict(report.torch),
        "packages": [_package_to_dict(package) for package in report.packages],
    }
    return json.dumps(facts, indent=2, ensure_ascii=False)


def _package_to_dict(package: Package) -> dict[str, str | bool | None]:
    added_by = pip_command(package.extra)
    return {**asdict(package), "fits": package.is_compatible, "purpose": package.purpose, "added_by": added_by}


def format_text(report: DoctorReport) -> str:
    """The page for a pipe or a log: aligned, never wrapped, no colours."""
    advice = [f"advice: {line}" for line in report.advice]
    inventory = [PACKAGE_HEADINGS, *package_rows(report)]
    return "\n".join(
        [*_align_columns(machine_rows(report)), "", *_align_columns(inventory), "", *advice, report.verdict]
    )


def _align_columns(rows: list[tuple[str, str]] | list[tuple[str, str, str, str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _print_at_terminal(report: DoctorReport) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(machine_table(report), package_table(report))
    for line in report.advice:
        console.print(Text.assemble(("advice  ", "yellow"), line))
    console.print(Text(report.verdict, style="bold red" if report.problems else "bold green"))


def machine_table(report: DoctorReport) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, title="This machine", title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in machine_rows(report):
        table.add_row(name, value)
    return table


def package_table(report: DoctorReport) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Packages", title_justify="left")
    for heading in PACKAGE_HEADINGS:
        table.add_column(heading, overflow="fold", header_style="dim")
    for package, (extra, name, version, purpose) in zip(report.packages, package_rows(report), strict=True):
        table.add_row(Text(extra, "cyan"), name, Text(version, _version_style(package)), Text(purpose, "dim"))
    return table


def _version_style(package: Package) -> str:
    if package.is_compatible:
        return "green"
    return "yellow" if package.extra and package.version is None else "red"
