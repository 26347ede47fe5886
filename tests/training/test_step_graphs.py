"""A recorded update is the update itself: on a CPU a "recording" runs the same work on the tensors that stay, and every
number must come out as without one. What only a GPU can show runs with `--device cuda`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

from attent.data.loader import PairBatch
from attent.training import checkpoint
from attent.training.config import TrainConfig
from attent.training.distributed import DistributedContext
from attent.training.events import Note, Progress
from attent.training.hardware import INDUCTOR_CACHE_ENV, persist_compile_cache
from attent.training.loop import MAX_NONFINITE_STEPS, Trainer
from attent.training.objective import Seq2SeqObjective
from attent.training.step_graphs import (
    EAGER_STEPS,
    MAX_GRAPHS,
    MAX_IN_FLIGHT,
    StepFunction,
    StepGraphCache,
    get_signature,
    list_tensors,
)
from tests.text.corpus import tokenizer
from tests.training.toys import RECIPE, ToyRun, are_equal, batches, build_toy_run, lstm, model

PACKED = replace(RECIPE, steps=12, micro_batch_tokens=None, save_every=4, valid_every=6, clip_norm=0.5)


def again(work: StepFunction) -> StepFunction:
    """In place of a CUDA graph: what was recorded is done again, on the tensors that it was recorded with."""
    return work


@dataclass
class Counted:
    """As `again`, and how often each recording was played."""

    recorded: int = 0
    played: int = 0

    def __call__(self, work: StepFunction) -> StepFunction:
        self.recorded += 1

        def replay() -> None:
            self.played += 1
            work()

        return replay


def recorded(out: Path, recipe: TrainConfig = PACKED, capture: Any = again, **how: Any) -> ToyRun:
    made = build_toy_run(out, recipe, layout=how.pop("layout", "packed"), **how)
    made.trainer.enable_cuda_graphs(capture)
    return made


def kept(one: ToyRun) -> dict[str, Tensor]:
    tensors = one.trainer.build_checkpoint().tensors
    return {f"{group}/{name}": t for group, part in tensors.items() for name, t in part.items() if group != "rng"}


def losses(one: ToyRun) -> list[tuple[int, float, float, float]]:
    return [(event.step, event.loss, event.perplexity, event.grad_norm) for event in one.of_type(Progress)]


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_recorded_updates_come_to_the_same_bits(
    tmp_path: Path, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates, divisors, dropout, clipping, the running mean and what is told, through validations and checkpoints."""
    monkeypatch.setattr("attent.training.loop.REPORT_INTERVAL", 0.0)
    recipe, count = replace(PACKED, optimizer=optimizer, weight_decay=0.1), Counted()
    plain, played = (
        build_toy_run(tmp_path / "plain", recipe, layout="packed"),
        recorded(tmp_path / "played", recipe, count),
    )
    plain.trainer.run()
    played.trainer.run()
    assert (count.recorded, count.played) == (1, 12 - EAGER_STEPS)
    assert are_equal(kept(plain), kept(played))
    assert losses(plain) == losses(played)
    assert plain.trainer.state.order_digest == played.trainer.state.order_digest


def test_steps_of_an_lstm_are_captured_by_their_widths(tmp_path: Path) -> None:
    recipe, count = replace(PACKED, steps=16), Counted()
    plain = build_toy_run(tmp_path / "plain", recipe, start=lstm(), layout="fixed")
    played = recorded(tmp_path / "played", recipe, count, start=lstm(), layout="fixed")
    plain.trainer.run()
    played.trainer.run()
    assert 0 < count.recorded < count.played
    assert are_equal(kept(plain), kept(played))


def test_going_on_from_a_checkpoint_records_anew_and_comes_to_the_same_bits(tmp_path: Path) -> None:
    whole, count = recorded(tmp_path / "whole"), Counted()
    whole.trainer.run()
    for steps in (8, 12):
        part = recorded(tmp_path / "parts", replace(PACKED, steps=steps), count)
        found = checkpoint.load_newest(tmp_path / "parts" / "state", print)
        if found is not None:
            part.trainer.load_checkpoint(found)
        part.trainer.run()
    assert count.recorded == 2
    assert are_equal(kept(whole), kept(part))


