"""The training loop recovers from out-of-memory errors, gradients that are not finite, and stops; publishes the best
weights; and resumes bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attent import models
from attent.data.loader import PairBatch
from attent.models import Seq2Seq
from attent.training import checkpoint
from attent.training.averaging import average_checkpoints
from attent.training.distributed import DistributedContext
from attent.training.events import Progress, Saved, StopRequested
from attent.training.loop import MAX_NONFINITE_STEPS, MAX_ROLLBACKS, EvalResult, Trainer
from attent.training.objective import Seq2SeqObjective
from attent.training.run_options import TrainConfig, TrainError
from attent.training.state import Pauses
from tests.training.toys import RECIPE, ToyRun, are_equal, batches, build_toy_run, conv, lstm, max_difference, model

EVERYTHING = replace(
    RECIPE, steps=9, accumulate=2, optimizer="adamw", weight_decay=0.1, clip_norm=0.5, rdrop=1.0, save_every=4,
    valid_every=3, schedule="cosine", workers=2,
)  # fmt: skip


class InterceptedObjective(nn.Module):
    """Wrap the objective and pass every micro-batch and its loss to a callback."""

    def __init__(self, toy: ToyRun, intercept: Callable[[PairBatch, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.meet = toy.trainer.wrapped_objective, intercept
        toy.trainer.wrapped_objective = self

    def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        loss, entropy = self.inner(batch)
        return self.meet(batch, loss), entropy


class OutOfMemoryInBackward(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")


def scripted_evaluator(scores: Sequence[float], metric: str = "chrf") -> Callable[[Seq2Seq], EvalResult]:
    """An evaluator that returns these scores in turn."""
    remaining = iter(scores)

    def evaluate(_: Seq2Seq) -> EvalResult:
        return EvalResult(metrics={"bleu": 0.0, metric: next(remaining), "exact": 0.0})

    return evaluate


def read_weights(folder: Path) -> dict[str, Tensor]:
    return dict(models.read_model(folder).named_parameters())


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_out_of_memory_halves_the_micro_batch_and_gives_the_same_weights(tmp_path: Path, backward: bool) -> None:
    # A larger eps: with the paper's, a gradient that is zero up to rounding (biases of keys) would give a full step.
    recipe = replace(RECIPE, eps=1e-4)
    met = [0]
    plain, short = (
        build_toy_run(tmp_path / "plain", recipe, dropout=0.0),
        build_toy_run(tmp_path / "short", recipe, dropout=0.0),
    )

    def intercept(batch: PairBatch, loss: Tensor) -> Tensor:
        met[0] += 1
        if (
            met[0] == 1 or max(batch.source.ids.numel(), batch.target.ids.numel()) <= 50
        ):  # the first micro-batch leaves a gradient
            return loss
        if not backward:
            raise torch.OutOfMemoryError("no memory")
        behind: Tensor = OutOfMemoryInBackward.apply(loss)  # type: ignore[no-untyped-call]
        return behind

    InterceptedObjective(short, intercept)
    plain.trainer.run()
    short.trainer.run()
    assert max_difference(plain.weights(), short.weights()) < 1e-6
    assert short.trainer.state.step == 6
    assert short.trainer.state.order_digest == plain.trainer.state.order_digest
    notes = [note for note in short.notes if "out of memory" in note]
    assert notes
    assert all("same gradient" in note for note in notes)
    assert short.trainer.state.micro_batch_tokens is not None
    assert short.trainer.state.micro_batch_tokens < 128
    assert "out of memory" not in "".join(plain.notes)


def test_out_of_memory_on_a_single_row_ends_with_advice(tmp_path: Path) -> None:
    short = build_toy_run(tmp_path)

    def intercept(batch: PairBatch, loss: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    InterceptedObjective(short, intercept)
    with pytest.raises(TrainError, match=r"does not hold a micro-batch of [\d,]+ tokens; choose a smaller --size"):
        short.trainer.run()


def test_out_of_memory_in_one_of_several_processes_ends_with_advice(tmp_path: Path) -> None:
    """The other ranks would wait for its gradients, and rows would be seen twice or never."""
    toy_run = build_toy_run(tmp_path)
    toy_run.trainer.distributed = DistributedContext(torch.device("cpu"), rank=1, world_size=2)
    with pytest.raises(TrainError, match=r"rank 1 is out of memory .* 128 tokens; .* --micro-batch-tokens 64 "):
        toy_run.trainer.halve_micro_batch([toy_run.trainer.train_batches.get_batch(0, 0)])


def test_the_micro_batch_is_the_smaller_of_what_memory_allows_and_the_request(tmp_path: Path) -> None:
    first = build_toy_run(tmp_path, replace(RECIPE, micro_batch_tokens=100))
    first.trainer.run()
    newest = checkpoint.load_newest(tmp_path / "state", print)
    assert newest is not None
    for requested, expected in ((60, 60), (500, 100), (None, 100)):
        other = build_toy_run(tmp_path, replace(RECIPE, micro_batch_tokens=requested))
        other.trainer.load_checkpoint(newest)
        assert other.trainer.state.micro_batch_tokens == expected


# ---- gradients that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [RECIPE, EVERYTHING], ids=["plain", "everything"])
def test_a_gradient_that_is_not_finite_is_skipped_and_reported(tmp_path: Path, recipe: TrainConfig) -> None:
    sick = build_toy_run(tmp_path, replace(recipe, steps=2))

    def intercept(_: PairBatch, loss: Tensor) -> Tensor:
        return loss * torch.nan if sick.trainer.state.step == 1 else loss

    InterceptedObjective(sick, intercept)
    updates = sick.trainer.iter_steps()
    sick.trainer.train_step(*next(updates))
    assert not sick.trainer.check_divergence()
    before, state = sick.weights(), {n: t.clone() for n, t in sick.trainer.optimizer.get_state().items()}
    sick.trainer.train_step(*next(updates))
    assert not sick.trainer.check_divergence()
    assert are_equal(before, sick.weights())
    assert are_equal(state, sick.trainer.optimizer.get_state())
    assert sick.trainer.state.step == 2
    assert sick.trainer.state.skipped_steps == 1
    assert any("step 2 skipped: non-finite gradient (1 so far)" in note for note in sick.notes)
    sick.trainer.train_step(*next(updates))
    assert not are_equal(before, sick.weights())
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())


def test_repeated_bad_gradients_roll_back_and_halve_the_learning_rate(tmp_path: Path) -> None:
    """Checkpoints that are due meanwhile are not written, since steps are skipped."""
    recipe = replace(RECIPE, steps=8 + MAX_NONFINITE_STEPS, save_every=4, valid_every=100)
    sick = build_toy_run(tmp_path, recipe, validated=False)
    seen: list[int] = []

    def intercept(_: PairBatch, loss: Tensor) -> Tensor:
        return loss * torch.inf if sick.trainer.state.step >= 6 and not seen else loss

    InterceptedObjective(sick, intercept)
    fill = sick.trainer.load_checkpoint

    def record_load(loaded: checkpoint.Checkpoint) -> None:
        fill(loaded)
        seen.append(loaded.step)

    sick.trainer.load_checkpoint = record_load  # type: ignore[method-assign]
    ended = sick.trainer.run()
    assert seen == [4]
    assert ended.step == recipe.steps
    assert ended.reason == "steps"
    assert sick.trainer.state.rollbacks == 1
    assert any(
        f"rolled back from step {6 + MAX_NONFINITE_STEPS} to 4, with 0.5 times the learning rate" in note
        for note in sick.notes
    )
    untroubled = build_toy_run(tmp_path / "other", recipe, validated=False)
    halved = pytest.approx(untroubled.trainer.get_lr(recipe.steps or 0) / 2)
    assert sick.trainer.get_lr(recipe.steps or 0) == halved
    untroubled.trainer.run()
    for name in ("order_digest", "epoch", "batch_index", "tokens"):  # the same batches again
        assert getattr(sick.trainer.state, name) == getattr(untroubled.trainer.state, name), name
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())


def test_too_many_rollbacks_end_with_advice(tmp_path: Path) -> None:
    sick = build_toy_run(tmp_path, replace(RECIPE, steps=1000, save_every=2), validated=False)
    InterceptedObjective(sick, lambda _, loss: loss * torch.nan if sick.trainer.state.step >= 3 else loss)
    with pytest.raises(TrainError, match=r"training diverges; lower the learning rate \(--lr, now .*set --clip-norm 1"):
        sick.trainer.run()
    assert sum("rolled back from step" in note for note in sick.notes) == MAX_ROLLBACKS


def test_a_rollback_without_a_checkpoint_ends_with_advice(tmp_path: Path) -> None:
    sick = build_toy_run(tmp_path, replace(RECIPE, steps=1000, save_every=500), validated=False)
    InterceptedObjective(sick, lambda _, loss: loss * torch.nan)
    with pytest.raises(TrainError, match="the last 10 gradients up to step 10 are not finite"):
        sick.trainer.run()


# ---- validation, best weights, early stopping ------------------------------------------------------------------------


def test_training_ends_when_patience_is_exhausted(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1000, valid_every=2, save_every=100, patience=2)
    toy_run = build_toy_run(tmp_path, recipe, evaluator=scripted_evaluator([5.0, 4.0, 7.0, 6.0, 6.9]))
    toy_run.trainer.compute_valid_loss = lambda _: 1.0  # type: ignore[method-assign]
    ended = toy_run.trainer.run()
    assert (ended.reason, ended.step) == ("patience", 10)
    assert [(event.step, event.best, event.validations_since_best) for event in toy_run.validations] == [
        (2, True, 0), (4, False, 1), (6, True, 0), (8, False, 1), (10, False, 2),
    ]  # fmt: skip
    assert checkpoint.list_steps(toy_run.trainer.state_dir)[-1] == 10


def test_the_lowest_error_rate_is_the_best(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=5, valid_every=1, save_every=1, metric="wer")
    toy_run = build_toy_run(tmp_path, recipe, evaluator=scripted_evaluator([80.0, 90.0, 20.0, 30.0, 20.1], "wer"))
    toy_run.trainer.run()
    assert [event.best for event in toy_run.validations] == [True, False, True, False, False]
    assert toy_run.trainer.state.best_step == 3


def test_among_error_rates_of_100_percent_and_more_the_loss_decides(tmp_path: Path) -> None:
    """An untrained recognizer has 100% with no output at all, which is no better than wrong words."""
    recipe = replace(RECIPE, steps=3, valid_every=1, save_every=1, metric="wer")
    toy_run = build_toy_run(tmp_path, recipe, evaluator=scripted_evaluator([100.0, 140.0, 99.0], "wer"))
    losses = iter([3.0, 1.0, 2.0])
    toy_run.trainer.compute_valid_loss = lambda _: next(losses)  # type: ignore[method-assign]
    toy_run.trainer.run()
    assert [event.best for event in toy_run.validations] == [True, True, True]


def test_a_falling_loss_resets_patience(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1000, warmup=0, valid_every=2, save_every=100, patience=2)
    toy_run = build_toy_run(tmp_path, recipe, evaluator=scripted_evaluator([5.0] + [4.0] * 5))
    losses = iter([5.0, 4.0, 3.0, 2.0, 2.0, 2.0])
    toy_run.trainer.compute_valid_loss = lambda _: next(losses)  # type: ignore[method-assign]
    assert (toy_run.trainer.run().step, toy_run.validations[-1].validations_since_best) == (12, 5)


def test_patience_does_not_count_during_warmup(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1000, warmup=8, valid_every=2, save_every=100, patience=1)
    toy_run = build_toy_run(tmp_path, recipe, evaluator=scripted_evaluator([5.0] + [4.0] * 5))
    toy_run.trainer.compute_valid_loss = lambda _: 1.0  # type: ignore[method-assign]
    assert toy_run.trainer.run().step == 10


def test_the_last_step_is_always_validated_and_saved(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, steps=5))
    assert toy_run.trainer.run().reason == "steps"
    assert [event.step for event in toy_run.validations] == [3, 5]
    assert [event.step for event in toy_run.saves] == [3, 5]


def test_the_folder_holds_the_weights_of_the_best_validation(tmp_path: Path) -> None:
    met: list[dict[str, Tensor]] = []
    scores = iter([1.0, 3.0, 2.0])

    def evaluate(network: Seq2Seq) -> EvalResult:
        met.append({name: tensor.detach().clone() for name, tensor in network.named_parameters()})
        return EvalResult(metrics={"bleu": 0.0, "chrf": next(scores), "exact": 0.0})

    toy_run = build_toy_run(tmp_path, replace(RECIPE, steps=9), evaluator=evaluate)
    toy_run.trainer.run()
    assert toy_run.trainer.state.best_step == 6
    assert toy_run.trainer.state.best_score == 3.0
    assert are_equal(read_weights(tmp_path), met[1])
    assert are_equal(toy_run.weights(), met[2])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_score_is_never_the_best(tmp_path: Path, wrong: float) -> None:
    toy_run = build_toy_run(tmp_path, evaluator=scripted_evaluator([wrong, 1.0]))
    toy_run.trainer.run()
    assert [event.best for event in toy_run.validations] == [False, True]


def test_the_loss_of_a_validation_is_the_cross_entropy_of_every_token(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, label_smoothing=0.3))
    toy_run.trainer.run()
    assert toy_run.trainer.model.training
    objective = Seq2SeqObjective(toy_run.trainer.model, smoothing=0.0).eval()
    assert toy_run.trainer.valid_batches is not None
    every = [
        toy_run.trainer.valid_batches.get_batch(0, step) for step in range(toy_run.trainer.valid_batches.num_batches(0))
    ]
    assert sum(len(batch.example_ids) for batch in every) == 30
    entropy = sum(float(objective(batch)[1]) for batch in every) / sum(batch.target.num_tokens for batch in every)
    assert toy_run.validations[-1].loss == pytest.approx(entropy, rel=1e-6)


def test_without_a_validation_part_each_checkpoint_is_published(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path, validated=False)
    toy_run.trainer.run()
    assert are_equal(read_weights(tmp_path), toy_run.weights())


def test_pruning_keeps_the_last_regular_checkpoints(tmp_path: Path) -> None:
    """The last `keep_last` regular ones and the newest remain; an interruption's is removed at the next save."""
    stop = [False]
    toy_run = build_toy_run(
        tmp_path, replace(RECIPE, steps=11, save_every=2, keep_last=3, average=0), stop=lambda: stop[0]
    )
    toy_run.trainer.run()
    assert checkpoint.list_steps(toy_run.trainer.state_dir) == [6, 8, 10, 11]
    longer = build_toy_run(tmp_path, replace(RECIPE, steps=13, save_every=2, keep_last=3, average=0))
    newest = checkpoint.load_newest(tmp_path / "state", print)
    assert newest is not None
    longer.trainer.load_checkpoint(newest)
    longer.trainer.run()
    assert checkpoint.list_steps(longer.trainer.state_dir) == [8, 10, 12, 13]


