"""The loop keeps its promises: nothing lost by short memory, by gradients that are not finite, or by a stop anywhere;
the best weights are the ones in the folder; a run that goes on comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
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
from attent.training.events import Progress
from attent.training.loop import MAX_NONFINITE_STEPS, MAX_ROLLBACKS, EvalResult
from attent.training.objective import Seq2SeqObjective
from attent.training.run_options import TrainConfig, TrainError
from attent.training.stop_signals import StopRequested
from tests.training.toys import RECIPE, ToyRun, are_equal, batches, build_toy_run, max_difference, model

EVERYTHING = replace(
    RECIPE, steps=9, accumulate=2, optimizer="adamw", weight_decay=0.1, clip_norm=0.5, rdrop=1.0, ema=0.9, save_every=4,
    valid_every=3, schedule="cosine", workers=2,
)  # fmt: skip


class Through(nn.Module):
    """Stands where the wrapped objective stands, and meets every piece before and behind it."""

    def __init__(self, toy: ToyRun, meet: Callable[[PairBatch, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.meet = toy.trainer.wrapped_objective, meet
        toy.trainer.wrapped_objective = self

    def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        loss, entropy = self.inner(batch)
        return self.meet(batch, loss), entropy


class OutOfMemoryBehind(torch.autograd.Function):
    """The identity, whose backward pass finds no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")


def falling(scores: Sequence[float]) -> Callable[[Seq2Seq], EvalResult]:
    """A judge with its mind made up: these scores, one after the other."""
    given = iter(scores)

    def judge(_: Seq2Seq) -> EvalResult:
        return EvalResult(metrics={"bleu": 0.0, "chrf": next(given), "exact": 0.0})

    return judge


def published(folder: Path) -> dict[str, Tensor]:
    return dict(models.read_model(folder).named_parameters())


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_out_of_memory_goes_on_in_smaller_pieces_to_the_same_weights(tmp_path: Path, backward: bool) -> None:
    # A larger eps: of a gradient that is zero but for rounding (keys' biases) the paper's would make a whole step.
    recipe = replace(RECIPE, eps=1e-4)
    met = [0]
    plain, short = (
        build_toy_run(tmp_path / "plain", recipe, dropout=0.0),
        build_toy_run(tmp_path / "short", recipe, dropout=0.0),
    )

    def meet(batch: PairBatch, loss: Tensor) -> Tensor:
        met[0] += 1
        if met[0] == 1 or max(batch.source.ids.numel(), batch.target.ids.numel()) <= 50:  # the first leaves a gradient
            return loss
        if not backward:
            raise torch.OutOfMemoryError("no memory")
        behind: Tensor = OutOfMemoryBehind.apply(loss)  # type: ignore[no-untyped-call]
        return behind

    Through(short, meet)
    plain.trainer.run()
    short.trainer.run()
    assert max_difference(plain.weights(), short.weights()) < 1e-6
    assert short.trainer.state.step == 6
    assert short.trainer.state.order_digest == plain.trainer.state.order_digest
    told = [note for note in short.notes if "out of memory" in note]
    assert told
    assert all("same gradient" in note for note in told)
    assert short.trainer.state.micro_batch_tokens is not None
    assert short.trainer.state.micro_batch_tokens < 128
    assert "out of memory" not in "".join(plain.notes)


