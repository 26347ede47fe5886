"""A recorded update is the update itself: on a CPU a "recording" runs the same work on the tensors that stay, and every
number must come out as without one. What only a GPU can show runs with `--device cuda`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

from attent.data.batches import Batch
from attent.train import checkpoint
from attent.train.config import TrainConfig
from attent.train.events import Note, Progress
from attent.train.hardware import COMPILED, keep_compiled
from attent.train.loop import MOST_BAD, Training
from attent.train.recorded import AHEAD, MOST, WARM, Recorder, Work, kind_of, on_gpu, tensors_of
from attent.train.team import Team
from tests.text.corpus import tokenizer
from tests.train.toys import RECIPE, Toy, batches, model, same, toy

PACKED = replace(RECIPE, steps=12, piece_tokens=None, save_every=4, valid_every=6, clip_norm=0.5, ema=0.9)


def again(work: Work) -> Work:
    """In place of a CUDA graph: what was recorded is done again, on the tensors that it was recorded with."""
    return work


@dataclass
class Counted:
    """As `again`, and how often each recording was played."""

    recorded: int = 0
    played: int = 0

    def __call__(self, work: Work) -> Work:
        self.recorded += 1

        def replay() -> None:
            self.played += 1
            work()

        return replay


def recorded(out: Path, recipe: TrainConfig = PACKED, capture: Any = again, **how: Any) -> Toy:
    made = toy(out, recipe, layout=how.pop("layout", "packed"), **how)
    made.training.record(capture)
    return made


def kept(one: Toy) -> dict[str, Tensor]:
    tensors = one.training.kept().tensors
    return {f"{group}/{name}": t for group, part in tensors.items() for name, t in part.items() if group != "random"}


def losses(one: Toy) -> list[tuple[int, float, float, float]]:
    return [(event.step, event.loss, event.perplexity, event.grad_norm) for event in one.of(Progress)]


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_recorded_updates_come_to_the_same_bits(
    tmp_path: Path, optimiser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates, divisors, dropout, clipping, the running mean and what is told, through validations and checkpoints."""
    monkeypatch.setattr("attent.train.loop.REPORT", 0.0)
    recipe, count = replace(PACKED, optimiser=optimiser, weight_decay=0.1), Counted()
    plain, played = toy(tmp_path / "plain", recipe, layout="packed"), recorded(tmp_path / "played", recipe, count)
    plain.training.run()
    played.training.run()
    assert (count.recorded, count.played) == (1, 12 - WARM)
    assert same(kept(plain), kept(played))
    assert losses(plain) == losses(played)
    assert plain.training.marks.order == played.training.marks.order


def test_going_on_from_a_checkpoint_records_anew_and_comes_to_the_same_bits(tmp_path: Path) -> None:
    whole, count = recorded(tmp_path / "whole"), Counted()
    whole.training.run()
    for steps in (8, 12):
        part = recorded(tmp_path / "parts", replace(PACKED, steps=steps), count)
        found = checkpoint.newest(tmp_path / "parts" / "state", print)
        if found is not None:
            part.training.fill(found)
        part.training.run()
    assert count.recorded == 2
    assert same(kept(whole), kept(part))


def test_a_checkpoint_brings_new_tensors_so_that_it_ends_every_recording(tmp_path: Path) -> None:
    """An old recording would go on writing to the old ones."""
    made = recorded(tmp_path, validated=False)
    updates = made.training.updates()
    for _ in range(WARM + 1):
        made.training.learn(*next(updates))
    assert made.training.recorder is not None
    assert made.training.recorder.recordings
    made.training.fill(made.training.kept())
    assert not made.training.recorder.recordings


def test_a_gradient_that_is_not_finite_is_skipped_in_a_recording_too(tmp_path: Path) -> None:
    sick = recorded(tmp_path, validated=False)
    spoil_at(sick, 5)
    updates = sick.training.updates()
    for _ in range(5):
        sick.training.learn(*next(updates))
    before, state = sick.weights(), {n: t.clone() for n, t in sick.training.optimiser.tensors().items()}
    sick.training.learn(*next(updates))
    assert not sick.training.trouble()
    assert same(before, sick.weights())
    assert same(state, sick.training.optimiser.tensors())
    assert any("update 6: the gradient was not finite, so it was skipped (1 so far)" in note for note in sick.notes)
    sick.training.learn(*next(updates))
    assert not sick.training.trouble()
    assert sick.training.marks.skipped == 1
    assert not same(before, sick.weights())