def test_steps_continue_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the state of its own step."""
    recipe = replace(RECIPE, steps=8, save_every=3)
    plain = build_toy_run(tmp_path / "plain", recipe, validated=False)
    plain.trainer.run()
    slow, save, reached = build_toy_run(tmp_path / "slow", recipe, validated=False), checkpoint.save_checkpoint, Event()

    def save_slowly(root: Path, saved: checkpoint.Checkpoint) -> Path:
        assert reached.wait(60), "training waits for the checkpoint"
        return save(root, saved)

    def count_steps(_: PairBatch, loss: Tensor) -> Tensor:
        if slow.trainer.state.step == 5 and not reached.is_set():
            assert not checkpoint.list_steps(slow.trainer.state_dir)
            reached.set()
        return loss

    InterceptedObjective(slow, count_steps)
    monkeypatch.setattr(checkpoint, "save_checkpoint", save_slowly)
    slow.trainer.run()
    assert [event.step for event in slow.saves] == [3, 6, 8]
    for step in (3, 6, 8):
        ours, theirs = (
            checkpoint.load_checkpoint(checkpoint.checkpoint_path(run.trainer.state_dir, step)) for run in (slow, plain)
        )
        assert ours.state | {"seconds": 0} == theirs.state | {"seconds": 0}
        for group in theirs.tensors:
            assert are_equal(ours.tensors[group], theirs.tensors[group])


@pytest.mark.parametrize(
    ("share", "seconds", "saved"),
    [(0.0, 1e6, [2, 4, 6, 8, 10]), (0.1, 0.0, [2, 4, 6, 8, 10]), (0.1, 1e6, [2, 8, 10])],
)
def test_checkpoints_take_a_share_of_the_time_and_the_last_are_always_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, seconds: float, saved: list[int]
) -> None:
    recipe = replace(RECIPE, steps=10, save_every=2, save_share=share, average=2)
    toy_run = build_toy_run(tmp_path, recipe, validated=False)
    save, trainer = checkpoint.save_checkpoint, toy_run.trainer

    def start_save(saved: checkpoint.Checkpoint) -> Future[Saved]:
        future: Future[Saved] = Future()
        future.set_result(Saved(step=saved.step, folder=str(save(trainer.state_dir, saved)), seconds=seconds))
        return future

    monkeypatch.setattr(trainer, "start_save", start_save)
    trainer.run()
    assert [event.step for event in toy_run.saves] == saved


def test_a_best_model_is_exported_after_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, steps=6, valid_every=2, save_every=2, save_share=1e-9))
    trainer, exported = toy_run.trainer, []

    def record_export() -> None:
        assert trainer.state.step in checkpoint.list_steps(trainer.state_dir)
        exported.append(trainer.state.step)

    monkeypatch.setattr(trainer, "export_model", record_export)
    trainer.run()
    assert exported
    assert exported[-1] == trainer.state.best_step


def test_an_interrupt_while_waiting_for_a_checkpoint_leaves_it_pending(tmp_path: Path) -> None:
    trainer = build_toy_run(tmp_path, RECIPE, validated=False).trainer

    class InterruptedFuture(Future[Saved]):
        def result(self, timeout: float | None = None) -> Saved:
            raise KeyboardInterrupt

    trainer.pending_save = InterruptedFuture()
    with pytest.raises(KeyboardInterrupt):
        trainer.finish_save()
    assert trainer.pending_save is not None


def test_out_of_memory_beside_a_checkpoint_keeps_the_micro_batch(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, steps=3, save_every=1), validated=False)
    failures = [True]

    def run_out_of_memory(_: PairBatch, loss: Tensor) -> Tensor:
        if toy_run.trainer.state.step == 1 and failures:
            assert toy_run.trainer.pending_save is not None
            failures.clear()
            raise torch.OutOfMemoryError("too much")
        return loss

    InterceptedObjective(toy_run, run_out_of_memory)
    size = toy_run.trainer.state.micro_batch_tokens
    toy_run.trainer.run()
    assert not failures
    assert toy_run.trainer.state.micro_batch_tokens == size


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, steps=8, save_every=3), validated=False)
    toy_run.trainer.state_dir.write_text("in the way")
    with pytest.raises(checkpoint.CheckpointError, match="could not be saved"):
        toy_run.trainer.run()
    assert 3 <= toy_run.trainer.state.step <= 6


# ---- optimization ----------------------------------------------------------------------------------------------------


def test_gradient_accumulation_sums_over_batches(tmp_path: Path) -> None:
    """After one step Adam's first moment is a tenth of the gradient."""
    toy_run = build_toy_run(tmp_path, replace(RECIPE, accumulate=2), dropout=0.0)
    group, after = next(toy_run.trainer.iter_steps())
    toy_run.trainer.train_step(group, after)
    network = model(dropout=0.0)
    objective, every = (
        Seq2SeqObjective(network, smoothing=0.1).train(),
        [batches().get_batch(0, 0), batches().get_batch(0, 1)],
    )
    loss = (objective(every[0])[0] + objective(every[1])[0]) / sum(batch.target.num_tokens for batch in every)
    loss.backward()
    assert len(group) == 2
    assert (toy_run.trainer.state.epoch, toy_run.trainer.state.batch_index) == after == (0, 2)
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        mean = toy_run.trainer.optimizer.get_state()[f"{name}:exp_avg"]
        torch.testing.assert_close(10 * mean, parameter.grad, rtol=1e-4, atol=1e-7)


