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
from attent.data.batches import Batch
from attent.models import Seq2Seq
from attent.train import checkpoint
from attent.train.events import Progress
from attent.train.loop import MOST_BAD, MOST_SETBACKS, Judged, Stopping
from attent.train.means import mean_weights
from attent.train.objective import Objective
from attent.train.recipe import TrainConfig, TrainError
from attent.train.team import Team
from tests.train.toys import RECIPE, Toy, batches, furthest, model, same, toy

EVERYTHING = replace(
    RECIPE, steps=9, accumulate=2, optimiser="adamw", weight_decay=0.1, clip_norm=0.5, rdrop=1.0, ema=0.9, save_every=4,
    valid_every=3, schedule="cosine", workers=2,
)  # fmt: skip


class Through(nn.Module):
    """Stands where the wrapped objective stands, and meets every piece before and behind it."""

    def __init__(self, toy: Toy, meet: Callable[[Batch, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.meet = toy.training.wrapped, meet
        toy.training.wrapped = self

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
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


def falling(scores: Sequence[float]) -> Callable[[Seq2Seq], Judged]:
    """A judge with its mind made up: these scores, one after the other."""
    given = iter(scores)

    def judge(_: Seq2Seq) -> Judged:
        return Judged(figures={"bleu": 0.0, "chrf": next(given), "exact": 0.0})

    return judge


def published(folder: Path) -> dict[str, Tensor]:
    return dict(models.read(folder).named_parameters())


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_out_of_memory_goes_on_in_smaller_pieces_to_the_same_weights(tmp_path: Path, backward: bool) -> None:
    # A larger eps: of a gradient that is zero but for rounding (keys' biases) the paper's would make a whole step.
    recipe = replace(RECIPE, eps=1e-4)
    met = [0]
    plain, short = toy(tmp_path / "plain", recipe, dropout=0.0), toy(tmp_path / "short", recipe, dropout=0.0)

    def meet(batch: Batch, loss: Tensor) -> Tensor:
        met[0] += 1
        if met[0] == 1 or max(batch.source.ids.numel(), batch.target.ids.numel()) <= 50:  # the first leaves a gradient
            return loss
        if not backward:
            raise torch.OutOfMemoryError("no memory")
        behind: Tensor = OutOfMemoryBehind.apply(loss)  # type: ignore[no-untyped-call]
        return behind

    Through(short, meet)
    plain.training.run()
    short.training.run()
    assert furthest(plain.weights(), short.weights()) < 1e-6
    assert short.training.marks.step == 6
    assert short.training.marks.order == plain.training.marks.order
    told = [note for note in short.notes if "out of memory" in note]
    assert told
    assert all("the update is the same" in note for note in told)
    assert short.training.marks.piece_tokens is not None
    assert short.training.marks.piece_tokens < 128
    assert "out of memory" not in "".join(plain.notes)


def test_memory_that_does_not_hold_a_row_ends_with_advice(tmp_path: Path) -> None:
    short = toy(tmp_path)

    def meet(batch: Batch, loss: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    Through(short, meet)
    with pytest.raises(TrainError, match=r"does not hold even [\d,]+ tokens at once; take a smaller --size"):
        short.training.run()


def test_one_of_several_processes_cannot_cut_its_pieces_alone_and_says_what_to_do(tmp_path: Path) -> None:
    """The others would wait for its gradients, and rows would come twice or never."""
    made = toy(tmp_path)
    made.training.team = Team(torch.device("cpu"), rank=1, size=2)
    with pytest.raises(
        TrainError, match=r"process 1 is out of memory with 128 tokens .* again with --piece-tokens 64,"
    ):
        made.training.smaller_pieces([made.training.batches.batch(0, 0)])


def test_pieces_are_the_smaller_of_what_memory_allowed_and_what_is_asked_for(tmp_path: Path) -> None:
    first = toy(tmp_path, replace(RECIPE, piece_tokens=100))
    first.training.run()
    found = checkpoint.newest(tmp_path / "state", print)
    assert found is not None
    for asked, expected in ((60, 60), (500, 100), (None, 100)):
        other = toy(tmp_path, replace(RECIPE, piece_tokens=asked))
        other.training.fill(found)
        assert other.training.marks.piece_tokens == expected


# ---- gradients that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [RECIPE, EVERYTHING], ids=["plain", "everything"])
def test_a_gradient_that_is_not_finite_is_skipped_and_told(tmp_path: Path, recipe: TrainConfig) -> None:
    sick = toy(tmp_path, replace(recipe, steps=2))

    def meet(_: Batch, loss: Tensor) -> Tensor:
        return loss * torch.nan if sick.training.marks.step == 1 else loss

    Through(sick, meet)
    updates = sick.training.updates()
    sick.training.learn(*next(updates))
    before, state = sick.weights(), {n: t.clone() for n, t in sick.training.optimiser.tensors().items()}
    sick.training.learn(*next(updates))
    assert not sick.training.trouble()
    assert same(before, sick.weights())
    assert same(state, sick.training.optimiser.tensors())
    assert sick.training.marks.step == 2
    assert sick.training.marks.skipped == 1
    assert any("update 2: the gradient was not finite, so it was skipped (1 so far)" in note for note in sick.notes)
    sick.training.learn(*next(updates))
    assert not same(before, sick.weights())
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())


def test_gradients_that_stay_bad_go_back_to_the_checkpoint_with_half_the_rate(tmp_path: Path) -> None:
    """Checkpoints are due in between as well; none is made while nothing is learned."""
    recipe = replace(RECIPE, steps=8 + MOST_BAD, save_every=4, valid_every=100)
    sick = toy(tmp_path, recipe, validated=False)
    seen: list[int] = []

    def meet(_: Batch, loss: Tensor) -> Tensor:
        return loss * torch.inf if sick.training.marks.step >= 6 and not seen else loss

    Through(sick, meet)
    fill = sick.training.fill

    def watched(found: checkpoint.Checkpoint) -> None:
        fill(found)
        seen.append(found.step)

    sick.training.fill = watched  # type: ignore[method-assign]
    ended = sick.training.run()
    assert seen == [4]
    assert ended.step == recipe.steps
    assert ended.reason == "steps"
    assert sick.training.marks.setbacks == 1
    assert any(f"back from update {6 + MOST_BAD} to 4, with 0.5 times the learning rate" in note for note in sick.notes)
    untroubled = toy(tmp_path / "other", recipe).training.rate(recipe.steps or 0)
    assert sick.training.rate(recipe.steps or 0) == pytest.approx(untroubled / 2)
    assert all(bool(tensor.isfinite().all()) for tensor in sick.weights().values())


def test_after_too_many_setbacks_training_ends_with_advice(tmp_path: Path) -> None:
    sick = toy(tmp_path, replace(RECIPE, steps=1000, save_every=2), validated=False)
    Through(sick, lambda _, loss: loss * torch.nan if sick.training.marks.step >= 3 else loss)
    with pytest.raises(TrainError, match=r"training diverges; lower the learning rate \(--lr, now .*set --clip-norm 1"):
        sick.training.run()
    assert sum("back from update" in note for note in sick.notes) == MOST_SETBACKS


def test_without_a_checkpoint_to_go_back_to_training_ends_with_advice(tmp_path: Path) -> None:
    sick = toy(tmp_path, replace(RECIPE, steps=1000, save_every=500), validated=False)
    Through(sick, lambda _, loss: loss * torch.nan)
    with pytest.raises(TrainError, match="the last 10 gradients up to update 10 are not finite"):
        sick.training.run()


# ---- validation, the best, the end -----------------------------------------------------------------------------------


def test_it_ends_when_patience_does(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1000, valid_every=2, save_every=100, patience=2)
    made = toy(tmp_path, recipe, judge=falling([5.0, 4.0, 7.0, 6.0, 6.9]))
    made.training.loss_of = lambda _: 1.0  # type: ignore[method-assign]
    ended = made.training.run()
    assert (ended.reason, ended.step) == ("patience", 10)
    assert [(event.step, event.best, event.waited) for event in made.validations] == [
        (2, True, 0), (4, False, 1), (6, True, 0), (8, False, 1), (10, False, 2),
    ]  # fmt: skip
    assert made.training.known()[-1] == 10


def test_a_loss_that_falls_is_worth_waiting_for_whatever_the_scores_say(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1000, warmup=0, valid_every=2, save_every=100, patience=2)
    made = toy(tmp_path, recipe, judge=falling([5.0] + [4.0] * 5))
    losses = iter([5.0, 4.0, 3.0, 2.0, 2.0, 2.0])
    made.training.loss_of = lambda _: next(losses)  # type: ignore[method-assign]
    assert (made.training.run().step, made.validations[-1].waited) == (12, 5)


def test_nobody_loses_patience_while_the_learning_rate_still_rises(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1000, warmup=8, valid_every=2, save_every=100, patience=1)
    made = toy(tmp_path, recipe, judge=falling([5.0] + [4.0] * 5))
    made.training.loss_of = lambda _: 1.0  # type: ignore[method-assign]
    assert made.training.run().step == 10


def test_the_last_step_is_validated_and_saved_whatever_its_number(tmp_path: Path) -> None:
    made = toy(tmp_path, replace(RECIPE, steps=5))
    assert made.training.run().reason == "steps"
    assert [event.step for event in made.validations] == [3, 5]
    assert [event.step for event in made.saved] == [3, 5]


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_folder_holds_the_weights_of_the_best_validation(tmp_path: Path, ema: float) -> None:
    """With a running mean these are the mean's, and the weights themselves go on untouched."""
    met: list[dict[str, Tensor]] = []
    scores = iter([1.0, 3.0, 2.0])

    def judge(of: Seq2Seq) -> Judged:
        met.append({name: tensor.detach().clone() for name, tensor in of.named_parameters()})
        return Judged(figures={"bleu": 0.0, "chrf": next(scores), "exact": 0.0})

    recipe = replace(RECIPE, steps=9, ema=ema)
    made = toy(tmp_path, recipe, judge=judge)
    made.training.run()
    assert made.training.marks.best_step == 6
    assert made.training.marks.best == 3.0
    assert same(published(tmp_path), met[1])
    plain = toy(tmp_path / "plain", replace(recipe, ema=0.0))
    plain.training.run()
    assert same(made.weights(), plain.weights())
    assert same(met[2], made.weights()) == (not ema)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_no_number_is_never_the_best(tmp_path: Path, wrong: float) -> None:
    made = toy(tmp_path, judge=falling([wrong, 1.0]))
    made.training.run()
    assert [event.best for event in made.validations] == [False, True]


def test_the_loss_of_a_validation_is_the_cross_entropy_of_every_token(tmp_path: Path) -> None:
    made = toy(tmp_path, replace(RECIPE, label_smoothing=0.3))
    made.training.run()
    assert made.training.model.training
    objective = Objective(made.training.model, smoothing=0.0).eval()
    assert made.training.valid is not None
    every = [made.training.valid.batch(0, step) for step in range(made.training.valid.steps(0))]
    assert sum(len(batch.pairs) for batch in every) == 30
    entropy = sum(float(objective(batch)[1]) for batch in every) / sum(batch.target.tokens for batch in every)
    assert made.validations[-1].loss == pytest.approx(entropy, rel=1e-6)


def test_without_a_validation_part_each_checkpoint_is_published(tmp_path: Path) -> None:
    made = toy(tmp_path, validated=False)
    made.training.run()
    assert same(published(tmp_path), made.weights())


def test_what_is_published_and_kept_is_not_pruned_away(tmp_path: Path) -> None:
    """The last `keep_last` regular ones stay, and the newest; an odd one of an interruption goes when another comes."""
    stop = [False]
    made = toy(tmp_path, replace(RECIPE, steps=11, save_every=2, keep_last=3, average=0), stop=lambda: stop[0])
    made.training.run()
    assert made.training.known() == [6, 8, 10, 11]
    longer = toy(tmp_path, replace(RECIPE, steps=13, save_every=2, keep_last=3, average=0))
    found = checkpoint.newest(tmp_path / "state", print)
    assert found is not None
    longer.training.fill(found)
    longer.training.run()
    assert longer.training.known() == [8, 10, 12, 13]


# ---- the recipe ------------------------------------------------------------------------------------------------------


def test_two_batches_of_an_update_give_the_gradient_of_both(tmp_path: Path) -> None:
    """After one update Adam's mean is a tenth of the first gradient."""
    made = toy(tmp_path, replace(RECIPE, accumulate=2), dropout=0.0)
    group, after = next(made.training.updates())
    made.training.learn(group, after)
    of = model(dropout=0.0)
    objective, every = Objective(of).train(), [batches().batch(0, 0), batches().batch(0, 1)]
    loss = (objective(every[0])[0] + objective(every[1])[0]) / sum(batch.target.tokens for batch in every)
    loss.backward()
    assert len(group) == 2
    assert (made.training.marks.epoch, made.training.marks.at) == after == (0, 2)
    for name, parameter in of.named_parameters():
        assert parameter.grad is not None
        mean = made.training.optimiser.tensors()[f"{name}:exp_avg"]
        torch.testing.assert_close(10 * mean, parameter.grad, rtol=1e-4, atol=1e-7)


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(tmp_path: Path) -> None:
    """Adam divides a gradient's length out again, so that it is seen in its state: a tenth of the first gradient."""
    lengths = {}
    for longest in (0.0, 0.01):
        made = toy(tmp_path, replace(RECIPE, clip_norm=longest), dropout=0.0)
        made.training.learn(*next(made.training.updates()))
        means = [t for name, t in made.training.optimiser.tensors().items() if name.endswith(":exp_avg")]
        lengths[longest] = 10 * float(torch.cat([mean.flatten() for mean in means]).norm())
    assert lengths[0.0] > 0.1
    assert lengths[0.01] == pytest.approx(0.01, rel=1e-3)


def test_the_running_mean_follows_the_weights(tmp_path: Path) -> None:
    made = toy(tmp_path, replace(RECIPE, ema=0.5))
    mean = made.weights()
    updates = made.training.updates()
    for step in range(1, 9):
        made.training.learn(*next(updates))
        decay = min(0.5, (1 + step) / (10 + step))
        mean = {name: decay * mean[name] + (1 - decay) * now for name, now in made.weights().items()}
        assert furthest(mean, made.training.ema) < 1e-6


def test_rdrop_changes_what_is_learned(tmp_path: Path) -> None:
    weights = []
    for rdrop in (0.0, 5.0):
        made = toy(tmp_path, replace(RECIPE, rdrop=rdrop), dropout=0.3)
        made.training.learn(*next(made.training.updates()))
        weights.append(made.weights())
    assert furthest(*weights) > 1e-4


def test_it_learns(tmp_path: Path) -> None:
    made = toy(tmp_path, replace(RECIPE, steps=60, lr=1e-2, valid_every=20, save_every=60))
    made.training.run()
    losses = [event.loss for event in made.validations]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.9 * losses[0]
    progress = made.of(Progress)
    assert progress[-1].loss < progress[0].loss
    assert progress[-1].step == 60


# ---- the mean of checkpoints -----------------------------------------------------------------------------------------


def test_the_checkpoints_hold_what_a_mean_is_taken_of(tmp_path: Path) -> None:
    made = toy(tmp_path, replace(RECIPE, save_every=2, valid_every=100), validated=False)
    seen: list[dict[str, Tensor]] = []
    save = made.training.save

    def watched() -> None:
        seen.append({name: tensor.double() for name, tensor in made.weights().items()})
        save()

    made.training.save = watched  # type: ignore[method-assign]
    made.training.run()
    folders = [tmp_path / "state" / f"step-{step:08d}" for step in (2, 4, 6)]
    expected = {name: ((seen[0][name] + seen[1][name] + seen[2][name]) / 3).float() for name in seen[0]}
    means = mean_weights(folders)
    for name, mean in means.items():
        torch.testing.assert_close(mean, expected[name], rtol=0, atol=0)
    made.training.load_weights(means)
    assert same(made.weights(), means)


# ---- stopping and going on -------------------------------------------------------------------------------------------


def run_on(out: Path, recipe: TrainConfig, stop: Callable[[Toy], bool] = lambda _: False, **how: Any) -> Toy:
    """One call of the command: from the newest checkpoint, if there is one."""
    holder: list[Toy] = []
    made = toy(out, recipe, stop=lambda: bool(holder) and stop(holder[0]), **how)
    holder.append(made)
    found = checkpoint.newest(out / "state", print)
    if found is not None:
        made.training.fill(found)
    made.training.run()
    return made


def kept(one: Toy) -> dict[str, Tensor]:
    return {
        f"{group}/{name}": t for group, tensors in one.training.kept().tensors.items() for name, t in tensors.items()
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

    def now_and_then(_: Toy) -> bool:
        asked[0] += 1
        return asked[0] % 14 == 0

    calls = 0
    while True:
        calls += 1
        broken = run_on(tmp_path / "broken", replace(recipe, workers=2), now_and_then, layout=layout)
        if broken.training.marks.step == recipe.steps and broken.training.marks.validated == recipe.steps:
            break
        assert calls < 30
    assert calls > 2
    assert same(kept(unbroken), kept(broken))
    one, other = vars(unbroken.training.marks), vars(broken.training.marks)
    assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert same(published(tmp_path / "unbroken"), published(tmp_path / "broken"))


def test_a_stop_inside_a_validation_repeats_that_validation_when_the_run_goes_on(tmp_path: Path) -> None:
    stopped = [True]

    def judge(_: Seq2Seq) -> Judged:
        if stopped[0]:
            raise Stopping
        return Judged(figures={"bleu": 1.0, "chrf": 2.0, "exact": 3.0})

    made = run_on(tmp_path, RECIPE, judge=judge)
    assert made.training.marks.step == 3
    assert not made.validations
    assert made.training.known() == [3]
    stopped[0] = False
    again = run_on(tmp_path, RECIPE, judge=judge)
    assert [event.step for event in again.validations] == [3, 6]


def test_two_runs_with_one_seed_are_equal_and_with_another_are_not(tmp_path: Path) -> None:
    first, second = run_on(tmp_path / "a", RECIPE), run_on(tmp_path / "b", RECIPE)
    third = run_on(tmp_path / "c", replace(RECIPE, seed=2))
    assert same(first.weights(), second.weights())
    assert not same(first.weights(), third.weights())


def test_a_checkpoint_of_other_text_is_refused(tmp_path: Path) -> None:
    run_on(tmp_path, RECIPE)
    other = toy(tmp_path)
    other.training.identity = {"data": "another"}
    found = checkpoint.newest(tmp_path / "state", print)
    assert found is not None
    with pytest.raises(TrainError, match=r"made with other data; give the data of then, or another --out"):
        other.training.fill(found)