def test_memory_that_does_not_hold_a_row_ends_with_advice(tmp_path: Path) -> None:
    short = build_toy_run(tmp_path)

    def meet(batch: PairBatch, loss: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    Through(short, meet)
    with pytest.raises(TrainError, match=r"does not hold a micro-batch of [\d,]+ tokens; choose a smaller --size"):
        short.trainer.run()


def test_one_of_several_processes_cannot_cut_its_pieces_alone_and_says_what_to_do(tmp_path: Path) -> None:
    """The others would wait for its gradients, and rows would come twice or never."""
    made = build_toy_run(tmp_path)
    made.trainer.distributed = DistributedContext(torch.device("cpu"), rank=1, world_size=2)
    with pytest.raises(TrainError, match=r"rank 1 is out of memory .* 128 tokens; .* --micro-batch-tokens 64 "):
        made.trainer.halve_micro_batch([made.trainer.train_batches.get_batch(0, 0)])


def test_pieces_are_the_smaller_of_what_memory_allowed_and_what_is_asked_for(tmp_path: Path) -> None:
    first = build_toy_run(tmp_path, replace(RECIPE, micro_batch_tokens=100))
    first.trainer.run()
    found = checkpoint.load_newest(tmp_path / "state", print)
    assert found is not None
    for asked, expected in ((60, 60), (500, 100), (None, 100)):
        other = build_toy_run(tmp_path, replace(RECIPE, micro_batch_tokens=asked))
        other.trainer.load_checkpoint(found)
        assert other.trainer.state.micro_batch_tokens == expected


# ---- gradients that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [RECIPE, EVERYTHING], ids=["plain", "everything"])
def test_a_gradient_that_is_not_finite_is_skipped_and_told(tmp_path: Path, recipe: TrainConfig) -> None:
    sick = build_toy_run(tmp_path, replace(recipe, steps=2))

    def meet(_: PairBatch, loss: Tensor) -> Tensor:
        return loss * torch.nan if sick.trainer.state.step == 1 else loss

    Through(sick, meet)
    updates = sick.trainer.iter_steps()
    sick.trainer.train_step(*next(updates))
    before, state = sick.weights(), {n: t.clone() for n, t in sick.trainer.optimizer.get_state().items()}
    sick.trainer.train_step(*next(updates))
    assert not sick.trainer.is_diverging()
    assert are_equal(before, sick.weights())
    assert are_equal(state, sick.trainer.optimizer.get_state())
    assert sick.trainer.state.step == 2
    assert sick.trainer.state.skipped_steps == 1
    assert any("step 2 skipped: non-finite gradient (1 so far)" in note for note in sick.notes)
    sick.trainer.train_step(*next(updates))
    assert not are_equal(before, sick.weights())
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())


def test_gradients_that_stay_bad_go_back_to_the_checkpoint_with_half_the_rate(tmp_path: Path) -> None:
    """Checkpoints are due in between as well; none is made while nothing is learned."""
    recipe = replace(RECIPE, steps=8 + MAX_NONFINITE_STEPS, save_every=4, valid_every=100)
    sick = build_toy_run(tmp_path, recipe, validated=False)
    seen: list[int] = []

    def meet(_: PairBatch, loss: Tensor) -> Tensor:
        return loss * torch.inf if sick.trainer.state.step >= 6 and not seen else loss

    Through(sick, meet)
    fill = sick.trainer.load_checkpoint

    def watched(found: checkpoint.Checkpoint) -> None:
        fill(found)
        seen.append(found.step)

    sick.trainer.load_checkpoint = watched  # type: ignore[method-assign]
    ended = sick.trainer.run()
    assert seen == [4]
    assert ended.step == recipe.steps
    assert ended.reason == "steps"
    assert sick.trainer.state.rollbacks == 1
    assert any(
        f"rolled back from step {6 + MAX_NONFINITE_STEPS} to 4, with 0.5 times the learning rate" in note
        for note in sick.notes
    )
    untroubled = build_toy_run(tmp_path / "other", recipe).trainer.get_lr(recipe.steps or 0)
    assert sick.trainer.get_lr(recipe.steps or 0) == pytest.approx(untroubled / 2)
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())


def test_after_too_many_setbacks_training_ends_with_advice(tmp_path: Path) -> None:
    sick = build_toy_run(tmp_path, replace(RECIPE, steps=1000, save_every=2), validated=False)
    Through(sick, lambda _, loss: loss * torch.nan if sick.trainer.state.step >= 3 else loss)
    with pytest.raises(TrainError, match=r"training diverges; lower the learning rate \(--lr, now .*set --clip-norm 1"):
        sick.trainer.run()
    assert sum("rolled back from step" in note for note in sick.notes) == MAX_ROLLBACKS


def test_without_a_checkpoint_to_go_back_to_training_ends_with_advice(tmp_path: Path) -> None:
    sick = build_toy_run(tmp_path, replace(RECIPE, steps=1000, save_every=500), validated=False)
    Through(sick, lambda _, loss: loss * torch.nan)
    with pytest.raises(TrainError, match="the last 10 gradients up to step 10 are not finite"):
        sick.trainer.run()


# ---- validation, the best, the end -----------------------------------------------------------------------------------


