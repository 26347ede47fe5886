"""Updates that an NVIDIA GPU repeats by itself. An update is a thousand kernels and more, which the host launches more
slowly than the GPU runs those of a small model: recorded once as a CUDA graph, they are launched as one.

A graph reads and writes the same memory every time, so a batch is copied into tensors that stay, and whatever else
changes (learning rate, the loss's divisor) stands in tensors too. What an update does is the loop's business (`work`).
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from attent.training.tasks.base import TrainBatch

WARMUP_STEPS = (
    3  # updates of one shape that run as usual first: they compile, and meet the end of memory where that is handled
)
MAX_GRAPHS = 4  # recordings; batches of many shapes are better not recorded at all
MAX_IN_FLIGHT = (
    8  # updates that the GPU may have before it: it never waits for the host, and the host hears of it soon enough
)
HOST_FIELDS = ("example_ids", "num_tokens", "num_targets", "flat_tensor")  # of a batch: no kernel sees these
MIN_FREE_MEMORY = 0.25  # of a GPU's memory that must be free for what comes between updates

StepFunction = Callable[[], None]
Capture = Callable[[StepFunction], StepFunction]  # of something to do, what does the same again on the same tensors


def make_cuda_capture(device: torch.device) -> Capture:
    """By a CUDA graph. All graphs share one pool: none leaves anything there that another needs."""
    stream, graphs, pool = torch.cuda.Stream(device), weakref.WeakSet[torch.cuda.CUDAGraph](), None

    def capture(work: StepFunction) -> StepFunction:
        nonlocal pool
        if not graphs:  # torch gives a pool up with the last graph of it, and lets nobody in again
            pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that make batches ask for pinned memory meanwhile: only what this thread does may spoil it.
            # The outer context gives the stream back even where a recording fails.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                work()
        except RuntimeError:
            reset_after_failed_capture(device, pool)
            raise
        graphs.add(graph)
        return graph.replay

    return capture


def reset_after_failed_capture(device: torch.device, pool: Any) -> None:
    """After a recording that failed, torch still believes itself in it: its memory, and its random numbers."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # it has ended as it should: nothing but memory was missing
        torch._C._cuda_endAllocateToPool(index, pool)
    fresh = torch.Generator(torch.device("cuda", index))
    torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())


class StepGraphCache:
    """Which batches are learned from by a recording, and the recordings."""

    def __init__(self, step: Callable[[TrainBatch], None], device: torch.device, capture: Capture) -> None:
        self.step, self.device, self.capture = step, device, capture
        self.in_flight = InFlightQueue() if device.type == "cuda" else None
        self.graphs: dict[Hashable, StepGraph] = {}
        self.signature_counts: Counter[Hashable] = Counter()
        self.failure: str | None = None  # why nothing is recorded

    def get_or_capture(self, batch: TrainBatch) -> StepGraph | None:
        """The recording for batches like this one: an earlier one, or made now where enough of them have been met."""
        kind = get_signature(batch)
        found = self.graphs.get(kind)
        if found is None and self.failure is None and self._should_capture(kind):
            try:
                found = self.graphs[kind] = StepGraph(batch, self.device, self.step, self.capture)
            except RuntimeError as error:  # memory for all of it at once, or something that a graph cannot hold
                self.clear()
                self.failure = str(error).splitlines()[0]
        return found

    def _should_capture(self, signature: Hashable) -> bool:
        self.signature_counts[signature] += 1
        return self.signature_counts[signature] > WARMUP_STEPS and len(self.graphs) < MAX_GRAPHS

    def replay(self, graph: StepGraph, batch: TrainBatch, nonfinite: Tensor) -> None:
        graph.load_batch(batch)
        if self.in_flight is None:
            graph.replay()
            return
        self.in_flight.start_step(batch)
        graph.replay()
        self.in_flight.end_step(nonfinite)

    def clear(self) -> bool:
        """Tensors of a recording were replaced, or its memory is needed. Whether there was any."""
        had = bool(self.graphs)
        if self.in_flight is not None:
            self.in_flight.synchronize()
            self.in_flight.nonfinite = [0.0, 0.0]
        self.graphs.clear()
        return had

    def free_memory(self) -> None:
        """What comes between updates needs memory too; to record again takes the time of a few updates."""
        if self.in_flight is not None:
            self.in_flight.synchronize()
            free, total = torch.cuda.mem_get_info(self.device)
            if free < MIN_FREE_MEMORY * total and self.clear():
                torch.cuda.empty_cache()


