"""How weights follow their gradients: the paper's Adam, AdamW, or Muon for matrices; and what a checkpoint keeps of it.

All of torch's own, fused where that exists: one pass over the weights instead of a dozen. A fused optimizer skips an
update whose gradient is not finite by itself (`found_inf`), so that a GPU need not wait to be asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attent.training.config import TrainConfig, TrainError
from attent.training.distributed import distribute_like

NamedParameters = Mapping[str, nn.Parameter]


class CombinedOptimizer:
    """One optimizer or, with Muon, two, as one."""

    def __init__(self, parameters: NamedParameters, config: TrainConfig) -> None:
        self.parameters = parameters
        self.fused = _can_fuse(parameters.values())
        self.optimizers = list(_build_optimizers(parameters, config, self.fused))
        self.lr_tensor: Tensor | None = None

    def step(self, lr: float, found_inf: Tensor) -> None:
        """An update, unless `found_inf` is 1."""
        self.set_lr(lr)
        self.update_weights(found_inf)

    def set_lr(self, lr: float) -> None:
        if self.lr_tensor is not None:
            self.lr_tensor.fill_(lr)
            return
        for part in self.optimizers:
            for group in part.param_groups:
                group["lr"] = lr

    def update_weights(self, found_inf: Tensor) -> None:
        """By the learning rate that is set."""
        for part in self.optimizers:
            if isinstance(part, torch.optim.Muon) or not self.fused:
                if not found_inf.item():
                    part.step()
            else:
                capturing = found_inf.is_cuda and torch.cuda.is_current_stream_capturing()
                for group in part.param_groups:
                    group["capturable"] = capturing  # fused, it always is; torch wants it said, and only then
                part.found_inf, part.grad_scale = found_inf, None  # type: ignore[attr-defined]
                part.step()

    def is_capturable(self) -> bool:
        """Whether an update never asks the device."""
        return self.fused and not any(isinstance(part, torch.optim.Muon) for part in self.optimizers)

    def use_lr_tensor(self) -> None:
        """From now on the learning rate stands in a tensor, where a recorded update finds that of its turn."""
        device = next(iter(self.parameters.values())).device
        # torch's kernels read a float32 on a GPU, and a float64 is the float itself on a CPU.
        self.lr_tensor = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        for part in self.optimizers:
            for group in part.param_groups:
                group["lr"] = self.lr_tensor

    def zero_grad(self) -> None:
        for part in self.optimizers:
            part.zero_grad(set_to_none=True)

    def get_state(self) -> dict[str, Tensor]:
        """All of its state by `name of the parameter:name of the number`."""
        return {
            f"{name}:{key}": value
            for name, parameter in self.parameters.items()
            for part in self.optimizers
            for key, value in part.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Go on with the state that `tensors` gave before, here or in another number of processes."""
        for part in self.optimizers:
            owned = {id(parameter) for group in part.param_groups for parameter in group["params"]}
            for name, parameter in self.parameters.items():
                if id(parameter) in owned:
                    state = dict(_select_parameter_state(saved, name))
                    part.state[parameter] = {
                        key: distribute_like(value, parameter).clone() for key, value in state.items()
                    }


def _select_parameter_state(tensors: Mapping[str, Tensor], name: str) -> Iterator[tuple[str, Tensor]]:
    for full, tensor in tensors.items():
        owner, _, key = full.rpartition(":")
        if owner == name:
            yield key, tensor


def _build_optimizers(parameters: NamedParameters, config: TrainConfig, fused: bool) -> Iterator[torch.optim.Optimizer]:
    rest = dict(parameters)
    if config.optimizer == "muon":
        if any(parameter.device.type == "cpu" for parameter in parameters.values()):
            raise TrainError(
                "`train.optimizer` muon needs a GPU: on a CPU an update takes 300 times as long; take adamw"
            )
        matrices = {
            name: p
            for name, p in parameters.items()
            if p.dim() == 2 and "embedding" not in name and "output" not in name
        }
        rest = {name: parameter for name, parameter in parameters.items() if name not in matrices}
        if matrices:
            # Its updates have the size that AdamW's have, so that one learning rate serves both.
            yield torch.optim.Muon(
                list(matrices.values()), weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
    if not rest:
        return
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    decay = config.weight_decay if config.optimizer != "adam" else 0.0
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


def compute_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The length of all gradients together; a tensor, so that a GPU need not wait."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], grad_norm: Tensor, max_norm: float) -> None:
    """Gradients to at most this length, in place."""
    factor = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads and not any(isinstance(grad, DTensor) for grad in grads):
        torch._foreach_mul_(grads, factor)
        return
    for grad in grads:
        grad.mul_(factor)