def test_it_ends_when_patience_does(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1000, valid_every=2, save_every=100, patience=2)
    made = build_toy_run(tmp_path, recipe, evaluator=falling([5.0, 4.0, 7.0, 6.0, 6.9]))
    made.trainer.compute_valid_loss = lambda _: 1.0  # type: ignore[method-assign]
    ended = made.trainer.run()
    assert (ended.reason, ended.step) == ("patience", 10)
    assert [(event.step, event.best, event.validations_since_best) for event in made.validations] == [
        (2, True, 0), (4, False, 1), (6, True, 0), (8, False, 1), (10, False, 2),
    ]  # fmt: skip
    assert made.trainer.list_checkpoints()[-1] == 10


def test_a_loss_that_falls_is_worth_waiting_for_whatever_the_scores_say(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1000, warmup=0, valid_every=2, save_every=100, patience=2)
    made = build_toy_run(tmp_path, recipe, evaluator=falling([5.0] + [4.0] * 5))
    losses = iter([5.0, 4.0, 3.0, 2.0, 2.0, 2.0])
    made.trainer.compute_valid_loss = lambda _: next(losses)  # type: ignore[method-assign]
    assert (made.trainer.run().step, made.validations[-1].validations_since_best) == (12, 5)


def test_nobody_loses_patience_while_the_learning_rate_still_rises(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1000, warmup=8, valid_every=2, save_every=100, patience=1)
    made = build_toy_run(tmp_path, recipe, evaluator=falling([5.0] + [4.0] * 5))
    made.trainer.compute_valid_loss = lambda _: 1.0  # type: ignore[method-assign]
    assert made.trainer.run().step == 10


def test_the_last_step_is_validated_and_saved_whatever_its_number(tmp_path: Path) -> None:
    made = build_toy_run(tmp_path, replace(RECIPE, steps=5))
    assert made.trainer.run().reason == "steps"
    assert [event.step for event in made.validations] == [3, 5]
    assert [event.step for event in made.saved] == [3, 5]


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_folder_holds_the_weights_of_the_best_validation(tmp_path: Path, ema: float) -> None:
    """With a running mean these are the mean's, and the weights themselves go on untouched."""
    met: list[dict[str, Tensor]] = []
    scores = iter([1.0, 3.0, 2.0])

    def judge(of: Seq2Seq) -> EvalResult:
        met.append({name: tensor.detach().clone() for name, tensor in of.named_parameters()})
        return EvalResult(metrics={"bleu": 0.0, "chrf": next(scores), "exact": 0.0})

    recipe = replace(RECIPE, steps=9, ema=ema)
    made = build_toy_run(tmp_path, recipe, evaluator=judge)
    made.trainer.run()
    assert made.trainer.state.best_step == 6
    assert made.trainer.state.best_score == 3.0
    assert are_equal(published(tmp_path), met[1])
    plain = build_toy_run(tmp_path / "plain", replace(recipe, ema=0.0))
    plain.trainer.run()
    assert are_equal(made.weights(), plain.weights())
    assert are_equal(met[2], made.weights()) == (not ema)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_no_number_is_never_the_best(tmp_path: Path, wrong: float) -> None:
    made = build_toy_run(tmp_path, evaluator=falling([wrong, 1.0]))
    made.trainer.run()
    assert [event.best for event in made.validations] == [False, True]


def test_the_loss_of_a_validation_is_the_cross_entropy_of_every_token(tmp_path: Path) -> None:
    made = build_toy_run(tmp_path, replace(RECIPE, label_smoothing=0.3))
    made.trainer.run()
    assert made.trainer.model.training
    objective = Seq2SeqObjective(made.trainer.model, smoothing=0.0).eval()
    assert made.trainer.valid_batches is not None
    every = [made.trainer.valid_batches.get_batch(0, step) for step in range(made.trainer.valid_batches.num_steps(0))]
    assert sum(len(batch.example_ids) for batch in every) == 30
    entropy = sum(float(objective(batch)[1]) for batch in every) / sum(batch.target.num_tokens for batch in every)
    assert made.validations[-1].loss == pytest.approx(entropy, rel=1e-6)


def test_without_a_validation_part_each_checkpoint_is_published(tmp_path: Path) -> None:
    made = build_toy_run(tmp_path, validated=False)
    made.trainer.run()
    assert are_equal(published(tmp_path), made.weights())


