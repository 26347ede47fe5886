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

from attent.train.task import Batch

WARM = 3  # updates of one shape that run as usual first: they compile, and meet the end of memory where that is handled
MOST = 4  # recordings; batches of many shapes are better not recorded at all
AHEAD = 8  # updates that the GPU may have before it: it never waits for the host, and the host hears of it soon enough
ON_HOST = ("pairs", "tokens", "units", "whole")  # of a batch: no kernel sees these
SPARE = 0.25  # of a GPU's memory that must be free for what comes between updates

Work = Callable[[], None]
Capture = Callable[[Work], Work]  # of something to do, what does the same again on the same tensors


def on_gpu(device: torch.device) -> Capture:
    """By a CUDA graph. All graphs share one pool: none leaves anything there that another needs."""
    stream, graphs, pool = torch.cuda.Stream(device), weakref.WeakSet[torch.cuda.CUDAGraph](), None

    def capture(work: Work) -> Work:
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
            clean_up(device, pool)
            raise
        graphs.add(graph)
        return graph.replay

    return capture


def clean_up(device: torch.device, pool: Any) -> None:
    """After a recording that failed, torch still believes itself in it: its memory, and its random numbers."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # it has ended as it should: nothing but memory was missing
        torch._C._cuda_endAllocateToPool(index, pool)
    fresh = torch.Generator(torch.device("cuda", index))
    torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())


class Recorder:
    """Which batches are learned from by a recording, and the recordings."""

    def __init__(self, update: Callable[[Batch], None], device: torch.device, capture: Capture) -> None:
        self.update, self.device, self.capture = update, device, capture
        self.flight = Flight() if device.type == "cuda" else None
        self.recordings: dict[Hashable, Recording] = {}
        self.met: Counter[Hashable] = Counter()
        self.refused: str | None = None  # why nothing is recorded

    def of(self, batch: Batch) -> Recording | None:
        """The recording for batches like this one: an earlier one, or made now where enough of them have been met."""
        kind = kind_of(batch)
        found = self.recordings.get(kind)
        if found is None and self.refused is None and self._ripe(kind):
            try:
                found = self.recordings[kind] = Recording(batch, self.device, self.update, self.capture)
            except RuntimeError as error:  # memory for all of it at once, or something that a graph cannot hold
                self.forget()
                self.refused = str(error).splitlines()[0]
        return found

    def _ripe(self, kind: Hashable) -> bool:
        self.met[kind] += 1
        return self.met[kind] > WARM and len(self.recordings) < MOST

    def play(self, recording: Recording, batch: Batch, bad: Tensor) -> None:
        recording.take(batch)
        if self.flight is None:
            recording.replay()
            return
        self.flight.begin(batch)
        recording.replay()
        self.flight.end(bad)

    def forget(self) -> bool:
        """Tensors of a recording were replaced, or its memory is needed. Whether there was any."""
        had = bool(self.recordings)
        if self.flight is not None:
            self.flight.rest()
            self.flight.bad = [0.0, 0.0]
        self.recordings.clear()
        return had

    def pause(self) -> None:
        """What comes between updates needs memory too; to record again takes the time of a few updates."""
        if self.flight is not None:
            self.flight.rest()
            free, total = torch.cuda.mem_get_info(self.device)
            if free < SPARE * total and self.forget():
                torch.cuda.empty_cache()


class Recording:
    """An update of batches of one kind, on tensors that stay."""

    def __init__(self, batch: Batch, device: torch.device, update: Callable[[Batch], None], capture: Capture) -> None:
        self.held = batch.to(device)  # anew: what an earlier update has worked out of its batch would be missing here
        self.replay = capture(lambda: update(self.held))

    def take(self, batch: Batch) -> None:
        """Its numbers, in one piece where they are; they wait in line behind the update before."""
        mine, new = whole_of(self.held), whole_of(batch)
        pairs = zip(tensors_of(self.held), tensors_of(batch), strict=True)
        for held, given in pairs if mine is None or new is None else [(mine, new)]:
            held.copy_(given, non_blocking=True)


# ---- batches ---------------------------------------------------------------------------------------------------------


def whole_of(batch: Batch) -> Tensor | None:
    """The one tensor of which all others are views, where a batch has one."""
    found = getattr(batch, "whole", None)
    return found if isinstance(found, Tensor) else None


def parts_of(part: Any) -> Iterator[Any]:
    """What a kernel may see of a batch: tensors, and numbers that are known to the host."""
    if is_dataclass(part):
        for field in fields(part):
            if field.name not in ON_HOST and not field.name.startswith("_"):
                yield from parts_of(getattr(part, field.name))
    elif isinstance(part, list | tuple):
        for each in part:
            yield from parts_of(each)
    else:
        yield part


def tensors_of(batch: Batch) -> list[Tensor]:
    return [part for part in parts_of(batch) if isinstance(part, Tensor)]


def kind_of(batch: Batch) -> Hashable:
    """A recording serves batches in which all of this agrees."""
    return tuple((part.shape, part.dtype) if isinstance(part, Tensor) else part for part in parts_of(batch))


# ---- what the GPU has before it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flying:
    """An update that was launched."""

    batch: Batch  # whose memory the GPU may still have to read
    begin: torch.cuda.Event
    end: torch.cuda.Event
    bad: Tensor  # in memory of the host, once it has ended


class Flight:
    """The updates that the GPU has not done yet; and of those that it has done how long they took, without a wait."""

    def __init__(self) -> None:
        self.flying: deque[Flying] = deque()
        self.slots = torch.zeros(AHEAD + 1, 2, pin_memory=True)
        self.count = 0
        self.bad: list[float] = [0.0, 0.0]  # as of the last that is done: in a row, in all
        self.last: torch.cuda.Event | None = None  # the end of the one before, if nothing else came between
        self.tokens = self.units = 0
        self.busy = self.span = 0.0  # milliseconds in updates, and in all

    def begin(self, batch: Batch) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flying.append(Flying(batch, begin, end, self.slots[self.count % len(self.slots)]))
        self.count += 1
        begin.record()

    def end(self, bad: Tensor) -> None:
        newest = self.flying[-1]
        newest.bad.copy_(bad, non_blocking=True)
        newest.end.record()
        while len(self.flying) > AHEAD:
            self._land()

    def _land(self) -> None:
        """The oldest is done."""
        done = self.flying.popleft()
        done.end.synchronize()
        self.bad = done.bad.tolist()
        if self.last is not None:
            self.busy += done.begin.elapsed_time(done.end)
            self.span += self.last.elapsed_time(done.end)
            self.tokens += done.batch.tokens
            self.units += done.batch.units
        self.last = done.end

    def rest(self) -> None:
        """All are done; what comes next is no update."""
        while self.flying:
            self._land()
        self.last = None

    def pace(self) -> Pace | None:
        """Of the updates that were done since it was last asked."""
        seconds = self.span / 1000
        pace = Pace(self.tokens / seconds, self.units / seconds, min(1.0, self.busy / self.span)) if seconds else None
        self.tokens = self.units = 0
        self.busy = self.span = 0.0
        return pace


@dataclass(frozen=True)
class Pace:
    """How fast a GPU was, by its own clock."""

    tokens: float  # a second
    units: float
    busy: float  # the share of the time that it was in an update
