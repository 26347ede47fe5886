"""`attent compare`: flags, entries and exit code; the comparison itself is in tests/training/test_comparison.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from attent import cli
from attent.training import comparison, comparison_report
from attent.training.run_options import Arch

Calls = dict[str, Any]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the command passes on; each entry has a run for each seed, but the last one fails if `fails` is set."""
    calls: Calls = {"fails": False}

    def compare(entries: Any, out: Path, **options: Any) -> list[Any]:
        calls.update(entries=entries, out=out, **options)
        runs = [list(options["seeds"]) for _ in entries]
        if calls["fails"]:
            runs[-1].pop()
        return [SimpleNamespace(runs=each) for each in runs]

    monkeypatch.setattr(comparison, "compare", compare)
    monkeypatch.setattr(comparison_report, "write_report", lambda *arguments: calls.update(report=arguments[1:]))
    return calls


def test_all_architectures_are_compared_by_default(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "--data", "x/multi30k", "--src", "en", "--tgt", "de", "--out", str(tmp_path)]) == 0
    assert [(entry.name, entry.settings) for entry in calls["entries"]] == [
        (name, {"arch": name}) for name in get_args(Arch)
    ]
    assert (calls["seeds"], calls["budget"], calls["jobs"]) == ([1], "params", 1)
    common = {name: value for name, value in calls["common"].items() if name.startswith("data.")}
    assert common == {"data.train": ["x/multi30k"], "data.src": "en", "data.tgt": "de"}
    assert calls["report"] == (tmp_path, "Comparison", "Budget: params.")
    report, page = tmp_path / comparison_report.REPORT_FILE, tmp_path / comparison_report.PAGE_FILE
    assert capsys.readouterr().out == f"report: {report}, {page}\n"
    assert not calls["open_display"]().quiet
    calls["notify"]("a word")
    assert capsys.readouterr() == ("", "a word\n")


def test_flags_are_passed_on(calls: Calls, tmp_path: Path) -> None:
    flags = "--data a --arch lstm transformer --seeds 3 4 --budget minutes --minutes 5 --jobs 2 --size tiny --quiet"
    assert cli.main(["compare", *flags.split(), "--set", "train.lr=0.5", "--out", str(tmp_path)]) == 0
    assert [entry.name for entry in calls["entries"]] == ["lstm", "transformer"]
    assert (calls["seeds"], calls["budget"], calls["jobs"], calls["out"]) == ([3, 4], "minutes", 2, tmp_path)
    common = calls["common"]
    assert (common["train.minutes"], common["train.lr"], common["size"]) == (5, 0.5, "tiny")
    assert calls["report"][2] == "Budget: minutes."
    assert calls["open_display"]().quiet


def test_one_seed_is_that_of_the_settings(calls: Calls, tmp_path: Path) -> None:
    assert cli.main(["compare", "--data", "a", "--seed", "7", "--out", str(tmp_path)]) == 0
    assert calls["seeds"] == [7]
    assert "train.seed" not in calls["common"]


def test_the_rows_of_table_3_are_compared(calls: Calls, tmp_path: Path) -> None:
    assert cli.main(["compare", "--table3", "--data", "a", "--out", str(tmp_path)]) == 0
    assert len(calls["entries"]) > len(get_args(Arch))
    assert calls["report"][1] == "Table 3"


def test_a_run_that_is_missing_fails_the_command(calls: Calls, tmp_path: Path) -> None:
    calls["fails"] = True
    assert cli.main(["compare", "--data", "a", "--arch", "lstm", "--seeds", "1", "2", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--jobs 0", "`--jobs` must be 1 or more, but is 0"),
        ("--table3 --arch lstm", "only one of --arch, --config and --table3 can be given; compare them in separate"),
        ("--arch lstm --config a.toml", "only one of --arch, --config and --table3 can be given"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "--data", "a", *flags.split(), "--out", str(tmp_path)]) == 1
    assert problem in capsys.readouterr().err
