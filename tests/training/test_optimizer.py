"""Updates are torch's own, number for number; one that is skipped leaves no trace; the state comes back bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from attent.models import build, presets
from attent.nn.positions import LearnedConfig
from attent.training.config import TrainConfig, TrainError
from attent.training.optimizer import (
    BatchedMuon,
    CombinedOptimizer,
    _build_optimizers,
    clip_gradients,
    compute_grad_norm,
    orthogonalize,
    select_block_matrices,
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


def ours(kind: Literal["adam", "adamw"] = "adam", weight_decay: float = 0.1) -> tuple[nn.Module, CombinedOptimizer]:
    of = layers()
    return of, CombinedOptimizer(named(of), TrainConfig(optimizer=kind, weight_decay=weight_decay))


def take_step(optimizer: CombinedOptimizer, lr: float, found_inf: Tensor) -> None:
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


def test_muon_on_a_cpu_is_refused_with_a_sentence() -> None:
    with pytest.raises(TrainError, match=r"muon needs a GPU .*; use adamw"):
        CombinedOptimizer(named(layers()), TrainConfig(optimizer="muon"))


def muon_pair(lr: float = 0.1) -> tuple[nn.ParameterList, BatchedMuon, torch.optim.Muon, nn.ParameterList]:
    """Three shapes, one of them twice, with the batched optimizer and torch's own."""
    torch.manual_seed(5)
    ours = nn.ParameterList([torch.randn(*shape) for shape in ((6, 4), (4, 6), (6, 4), (5, 5))])
    theirs = nn.ParameterList([parameter.detach().clone() for parameter in ours])
    reference = torch.optim.Muon(list(theirs), lr=lr, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    batched = BatchedMuon(ours, 0.2)
    batched.param_groups[0]["lr"] = lr
    return ours, batched, reference, theirs


def test_batched_muon_updates_each_matrix_as_torch_does() -> None:
    ours, batched, reference, theirs = muon_pair()
    for step in range(4):
        gradients(ours, step)
        gradients(theirs, step)
        batched.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.03, atol=0.03)  # torch's iterations are in bfloat16
        torch.testing.assert_close(batched.state[mine]["momentum_buffer"], reference.state[other]["momentum_buffer"])


def test_orthogonalized_matrices_do_not_depend_on_their_batch() -> None:
    matrices = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
    matrices[1] *= 1000
    together = orthogonalize(matrices)
    for i in range(3):
        torch.testing.assert_close(together[i], orthogonalize(matrices[i : i + 1])[0])
        values = torch.linalg.svdvals(together[i])
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.5
    torch.testing.assert_close(orthogonalize(matrices.mT), together.mT)
    assert not orthogonalize(torch.zeros(1, 3, 3)).any()


def test_batched_muon_skips_a_step_on_the_device_and_without_a_gradient() -> None:
    ours, batched, _, _ = muon_pair()
    gradients(ours, 0)
    batched.found_inf = GO
    batched.step()
    before, momentum = weights(ours), [batched.state[p]["momentum_buffer"].clone() for p in ours]
    for parameter in ours:
        parameter.grad = torch.full_like(parameter, torch.nan)
    batched.found_inf = SKIP
    batched.step()
    assert all_equal(before, weights(ours))
    assert all_equal(momentum, [batched.state[p]["momentum_buffer"] for p in ours])
    batched.found_inf = GO
    ours[0].grad = None
    gradients(ours[1:], 1)
    batched.step()
    assert torch.equal(ours[0], before[0])
    assert not any(torch.equal(p, old) for p, old in zip(ours[1:], before[1:], strict=True))