def test_gradients_are_clipped_to_the_requested_norm(tmp_path: Path) -> None:
    """Adam normalizes the gradient, so the norm is read from its first moment: a tenth of the first gradient."""
    lengths = {}
    for longest in (0.0, 0.01):
        toy_run = build_toy_run(tmp_path, replace(RECIPE, clip_norm=longest), dropout=0.0)
        toy_run.trainer.train_step(*next(toy_run.trainer.iter_steps()))
        means = [t for name, t in toy_run.trainer.optimizer.get_state().items() if name.endswith(":exp_avg")]
        lengths[longest] = 10 * float(torch.cat([mean.flatten() for mean in means]).norm())
    assert lengths[0.0] > 0.1
    assert lengths[0.01] == pytest.approx(0.01, rel=1e-3)


def test_rdrop_changes_the_weights(tmp_path: Path) -> None:
    weights = []
    for rdrop in (0.0, 5.0):
        toy_run = build_toy_run(tmp_path, replace(RECIPE, rdrop=rdrop), dropout=0.3)
        toy_run.trainer.train_step(*next(toy_run.trainer.iter_steps()))
        weights.append(toy_run.weights())
    assert max_difference(*weights) > 1e-4


def test_the_loss_falls(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, steps=60, lr=1e-2, valid_every=20, save_every=60))
    toy_run.trainer.run()
    losses = [event.loss for event in toy_run.validations]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.9 * losses[0]
    progress = toy_run.of_type(Progress)
    assert progress[-1].loss < progress[0].loss
    assert progress[-1].step == 60


