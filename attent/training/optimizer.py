"""The optimizer: the paper's Adam, AdamW, or Muon for matrices, and its state in checkpoints.

Fused kernels of torch where they exist: one pass over the weights instead of a dozen. A fused optimizer skips a step
with a non-finite gradient on the device (`found_inf`), without a host synchronization.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from attent.training.distributed import distribute_like, is_sharded, to_full_tensor
from attent.training.run_options import TrainConfig, TrainError

NamedParameters = Mapping[str, nn.Parameter]
# Of Keller Jordan's Muon, as in torch.
MUON_MOMENTUM, NEWTON_SCHULZ = 0.95, (3.4445, -4.7750, 2.0315)


class CombinedOptimizer:
    """One torch optimizer or, with Muon, two."""

    def __init__(self, parameters: NamedParameters, config: TrainConfig) -> None:
        self.parameters = parameters
        self.fused = all(p.device.type in ("cuda", "cpu", "mps") and p.is_floating_point() for p in parameters.values())
        self.optimizers = list(_build_optimizers(parameters, config, self.fused))
        self.lr_tensor: Tensor | None = None

    def set_lr(self, lr: float) -> None:
        if self.lr_tensor is not None:
            self.lr_tensor.fill_(lr)
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def update_weights(self, found_inf: Tensor) -> None:
        """Update the weights with the current learning rate, unless `found_inf` is 1."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.Muon) or not self.fused:
                if not found_inf.item():
                    optimizer.step()
            else:
                capturing = found_inf.is_cuda and torch.cuda.is_current_stream_capturing()
                for group in optimizer.param_groups:
                    group["capturable"] = capturing  # torch requires the flag, but only during capture
                optimizer.found_inf, optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]
                optimizer.step()

    def is_capturable(self) -> bool:
        """True if a step needs no host synchronization."""
        return self.fused and not any(isinstance(optimizer, torch.optim.Muon) for optimizer in self.optimizers)

    def use_lr_tensor(self) -> None:
        """Keep the learning rate in a tensor, which captured steps read."""
        device = next(iter(self.parameters.values())).device
        # torch's CUDA kernels read float32; on a CPU, float64 gives the same result as a Python float.
        self.lr_tensor = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr_tensor

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def get_state(self) -> dict[str, Tensor]:
        """Return the state as `parameter name:state name` -> tensor."""
        return {
            f"{name}:{key}": value
            for name, parameter in self.parameters.items()
            for optimizer in self.optimizers
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Load what `get_state` returned, in any number of processes."""
        for optimizer in self.optimizers:
            owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for name, parameter in self.parameters.items():
                if id(parameter) in owned:
                    optimizer.state[parameter] = {
                        full.removeprefix(f"{name}:"): distribute_like(value, parameter).clone()
                        for full, value in saved.items()
                        if full.rpartition(":")[0] == name
                    }


def _build_optimizers(parameters: NamedParameters, config: TrainConfig, fused: bool) -> Iterator[torch.optim.Optimizer]:
    rest = dict(parameters)
    if config.optimizer == "muon":
        if any(parameter.device.type == "cpu" for parameter in parameters.values()):
            raise TrainError("`train.optimizer` muon needs a GPU (a step takes 300 times as long on a CPU); use adamw")
        matrices = select_block_matrices(parameters)
        rest = {name: parameter for name, parameter in parameters.items() if name not in matrices}
        if any(is_sharded(parameter) for parameter in matrices.values()):
            yield torch.optim.Muon(
                list(matrices.values()), weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        elif matrices:
            yield BatchedMuon(matrices.values(), config.weight_decay)
    if not rest:
        return
    optimizer_class = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    decay = config.weight_decay if config.optimizer != "adam" else 0.0
    groups = [
        {"params": [p for p in rest.values() if (p.dim() >= 2) is matrix], "weight_decay": decay if matrix else 0.0}
        for matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    yield optimizer_class(groups, lr=1e-3, betas=config.betas, eps=config.eps, fused=fused)


class BatchedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` with the matrices of each shape in one tensor, and without host synchronization.

    One by one, the 15 products of each matrix are small kernels, and a step takes 9 times as long as Adam's. Updates
    are scaled to AdamW's RMS, so that one learning rate serves both. If `found_inf` is 1, nothing changes.
    """

    found_inf: Tensor | None = None

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 1e-3, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group["lr"], group["weight_decay"])

    def _update(self, parameters: list[Tensor], lr: float | Tensor, weight_decay: float) -> None:
        """Update matrices of one shape."""
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        old = torch.stack(buffers)
        grads = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
        if self.found_inf is not None:
            grads = torch.where(self.found_inf.bool(), old, grads)  # the momentum stays, and so do the weights
            lr = lr * (1 - self.found_inf)
        momentum = old.lerp(grads, 1 - MUON_MOMENTUM)
        updates = orthogonalize(grads.lerp(momentum, MUON_MOMENTUM)).to(momentum.dtype)
        torch._foreach_copy_(buffers, list(momentum))
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        torch._foreach_sub_(parameters, list(updates * (lr * 0.2 * math.sqrt(max(updates.shape[1:])))))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of each matrix by about 1 with five Newton-Schulz iterations; (N, A, B)."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if x.shape[1] > x.shape[2] else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


def select_block_matrices(parameters: NamedParameters) -> dict[str, nn.Parameter]:
    """Return the matrices of the linear layers in transformer blocks, which Muon is made for.

    All 2-D parameters in `blocks` are such matrices; embeddings, position tables and output layers are outside of it.
    """
    return {name: p for name, p in parameters.items() if p.dim() == 2 and "blocks" in name.split(".")}


def compute_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the global gradient norm as a tensor, without a host synchronization."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return to_full_tensor(torch.nn.utils.get_total_norm(grads))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], grad_norm: Tensor, max_norm: float) -> None:
    """Scale the gradients to at most `max_norm`, in place."""
    factor = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads and not any(is_sharded(grad) for grad in grads):
        torch._foreach_mul_(grads, factor)
        return
    for grad in grads:
        grad.mul_(factor)