def test_batched_muon_needs_no_host_and_reads_its_learning_rate_from_a_tensor() -> None:
    """As a captured step does; torch's own Muon needs a host synchronization."""
    results = []
    for use_tensor in (False, True):
        ours, batched, reference, theirs = muon_pair()
        combined = CombinedOptimizer(named(ours), TrainConfig(optimizer="adamw"))
        combined.optimizers = [batched]
        assert combined.is_capturable()
        if use_tensor:
            combined.use_lr_tensor()
        for step, found_inf in ((0, GO), (1, SKIP), (2, GO)):
            gradients(ours, step)
            take_step(combined, 0.05 / (1 + step), found_inf)
        assert combined.get_state().keys() == {f"{i}:momentum_buffer" for i in range(4)}
        results.append(weights(ours))
        other = CombinedOptimizer(named(theirs), TrainConfig(optimizer="adamw"))
        other.optimizers = [reference]
        assert not other.is_capturable()
        gradients(theirs, 0)
        before = weights(theirs)
        take_step(other, 0.05, SKIP)
        assert all_equal(before, weights(theirs))
        take_step(other, 0.05, GO)
        assert not all_equal(before, weights(theirs))
    for plain, from_tensor in zip(*results, strict=True):
        torch.testing.assert_close(plain, from_tensor)


def test_muon_gets_the_matrices_of_blocks_only() -> None:
    config = presets.tiny(11)
    stacks = [
        replace(stack, layers=1, positions=LearnedConfig(max_length=9)) for stack in (config.encoder, config.decoder)
    ]
    model = build(replace(config, encoder=stacks[0], decoder=stacks[1], share_embeddings=False))
    linears = {name for name, part in model.named_modules() if isinstance(part, nn.Linear) and "blocks" in name}
    assert any(name.endswith("cross_attn.output") for name in linears)
    assert {name.removesuffix(".weight") for name in select_block_matrices(named(model))} == linears


def test_muon_leaves_the_rest_to_adamw() -> None:
    config = TrainConfig(optimizer="muon", weight_decay=0.25, betas=(0.8, 0.9), eps=1e-7)
    block, outside = nn.Linear(3, 4, device="meta"), nn.Linear(4, 3, device="meta")
    parameters = {
        "encoder.blocks.0.weight": block.weight, "encoder.blocks.0.bias": block.bias, "output.weight": outside.weight,
    }  # fmt: skip
    muon, adamw = _build_optimizers(parameters, config, fused=False)
    assert isinstance(muon, BatchedMuon)
    assert [group["params"] for group in muon.param_groups] == [[block.weight]]
    assert muon.param_groups[0]["weight_decay"] == 0.25
    assert type(adamw) is torch.optim.AdamW
    matrices, vectors = adamw.param_groups
    assert (matrices["params"], matrices["weight_decay"]) == ([outside.weight], 0.25)
    assert (vectors["params"], vectors["weight_decay"]) == ([block.bias], 0.0)
    assert (matrices["betas"], matrices["eps"], matrices["lr"]) == ((0.8, 0.9), 1e-7, 1e-3)
    (only_muon,) = _build_optimizers({"blocks.0.weight": block.weight}, config, fused=False)
    assert isinstance(only_muon, BatchedMuon)
    (only_adamw,) = _build_optimizers({"output.weight": outside.weight}, config, fused=False)
    assert type(only_adamw) is torch.optim.AdamW


def test_adam_has_no_weight_decay() -> None:
    layer = nn.Linear(3, 4)
    (adam,) = _build_optimizers(named(layer), TrainConfig(optimizer="adam", weight_decay=0.5), fused=False)
    assert type(adam) is torch.optim.Adam
    assert [group["weight_decay"] for group in adam.param_groups] == [0.0, 0.0]


def test_gradients_that_are_too_long_are_shortened_and_others_stay() -> None:
    of = layers()
    gradients(of, 0)
    parameters = list(of.parameters())
    norm = compute_grad_norm(parameters)
    assert float(norm) == pytest.approx(
        float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())
    )
    directions = [p.grad.clone() for p in parameters if p.grad is not None]
    clip_gradients(parameters, norm, 2 * float(norm))
    assert all(p.grad is not None and torch.equal(p.grad, d) for p, d in zip(parameters, directions, strict=True))
    clip_gradients(parameters, norm, 0.5)
    assert float(compute_grad_norm(parameters)) == pytest.approx(0.5, rel=1e-4)
    for parameter, direction in zip(parameters, directions, strict=True):
        torch.testing.assert_close(parameter.grad, direction * 0.5 / norm, rtol=1e-4, atol=1e-7)
