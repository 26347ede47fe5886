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
from attent.train.config import TrainError

PATIENCE = timedelta(minutes=30)  # the first process may tokenise a large corpus while the others wait


@dataclass(frozen=True)
class Team:
    """The processes of a run, seen from one of them."""

    device: torch.device
    rank: int = 0
    size: int = 1
    control: dist.ProcessGroup | None = None  # small messages between CPUs, whatever the gradients travel by

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.control is not None:
            dist.barrier(self.control)

    def any(self, said: bool) -> bool:
        """Whether one of them says so. All must ask at the same point."""
        if self.control is None:
            return said
        flag = torch.tensor([int(said)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, self.control)
        return bool(flag.item())

    def sum(self, numbers: Tensor) -> Tensor:
        if self.control is None:
            return numbers
        numbers = numbers.detach().cpu()
        dist.all_reduce(numbers, dist.ReduceOp.SUM, self.control)
        return numbers

    def told(self, numbers: list[float]) -> list[float]:
        """What the first process says."""
        if self.control is None:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(tensor, 0, self.control)
        return tensor.tolist()

    def wrapped(self, module: nn.Module, shard: bool) -> nn.Module:
        """The module whose backward leaves every process with the mean of all their gradients."""
        if self.size == 1:
            return module
        if not shard:
            return DistributedDataParallel(module, device_ids=[self.device] if self.device.type == "cuda" else None)
        for part in module.modules():
            if isinstance(part, Block):
                fully_shard(part)
        fully_shard(module)
        return module

    @contextmanager
    def quiet(self, module: nn.Module, last: bool) -> Iterator[None]:
        """Gradients travel once an update: with its last piece."""
        if self.size == 1 or last:
            _set_sync(module, True)
            yield
        elif isinstance(module, DistributedDataParallel):
            with module.no_sync():
                yield
        else:
            _set_sync(module, False)
            yield


def _set_sync(module: nn.Module, on: bool) -> None:
    setter = getattr(module, "set_requires_gradient_sync", None)
    if setter is not None:
        setter(on)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over several processes; all of them must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed(value: Tensor, like: Tensor) -> Tensor:
    """On the device of `like` and, where that is spread over several processes, spread as it is."""
    value = value.to(like.device)
    if isinstance(like, DTensor) and value.shape == like.shape:  # a count of steps is whole everywhere
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


LOST = ("gloo", "nccl", "connection", "broken pipe", "socket")  # in what a backend says when another has gone


@contextmanager
def missed(team: Team) -> Iterator[None]:
    """When another process goes, this one cannot go on: a sentence instead of what the backend says of its sockets."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or any(word in str(error).lower() for word in LOST)
        if team.size == 1 or not lost:
            raise
        raise TrainError(
            f"process {team.rank} of {team.size}: another process of this run has gone, so it ends here; run the same "
            "command again, and it goes on from the last checkpoint"
        ) from error


@contextmanager
def joined(device: torch.device) -> Iterator[Team]:
    """The team that a launcher has started, or a team of one."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Team(device)
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise TrainError(f"RANK is set, but {', '.join(missing)} is not: start several processes with torchrun")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Team(device, dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=PATIENCE))
    finally:
        dist.destroy_process_group()
