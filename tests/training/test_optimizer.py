"""Updates are torch's own, number for number; one that is skipped leaves no trace; the state comes back bit for bit."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from attent.training.config import TrainConfig
from attent.training.optimizer import (
    AdamOptimizer,
    _build_optimizer,
    compute_grad_norm,
)

GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5))


def named(of: nn.Module) -> dict[str, nn.Parameter]:
    return dict(of.named_parameters())


def gradients(of: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in of.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def ours(kind: Literal["adam", "adamw"] = "adam", weight_decay: float = 0.1) -> tuple[nn.Module, AdamOptimizer]:
    of = layers()
    return of, AdamOptimizer(named(of), TrainConfig(optimizer=kind, weight_decay=weight_decay))


def take_step(optimizer: AdamOptimizer, lr: float, found_inf: Tensor) -> None:
    optimizer.set_lr(lr)
    optimizer.update_weights(found_inf)


def weights(of: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in of.parameters()]


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_step_by_step_the_weights_are_those_of_torchs_own(kind: Literal["adam", "adamw"]) -> None:
    of, optimizer = ours(kind)
    theirs = layers()
    decayed = [p for p in theirs.parameters() if p.dim() == 2]
    plain = [p for p in theirs.parameters() if p.dim() != 2]
    their = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](
        [{"params": decayed, "weight_decay": 0.1 if kind == "adamw" else 0.0}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        eps=1e-9,
    )
    for step in range(20):
        for one in (of, theirs):
            gradients(one, step)
        for group in their.param_groups:
            group["lr"] = 0.01 / (1 + step)
        take_step(optimizer, 0.01 / (1 + step), GO)
        their.step()
        for mine, other in zip(of.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_biases_and_norms_do_not_decay_and_matrices_do() -> None:
    of, optimizer = ours("adamw", weight_decay=0.5)
    before = {name: tensor.detach().clone() for name, tensor in named(of).items()}
    for parameter in of.parameters():
        parameter.grad = torch.zeros_like(parameter)
    take_step(optimizer, 0.1, GO)
    for name, parameter in named(of).items():
        shrunk = 0.95 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * shrunk, msg=name)


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("first", [0, 3])
def test_a_skipped_update_leaves_weights_and_state_as_if_it_had_not_been(
    kind: Literal["adam", "adamw"], first: int
) -> None:
    """Before the first real update, too, when there is no state yet."""
    (of, optimizer), (other, unbroken) = ours(kind), ours(kind)
    for step in range(6):
        if step == first:
            for parameter in of.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan)
            before = weights(of)
            take_step(optimizer, 0.01, SKIP)
            assert all_equal(before, weights(of))
        for one in (of, other):
            gradients(one, step)
        take_step(optimizer, 0.01, GO)
        take_step(unbroken, 0.01, GO)
        assert all_equal(weights(of), weights(other)), step
    left, right = optimizer.get_state(), unbroken.get_state()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_filled_with_its_state_another_goes_on_to_the_same_bits(kind: Literal["adam", "adamw"]) -> None:
    (of, optimizer), (other, resumed) = ours(kind), ours(kind)
    for step in range(8):
        if step == 4:
            other.load_state_dict(of.state_dict())
            resumed.load_state({name: tensor.clone() for name, tensor in optimizer.get_state().items()})
            back = resumed.get_state()
            assert back.keys() == optimizer.get_state().keys()
            assert len(back) == 3 * len(named(of))
            assert all(torch.equal(back[name], tensor) for name, tensor in optimizer.get_state().items())
        gradients(of, step)
        take_step(optimizer, 0.01, GO)
        if step >= 4:
            gradients(other, step)
            take_step(resumed, 0.01, GO)
    assert all_equal(weights(of), weights(other))


def test_what_fills_one_does_not_change_with_it() -> None:
    (of, optimizer), (other, resumed) = ours(), ours()
    gradients(of, 0)
    take_step(optimizer, 0.01, GO)
    kept = {name: tensor.clone() for name, tensor in optimizer.get_state().items()}
    resumed.load_state(optimizer.get_state())
    gradients(other, 1)
    take_step(resumed, 0.01, GO)
    assert all(torch.equal(kept[name], tensor) for name, tensor in optimizer.get_state().items())


def test_a_learning_rate_in_a_tensor_gives_the_same_bits() -> None:
    """Captured steps read it from there."""
    (of, optimizer), (other, from_tensor) = ours("adamw"), ours("adamw")
    from_tensor.use_lr_tensor()
    for step, found_inf in ((0, GO), (1, SKIP), (2, GO)):
        for module, stepped in ((of, optimizer), (other, from_tensor)):
            gradients(module, step)
            take_step(stepped, 0.05 / (1 + step), found_inf)
    assert all_equal(weights(of), weights(other))


def test_adam_has_no_weight_decay() -> None:
    layer = nn.Linear(3, 4)
    adam = _build_optimizer(named(layer), TrainConfig(optimizer="adam", weight_decay=0.5))
    assert type(adam) is torch.optim.Adam
    assert [group["weight_decay"] for group in adam.param_groups] == [0.0, 0.0]


def test_the_norm_of_gradients_is_that_of_all() -> None:
    of = layers()
    gradients(of, 0)
    parameters = list(of.parameters())
    norm = compute_grad_norm(parameters)
    assert float(norm) == pytest.approx(
        float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())
    )