class StepGraph:
    """An update of batches of one kind, on tensors that stay."""

    def __init__(
        self, batch: TrainBatch, device: torch.device, step: Callable[[TrainBatch], None], capture: Capture
    ) -> None:
        self.static_batch = batch.to(
            device
        )  # anew: what an earlier update has worked out of its batch would be missing here
        self.replay = capture(lambda: step(self.static_batch))

    def load_batch(self, batch: TrainBatch) -> None:
        """Its numbers, in one piece where they are; they wait in line behind the update before."""
        mine, new = get_backing_tensor(self.static_batch), get_backing_tensor(batch)
        pairs = zip(list_tensors(self.static_batch), list_tensors(batch), strict=True)
        for held, given in pairs if mine is None or new is None else [(mine, new)]:
            held.copy_(given, non_blocking=True)


# ---- batches ---------------------------------------------------------------------------------------------------------


def get_backing_tensor(batch: TrainBatch) -> Tensor | None:
    """The one tensor of which all others are views, where a batch has one."""
    found = getattr(batch, "flat_tensor", None)
    return found if isinstance(found, Tensor) else None


def iter_kernel_inputs(value: Any) -> Iterator[Any]:
    """What a kernel may see of a batch: tensors, and numbers that are known to the host."""
    if is_dataclass(value):
        for field in fields(value):
            if field.name not in HOST_FIELDS and not field.name.startswith("_"):
                yield from iter_kernel_inputs(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from iter_kernel_inputs(each)
    else:
        yield value


def list_tensors(batch: TrainBatch) -> list[Tensor]:
    return [part for part in iter_kernel_inputs(batch) if isinstance(part, Tensor)]


def get_signature(batch: TrainBatch) -> Hashable:
    """A recording serves batches in which all of this agrees."""
    return tuple((part.shape, part.dtype) if isinstance(part, Tensor) else part for part in iter_kernel_inputs(batch))


# ---- what the GPU has before it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InFlightStep:
    """An update that was launched."""

    batch: TrainBatch  # whose memory the GPU may still have to read
    start_event: torch.cuda.Event
    end_event: torch.cuda.Event
    nonfinite: Tensor  # in memory of the host, once it has ended


class InFlightQueue:
    """The updates that the GPU has not done yet; and of those that it has done how long they took, without a wait."""

    def __init__(self) -> None:
        self.steps: deque[InFlightStep] = deque()
        self.host_slots = torch.zeros(MAX_IN_FLIGHT + 1, 2, pin_memory=True)
        self.count = 0
        self.nonfinite: list[float] = [0.0, 0.0]  # as of the last that is done: in a row, in all
        self.last_end_event: torch.cuda.Event | None = None  # the end of the one before, if nothing else came between
        self.tokens = self.num_targets = 0
        self.busy_ms = self.total_ms = 0.0  # milliseconds in updates, and in all

    def start_step(self, batch: TrainBatch) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.steps.append(InFlightStep(batch, begin, end, self.host_slots[self.count % len(self.host_slots)]))
        self.count += 1
        begin.record()

    def end_step(self, nonfinite: Tensor) -> None:
        newest = self.steps[-1]
        newest.nonfinite.copy_(nonfinite, non_blocking=True)
        newest.end_event.record()
        while len(self.steps) > MAX_IN_FLIGHT:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """The oldest is done."""
        done = self.steps.popleft()
        done.end_event.synchronize()
        self.nonfinite = done.nonfinite.tolist()
        if self.last_end_event is not None:
            self.busy_ms += done.start_event.elapsed_time(done.end_event)
            self.total_ms += self.last_end_event.elapsed_time(done.end_event)
            self.tokens += done.batch.num_tokens
            self.num_targets += done.batch.num_targets
        self.last_end_event = done.end_event

    def synchronize(self) -> None:
        """All are done; what comes next is no update."""
        while self.steps:
            self._finish_oldest()
        self.last_end_event = None

    def take_throughput(self) -> DeviceThroughput | None:
        """Of the updates that were done since it was last asked."""
        seconds = self.total_ms / 1000
        pace = (
            DeviceThroughput(self.tokens / seconds, self.num_targets / seconds, min(1.0, self.busy_ms / self.total_ms))
            if seconds
            else None
        )
        self.tokens = self.num_targets = 0
        self.busy_ms = self.total_ms = 0.0
        return pace


@dataclass(frozen=True)
class DeviceThroughput:
    """How fast a GPU was, by its own clock."""

    tokens_per_second: float  # a second
    targets_per_second: float
    busy_fraction: float  # the share of the time that it was in an update