# ---- averaging of checkpoints ----------------------------------------------------------------------------------------


def test_checkpoints_contain_the_weights_that_are_averaged(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, save_every=2, valid_every=100), validated=False)
    seen: list[dict[str, Tensor]] = []
    save = toy_run.trainer.save_checkpoint

    def save_and_record_weights() -> None:
        seen.append({name: tensor.double() for name, tensor in toy_run.weights().items()})
        save()

    toy_run.trainer.save_checkpoint = save_and_record_weights  # type: ignore[method-assign]
    toy_run.trainer.run()
    folders = [tmp_path / "state" / f"step-{step:08d}" for step in (2, 4, 6)]
    expected = {name: ((seen[0][name] + seen[1][name] + seen[2][name]) / 3).float() for name in seen[0]}
    means = average_checkpoints(folders)
    for name, mean in means.items():
        torch.testing.assert_close(mean, expected[name], rtol=0, atol=0)
    toy_run.trainer.load_weights(means)
    assert are_equal(toy_run.weights(), means)


# ---- stopping and resuming -------------------------------------------------------------------------------------------


def resume(out: Path, recipe: TrainConfig, stop: Callable[[ToyRun], bool] = lambda _: False, **how: Any) -> ToyRun:
    """Run from the newest checkpoint, if there is one, as one call of the command does."""
    holder: list[ToyRun] = []
    toy_run = build_toy_run(out, recipe, stop=lambda: bool(holder) and stop(holder[0]), **how)
    holder.append(toy_run)
    newest = checkpoint.load_newest(out / "state", print)
    if newest is not None:
        toy_run.trainer.load_checkpoint(newest)
    toy_run.trainer.run()
    return toy_run