def test_a_checkpoint_brings_new_tensors_so_that_it_ends_every_recording(tmp_path: Path) -> None:
    """An old recording would go on writing to the old ones."""
    made = recorded(tmp_path, validated=False)
    updates = made.trainer.iter_steps()
    for _ in range(EAGER_STEPS + 1):
        made.trainer.train_step(*next(updates))
    assert made.trainer.step_graphs is not None
    assert made.trainer.step_graphs.graphs
    made.trainer.load_checkpoint(made.trainer.build_checkpoint())
    assert not made.trainer.step_graphs.graphs


def test_a_gradient_that_is_not_finite_is_skipped_in_a_recording_too(tmp_path: Path) -> None:
    sick = recorded(tmp_path, validated=False)
    spoil_at(sick, 5)
    updates = sick.trainer.iter_steps()
    for _ in range(5):
        sick.trainer.train_step(*next(updates))
    before, state = sick.weights(), {n: t.clone() for n, t in sick.trainer.optimizer.get_state().items()}
    sick.trainer.train_step(*next(updates))
    assert not sick.trainer.check_divergence()
    assert are_equal(before, sick.weights())
    assert are_equal(state, sick.trainer.optimizer.get_state())
    # Polled for the first time since the run began, as a GPU is polled every few steps.
    assert any("1 of the steps 1 to 6 skipped: non-finite gradient (1 so far)" in note for note in sick.notes)
    sick.trainer.train_step(*next(updates))
    assert not sick.trainer.check_divergence()
    assert sick.trainer.state.skipped_steps == 1
    assert not are_equal(before, sick.weights())


def test_measured_steps_are_undone_and_capturing_begins_anew(tmp_path: Path) -> None:
    """A captured first step would create the optimizer's state at each replay."""
    plain, made = build_toy_run(tmp_path / "plain", PACKED, layout="packed"), recorded(tmp_path / "made")
    made.trainer.measure_step_seconds(0.0, min_steps=6)
    assert made.trainer.step_graphs is not None
    assert not made.trainer.step_graphs.graphs
    assert not made.trainer.step_graphs.signature_counts
    plain.trainer.run()
    made.trainer.run()
    assert are_equal(kept(plain), kept(made))


def spoil_at(made: ToyRun, first: int, last: int | None = None) -> None:
    """Losses that are no numbers in the updates behind `first` up to `last`; on the device, as a recording needs it."""
    inner, training = made.trainer.wrapped_objective, made.trainer
    factor = torch.ones((), device=training.distributed.device)
    learn = training.train_step

    class Spoiled(nn.Module):
        def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
            loss, entropy = inner(batch)
            return loss * factor, entropy

    def learned(group: Any, after: Any) -> None:
        factor.fill_(torch.nan if first <= training.state.step <= (last or first) else 1.0)
        learn(group, after)

    training.wrapped_objective = Spoiled()
    training.train_step = learned  # type: ignore[method-assign]


def test_gradients_that_stay_bad_go_back_and_then_the_run_goes_on(tmp_path: Path) -> None:
    sick = recorded(tmp_path, replace(PACKED, steps=8 + MAX_NONFINITE_STEPS, valid_every=100), validated=False)
    spoil_at(sick, 6, 6 + MAX_NONFINITE_STEPS)
    fill, seen = sick.trainer.load_checkpoint, []

    def watched(found: checkpoint.Checkpoint) -> None:
        fill(found)
        seen.append(found.step)
        sick.trainer.wrapped_objective = sick.trainer.objective

    sick.trainer.load_checkpoint = watched  # type: ignore[method-assign]
    sick.trainer.run()
    assert seen == [4]
    assert sick.trainer.state.step == 8 + MAX_NONFINITE_STEPS
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())


