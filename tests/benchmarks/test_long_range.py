"""The generated tasks and the report of the long-range benchmark."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from attent.models import build_empty
from benchmarks import long_range
from benchmarks.long_range import ARTICLE, END, FIRST_NOUN, FIRST_PREPOSITION, FIRST_VERB, Budget

TINY = Budget(steps=10, rows=4, width=16, layers=1, test_rows=4)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_copy_and_reverse(rng: torch.Generator) -> None:
    source, target = long_range.make_copy(3, 5, rng)
    assert source.shape == (3, 6)
    assert torch.equal(source, target)
    source, target = long_range.make_reverse(3, 5, rng)
    assert torch.equal(source[:, :5].flip(1), target[:, :5])
    assert source[:, 5].tolist() == target[:, 5].tolist() == [END] * 3


@pytest.mark.parametrize("phrases", [0, 4])
def test_verb_agrees_with_the_noun_without_preposition(rng: torch.Generator, phrases: int) -> None:
    forms = set()
    for _ in range(20):
        (source,), (target,) = (side.tolist() for side in long_range.make_agreement(1, phrases, rng))
        words = source[:-1]
        subjects = [
            i
            for i in range(1, len(words) - 1)
            if words[i - 1] == ARTICLE and not (i > 1 and FIRST_PREPOSITION <= words[i - 2] < FIRST_NOUN)
        ]
        assert len(subjects) == 1
        assert len(words) - 2 - subjects[0] == 3 * phrases
        is_plural = (words[subjects[0]] - FIRST_NOUN) % 2
        assert target == [words[subjects[0]], words[-1] + 1 + is_plural, END]
        assert (words[-1] - FIRST_VERB) % 3 == 0
        forms.add(is_plural)
    assert forms == {0, 1}


@pytest.mark.parametrize("name", long_range.MODELS)
def test_every_model_is_trained_and_tested(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(long_range.TASKS, "copy", long_range.TaskSpec(long_range.make_copy, (1, 3), (2, 5), "symbols"))
    result = long_range.run_model(name, "copy", TINY, "cpu", seed=1)
    assert list(result["tokens"]) == [2, 5]
    assert all(0 <= share <= 1 for share in result["tokens"].values())


def test_report_and_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_range, "QUICK", TINY)
    flags = ["--quick", "--out", str(tmp_path), "--models", "sinusoidal", "--tasks", "agreement", "--device", "cpu"]
    shares = {str(length): 0.75 for length in long_range.TASKS["agreement"].tested}
    common = {"model": "sinusoidal", "task": "agreement", "parameters": 1234}
    stored = [
        {**common, "seed": 1, "tokens": shares, "machine": "a GPU"},
        {**common, "seed": 2, "tokens": dict.fromkeys(shares, 0.25), "machine": "a CPU"},
    ]
    (tmp_path / "results.json").write_text(json.dumps({"budget": asdict(TINY), "results": stored}))
    assert long_range.main(flags) == 0
    assert "[1/" not in capsys.readouterr().out
    report = (tmp_path / "long-range.md").read_text()
    assert "a GPU; a CPU." in report
    assert "| sinusoidal | 1,234 | 2 | 50% (25-75) |" in report
    assert (tmp_path / "long-range.svg").exists()
    monkeypatch.setattr(long_range, "QUICK", long_range.FULL)
    with pytest.raises(SystemExit, match="another budget"):
        long_range.main(flags)


def test_models_are_of_the_same_size() -> None:
    sizes = {}
    for name, build_config in long_range.MODELS.items():
        model = build_empty(build_config(long_range.FULL))
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
    assert all(size == pytest.approx(sizes["sinusoidal"], rel=0.05) for size in sizes.values()), sizes


def test_other_models_go_on_where_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_model(name: str, task: str, budget: Budget, device: str, seed: int) -> dict[str, object]:
        if name == "LSTM":
            raise RuntimeError("out of memory")
        shares = dict.fromkeys(long_range.TASKS[task].tested, 1.0)
        result = {"model": name, "task": task, "seed": seed, "tokens": shares}
        return {**result, "loss": 0.0, "seconds": 0.0, "parameters": 9}

    monkeypatch.setattr(long_range, "run_model", run_model)
    monkeypatch.setattr(long_range, "ProcessPoolExecutor", lambda jobs, context: ThreadPoolExecutor(jobs))
    flags = ["--quick", "--out", str(tmp_path), "--models", "LSTM", "rotary", "--tasks", "copy", "--device", "cpu"]
    assert long_range.main(flags) == 1
    assert "LSTM, copy, seed 1: failed: out of memory" in capsys.readouterr().out
    assert "| rotary | 9 | 1 | 100% |" in (tmp_path / "long-range.md").read_text()
