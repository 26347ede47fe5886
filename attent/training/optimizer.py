"""The learning rate as a pure function of the step, and the optimizer: the paper's Adam or AdamW.

torch's fused optimizers skip steps with a non-finite gradient on the device (`found_inf`), without a host
synchronization.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from attent.training.distributed import distribute_like, to_full_tensor
from attent.training.run_options import Schedule, TrainConfig

NamedParameters = Mapping[str, nn.Parameter]


def compute_lr(step: int, *, schedule: Schedule, peak_lr: float, warmup: int, total_steps: int) -> float:
    """Return the learning rate of `step`, counted from 1: linear warm-up to `peak_lr`, then the schedule.

    `inverse_sqrt` is equation 3 of the paper, where the peak is width^-0.5 * warmup^-0.5 (`compute_paper_lr`).
    """
    if schedule == "inverse_sqrt":
        return peak_lr * min(step / max(1, warmup), math.sqrt(max(1, warmup) / step))
    ramp = min(1.0, step / max(1, warmup))
    progress = min(1.0, max(0, step - warmup) / max(1, total_steps - warmup))
    return peak_lr * ramp * 0.5 * (1 + math.cos(math.pi * progress))


def compute_paper_lr(width: int, warmup: int) -> float:
    """Return the peak learning rate of equation 3."""
    return float(width**-0.5 * max(1, warmup) ** -0.5)


class AdamOptimizer:
    """Adam or AdamW of torch for named parameters; only matrices decay."""

    def __init__(self, parameters: NamedParameters, config: TrainConfig) -> None:
        self.parameters = parameters
        self.optimizer = _build_optimizer(parameters, config)
        self.lr_tensor: Tensor | None = None

    def set_lr(self, lr: float) -> None:
        if self.lr_tensor is not None:
            self.lr_tensor.fill_(lr)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def update_weights(self, found_inf: Tensor) -> None:
        capturing = found_inf.is_cuda and torch.cuda.is_current_stream_capturing()
        for group in self.optimizer.param_groups:
            group["capturable"] = capturing  # torch requires the flag, but only during capture
        self.optimizer.found_inf, self.optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]
        self.optimizer.step()

    def use_lr_tensor(self) -> None:
        """Keep the learning rate in a tensor, which captured steps read."""
        device = next(iter(self.parameters.values())).device
        # torch's CUDA kernels read float32; on a CPU, float64 gives the same result as a Python float.
        self.lr_tensor = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_tensor

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def get_state(self) -> dict[str, Tensor]:
        """Return the state as `parameter name:state name` -> tensor."""
        return {
            f"{name}:{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            self.optimizer.state[parameter] = {
                full.removeprefix(f"{name}:"): distribute_like(value, parameter).clone()
                for full, value in saved.items()
                if full.rpartition(":")[0] == name
            }


def _build_optimizer(parameters: NamedParameters, config: TrainConfig) -> torch.optim.Optimizer:
    optimizer_class = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    decay = config.weight_decay if config.optimizer == "adamw" else 0.0
    groups = [
        {
            "params": [p for p in parameters.values() if (p.dim() >= 2) is matrix],
            "weight_decay": decay if matrix else 0.0,
        }
        for matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    return optimizer_class(groups, lr=1e-3, betas=config.betas, eps=config.eps, fused=True)


def compute_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the global gradient norm as a tensor, without a host synchronization."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return to_full_tensor(torch.nn.utils.get_total_norm(grads))