# ---- what is recorded, and what is not -------------------------------------------------------------------------------


def test_batches_of_many_shapes_are_recorded_a_few_times_only_and_learned_from_all_the_same(tmp_path: Path) -> None:
    recipe, count = replace(PACKED, steps=40, valid_every=100, save_every=100), Counted()
    plain = build_toy_run(tmp_path / "plain", recipe, validated=False)
    played = recorded(tmp_path / "played", recipe, count, layout="bucketed", validated=False)
    plain.trainer.run()
    played.trainer.run()
    assert count.recorded <= MAX_GRAPHS
    assert 0 < count.played < 40
    assert are_equal(kept(plain), kept(played))


@pytest.mark.parametrize(
    "recipe", [replace(PACKED, accumulate=2), replace(PACKED, micro_batch_tokens=64)], ids=["accumulate", "pieces"]
)
def test_several_batches_or_pieces_an_update_are_not_recorded(tmp_path: Path, recipe: TrainConfig) -> None:
    count = Counted()
    plain = build_toy_run(tmp_path / "plain", recipe, layout="packed")
    played = recorded(tmp_path / "played", recipe, count)
    plain.trainer.run()
    played.trainer.run()
    assert count.recorded == 0
    assert are_equal(kept(plain), kept(played))


def test_what_cannot_be_recorded_runs_as_before_and_says_so_once(tmp_path: Path) -> None:
    def failing(work: StepFunction) -> StepFunction:
        work_begins_and_breaks(played.trainer)
        raise torch.OutOfMemoryError("no memory\nand more")

    plain, played = (
        build_toy_run(tmp_path / "plain", PACKED, layout="packed"),
        recorded(tmp_path / "played", capture=failing),
    )
    plain.trainer.run()
    played.trainer.run()
    assert are_equal(kept(plain), kept(played))
    told = [note for note in played.notes if "capture failed" in note]
    assert told == ["CUDA graph capture failed, so kernels are launched one by one (no memory)"]


def work_begins_and_breaks(training: Trainer) -> None:
    for parameter in training.trainable_parameters.values():
        parameter.grad = torch.full_like(parameter, 7.0)


def test_memory_that_recordings_hold_is_given_back_before_pieces_become_smaller(tmp_path: Path) -> None:
    made = recorded(tmp_path, validated=False)
    updates = made.trainer.iter_steps()
    for _ in range(EAGER_STEPS + 1):
        made.trainer.train_step(*next(updates))
    assert made.trainer.step_graphs is not None
    assert made.trainer.step_graphs.graphs
    inner, met = made.trainer.wrapped_objective, [0]

    class Short(nn.Module):
        def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
            met[0] += 1
            if met[0] == 1:
                raise torch.OutOfMemoryError("no memory")
            found: tuple[Tensor, Tensor] = inner(batch)
            return found

    made.trainer.wrapped_objective = Short()
    group, _ = next(updates)
    made.trainer.accumulate_gradients(group, group[0].num_targets)
    assert not made.trainer.step_graphs.graphs
    assert made.trainer.state.micro_batch_tokens is None
    assert met[0] == 2


def test_a_recording_serves_batches_of_the_same_shapes_and_host_numbers_only() -> None:
    first, second = (batches(layout="packed").get_batch(0, step) for step in (0, 1))
    assert get_signature(first) == get_signature(second)
    assert get_signature(first) == get_signature(first.to("cpu"))  # in one tensor or in several
    assert first.target.packing is not None
    longer = replace(first.target.packing, max_length=first.target.packing.max_length + 1)
    assert get_signature(first) != get_signature(replace(first, target=replace(first.target, packing=longer)))
    assert get_signature(first) != get_signature(first.slice_rows(0, 1))


