"""`training.run.train`, called from Python."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attent.training.config import TrainError
from attent.training.events import Event, Started
from attent.training.run import TrainResult, train
from tests.training.runs import write_corpus

SETTINGS = {"model.width": 32, "model.ffn_width": 64, "model.layers": 1}


def train_small(folder: Path, **options: object) -> TrainResult:
    data = folder / "corpus.tsv"
    if not data.exists():
        write_corpus(data, 60)
    return train(
        data,
        src="en",
        tgt="xx",
        out=folder / "run",
        size="tiny",
        settings=SETTINGS,
        **{"batch_tokens": 256, "hold_out": 6, "steps": 4, "valid_sentences": 4, "beam_size": 1, **options},
    )


def test_train_returns_the_scores_and_a_second_call_finds_the_run_complete(tmp_path: Path) -> None:
    events: list[Event] = []
    handler = signal.getsignal(signal.SIGINT)
    result = train_small(tmp_path, listeners=[events.append])
    assert (result.step, result.stop_reason, result.exit_code) == (4, "steps", 0)
    assert result.scores[0]["split"] == "validation"
    assert any(isinstance(event, Started) for event in events)
    assert train_small(tmp_path) == result
    assert signal.getsignal(signal.SIGINT) is handler


def test_train_in_a_thread_is_stopped_by_its_caller_and_resumed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(train_small, tmp_path, should_stop=lambda: True).result()
    assert (stopped.stop_reason, stopped.exit_code, stopped.scores) == ("stopped", 130, ())
    assert stopped.resume_command == f"attent train --out {tmp_path / 'run'}"
    assert train_small(tmp_path).stop_reason == "steps"


def test_unknown_settings_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="`step`; did you mean `steps`"):
        train_small(tmp_path, step=3)
