"""More than one process: torch.distributed is the engine, `torchrun` or any launcher that sets its variables starts it.

Every process makes the same batches and takes its share of the pieces, so that how many there are changes the speed
and not the update. Weights are copied to each (DDP), or spread over them (FSDP2) when one GPU cannot hold the model.
Only the first process talks and writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from attent.nn import Block
from attent.training.config import TrainError

TIMEOUT = timedelta(minutes=30)  # the first process may tokenise a large corpus while the others wait


@dataclass(frozen=True)
class DistributedContext:
    """The processes of a run, seen from one of them."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    control_group: dist.ProcessGroup | None = None  # small messages between CPUs, whatever the gradients travel by

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.control_group is not None:
            dist.barrier(self.control_group)

    def any_rank(self, value: bool) -> bool:
        """Whether one of them says so. All must ask at the same point."""
        if self.control_group is None:
            return value
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, self.control_group)
        return bool(flag.item())

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        if self.control_group is None:
            return values
        values = values.detach().cpu()
        dist.all_reduce(values, dist.ReduceOp.SUM, self.control_group)
        return values

    def broadcast(self, values: list[float]) -> list[float]:
        """What the first process says."""
        if self.control_group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(tensor, 0, self.control_group)
        return tensor.tolist()

    def wrap_module(self, module: nn.Module, shard: bool) -> nn.Module:
        """The module whose backward leaves every process with the mean of all their gradients."""
        if self.world_size == 1:
            return module
        if not shard:
            return DistributedDataParallel(module, device_ids=[self.device] if self.device.type == "cuda" else None)
        for part in module.modules():
            if isinstance(part, Block):
                fully_shard(part)
        fully_shard(module)
        return module

    @contextmanager
    def no_sync(self, module: nn.Module, is_last: bool) -> Iterator[None]:
        """Gradients travel once an update: with its last piece."""
        if self.world_size == 1 or is_last:
            _set_gradient_sync(module, True)
            yield
        elif isinstance(module, DistributedDataParallel):
            with module.no_sync():
                yield
        else:
            _set_gradient_sync(module, False)
            yield


def _set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    setter = getattr(module, "set_requires_gradient_sync", None)
    if setter is not None:
        setter(enabled)


def to_full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over several processes; all of them must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute_like(value: Tensor, like: Tensor) -> Tensor:
    """On the device of `like` and, where that is spread over several processes, spread as it is."""
    value = value.to(like.device)
    if isinstance(like, DTensor) and value.shape == like.shape:  # a count of steps is whole everywhere
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


CONNECTION_ERRORS = (
    "gloo",
    "nccl",
    "connection",
    "broken pipe",
    "socket",
)  # in what a backend says when another has gone


@contextmanager
def explain_lost_process(distributed: DistributedContext) -> Iterator[None]:
    """When another process goes, this one cannot go on: a sentence instead of what the backend says of its sockets."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or any(word in str(error).lower() for word in CONNECTION_ERRORS)
        if distributed.world_size == 1 or not lost:
            raise
        raise TrainError(
            f"process {distributed.rank} of {distributed.world_size}: another process of this run has gone, so it ends here; run the same "
            "command again, and it goes on from the last checkpoint"
        ) from error


@contextmanager
def init_distributed(device: torch.device) -> Iterator[DistributedContext]:
    """The team that a launcher has started, or a team of one."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield DistributedContext(device)
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise TrainError(f"RANK is set, but {', '.join(missing)} is not: start several processes with torchrun")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield DistributedContext(
            device, dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=TIMEOUT)
        )
    finally:
        dist.destroy_process_group()