def checkpoint_tensors(toy_run: ToyRun) -> dict[str, Tensor]:
    return {
        f"{group}/{name}": t
        for group, tensors in toy_run.trainer.build_checkpoint().tensors.items()
        for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("layout", "lora", "build"),
    [
        ("packed", 0, model),
        ("bucketed", 2, model),
        pytest.param("bucketed", 0, model, marks=pytest.mark.slow),
        pytest.param("packed", 2, model, marks=pytest.mark.slow),
        ("bucketed", 0, lstm),
        ("bucketed", 0, conv),
    ],
)
def test_a_run_stopped_anywhere_resumes_to_the_same_bits(
    tmp_path: Path, layout: Any, lora: int, build: Callable[[], Seq2Seq]
) -> None:
    """With every option on. Generators are seeded in every step, so only the last draw is compared."""
    recipe = replace(EVERYTHING, lora=lora, workers=0)
    uninterrupted = resume(tmp_path / "uninterrupted", recipe, layout=layout, start=build())
    num_polls = [0]

    def stop_sometimes(_: ToyRun) -> bool:
        num_polls[0] += 1
        return num_polls[0] % 14 == 0

    calls = 0
    while True:
        calls += 1
        other = replace(recipe, workers=2)
        interrupted = resume(tmp_path / "interrupted", other, stop_sometimes, layout=layout, start=build())
        if (
            interrupted.trainer.state.step == recipe.steps
            and interrupted.trainer.state.last_validated_step == recipe.steps
        ):
            break
        assert calls < 30
    assert calls > 2
    assert are_equal(checkpoint_tensors(uninterrupted), checkpoint_tensors(interrupted))
    expected, actual = vars(uninterrupted.trainer.state), vars(interrupted.trainer.state)
    assert {**expected, "seconds": 0} == {**actual, "seconds": 0}
    assert are_equal(read_weights(tmp_path / "uninterrupted"), read_weights(tmp_path / "interrupted"))