def spoil_at(made: Toy, first: int, last: int | None = None) -> None:
    """Losses that are no numbers in the updates behind `first` up to `last`; on the device, as a recording needs it."""
    inner, training = made.training.wrapped, made.training
    factor = torch.ones((), device=training.team.device)
    learn = training.learn

    class Spoiled(nn.Module):
        def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
            loss, entropy = inner(batch)
            return loss * factor, entropy

    def learned(group: Any, after: Any) -> None:
        factor.fill_(torch.nan if first <= training.marks.step <= (last or first) else 1.0)
        learn(group, after)

    training.wrapped = Spoiled()
    training.learn = learned  # type: ignore[method-assign]


def test_gradients_that_stay_bad_go_back_and_then_the_run_goes_on(tmp_path: Path) -> None:
    sick = recorded(tmp_path, replace(PACKED, steps=8 + MOST_BAD, valid_every=100), validated=False)
    spoil_at(sick, 6, 6 + MOST_BAD)
    fill, seen = sick.training.fill, []

    def watched(found: checkpoint.Checkpoint) -> None:
        fill(found)
        seen.append(found.step)
        sick.training.wrapped = sick.training.objective

    sick.training.fill = watched  # type: ignore[method-assign]
    sick.training.run()
    assert seen == [4]
    assert sick.training.marks.step == 8 + MOST_BAD
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())


# ---- what is recorded, and what is not -------------------------------------------------------------------------------


def test_batches_of_many_shapes_are_recorded_a_few_times_only_and_learned_from_all_the_same(tmp_path: Path) -> None:
    recipe, count = replace(PACKED, steps=40, valid_every=100, save_every=100), Counted()
    plain = toy(tmp_path / "plain", recipe, validated=False)
    played = recorded(tmp_path / "played", recipe, count, layout="bucketed", validated=False)
    plain.training.run()
    played.training.run()
    assert count.recorded <= MOST
    assert 0 < count.played < 40
    assert same(kept(plain), kept(played))


@pytest.mark.parametrize(
    "recipe", [replace(PACKED, accumulate=2), replace(PACKED, piece_tokens=64)], ids=["accumulate", "pieces"]
)
def test_several_batches_or_pieces_an_update_are_not_recorded(tmp_path: Path, recipe: TrainConfig) -> None:
    count = Counted()
    plain = toy(tmp_path / "plain", recipe, layout="packed")
    played = recorded(tmp_path / "played", recipe, count)
    plain.training.run()
    played.training.run()
    assert count.recorded == 0
    assert same(kept(plain), kept(played))


def test_what_cannot_be_recorded_runs_as_before_and_says_so_once(tmp_path: Path) -> None:
    def failing(work: Work) -> Work:
        work_begins_and_breaks(played.training)
        raise torch.OutOfMemoryError("no memory\nand more")

    plain, played = toy(tmp_path / "plain", PACKED, layout="packed"), recorded(tmp_path / "played", capture=failing)
    plain.training.run()
    played.training.run()
    assert same(kept(plain), kept(played))
    told = [note for note in played.notes if "cannot be recorded" in note]
    assert told == ["updates cannot be recorded as a CUDA graph, so each is launched by itself (no memory)"]


def work_begins_and_breaks(training: Training) -> None:
    for parameter in training.learning.values():
        parameter.grad = torch.full_like(parameter, 7.0)


