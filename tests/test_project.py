"""The files around the package agree with each other: locks, citation, CI workflow, targets."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import attent

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"^([a-z0-9][\w.-]*)==([^\s;\\]+)", re.MULTILINE)
TORCH_PACKAGES = ("torch", "nvidia-", "cuda-")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_hash_lock_pins_what_the_constraints_pin() -> None:
    pins = {match.groups() for match in PIN.finditer(read("constraints.txt"))}
    assert ("torch", "2.13.0") in pins
    others = {pin for pin in pins if not pin[0].startswith(TORCH_PACKAGES)}
    assert {match.groups() for match in PIN.finditer(read("requirements.lock"))} == others


def test_every_locked_package_has_hashes() -> None:
    entries = re.split(r"\n(?=[a-z])", read("requirements.lock").partition("\na")[2])
    assert len(entries) > 50
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


def test_dependencies_are_locked() -> None:
    """After adding a dependency, run `make lock`."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    requirements = [*project["dependencies"], *(r for rs in project["optional-dependencies"].values() for r in rs)]
    names = {
        re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-").replace(".", "-") for requirement in requirements
    }
    assert names - {"attent"} <= {match[1] for match in PIN.finditer(read("constraints.txt"))}


def test_citation_names_the_current_version() -> None:
    assert f"\nversion: {attent.__version__}\n" in read("CITATION.cff")


def test_ci_runs_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    workflow, script = read(".github/workflows/ci.yml"), read(".ci/run")
    used = {
        word
        for line in re.findall(r"^(?:make|.*run: make) ([a-z -]+?)(?: \|\||$)", workflow + script, re.MULTILINE)
        for word in line.split()
        if word != "or"
    }
    assert {"setup", "test", "wheel-test", "sbom"} <= used <= targets


def test_all_supported_python_versions_are_in_ci() -> None:
    versions = re.findall(r"Python :: (3\.\d+)", read("pyproject.toml"))
    assert f"python: {versions}".replace("'", '"') in read(".github/workflows/ci.yml")