def test_a_stop_inside_a_validation_repeats_it_on_resume(tmp_path: Path) -> None:
    stopped = [True]

    def evaluate(_: Seq2Seq) -> EvalResult:
        if stopped[0]:
            raise StopRequested
        return EvalResult(metrics={"bleu": 1.0, "chrf": 2.0, "exact": 3.0})

    toy_run = resume(tmp_path, RECIPE, evaluator=evaluate)
    assert toy_run.trainer.state.step == 3
    assert not toy_run.validations
    assert checkpoint.list_steps(toy_run.trainer.state_dir) == [3]
    stopped[0] = False
    again = resume(tmp_path, RECIPE, evaluator=evaluate)
    assert [event.step for event in again.validations] == [3, 6]


def test_runs_are_equal_exactly_if_their_seeds_are(tmp_path: Path) -> None:
    first, second = resume(tmp_path / "a", RECIPE), resume(tmp_path / "b", RECIPE)
    third = resume(tmp_path / "c", replace(RECIPE, seed=2))
    assert are_equal(first.weights(), second.weights())
    assert not are_equal(first.weights(), third.weights())


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    resume(tmp_path, RECIPE)
    other = build_toy_run(tmp_path)
    other.trainer.fingerprints = {"data": "another"}
    newest = checkpoint.load_newest(tmp_path / "state", print)
    assert newest is not None
    with pytest.raises(TrainError, match=r"the data must match its checkpoints"):
        other.trainer.load_checkpoint(newest)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_measured_steps_leave_no_trace(tmp_path: Path) -> None:
    plain, measured = (build_toy_run(tmp_path / name, EVERYTHING) for name in ("plain", "measured"))
    before = measured.weights()
    assert 0 < measured.trainer.measure_step_seconds(0.0, min_steps=3) < 60
    assert are_equal(before, measured.weights())
    assert not measured.trainer.optimizer.get_state()
    assert measured.events == []
    assert measured.trainer.state.step == measured.trainer.metrics.steps == 0
    assert measured.trainer.last_saved == (-1, 0)
    plain.trainer.run()
    measured.trainer.run()
    assert are_equal(plain.weights(), measured.weights())
    assert plain.trainer.state.order_digest == measured.trainer.state.order_digest


