"""The one command of the comparison: its parts, and the report that it collects."""

from __future__ import annotations

from pathlib import Path

import pytest

from attent import cli
from benchmarks import long_range, why_attention


def test_parts_accept_their_flags(tmp_path: Path) -> None:
    flags = ["--out", str(tmp_path), "--data", "missing.tsv", "--jobs", "1", "--quick"]
    arguments = why_attention.parse_arguments(flags)
    commands = [why_attention.build_command(part, arguments) for part in arguments.parts]
    assert [command[0] for command in commands] == ["attent", "attent", "benchmarks.table1", "benchmarks.long_range"]
    for _, *rest in commands[:2]:
        assert cli.main(rest) == 1  # not 2: only the corpus is missing
    with pytest.raises(SystemExit, match="0"):
        long_range.main([*commands[3][1:], "--help"])


def test_reports_are_joined(tmp_path: Path) -> None:
    (tmp_path / "table1").mkdir()
    (tmp_path / "table1" / "table1.md").write_text("# Table 1\n\n## Time\n\n![Time](time.svg)\n")
    measured = {"table1": {"seconds": 90.0, "conditions": ["2026-11-16; a machine"]}}
    report = why_attention.collect_reports(tmp_path, measured)
    assert "## Table 1\n\n### Time\n\n![Time](table1/time.svg)" in report
    assert "| table1 | 1 min 30 s | 2026-11-16; a machine |" in report


def test_conditions_are_those_of_the_call_that_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"table1": tmp_path / "table1" / "results.json", "long-range": tmp_path / "long-range" / "results.json"}
    calls: list[tuple[str, list[str]]] = [("Monday", ["table1"]), ("Tuesday", ["long-range"]), ("Wednesday", [])]
    for day, parts in calls:

        def run_part(command: list[str], parts: list[str] = parts) -> int:
            for part in parts:
                if str(tmp_path / part) in command:
                    results[part].parent.mkdir()
                    results[part].write_text("{}")
            return 0

        monkeypatch.setattr(why_attention, "describe_conditions", lambda day=day: day)
        monkeypatch.setattr(why_attention, "run_part", run_part)
        assert why_attention.main(["--out", str(tmp_path), "--parts", "table1", "long-range"]) == 0
    rows = [line.split(" | ") for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| ")]
    assert [row[2].rstrip(" |") for row in rows[2:4]] == ["Monday", "Tuesday"]


def test_commands_in_the_docs_are_those_that_are_measured() -> None:
    page = (Path(__file__).parents[2] / "docs" / "why-attention.md").read_text()
    flags = page.partition("python -m benchmarks.why_attention ")[2].splitlines()[0].split()
    arguments = why_attention.parse_arguments(flags)
    for part in arguments.parts:
        command = " ".join(why_attention.build_command(part, arguments))
        assert command.removeprefix("attent ") in page