def test_no_more_than_a_few_recordings_hold_memory() -> None:
    whole = batches(1024, layout="packed").get_batch(0, 0)
    recorder = StepGraphCache(lambda _: None, torch.device("cpu"), again)
    kinds = [whole.slice_rows(0, rows) for rows in range(1, MAX_GRAPHS + 2)]
    for _ in range(EAGER_STEPS):
        assert not any(recorder.get_or_capture(batch) for batch in kinds)
    assert [recorder.get_or_capture(batch) is not None for batch in kinds] == [True] * MAX_GRAPHS + [False]


def test_a_batch_is_copied_into_the_tensors_that_stay() -> None:
    first, second = (batches(layout="packed").get_batch(0, step) for step in (0, 1))
    seen: list[list[Tensor]] = []

    def update(batch: Any) -> None:
        seen.append([tensor.clone() for tensor in list_tensors(batch)])

    recorder = StepGraphCache(update, torch.device("cpu"), again)
    for _ in range(EAGER_STEPS):
        assert recorder.get_or_capture(first) is None
    recording = recorder.get_or_capture(first)
    assert recording is not None
    addresses = [tensor.data_ptr() for tensor in list_tensors(recording.static_batch)]
    for given in (second, first, second.to("cpu")):  # in several tensors, and in one
        recorder.replay(recording, given, 1, torch.zeros(2))
        assert all(torch.equal(a, b) for a, b in zip(seen[-1], list_tensors(given), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True))
    assert addresses == [tensor.data_ptr() for tensor in list_tensors(recording.static_batch)]


# ---- speed that is told ----------------------------------------------------------------------------------------------


def test_targets_are_counted_beside_all_tokens(tmp_path: Path) -> None:
    made = build_toy_run(tmp_path, replace(RECIPE, steps=3, valid_every=100), validated=False)
    made.trainer.run()
    event = made.of_type(Progress)[-1]
    assert event.targets_per_second is not None
    assert 0 < event.targets_per_second < event.tokens_per_second
    assert event.gpu_busy is None


def test_the_time_that_compiling_takes_is_told_and_not_counted_as_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attent.training.loop.REPORT_INTERVAL", 0.0)
    made = build_toy_run(tmp_path, replace(RECIPE, steps=8, valid_every=100), validated=False)
    made.trainer.compiled = True
    inner = made.trainer.wrapped_objective

    class Slow(nn.Module):
        def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
            if made.trainer.state.step == 0:
                time.sleep(0.7)
            found: tuple[Tensor, Tensor] = inner(batch)
            return found

    made.trainer.wrapped_objective = Slow()
    made.trainer.run()
    assert any(note.startswith("compiling") for note in made.notes)
    assert any(note.startswith(("compiled in 1 s", "compiled in 2 s")) for note in made.notes)
    spoken = [event.tokens_per_second for event in made.of_type(Progress) if event.tokens_per_second > 0]
    assert min(spoken) > 200  # of 200 tokens and more an update, in far less than the second that compiling took
    assert made.of_type(Progress)[-1].seconds_left == 0


def test_what_is_compiled_is_kept_in_our_cache_unless_a_person_said_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(INDUCTOR_CACHE_ENV, str(tmp_path / "theirs"))
    persist_compile_cache()
    assert Path(cache_dir()) == tmp_path / "theirs"
    monkeypatch.delenv(INDUCTOR_CACHE_ENV)
    monkeypatch.setenv(INDUCTOR_CACHE_ENV, cache_dir())  # torch's own choice, which it writes there itself
    persist_compile_cache()
    assert Path(cache_dir()) == tmp_path / "cache" / "compiled"
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(INDUCTOR_CACHE_ENV)
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "file"))
    persist_compile_cache()
    assert INDUCTOR_CACHE_ENV not in os.environ


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def on_device(
    out: Path, device: torch.device, recipe: TrainConfig, *, record: bool, network: Any = model, layout: Any = "packed"
) -> ToyRun:
    told: list[Any] = []
    made = Trainer(
        network().to(device),
        tokenizer(),
        recipe,
        batches(256, layout),
        None,
        None,
        out,
        DistributedContext(device),
        told.append,
        make_objective=Seq2SeqObjective,
    )
    if not record:
        made.step_graphs = None
    return ToyRun(made, told)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    return device