def test_memory_that_recordings_hold_is_given_back_before_pieces_become_smaller(tmp_path: Path) -> None:
    made = recorded(tmp_path, validated=False)
    updates = made.training.updates()
    for _ in range(WARM + 1):
        made.training.learn(*next(updates))
    assert made.training.recorder is not None
    assert made.training.recorder.recordings
    inner, met = made.training.wrapped, [0]

    class Short(nn.Module):
        def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
            met[0] += 1
            if met[0] == 1:
                raise torch.OutOfMemoryError("no memory")
            found: tuple[Tensor, Tensor] = inner(batch)
            return found

    made.training.wrapped = Short()
    group, _ = next(updates)
    made.training.gradients(group, group[0].units)
    assert not made.training.recorder.recordings
    assert made.training.marks.piece_tokens is None
    assert met[0] == 2


def test_a_recording_serves_batches_of_the_same_shapes_and_host_numbers_only() -> None:
    first, second = (batches(layout="packed").batch(0, step) for step in (0, 1))
    assert kind_of(first) == kind_of(second)
    assert kind_of(first) == kind_of(first.to("cpu"))  # in one tensor or in several
    assert first.target.packing is not None
    longer = replace(first.target.packing, longest=first.target.packing.longest + 1)
    assert kind_of(first) != kind_of(replace(first, target=replace(first.target, packing=longer)))
    assert kind_of(first) != kind_of(first.rows(0, 1))


def test_no_more_than_a_few_recordings_hold_memory() -> None:
    whole = batches(1024, layout="packed").batch(0, 0)
    recorder = Recorder(lambda _: None, torch.device("cpu"), again)
    kinds = [whole.rows(0, rows) for rows in range(1, MOST + 2)]
    for _ in range(WARM):
        assert not any(recorder.of(batch) for batch in kinds)
    assert [recorder.of(batch) is not None for batch in kinds] == [True] * MOST + [False]


def test_a_batch_is_copied_into_the_tensors_that_stay() -> None:
    first, second = (batches(layout="packed").batch(0, step) for step in (0, 1))
    seen: list[list[Tensor]] = []

    def update(batch: Any) -> None:
        seen.append([tensor.clone() for tensor in tensors_of(batch)])

    recorder = Recorder(update, torch.device("cpu"), again)
    for _ in range(WARM):
        assert recorder.of(first) is None
    recording = recorder.of(first)
    assert recording is not None
    addresses = [tensor.data_ptr() for tensor in tensors_of(recording.held)]
    for given in (second, first, second.to("cpu")):  # in several tensors, and in one
        recorder.play(recording, given, torch.zeros(2))
        assert all(torch.equal(a, b) for a, b in zip(seen[-1], tensors_of(given), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True))
    assert addresses == [tensor.data_ptr() for tensor in tensors_of(recording.held)]


# ---- speed that is told ----------------------------------------------------------------------------------------------


def test_targets_are_counted_beside_all_tokens(tmp_path: Path) -> None:
    made = toy(tmp_path, replace(RECIPE, steps=3, valid_every=100), validated=False)
    made.training.run()
    event = made.of(Progress)[-1]
    assert event.targets_per_second is not None
    assert 0 < event.targets_per_second < event.tokens_per_second
    assert event.busy is None


def test_the_time_that_compiling_takes_is_told_and_not_counted_as_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attent.train.loop.REPORT", 0.0)
    made = toy(tmp_path, replace(RECIPE, steps=8, valid_every=100), validated=False)
    made.training.compiled = True
    inner = made.training.wrapped

    class Slow(nn.Module):
        def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
            if made.training.marks.step == 0:
                time.sleep(0.7)
            found: tuple[Tensor, Tensor] = inner(batch)
            return found

    made.training.wrapped = Slow()
    made.training.run()
    assert any(note.startswith("compiling: once") for note in made.notes)
    assert any(note.startswith(("compiled in 1 s", "compiled in 2 s")) for note in made.notes)
    spoken = [event.tokens_per_second for event in made.of(Progress) if event.tokens_per_second > 0]
    assert min(spoken) > 200  # of 200 tokens and more an update, in far less than the second that compiling took
    assert made.of(Progress)[-1].seconds_left == 0


