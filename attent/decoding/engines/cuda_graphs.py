"""Steps that an NVIDIA GPU repeats by itself. A step is some 400 small kernels: to launch them one by one takes the
host longer than the GPU needs to run them. Recorded once as a CUDA graph, they are launched as one.

A graph reads and writes the same memory every time. So the state of a search is copied into tensors that stay, and each
graph ends by writing the next state into them. How many columns of the cache are looked at is part of a graph: there is
one for each stretch of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attent.decoding.constraints.base import MinLength, NoLoops
from attent.decoding.search import BeamState, FinishedHypotheses, SearchContext, StepModel, search_step
from attent.nn import Cache

GRAPH_STRIDE = 32  # places of a cache that a graph more looks at: so many steps are played before the next is recorded


def can_capture(state: object, context: SearchContext) -> bool:
    """Is this known to run without the host? Rules that look things up in tables are left as they are."""
    on_cuda = isinstance(state, Cache) and context.suppressed_tokens.device.type == "cuda"
    return on_cuda and all(isinstance(rule, MinLength | NoLoops) for rule in context.all_constraints)


class GraphedSearchStep:
    """The steps of one batch. `beams` are its state from now on, written in place."""

    def __init__(self, model: StepModel[Any], cache: Cache, beams: BeamState, context: SearchContext) -> None:
        self.model, self.cache, self.context = model, cache, context
        self.beams = clone_state(beams)
        self.lengths = torch.zeros_like(beams.lengths)
        self.ancestors = None if cache.ancestors is None else cache.ancestors.clone()
        self.memory_lengths = cache.memory_lengths
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.graph_pool = torch.cuda.graph_pool_handle()
        self.load_state(beams)

    def load_state(self, beams: BeamState) -> None:
        """The state was changed from outside: rows were replaced."""
        for mine, new in zip(iter_tensors(self.beams), iter_tensors(beams), strict=True):
            if mine is not new:
                mine.copy_(new)
        held = self.cache.used_columns if self.cache.lengths is None else self.cache.lengths
        self.lengths.copy_(held) if isinstance(held, Tensor) else self.lengths.fill_(held)
        self.cache.lengths = self.lengths
        for name in ("ancestors", "memory_lengths"):
            mine, new = getattr(self, name), getattr(self.cache, name)
            if mine is not new:
                mine.copy_(new)
                setattr(self.cache, name, mine)

    def step(self, position: int) -> BeamState:
        """Every beam one token longer; `place` is that of the row that is furthest."""
        upto = min(-(-(position + 1) // GRAPH_STRIDE) * GRAPH_STRIDE, self.cache.capacity // self.cache.beams)
        if upto not in self.graphs:
            self.graphs[upto] = self._capture(upto)
        self.graphs[upto].replay()
        return self.beams

    def _capture(self, max_positions: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.cache.used_columns = (max_positions - 1) * self.cache.beams
        # Other threads may go on with work of their own.
        with torch.cuda.graph(graph, pool=self.graph_pool, capture_error_mode="thread_local"):
            grown = search_step(self.model, self.cache, self.beams, self.context)
            for mine, new in zip(iter_tensors(self.beams), iter_tensors(grown), strict=True):
                if mine is not new:
                    mine.copy_(new)
            assert self.cache.lengths is not None
            self.lengths.copy_(self.cache.lengths)
            if self.ancestors is not None and self.cache.ancestors is not None:
                self.ancestors.copy_(self.cache.ancestors)
        self.cache.lengths, self.cache.ancestors = self.lengths, self.ancestors
        return graph


def iter_tensors(beams: BeamState) -> Iterator[Tensor]:
    for f in fields(BeamState):
        value = getattr(beams, f.name)
        if isinstance(value, FinishedHypotheses):
            yield from (getattr(value, part.name) for part in fields(FinishedHypotheses))
        elif isinstance(value, Tensor):
            yield value
        else:
            yield from value


def clone_state(beams: BeamState) -> BeamState:
    """The same in memory of its own: parts of a new state may be one tensor."""
    pool = FinishedHypotheses(*(getattr(beams.finished, f.name).clone() for f in fields(FinishedHypotheses)))
    plain = {
        f.name: getattr(beams, f.name).clone()
        for f in fields(BeamState)
        if f.name not in ("finished", "constraint_states")
    }
    return BeamState(
        **plain, finished=pool, constraint_states=tuple(memory.clone() for memory in beams.constraint_states)
    )
