"""Training steps as CUDA graphs: a step launches a thousand kernels, slower than a GPU runs those of a small model.

A graph reads and writes the same memory at each replay, so a batch is copied into static tensors, and whatever else
changes (learning rate, number of targets) is in tensors too.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attent.nn.kernels.cuda_graphs import capture_graph
from attent.training.tasks.base import TrainBatch

EAGER_STEPS = 3  # eager steps of each shape: they compile, and meet out-of-memory errors where those are handled
MAX_GRAPHS = 8  # with more shapes than this, capturing does not pay
MAX_IN_FLIGHT = 8  # steps: the GPU never waits for the host, and the host learns of non-finite gradients soon enough
HOST_FIELDS = ("num_tokens", "num_targets", "flat_tensor")  # of a batch, which no kernel reads
MIN_FREE_MEMORY = 0.25  # of the GPU's memory, for validation between steps

StepFunction = Callable[[], None]
Capture = Callable[[StepFunction], StepFunction]  # returns a function that repeats the step on the same tensors


def make_cuda_capture(device: torch.device) -> Capture:
    """Return a function that captures steps as CUDA graphs, which share one memory pool."""
    stream, graphs, pool = torch.cuda.Stream(device), weakref.WeakSet[torch.cuda.CUDAGraph](), None

    def capture(step: StepFunction) -> StepFunction:
        nonlocal pool
        if not graphs:  # torch frees a pool with its last graph, and does not accept its handle again
            pool = torch.cuda.graph_pool_handle()
        try:
            graph = capture_graph(step, pool=pool, stream=stream)
        except RuntimeError:  # undo what torch leaves: the allocator serves the pool, the generator knows the capture
            index = torch.cuda.current_device() if device.index is None else device.index
            with suppress(RuntimeError):  # the capture ended properly, as after an out-of-memory error
                torch._C._cuda_endAllocateToPool(index, pool)  # type: ignore[arg-type]
            fresh = torch.Generator(torch.device("cuda", index))
            torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())
            raise
        graphs.add(graph)
        return graph.replay

    return capture


class StepGraphCache:
    def __init__(self, step: Callable[[TrainBatch], None], device: torch.device, capture: Capture) -> None:
        self.step, self.device, self.capture = step, device, capture
        self.in_flight = InFlightQueue() if device.type == "cuda" else None
        self.graphs: dict[Hashable, StepGraph] = {}
        self.signature_counts: Counter[Hashable] = Counter()
        self.failure: str | None = None  # why capturing failed

    def get_or_capture(self, batch: TrainBatch) -> StepGraph | None:
        """Return the graph for batches of this shape; captured now if enough of them have been seen."""
        signature = get_signature(batch)
        graph = self.graphs.get(signature)
        if graph is not None or self.failure is not None:
            return graph
        self.signature_counts[signature] += 1
        if self.signature_counts[signature] > EAGER_STEPS and len(self.graphs) < MAX_GRAPHS:
            try:
                graph = self.graphs[signature] = StepGraph(batch, self.device, self.step, self.capture)
            except RuntimeError as error:  # out of memory, or an operation that cannot be captured
                self.clear()
                self.failure = str(error).splitlines()[0]
        return graph

    def replay(self, graph: StepGraph, batch: TrainBatch, step: int, nonfinite_counts: Tensor) -> None:
        graph.load_batch(batch)
        if self.in_flight is None:
            graph.replay()
            return
        self.in_flight.start_step(batch, step)
        graph.replay()
        self.in_flight.end_step(nonfinite_counts)

    def clear(self) -> bool:
        had_graphs = bool(self.graphs)
        if self.in_flight is not None:
            self.in_flight.synchronize()
            self.in_flight.nonfinite_counts = [0.0, 0.0]
        self.graphs.clear()
        return had_graphs

    def free_memory_if_low(self) -> None:
        """Delete the graphs if little memory is free; capturing again takes the time of a few steps."""
        if self.in_flight is not None:
            self.in_flight.synchronize()
            free, total = torch.cuda.mem_get_info(self.device)
            if free < MIN_FREE_MEMORY * total and self.clear():
                torch.cuda.empty_cache()


class StepGraph:
    def __init__(
        self, batch: TrainBatch, device: torch.device, step: Callable[[TrainBatch], None], capture: Capture
    ) -> None:
        self.static_batch = batch.to(device)  # a copy without cached properties, which the capture must compute
        self.replay = capture(lambda: step(self.static_batch))

    def load_batch(self, batch: TrainBatch) -> None:
        # The one tensor that all tensors of a batch are views of, if there is one.
        static_flat, flat = (getattr(side, "flat_tensor", None) for side in (self.static_batch, batch))
        if isinstance(static_flat, Tensor) and isinstance(flat, Tensor):
            static_flat.copy_(flat, non_blocking=True)
            return
        for static, new in zip(list_tensors(self.static_batch), list_tensors(batch), strict=True):
            static.copy_(new, non_blocking=True)


def iter_kernel_inputs(value: Any) -> Iterator[Any]:
    """Yield the tensors and constants of a batch that kernels may read, so no arrays of the host."""
    if is_dataclass(value):
        for field in fields(value):
            if field.name not in HOST_FIELDS and not field.name.startswith("_"):
                yield from iter_kernel_inputs(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iter_kernel_inputs(item)
    elif not isinstance(value, np.ndarray):
        yield value


def list_tensors(batch: TrainBatch) -> list[Tensor]:
    return [value for value in iter_kernel_inputs(batch) if isinstance(value, Tensor)]


def get_signature(batch: TrainBatch) -> Hashable:
    inputs = iter_kernel_inputs(batch)
    return tuple((value.shape, value.dtype) if isinstance(value, Tensor) else value for value in inputs)


@dataclass(frozen=True)
class InFlightStep:
    step: int
    batch: TrainBatch  # keeps its memory alive until the GPU has read it
    start_event: torch.cuda.Event
    end_event: torch.cuda.Event
    nonfinite_counts: Tensor  # in pinned memory, valid after `end_event`


class InFlightQueue:
    """Steps that were launched and are not finished; of the finished ones, the GPU's own timing."""

    def __init__(self) -> None:
        self.steps: deque[InFlightStep] = deque()
        self.host_slots = torch.zeros(MAX_IN_FLIGHT + 1, 2, pin_memory=True)
        self.count = 0
        self.nonfinite_counts: list[float] = [0.0, 0.0]  # of the last finished step: in a row, in total
        self.finished_step = 0
        self.last_end_event: torch.cuda.Event | None = None  # of the step before, if nothing ran in between
        self.tokens = self.num_targets = 0
        self.busy_ms = self.total_ms = 0.0

    def start_step(self, batch: TrainBatch, step: int) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.steps.append(InFlightStep(step, batch, start, end, self.host_slots[self.count % len(self.host_slots)]))
        self.count += 1
        start.record()

    def end_step(self, nonfinite_counts: Tensor) -> None:
        newest = self.steps[-1]
        newest.nonfinite_counts.copy_(nonfinite_counts, non_blocking=True)
        newest.end_event.record()
        while len(self.steps) > MAX_IN_FLIGHT:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step = self.steps.popleft()
        step.end_event.synchronize()
        self.nonfinite_counts, self.finished_step = step.nonfinite_counts.tolist(), step.step
        if self.last_end_event is not None:
            self.busy_ms += step.start_event.elapsed_time(step.end_event)
            self.total_ms += self.last_end_event.elapsed_time(step.end_event)
            self.tokens += step.batch.num_tokens
            self.num_targets += step.batch.num_targets
        self.last_end_event = step.end_event

    def synchronize(self) -> None:
        while self.steps:
            self._finish_oldest()
        self.last_end_event = None

    def take_throughput(self) -> dict[str, Any]:
        """Return the throughput of the steps that finished since the last call, as fields of `Progress`."""
        throughput = {}
        if seconds := self.total_ms / 1000:
            throughput = {
                "tokens_per_second": self.tokens / seconds,
                "targets_per_second": self.num_targets / seconds,
                "gpu_busy": min(1.0, self.busy_ms / self.total_ms),
            }
        self.tokens = self.num_targets = 0
        self.busy_ms = self.total_ms = 0.0
        return throughput