def test_what_is_compiled_is_kept_in_our_cache_unless_a_person_said_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(COMPILED, str(tmp_path / "theirs"))
    assert keep_compiled() == tmp_path / "theirs"
    monkeypatch.delenv(COMPILED)
    monkeypatch.setenv(COMPILED, cache_dir())  # torch's own choice, which it writes there itself
    assert keep_compiled() == tmp_path / "cache" / "compiled"
    assert Path(cache_dir()) == tmp_path / "cache" / "compiled"
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(COMPILED)
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "file"))
    assert keep_compiled() is None


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def on_device(out: Path, device: torch.device, recipe: TrainConfig, *, record: bool) -> Toy:
    told: list[Any] = []
    made = Training(
        model().to(device), tokenizer(), recipe, batches(256, "packed"), None, None, out, Team(device), told.append
    )
    if record:
        made.record(on_gpu(device))
    return Toy(made, told)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    return device


def test_a_cuda_graph_gives_the_losses_of_the_plain_update(
    tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as a GPU gives the same twice: it adds up gradients of embeddings in any order."""
    monkeypatch.setattr("attent.train.loop.REPORT", 0.0)
    recipe = replace(PACKED, steps=40, valid_every=100, save_every=100)
    plain = on_device(tmp_path / "plain", gpu, recipe, record=False)
    played = on_device(tmp_path / "played", gpu, recipe, record=True)
    plain.training.run()
    played.training.run()
    assert played.training.recorder is not None
    assert played.training.recorder.recordings
    assert len(losses(plain)) == len(losses(played)) == 40
    for one, other in zip(losses(plain), losses(played), strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-3)


@pytest.mark.parametrize("sick", ["asks", "short"])
def test_on_a_gpu_what_a_graph_cannot_hold_is_launched_as_before(
    tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch, sick: str
) -> None:
    monkeypatch.setattr("attent.train.loop.REPORT", 0.0)
    recipe = replace(PACKED, steps=20, valid_every=100, save_every=100)
    plain = on_device(tmp_path / "plain", gpu, recipe, record=False)
    tried = on_device(tmp_path / "tried", gpu, recipe, record=True)
    inner = tried.training.wrapped

    class Sick(nn.Module):
        def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
            loss, entropy = inner(batch)
            if sick == "asks":
                loss.item()
            elif torch.cuda.is_current_stream_capturing():
                raise torch.OutOfMemoryError("no memory")
            return loss, entropy

    tried.training.wrapped = Sick()
    plain.training.run()
    tried.training.run()
    assert tried.training.recorder is None
    assert sum("cannot be recorded" in note for note in tried.notes) == 1
    for one, other in zip(losses(plain), losses(tried), strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-3)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()


def test_no_update_that_is_played_waits_for_the_gpu(tmp_path: Path, gpu: torch.device) -> None:
    made = on_device(tmp_path, gpu, replace(PACKED, steps=1000), record=True)
    updates = made.training.updates()
    for _ in range(WARM + 1):
        made.training.learn(*next(updates))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2 * AHEAD):
            made.training.learn(*next(updates))
            made.training.trouble()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.training.recorder is not None
    assert made.training.recorder.flight is not None
    pace = made.training.recorder.flight.pace()
    assert pace is not None
    assert 0 < pace.busy <= 1


def test_on_a_gpu_an_update_that_is_not_finite_is_skipped_and_many_go_back(tmp_path: Path, gpu: torch.device) -> None:
    sick = on_device(tmp_path, gpu, replace(PACKED, steps=60, save_every=4, valid_every=100), record=True)
    spoil_at(sick, 20, 20 + MOST_BAD + AHEAD)
    fill = sick.training.fill

    def watched(found: checkpoint.Checkpoint) -> None:
        fill(found)
        sick.training.wrapped = sick.training.objective
        assert sick.training.recorder is not None
        sick.training.recorder.met.clear()

    sick.training.fill = watched  # type: ignore[method-assign]
    sick.training.run()
    assert sick.training.marks.setbacks == 1
    assert sick.training.marks.step == 60
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())
    assert sick.training.recorder is not None, [event for event in sick.told if isinstance(event, Note)]
    assert sick.training.recorder.recordings, "it was not recorded anew"
