"""How weights follow their gradients: the paper's Adam, AdamW, or Muon for matrices; and what a checkpoint keeps of it.

All of torch's own, fused where that exists: one pass over the weights instead of a dozen. A fused optimiser skips an
update whose gradient is not finite by itself (`found_inf`), so that a GPU need not wait to be asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attent.train.config import TrainConfig, TrainError
from attent.train.team import placed

Named = Mapping[str, nn.Parameter]


class Optimiser:
    """One optimiser or, with Muon, two, as one."""

    def __init__(self, named: Named, config: TrainConfig) -> None:
        self.named = named
        self.fused = _can_fuse(named.values())
        self.parts = list(_parts(named, config, self.fused))
        self.rate: Tensor | None = None

    def step(self, lr: float, found_inf: Tensor) -> None:
        """An update, unless `found_inf` is 1."""
        self.set_rate(lr)
        self.update(found_inf)

    def set_rate(self, lr: float) -> None:
        if self.rate is not None:
            self.rate.fill_(lr)
            return
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr

    def update(self, found_inf: Tensor) -> None:
        """By the learning rate that is set."""
        for part in self.parts:
            if isinstance(part, torch.optim.Muon) or not self.fused:
                if not found_inf.item():
                    part.step()
            else:
                capturing = found_inf.is_cuda and torch.cuda.is_current_stream_capturing()
                for group in part.param_groups:
                    group["capturable"] = capturing  # fused, it always is; torch wants it said, and only then
                part.found_inf, part.grad_scale = found_inf, None  # type: ignore[attr-defined]
                part.step()

    def can_be_recorded(self) -> bool:
        """Whether an update never asks the device."""
        return self.fused and not any(isinstance(part, torch.optim.Muon) for part in self.parts)

    def hold_rate(self) -> None:
        """From now on the learning rate stands in a tensor, where a recorded update finds that of its turn."""
        device = next(iter(self.named.values())).device
        # torch's kernels read a float32 on a GPU, and a float64 is the float itself on a CPU.
        self.rate = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.rate

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by `name of the parameter:name of the number`."""
        return {
            f"{name}:{key}": value
            for name, parameter in self.named.items()
            for part in self.parts
            for key, value in part.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with the state that `tensors` gave before, here or in another number of processes."""
        for part in self.parts:
            owned = {id(parameter) for group in part.param_groups for parameter in group["params"]}
            for name, parameter in self.named.items():
                if id(parameter) in owned:
                    state = dict(_of(tensors, name))
                    part.state[parameter] = {key: placed(value, parameter).clone() for key, value in state.items()}


def _of(tensors: Mapping[str, Tensor], name: str) -> Iterator[tuple[str, Tensor]]:
    for full, tensor in tensors.items():
        owner, _, key = full.rpartition(":")
        if owner == name:
            yield key, tensor


def _parts(named: Named, config: TrainConfig, fused: bool) -> Iterator[torch.optim.Optimizer]:
    rest = dict(named)
    if config.optimiser == "muon":
        if any(parameter.device.type == "cpu" for parameter in named.values()):
            raise TrainError(
                "`train.optimiser` muon needs a GPU: on a CPU an update takes 300 times as long; take adamw"
            )
        matrices = {
            name: p for name, p in named.items() if p.dim() == 2 and "embedding" not in name and "output" not in name
        }
        rest = {name: parameter for name, parameter in named.items() if name not in matrices}
        if matrices:
            # Its updates have the size that AdamW's have, so that one learning rate serves both.
            yield torch.optim.Muon(
                list(matrices.values()), weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
    if not rest:
        return
    kind = torch.optim.Adam if config.optimiser == "adam" else torch.optim.AdamW
    decay = config.weight_decay if config.optimiser != "adam" else 0.0
    groups = [
        {"params": [p for p in rest.values() if (p.dim() >= 2) is matrix], "weight_decay": decay if matrix else 0.0}
        for matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    yield kind(groups, lr=1e-3, betas=config.betas, eps=config.eps, fused=fused)


def _can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    return all(
        parameter.device.type in ("cuda", "cpu", "mps") and parameter.is_floating_point() for parameter in parameters
    )


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The length of all gradients together; a tensor, so that a GPU need not wait."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def shorten(parameters: Iterable[nn.Parameter], norm: Tensor, longest: float) -> None:
    """Gradients to at most this length, in place."""
    factor = (longest / (norm + 1e-6)).clamp(max=1.0)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads and not any(isinstance(grad, DTensor) for grad in grads):
        torch._foreach_mul_(grads, factor)
        return
    for grad in grads:
        grad.mul_(factor)
