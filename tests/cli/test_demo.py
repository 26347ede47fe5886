"""`attent demo`: its test dates are unseen, it finishes, and it learns its task."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

import attent
from attent.cli import main
from attent.cli.demo import (
    MAX_OUTPUT_CHARS,
    TEST_DATES,
    demo_overrides,
    format_tokens,
    print_translations,
    render_heatmap,
)
from attent.data import dates
from attent.data.dates import choose_split
from tests.training.runs import MAX_EXTRA_TOKENS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "cache"))


def test_the_dates_that_are_shown_are_unseen() -> None:
    assert all(choose_split(datetime.date.fromisoformat(date)) == "test" for _, date in TEST_DATES)


def test_digits_are_listed_once() -> None:
    digits = list(demo_overrides(1, 1)["data.tokenizer.symbols"])  # type: ignore[call-overload]
    assert len(digits) == len(set(digits)) == 100
    assert all(digit.isdigit() for digit in digits)


def test_the_settings_of_the_demo() -> None:
    chosen = demo_overrides(800, 3)
    chosen.pop("data.tokenizer.symbols")
    assert chosen == {
        "data.train": ("dates",), "data.augment": ("none",), "data.tokenizer.vocab": 1_500, "size": "tiny",
        "model.layers": 2,
        "model.ffn_width": 512, "model.norm_order": "pre", "model.positions": {"kind": "rotary"}, "model.dropout": 0.0,
        "train.steps": 800, "train.seed": 3, "train.batch_tokens": 1_024, "train.lr": 4e-3, "train.warmup": 100,
        "train.schedule": "cosine", "train.label_smoothing": 0.0, "train.metric": "exact", "train.valid_every": 100,
        "train.save_every": 100, "train.valid_sentences": 100, "train.patience": 0, "train.threads": 1,
        "train.average": 0, "decode.beam_size": 1,
    }  # fmt: skip
    assert [demo_overrides(steps, 1)["train.valid_every"] for steps in (1, 7, 8, 15, 16)] == [1, 1, 1, 1, 2]


def test_translations_are_compared_with_their_dates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [date for _, date in TEST_DATES]
    outputs[1] = "x" * 99
    monkeypatch.setattr("attent.decoding.translator.translate_texts", lambda *_, beam_size: outputs)
    print_translations(None, None)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(TEST_DATES)
    assert lines[0] == lines[0].rstrip()
    assert lines[0].endswith(f"   {TEST_DATES[0][1]}")
    assert lines[1].endswith(f"   {'x' * MAX_OUTPUT_CHARS}   WRONG: it is {TEST_DATES[1][1]}")
    width = max(cell_len(text) for text, _ in TEST_DATES)
    assert {cell_len(line) for line in (lines[0], *lines[2:])} == {2 + width + 13}


def test_a_demo_has_one_step_or_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "m"), "--steps", "0"]) == 1
    assert "`--steps` must be 1 or more, but is 0" in capsys.readouterr().err


def test_the_heatmap_shows_the_weights() -> None:
    lines = list(render_heatmap(["Mai", "日", "end"], ["0", "5"], [[0.9, 0.1, 0.0], [0.0, 0.5, 0.5]]))
    assert [line.rstrip() for line in lines] == ["       0   5", "  Mai ███", "   日     ▒▒▒", "  end     ▒▒▒"]


def test_tokens_are_readable() -> None:
    assert format_tokens(["▁Mai", "▁", "1", "</s>"]) == ["Mai", "space", "1", "end"]


def run_demo(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[float, str]:
    """Return the percentage of exact translations, and the output."""
    assert main(["demo", "--out", str(folder), *options]) == 0
    printed = capsys.readouterr()
    assert "loss" in printed.err
    exact = re.search(r"([\d.]+)% of [\d,]+ unseen dates", printed.out)
    assert exact is not None
    return float(exact[1]), printed.out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_demo_learns_its_task(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact, _ = run_demo(tmp_path / "model", capsys, "--seed", str(seed))
    assert exact >= 99


@pytest.mark.slow
def test_a_second_demo_only_shows_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dates.write_corpus, "__defaults__", ({"train": 2000, "valid": 20, "test": 30},))
    monkeypatch.setattr("attent.decoding.options.MAX_EXTRA_TOKENS", MAX_EXTRA_TOKENS)
    _, out = run_demo(tmp_path / "model", capsys, "--steps", "2")
    assert "while it writes 1954-03-13" in out
    assert len(list(attent.load(tmp_path / "model").parameters())) > 10
    assert main(["demo", "--out", str(tmp_path / "model"), "--steps", "2"]) == 0
    again = capsys.readouterr()
    assert "this run is complete" in again.err
    assert "Cross-attention" in again.out


def test_a_bad_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("here")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 1
    assert "but is a file; give another --out" in capsys.readouterr().err