def test_what_is_published_and_kept_is_not_pruned_away(tmp_path: Path) -> None:
    """The last `keep_last` regular ones stay, and the newest; an odd one of an interruption goes when another comes."""
    stop = [False]
    made = build_toy_run(
        tmp_path, replace(RECIPE, steps=11, save_every=2, keep_last=3, average=0), stop=lambda: stop[0]
    )
    made.trainer.run()
    assert made.trainer.list_checkpoints() == [6, 8, 10, 11]
    longer = build_toy_run(tmp_path, replace(RECIPE, steps=13, save_every=2, keep_last=3, average=0))
    found = checkpoint.load_newest(tmp_path / "state", print)
    assert found is not None
    longer.trainer.load_checkpoint(found)
    longer.trainer.run()
    assert longer.trainer.list_checkpoints() == [8, 10, 12, 13]


# ---- the recipe ------------------------------------------------------------------------------------------------------


def test_two_batches_of_an_update_give_the_gradient_of_both(tmp_path: Path) -> None:
    """After one update Adam's mean is a tenth of the first gradient."""
    made = build_toy_run(tmp_path, replace(RECIPE, accumulate=2), dropout=0.0)
    group, after = next(made.trainer.iter_steps())
    made.trainer.train_step(group, after)
    of = model(dropout=0.0)
    objective, every = Seq2SeqObjective(of).train(), [batches().get_batch(0, 0), batches().get_batch(0, 1)]
    loss = (objective(every[0])[0] + objective(every[1])[0]) / sum(batch.target.num_tokens for batch in every)
    loss.backward()
    assert len(group) == 2
    assert (made.trainer.state.epoch, made.trainer.state.batch_index) == after == (0, 2)
    for name, parameter in of.named_parameters():
        assert parameter.grad is not None
        mean = made.trainer.optimizer.get_state()[f"{name}:exp_avg"]
        torch.testing.assert_close(10 * mean, parameter.grad, rtol=1e-4, atol=1e-7)


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(tmp_path: Path) -> None:
    """Adam divides a gradient's length out again, so that it is seen in its state: a tenth of the first gradient."""
    lengths = {}
    for longest in (0.0, 0.01):
        made = build_toy_run(tmp_path, replace(RECIPE, clip_norm=longest), dropout=0.0)
        made.trainer.train_step(*next(made.trainer.iter_steps()))
        means = [t for name, t in made.trainer.optimizer.get_state().items() if name.endswith(":exp_avg")]
        lengths[longest] = 10 * float(torch.cat([mean.flatten() for mean in means]).norm())
    assert lengths[0.0] > 0.1
    assert lengths[0.01] == pytest.approx(0.01, rel=1e-3)


def test_the_running_mean_follows_the_weights(tmp_path: Path) -> None:
    made = build_toy_run(tmp_path, replace(RECIPE, ema=0.5))
    mean = made.weights()
    updates = made.trainer.iter_steps()
    for step in range(1, 9):
        made.trainer.train_step(*next(updates))
        decay = min(0.5, (1 + step) / (10 + step))
        mean = {name: decay * mean[name] + (1 - decay) * now for name, now in made.weights().items()}
        assert max_difference(mean, made.trainer.ema) < 1e-6


def test_rdrop_changes_what_is_learned(tmp_path: Path) -> None:
    weights = []
    for rdrop in (0.0, 5.0):
        made = build_toy_run(tmp_path, replace(RECIPE, rdrop=rdrop), dropout=0.3)
        made.trainer.train_step(*next(made.trainer.iter_steps()))
        weights.append(made.weights())
    assert max_difference(*weights) > 1e-4


def test_it_learns(tmp_path: Path) -> None:
    made = build_toy_run(tmp_path, replace(RECIPE, steps=60, lr=1e-2, valid_every=20, save_every=60))
    made.trainer.run()
    losses = [event.loss for event in made.validations]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.9 * losses[0]
    progress = made.of_type(Progress)
    assert progress[-1].loss < progress[0].loss
    assert progress[-1].step == 60


# ---- the mean of checkpoints -----------------------------------------------------------------------------------------