def make_timed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: TrainConfig, pauses: Pauses) -> Trainer:
    """40 of 100 steps, 100 seconds after the clock was started."""
    trainer = build_toy_run(tmp_path, replace(recipe, steps=100, valid_every=10)).trainer
    monkeypatch.setattr("attent.training.loop.time.monotonic", lambda: 1000.0)
    trainer.state.step, trainer.eta_start, trainer.pauses = 40, (900.0, 0), pauses
    return trainer


@pytest.mark.parametrize(
    ("share", "pauses", "left"),
    [
        (0.1, Pauses(), 150 + 150 / 9),  # before the first validation: the most that validations may take
        (0.1, Pauses(20.0, 20.0, 1), 120 + 120 / 9),
        (0.5, Pauses(6.0, 6.0, 2), 141 + 6 * 3),
        (0.0, Pauses(20.0, 20.0, 1), 120 + 6 * 20),
        (0.0, Pauses(), 150),
    ],
)
def test_the_time_left_counts_validations_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, pauses: Pauses, left: float
) -> None:
    trainer = make_timed_run(tmp_path, monkeypatch, replace(RECIPE, valid_share=share), pauses)
    assert trainer.estimate_seconds_left() == pytest.approx(left)


def test_the_time_of_a_step_is_measured_since_the_clock_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_timed_run(tmp_path, monkeypatch, RECIPE, Pauses())
    trainer.eta_start = (900.0, 15)
    assert trainer.get_step_seconds() == 100 / 25


