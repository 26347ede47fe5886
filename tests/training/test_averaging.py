"""The mean of weights is the mean, to the last digit of their format; models that do not match are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attent import models
from attent.cli import main
from attent.models import Seq2Seq
from attent.storage.errors import FolderError
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.training.averaging import average_checkpoints, average_weights, write_average
from attent.training.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from attent.training.config import TrainError
from attent.training.events import Note
from attent.training.loop import EvalResult, write_model
from attent.training.run import TrainSession
from tests.text.corpus import lines, tokenizer
from tests.training.toys import are_equal, build_toy_run, model


def test_the_mean_is_taken_without_losing_digits() -> None:
    """In float32 one by one, the ones would vanish beside the large number."""
    many = [{"w": torch.tensor([1e8])}, *({"w": torch.tensor([1.0])} for _ in range(1023))]
    assert average_weights(many)["w"].item() == torch.tensor((1e8 + 1023) / 1024, dtype=torch.float32).item()
    assert torch.equal(average_weights(reversed(many))["w"], average_weights(many)["w"])


def test_it_stays_in_the_format_of_the_weights() -> None:
    assert average_weights([{"w": torch.ones(2, dtype=torch.bfloat16)}] * 3)["w"].dtype == torch.bfloat16


def test_the_mean_of_one_is_itself() -> None:
    weights = dict(model().named_parameters())
    assert are_equal(average_weights([weights]), {name: tensor.detach() for name, tensor in weights.items()})


def test_checkpoints_give_their_weights(tmp_path: Path) -> None:
    folders = [
        save_checkpoint(tmp_path, Checkpoint(step=n, state={}, tensors={"weights": {"w": torch.tensor([float(n)])}}))
        for n in (1, 2, 6)
    ]
    assert average_checkpoints(folders)["w"].item() == 3.0
    with pytest.raises(CheckpointError, match="does not exist"):
        average_checkpoints([tmp_path / "step-00000009"])


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="one of the models"):
        average_weights([{"w": torch.ones(2)}, {"w": torch.ones(3)}])
    with pytest.raises(ValueError, match="one of the models"):
        average_weights([{"w": torch.ones(2)}, {"v": torch.ones(2)}])


@pytest.mark.parametrize("better", [True, False])
def test_at_the_end_of_a_run_the_mean_is_taken_only_if_it_is_better(tmp_path: Path, better: bool) -> None:
    scores = iter([4.0, 3.0, 5.0 if better else 3.9])

    def judge(_: Seq2Seq) -> EvalResult:
        return EvalResult(metrics={"bleu": 0.0, "chrf": next(scores), "exact": 0.0})

    made = build_toy_run(tmp_path, evaluator=judge)
    ended = made.trainer.run()
    best = dict(models.read_model(tmp_path).named_parameters())
    told: list[Note] = []
    session: Any = SimpleNamespace(out=tmp_path, state_dir=tmp_path / "state", emit=told.append)
    label = TrainSession.choose_weights(session, made.trainer, ended)
    mean = average_checkpoints([tmp_path / "state" / f"step-{step:08d}" for step in (3, 6)])
    found = dict(models.read_model(tmp_path).named_parameters())
    assert are_equal(found, mean) == better
    assert are_equal(found, best) != better
    assert label == ("average of the last 2 checkpoints" if better else "best, step 3")
    figure = "chrf 5.00" if better else "no better"
    assert told[0].text.startswith(f"average of the last 2 checkpoints: {figure} (best")
    assert "before: 4.00" in told[0].text


def test_the_command_averages_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        write_model(tmp_path / str(seed), model(seed=seed), tokenizer())
    assert main(["average", str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(tmp_path / "mean")]) == 0
    mean = dict(models.read_model(tmp_path / "mean").named_parameters())
    for name, parameter in model(seed=1).named_parameters():
        other = model(seed=2).get_parameter(name)
        torch.testing.assert_close(mean[name], (parameter + other) / 2)
    assert "average of 2 models" in capsys.readouterr().out
    assert main(["average", str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(tmp_path / "mean")]) == 1
    assert "nothing is overwritten" in capsys.readouterr().err


def test_the_command_averages_the_last_checkpoints_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_toy_run(tmp_path / "run").trainer.run()
    assert main(["average", str(tmp_path / "run"), "--out", str(tmp_path / "mean")]) == 0
    folders = [tmp_path / "run" / "state" / f"step-{step:08d}" for step in (3, 6)]
    found = {name: parameter.detach() for name, parameter in models.read_model(tmp_path / "mean").named_parameters()}
    assert are_equal(found, average_checkpoints(folders))
    assert "steps 3, 6" in capsys.readouterr().out
    assert main(["average", str(tmp_path / "run"), "--last", "1", "--out", str(tmp_path / "one")]) == 1
    assert "`--last` must be 2 or more, but is 1" in capsys.readouterr().err
    shutil.rmtree(folders[0])
    assert main(["average", str(tmp_path / "run"), "--out", str(tmp_path / "one")]) == 1
    assert "must have 2 checkpoints or more, but has 1" in capsys.readouterr().err
    assert not (tmp_path / "one").exists()


def test_models_that_are_no_average_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "a", model(), tokenizer())
    other = train_tokenizer(*lines(400), TokenizerConfig(vocab=400))
    write_model(tmp_path / "b", model(), other)
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    for models_, last, problem in (
        ([a, b], 5, "b: must have the tokenizer of .*a, but has another; give models of one run"),
        ([a], 1, "`--last` must be 2 or more, but is 1; raise it"),
        ([a], 2, "a: must have 2 checkpoints or more, but has 0; name several models, or keep more"),
    ):
        with pytest.raises(TrainError, match=problem):
            write_average(models_, out, last)
    with pytest.raises(FolderError, match="c: must be a model folder, but does not exist"):
        write_average([a, tmp_path / "c"], out, 5)
    assert write_average([a, a], out, 1) == "2 models"
    assert are_equal(dict(models.read_model(out).named_parameters()), dict(model().named_parameters()))
    with pytest.raises(TrainError, match="out: exists, and nothing is overwritten; give another --out"):
        write_average([a, a], out, 2)


def test_lora_factors_are_not_averaged(tmp_path: Path) -> None:
    write_model(tmp_path / "a", model(), tokenizer())
    for step in (1, 2):
        tensors = {"weights": {"factor": torch.ones(1)}}
        save_checkpoint(tmp_path / "a" / "state", Checkpoint(step=step, state={}, tensors=tensors))
    with pytest.raises(TrainError, match="its checkpoints hold LoRA factors, which have no average; average its"):
        write_average([tmp_path / "a"], tmp_path / "out", 2)