def test_the_checkpoints_hold_what_a_mean_is_taken_of(tmp_path: Path) -> None:
    made = build_toy_run(tmp_path, replace(RECIPE, save_every=2, valid_every=100), validated=False)
    seen: list[dict[str, Tensor]] = []
    save = made.trainer.save_checkpoint

    def watched() -> None:
        seen.append({name: tensor.double() for name, tensor in made.weights().items()})
        save()

    made.trainer.save_checkpoint = watched  # type: ignore[method-assign]
    made.trainer.run()
    folders = [tmp_path / "state" / f"step-{step:08d}" for step in (2, 4, 6)]
    expected = {name: ((seen[0][name] + seen[1][name] + seen[2][name]) / 3).float() for name in seen[0]}
    means = average_checkpoints(folders)
    for name, mean in means.items():
        torch.testing.assert_close(mean, expected[name], rtol=0, atol=0)
    made.trainer.load_weights(means)
    assert are_equal(made.weights(), means)


# ---- stopping and going on -------------------------------------------------------------------------------------------


def run_on(out: Path, recipe: TrainConfig, stop: Callable[[ToyRun], bool] = lambda _: False, **how: Any) -> ToyRun:
    """One call of the command: from the newest checkpoint, if there is one."""
    holder: list[ToyRun] = []
    made = build_toy_run(out, recipe, stop=lambda: bool(holder) and stop(holder[0]), **how)
    holder.append(made)
    found = checkpoint.load_newest(out / "state", print)
    if found is not None:
        made.trainer.load_checkpoint(found)
    made.trainer.run()
    return made


def kept(one: ToyRun) -> dict[str, Tensor]:
    return {
        f"{group}/{name}": t
        for group, tensors in one.trainer.build_checkpoint().tensors.items()
        for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        ("packed", 0),
        ("bucketed", 2),
        pytest.param("bucketed", 0, marks=pytest.mark.slow),
        pytest.param("packed", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_anywhere_comes_to_the_same_bits(tmp_path: Path, layout: Any, lora: int) -> None:
    """With every option on. The generators are set anew in every update, so that only the last draw is compared."""
    recipe = replace(EVERYTHING, lora=lora, workers=0)
    unbroken = run_on(tmp_path / "unbroken", recipe, layout=layout)
    asked = [0]

    def now_and_then(_: ToyRun) -> bool:
        asked[0] += 1
        return asked[0] % 14 == 0

    calls = 0
    while True:
        calls += 1
        broken = run_on(tmp_path / "broken", replace(recipe, workers=2), now_and_then, layout=layout)
        if broken.trainer.state.step == recipe.steps and broken.trainer.state.last_validated_step == recipe.steps:
            break
        assert calls < 30
    assert calls > 2
    assert are_equal(kept(unbroken), kept(broken))
    one, other = vars(unbroken.trainer.state), vars(broken.trainer.state)
    assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert are_equal(published(tmp_path / "unbroken"), published(tmp_path / "broken"))


def test_a_stop_inside_a_validation_repeats_that_validation_when_the_run_goes_on(tmp_path: Path) -> None:
    stopped = [True]

    def judge(_: Seq2Seq) -> EvalResult:
        if stopped[0]:
            raise StopRequested
        return EvalResult(metrics={"bleu": 1.0, "chrf": 2.0, "exact": 3.0})

    made = run_on(tmp_path, RECIPE, evaluator=judge)
    assert made.trainer.state.step == 3
    assert not made.validations
    assert made.trainer.list_checkpoints() == [3]
    stopped[0] = False
    again = run_on(tmp_path, RECIPE, evaluator=judge)
    assert [event.step for event in again.validations] == [3, 6]


def test_two_runs_with_one_seed_are_equal_and_with_another_are_not(tmp_path: Path) -> None:
    first, second = run_on(tmp_path / "a", RECIPE), run_on(tmp_path / "b", RECIPE)
    third = run_on(tmp_path / "c", replace(RECIPE, seed=2))
    assert are_equal(first.weights(), second.weights())
    assert not are_equal(first.weights(), third.weights())


def test_a_checkpoint_of_other_text_is_refused(tmp_path: Path) -> None:
    run_on(tmp_path, RECIPE)
    other = build_toy_run(tmp_path)
    other.trainer.fingerprints = {"data": "another"}
    found = checkpoint.load_newest(tmp_path / "state", print)
    assert found is not None
    with pytest.raises(TrainError, match=r"the data must match its checkpoints"):
        other.trainer.load_checkpoint(found)
