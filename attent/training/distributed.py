"""Training in several processes: torch.distributed, started by `torchrun` or any launcher that sets its variables.

Every rank makes the same batches and computes its share of the micro-batches, so that the number of ranks changes the
speed and not the gradient. Weights are replicated (DDP) or sharded (FSDP2). Only rank 0 writes files and emits events.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attent.nn import Block
from attent.training.run_options import TrainError

TIMEOUT = timedelta(minutes=30)  # rank 0 may tokenize a large corpus while the others wait
CONNECTION_ERRORS = ("gloo", "nccl", "connection", "broken pipe", "socket")  # in messages about a lost process


@dataclass(frozen=True)
class DistributedContext:
    device: torch.device
    rank: int = 0
    world_size: int = 1
    control_group: dist.ProcessGroup | None = None  # gloo, for small messages between CPUs

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.control_group is not None:
            dist.barrier(self.control_group)

    def is_true_on_any_rank(self, value: bool) -> bool:
        """True if `value` is true on any rank. All ranks must call it."""
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
        if self.control_group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(tensor, 0, self.control_group)
        return tensor.tolist()

    def wrap_module(self, module: nn.Module, shard: bool) -> nn.Module:
        if self.world_size == 1:
            return module
        if not shard:
            return DistributedDataParallel(module, device_ids=[self.device] if self.device.type == "cuda" else None)
        from torch.distributed.fsdp import fully_shard

        for submodule in module.modules():
            if isinstance(submodule, Block):
                fully_shard(submodule)
        fully_shard(module)
        return module

    @contextmanager
    def sync_gradients(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Synchronize the gradients of a backward pass over the ranks, or not (DDP's `no_sync`)."""
        if hasattr(module, "set_requires_gradient_sync"):  # FSDP2
            module.set_requires_gradient_sync(enabled)  # type: ignore[operator]
        postpone = isinstance(module, DistributedDataParallel) and not enabled
        with module.no_sync() if postpone else nullcontext():  # type: ignore[operator]
            yield


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor, whose module takes a second to import and is not needed without one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded. All ranks must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def distribute_like(value: Tensor, like: Tensor) -> Tensor:
    """Move a tensor to the device of `like`, sharded as `like` is."""
    value = value.to(like.device)
    if is_sharded(like) and value.shape == like.shape:  # a step counter is replicated
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


@contextmanager
def explain_lost_process(distributed: DistributedContext) -> Iterator[None]:
    """Raise TrainError instead of the backend's socket errors when another process has died."""
    try:
        yield
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError) or any(word in str(error).lower() for word in CONNECTION_ERRORS)
        if distributed.world_size == 1 or not is_lost:
            raise
        raise TrainError(
            f"rank {distributed.rank} of {distributed.world_size}: another process of this run has exited; run the "
            "same command again to resume from the last checkpoint"
        ) from error


@contextmanager
def init_distributed(device: torch.device) -> Iterator[DistributedContext]:
    """Join the process group that a launcher has started; without one, a single process."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield DistributedContext(device)
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise TrainError(f"RANK is set, but {', '.join(missing)} is not; start several processes with torchrun")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        yield DistributedContext(device, dist.get_rank(), dist.get_world_size(), control)
    finally:
        dist.destroy_process_group()