@pytest.mark.parametrize(("network", "layout"), [(model, "packed"), (lstm, "fixed")], ids=["transformer", "lstm"])
def test_a_cuda_graph_gives_the_losses_of_the_plain_update(
    tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch, network: Any, layout: Any
) -> None:
    """As far as a GPU gives the same twice: it adds up gradients of embeddings in any order."""
    monkeypatch.setattr("attent.training.loop.REPORT_INTERVAL", 0.0)
    recipe = replace(PACKED, steps=40, valid_every=100, save_every=100)
    plain = on_device(tmp_path / "plain", gpu, recipe, record=False, network=network, layout=layout)
    played = on_device(tmp_path / "played", gpu, recipe, record=True, network=network, layout=layout)
    plain.trainer.run()
    played.trainer.run()
    assert played.trainer.step_graphs is not None
    assert played.trainer.step_graphs.graphs
    assert len(losses(plain)) == len(losses(played)) == 40
    for one, other in zip(losses(plain), losses(played), strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-3)


@pytest.mark.parametrize("sick", ["asks", "short"])
def test_on_a_gpu_what_a_graph_cannot_hold_is_launched_as_before(
    tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch, sick: str
) -> None:
    monkeypatch.setattr("attent.training.loop.REPORT_INTERVAL", 0.0)
    recipe = replace(PACKED, steps=20, valid_every=100, save_every=100)
    plain = on_device(tmp_path / "plain", gpu, recipe, record=False)
    tried = on_device(tmp_path / "tried", gpu, recipe, record=True)
    inner = tried.trainer.wrapped_objective

    class Sick(nn.Module):
        def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
            loss, entropy = inner(batch)
            if sick == "asks":
                loss.item()
            elif torch.cuda.is_current_stream_capturing():
                raise torch.OutOfMemoryError("no memory")
            return loss, entropy

    tried.trainer.wrapped_objective = Sick()
    plain.trainer.run()
    tried.trainer.run()
    assert tried.trainer.step_graphs is None
    assert sum("capture failed" in note for note in tried.notes) == 1
    for one, other in zip(losses(plain), losses(tried), strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-3)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()


def test_no_update_that_is_played_waits_for_the_gpu(tmp_path: Path, gpu: torch.device) -> None:
    made = on_device(tmp_path, gpu, replace(PACKED, steps=1000), record=True)
    updates = made.trainer.iter_steps()
    for _ in range(EAGER_STEPS + 1):
        made.trainer.train_step(*next(updates))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2 * MAX_IN_FLIGHT):
            made.trainer.train_step(*next(updates))
            made.trainer.check_divergence()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.trainer.step_graphs is not None
    assert made.trainer.step_graphs.in_flight is not None
    pace = made.trainer.step_graphs.in_flight.take_throughput()
    assert 0 < pace["gpu_busy"] <= 1


def test_on_a_gpu_an_update_that_is_not_finite_is_skipped_and_many_go_back(tmp_path: Path, gpu: torch.device) -> None:
    sick = on_device(tmp_path, gpu, replace(PACKED, steps=60, save_every=4, valid_every=100), record=True)
    spoil_at(sick, 20, 20 + MAX_NONFINITE_STEPS + MAX_IN_FLIGHT)
    fill = sick.trainer.load_checkpoint

    def watched(found: checkpoint.Checkpoint) -> None:
        fill(found)
        sick.trainer.wrapped_objective = sick.trainer.objective
        assert sick.trainer.step_graphs is not None
        sick.trainer.step_graphs.signature_counts.clear()

    sick.trainer.load_checkpoint = watched  # type: ignore[method-assign]
    sick.trainer.run()
    assert sick.trainer.state.rollbacks == 1
    assert sick.trainer.state.step == 60
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())
    assert sick.trainer.step_graphs is not None, [event for event in sick.events if isinstance(event, Note)]
    assert sick.trainer.step_graphs.graphs, "it was not recorded anew"
