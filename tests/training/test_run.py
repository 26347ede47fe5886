"""`training.run.train`, called from Python."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from attent import interop
from attent.models import Seq2SeqConfig
from attent.settings import read_json
from attent.training import autoconfig, checkpoint, hardware
from attent.training.checkpoint import FINISHED_FILE, REQUESTED_FILE, RUN_FILE
from attent.training.config import TrainError, read_run
from attent.training.events import Event, EventLog, Note, Progress, Started, StopSignals
from attent.training.loop import Trainer, write_model
from attent.training.run import TrainResult, describe_average, train
from attent.training.tasks.translation import TranslationTask
from tests.training import toys
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
        **{
            "settings": SETTINGS,
            "size": "tiny",
            "batch_tokens": 256,
            "hold_out": 6,
            "steps": 4,
            "valid_sentences": 4,
            "beam_size": 1,
            **options,
        },
    )


def test_run_without_a_finite_loss_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"no validation gave a finite loss.*; lower --lr"):
        train_small(tmp_path, lr=1e30, warmup=1)


def test_train_returns_the_scores_and_a_second_call_finds_the_run_complete(tmp_path: Path) -> None:
    events: list[Event] = []
    handler = signal.getsignal(signal.SIGINT)
    result = train_small(tmp_path, callbacks=[events.append])
    assert (result.step, result.stop_reason, result.exit_code) == (4, "steps", 0)
    assert result.scores[0]["split"] == "validation"
    assert any(isinstance(event, Started) for event in events)
    assert train_small(tmp_path) == result
    assert signal.getsignal(signal.SIGINT) is handler


def test_augmentation_is_off_on_a_cpu_and_described_where_it_is_on(tmp_path: Path) -> None:
    events: list[Event] = []
    for augment, expected in ((None, ("none",)), (("upper", "typos=0.1"), ("upper=0.07", "typos=0.1"))):
        folder = tmp_path / str(augment)
        folder.mkdir()
        train_small(folder, callbacks=[events.append], steps=1, augment=augment, device="cpu")
        assert read_run(folder / "run" / "run.toml").data.augment == expected
    texts = [event.text for event in events if isinstance(event, Note) and event.text.startswith("augmentation")]
    assert texts == ["augmentation: upper, typos (--augment none: off)"]


def test_train_in_a_thread_is_stopped_by_its_caller_and_resumed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(train_small, tmp_path, should_stop=lambda: True).result()
    assert (stopped.stop_reason, stopped.exit_code, stopped.scores) == ("stopped", 130, ())
    assert stopped.resume_command == f"attent train --out {tmp_path / 'run'}"
    assert train_small(tmp_path).stop_reason == "steps"


def test_a_resumed_run_accepts_chosen_values_and_keeps_flags_that_are_no_longer_given(tmp_path: Path) -> None:
    chosen = train_small(tmp_path, size=None, patience=3, steps=2)
    assert chosen.stop_reason == "steps"
    run = read_run(tmp_path / "run" / RUN_FILE)
    assert run.size == "tiny"
    assert isinstance(run.model, Seq2SeqConfig)
    again = train_small(tmp_path, dropout=run.model.encoder.dropout, steps=3)
    assert again.step == 3
    assert read_run(tmp_path / "run" / RUN_FILE).train.patience == 3
    requested = read_json(tmp_path / "run" / "state" / REQUESTED_FILE)
    assert requested["train"]["patience"] == 3
    assert requested["train"]["steps"] == 3
    assert "size" not in requested  # it states the chosen value


@pytest.mark.parametrize("requested_minutes", [None, 0.01])
def test_a_run_of_some_minutes_is_resumed_with_its_file_with_or_without_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested_minutes: float | None
) -> None:
    monkeypatch.setattr(TranslationTask, "cpu_minutes", 0.01)
    monkeypatch.setattr(autoconfig, "MIN_STEPS", 3)
    monkeypatch.setattr(autoconfig, "MAX_STEPS", 3)
    out = tmp_path / "run"
    result = train_small(tmp_path, steps=None, minutes=requested_minutes)
    requested = read_json(out / "state" / REQUESTED_FILE)
    run = read_run(out / RUN_FILE)
    assert run.train.minutes == 0.01
    assert train(out=out, config=out / RUN_FILE) == result
    assert train_small(tmp_path, steps=None, minutes=requested_minutes) == result
    assert train_small(tmp_path, steps=None, config=out / RUN_FILE) == result
    assert train_small(tmp_path, steps=None) == result
    assert train_small(tmp_path, steps=None, minutes=0.01) == result
    assert train(out=out) == result
    assert read_json(out / "state" / REQUESTED_FILE) == requested
    assert read_run(out / RUN_FILE) == run
    for config in (None, out / RUN_FILE):
        with pytest.raises(TrainError, match=r"other settings \(train\.minutes: .* -> 0\.02\)"):
            train_small(tmp_path, steps=None, minutes=0.02, config=config)


def test_the_time_for_validations_and_checkpoints_may_change_on_resume(tmp_path: Path) -> None:
    def resume(*overrides: str) -> tuple[float | None, float | None]:
        assert train_small(tmp_path, overrides=overrides).stop_reason == "steps"
        run = read_run(tmp_path / "run" / RUN_FILE).train
        return run.valid_share, run.save_share

    assert resume() == (0.1, 0.1)
    assert resume("train.valid_share=0.2", "train.save_share=0.3") == (0.2, 0.3)
    assert resume("train.valid_every=2") == (0.0, 0.3)
    assert resume("train.valid_share=0.4", "train.valid_every=3") == (0.4, 0.3)


def test_a_model_without_a_checkpoint_is_trained_again_with_its_settings(tmp_path: Path) -> None:
    train_small(tmp_path, lr=0.003)
    for folder in (tmp_path / "run" / "state").glob("step-*"):
        shutil.rmtree(folder)
    train_small(tmp_path)
    assert read_run(tmp_path / "run" / RUN_FILE).train.lr == 0.003


def test_an_average_is_compared_to_the_best_before_if_there_is_one() -> None:
    assert (
        describe_average(2, "bleu", 30.5, 29.0) == "average of the last 2 checkpoints: bleu 30.50 (best before: 29.00)"
    )
    assert describe_average(3, "loss", -1.5, None) == "average of the last 3 checkpoints: loss 1.50"
    assert describe_average(3, "loss", None, -1.5) == "average of the last 3 checkpoints: no better (best before: 1.50)"


def test_the_log_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[EventLog] = []
    monkeypatch.setattr(EventLog, "close", lambda log: closed.append(log))
    train_small(tmp_path, steps=1)
    assert len(closed) == 1


def test_libraries_are_loaded_before_an_error_in_the_data_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def preload(device: torch.device) -> threading.Thread:
        threads.append(threading.Thread(target=time.sleep, args=(0.3,)))
        threads[0].start()
        return threads[0]

    monkeypatch.setattr(hardware, "preload_libraries", preload)
    with pytest.raises(ValueError, match="nowhere"):
        train(data=str(tmp_path / "nowhere"), src="en", tgt="de", out=tmp_path / "run")
    assert not threads[0].is_alive()


def test_a_negative_length_penalty_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`length_penalty` must be 0 or more, but is -1"):
        train_small(tmp_path, length_penalty=-1.0)


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("beam_size", 0), ("lr", 0.0), ("max_tokens", 0)])
def test_a_value_below_its_limit_is_blamed_on_its_flag(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^`{name}` must be .*, but is {value}$"):
        train_small(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=r"^settings: `train`: `steps` must be 1 or more, but is 0$"):
        train_small(tmp_path, overrides=["train.steps=0"])


def test_a_model_with_weights_that_are_not_finite_is_not_fine_tuned(tmp_path: Path) -> None:
    network = toys.model()
    with torch.no_grad():
        network.get_parameter("decoder.blocks.0.feedforward.expand.weight")[0, 0] = torch.nan
    write_model(tmp_path / "start", network, toys.tokenizer())
    with pytest.raises(
        TrainError, match=r"start: its weights must be finite, but 1 of its tensors contain NaN .*decoder"
    ):
        train_small(tmp_path, size=None, init_from=str(tmp_path / "start"))


@pytest.mark.parametrize("lora", [0, 2])
def test_a_model_in_half_precision_is_fine_tuned_in_float32(tmp_path: Path, lora: int) -> None:
    write_model(tmp_path / "start", toys.model().bfloat16(), toys.tokenizer())
    train_small(tmp_path, size=None, settings={}, init_from=str(tmp_path / "start"), lora=lora)
    assert {weight.dtype for weight in interop.load(tmp_path / "run").parameters()} == {torch.float32}


def test_unknown_settings_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="`step`; did you mean `steps`"):
        train_small(tmp_path, step=3)


def test_a_run_killed_before_its_best_model_was_exported_exports_it_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[int] = []

    def fail(trainer: Trainer) -> None:
        raise RuntimeError("killed")

    export = Trainer.export_model
    monkeypatch.setattr(Trainer, "export_model", fail)
    with pytest.raises(RuntimeError, match="killed"):
        train_small(tmp_path, valid_every=2, save_every=2)

    def record_export(trainer: Trainer) -> None:
        exported.append(trainer.state.step)
        export(trainer)

    monkeypatch.setattr(Trainer, "export_model", record_export)
    train_small(tmp_path, valid_every=2, save_every=2)
    assert exported[0] == 2


# ---- a time budget and threads ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "recipe_steps"), [(30.0, 3), (0.02, 2_000)])
def test_a_cpu_run_ends_after_its_recipe_or_its_default_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, recipe_steps: int
) -> None:
    monkeypatch.setattr(TranslationTask, "cpu_minutes", minutes)
    monkeypatch.setattr(autoconfig, "MIN_STEPS", recipe_steps)
    monkeypatch.setattr(autoconfig, "MAX_STEPS", recipe_steps)
    events: list[Event] = []
    result = train_small(tmp_path, steps=None, callbacks=[events.append])
    run = read_run(tmp_path / "run" / RUN_FILE).train
    assert (run.minutes, run.steps, result.stop_reason) == (minutes, result.step, "steps")
    assert result.step == 3 if recipe_steps == 3 else result.step < recipe_steps
    assert any(isinstance(event, Note) and "minutes at most (the default on a CPU" in event.text for event in events)


def test_steps_are_decided_once_from_the_minutes(tmp_path: Path) -> None:
    events: list[Event] = []
    stop: list[bool] = []

    def should_stop() -> bool:
        return any(isinstance(event, Progress) for event in events) and not stop

    stopped = train_small(tmp_path, steps=None, minutes=0.03, callbacks=[events.append], should_stop=should_stop)
    run = read_run(tmp_path / "run" / RUN_FILE).train
    assert (stopped.stop_reason, run.minutes, run.schedule, run.patience) == ("stopped", 0.03, "cosine", 0)
    assert run.steps
    assert run.steps > stopped.step
    decided = [event.text for event in events if isinstance(event, Note) and event.text.startswith("0.03 minutes: ")]
    assert len(decided) == 1
    assert f"{run.steps:,} steps of " in decided[0]
    assert any(isinstance(event, Note) and f"at most {run.steps:,} steps" in event.text for event in events)
    saved = checkpoint.load_newest(tmp_path / "run" / "state", print)
    assert saved is not None
    stop.append(True)
    events.clear()
    resumed = train_small(tmp_path, steps=None, minutes=0.03, callbacks=[events.append])
    assert resumed.step == run.steps
    assert not any(isinstance(event, Note) and " minutes: " in event.text for event in events)
    with pytest.raises(TrainError, match=r"train\.minutes: 0\.03 -> 0\.5"):
        train_small(tmp_path, steps=None, minutes=0.5)


def test_a_stop_while_steps_are_measured_saves_nothing(tmp_path: Path) -> None:
    result = train_small(tmp_path, steps=None, minutes=1, should_stop=lambda: True)
    assert (result.stop_reason, result.step, result.exit_code) == ("stopped", 0, 130)
    assert checkpoint.list_steps(tmp_path / "run" / "state") == []


@pytest.mark.slow
def test_measured_threads_are_recorded_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(hardware, "MAX_TIME_RATIO", 1e9)  # whatever is fastest
    try:
        torch.set_num_threads(2)
        events: list[Event] = []
        train_small(tmp_path, steps=2, callbacks=[events.append])
        chosen = read_run(tmp_path / "run" / RUN_FILE).train.threads
        assert chosen in (1, 2)
        assert any(isinstance(e, Note) and e.text.startswith(f"threads: {chosen} (a step with 2 in ") for e in events)
        torch.set_num_threads(3 - chosen)
        monkeypatch.setattr("attent.training.run.count_usable_cores", lambda: 0)
        events.clear()
        train_small(tmp_path, steps=3, callbacks=[events.append])
        assert torch.get_num_threads() == chosen
        warnings = [event.text for event in events if isinstance(event, Note) and event.level == "warning"]
        assert f"this run has {chosen} threads, but this machine has 0 cores: the threads stay" in warnings[0]
    finally:
        torch.set_num_threads(before)


def test_lora_needs_a_pretrained_model(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"`train\.lora` needs a pretrained model, but there is none; name one with"):
        train_small(tmp_path, lora=2)


def test_parameters_to_freeze_must_exist(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="nonsense"):
        train_small(tmp_path, freeze=("nonsense",))


def test_a_complete_run_is_scored_again_with_other_search_options(tmp_path: Path) -> None:
    first = train_small(tmp_path)
    summary = tmp_path / "run" / "state" / FINISHED_FILE
    stored = read_json(summary)
    assert train_small(tmp_path) == first
    assert read_json(summary) == stored
    events: list[Event] = []
    again = train_small(tmp_path, beam_size=2, callbacks=[events.append])
    assert (again.step, again.stop_reason) == (first.step, "steps")
    assert read_json(summary)["scoring"] != stored["scoring"]
    text = f"{tmp_path / 'run'}: this run is complete at step 4; raise --steps (and --patience) to continue"
    assert Note(text=text) in events
    assert train_small(tmp_path, beam_size=2) == again


@pytest.mark.parametrize("force_exit", [False, True])
def test_signals_request_a_stop_once_a_checkpoint_can_be_saved(
    force_exit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals(force_exit=force_exit) as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
        assert not signals.should_stop()
        signals.can_save = True
        signal.raise_signal(signal.SIGTERM)
        assert (signals.should_stop(), signals.exit_code) == (True, 143)
        signal.raise_signal(signal.SIGTERM)  # no second request
        if force_exit:
            signal.raise_signal(signal.SIGINT)
        else:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signals.exit_code == 143  # that of the first one
    assert codes == [130] * force_exit
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_forced_exit_shows_the_cursor_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, bytes]] = []
    monkeypatch.setattr("os._exit", lambda code: None)
    monkeypatch.setattr("os.write", lambda file, text: written.append((file, text)))
    with StopSignals(force_exit=True) as signals:
        signals.can_save = True
        for is_terminal in (False, True):
            monkeypatch.setattr("os.isatty", lambda file, is_terminal=is_terminal: is_terminal)
            signals.received = signal.SIGINT
            signal.raise_signal(signal.SIGINT)
    assert written == [(2, b"\x1b[?25h\n")]