@pytest.mark.parametrize(("share", "step"), [(0.1, 40 + 250), (0.5, 40 + 10), (0.9, 40), (0.0, 0)])
def test_validations_are_postponed_until_they_take_their_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, step: int
) -> None:
    """A step takes 2 seconds and a validation 20: this, the next and the last one are 60 seconds."""
    trainer = make_timed_run(tmp_path, monkeypatch, replace(RECIPE, valid_share=share), Pauses(20.0, 20.0, 1))
    trainer.schedule_next_validation(20.0)
    assert trainer.state.next_validation == step


@pytest.mark.parametrize(("compiles", "second"), [(True, 4), (False, 7)])
def test_a_first_validation_that_compiles_does_not_postpone_the_second(
    tmp_path: Path, compiles: bool, second: int
) -> None:
    def evaluate_slowly(_: Seq2Seq) -> EvalResult:
        time.sleep(0.0 if toy_run.validations else 0.5)
        return EvalResult()

    recipe = replace(RECIPE, steps=7, valid_every=2, valid_share=0.1, metric="loss")
    toy_run = build_toy_run(tmp_path, recipe, evaluator=evaluate_slowly)
    toy_run.trainer.compiled = compiles
    toy_run.trainer.run()
    assert [event.step for event in toy_run.validations][:2] == [2, second]


@pytest.mark.parametrize(("next_validation", "steps"), [(0, [2, 4, 6, 7]), (4, [4, 6, 7]), (5, [6, 7]), (9, [7])])
def test_no_validation_comes_before_the_next_one_is_due_except_the_last(
    tmp_path: Path, next_validation: int, steps: list[int]
) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, steps=7, valid_every=2, valid_share=0.0))
    toy_run.trainer.state.next_validation = next_validation
    toy_run.trainer.run()
    assert [event.step for event in toy_run.validations] == steps


def test_a_checkpoint_of_another_number_of_threads_is_reported(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path)
    saved = toy_run.trainer.build_checkpoint()
    assert saved.state["threads"] == torch.get_num_threads()
    toy_run.trainer.load_checkpoint(saved)
    assert toy_run.notes == []
    saved.state["threads"] += 3
    toy_run.trainer.load_checkpoint(saved)
    assert "with 4 threads, and this run has 1: the weights will differ" in toy_run.notes[0]


def test_steps_start_slowly_if_they_compile_or_capture_graphs(tmp_path: Path) -> None:
    trainer = build_toy_run(tmp_path).trainer
    assert not trainer.has_slow_start
    trainer.compiled = True
    assert trainer.has_slow_start
    trainer.compiled, trainer.step_graphs = False, object()  # type: ignore[assignment]
    assert trainer.has_slow_start
