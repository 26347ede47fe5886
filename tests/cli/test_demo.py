"""`attent demo`, and the task that it teaches."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import attent
from attent.cli import main
from attent.cli.demo import SHOWN, unseen, words


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety nine"),
        (100, "one hundred"),
        (815, "eight hundred and fifteen"),
        (1_000, "one thousand"),
        (30_004, "thirty thousand and four"),
        (314_159, "three hundred and fourteen thousand one hundred and fifty nine"),
        (700_100, "seven hundred thousand one hundred"),
    ],
)
def test_numbers_in_words(n: int, text: str) -> None:
    assert " ".join(words(n)) == text


def test_what_is_shown_was_never_trained_on() -> None:
    assert all(unseen(n) for n in SHOWN)
    assert 0.08 < sum(unseen(n) for n in range(100, 100_000)) / 99_900 < 0.12


def run_demo(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[float, str]:
    """The share of right answers, and all that it printed."""
    assert main(["demo", "--out", str(folder), *options]) == 0
    printed = capsys.readouterr()
    assert "loss" in printed.err
    share = re.search(r"([\d.]+)% of 1,000 numbers that it never saw are right", printed.out)
    assert share is not None
    return float(share[1]), printed.out


def test_the_demo_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run_demo(tmp_path / "model", capsys, "--steps", "3")
    assert "What it looks at while it writes 200090" in out
    assert len(list(attent.load(tmp_path / "model").parameters())) > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_learns_its_task(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    share, _ = run_demo(tmp_path / "model", capsys, "--seed", str(seed))
    assert share >= 99


def test_no_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "0", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "attent: error: `--steps` must be 1 or more, but is 0\n"


def test_a_bad_folder_is_told_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("here")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 1
    assert "there is a file where the folder must be" in capsys.readouterr().err


def test_what_the_demo_says_to_type_next_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run_demo(tmp_path / "model", capsys, "--steps", "1")
    typed = textwrap.dedent(out[out.index("    import attent") :])
    exec(compile(typed, "demo", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([1, 4, 5, 8])\n"
