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
    report = why_attention.collect_reports(tmp_path, "2026-11-16; a machine.", {"table1": 90.0})
    assert "## Table 1\n\n### Time\n\n![Time](table1/time.svg)" in report
    assert "| table1 | 1 min 30 s |" in report
