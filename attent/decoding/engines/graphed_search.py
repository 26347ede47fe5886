"""Search steps as CUDA graphs: a step is some 400 small kernels, which the host launches more slowly than a GPU runs
them; captured once, they are launched as one.

A graph reads and writes the same memory at each replay, so the beams are copied into static tensors, and each graph
ends by writing the next state into them. The number of cache columns that attention reads is part of a graph: there is
one graph for each `GRAPH_STRIDE` positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attent.decoding.constraints.min_length import MinLength
from attent.decoding.constraints.no_repeat import NoLoops
from attent.decoding.search import BeamState, SearchContext, StepModel, map_tensors, search_step
from attent.nn import Cache
from attent.nn.kernels.cuda_graphs import capture_graph

GRAPH_STRIDE = 32  # cache positions: a new graph is captured after this number of steps


def can_capture(state: object, context: SearchContext) -> bool:
    """True if a step is known not to need the host; constraints that look things up in tables may."""
    on_cuda = isinstance(state, Cache) and context.device.type == "cuda"
    return on_cuda and all(isinstance(each, MinLength | NoLoops) for each in context.all_constraints)


class GraphedSearchStep:
    def __init__(self, model: StepModel[Any], cache: Cache, beams: BeamState, context: SearchContext) -> None:
        self.model, self.cache, self.context = model, cache, context
        self.beams = map_tensors(torch.clone, beams)  # parts of a new state may share one tensor
        self.row_columns = torch.zeros_like(beams.lengths)
        self.ancestors = None if cache.ancestors is None else cache.ancestors.clone()
        self.memory_lengths = cache.memory_lengths
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.graph_pool = torch.cuda.graph_pool_handle()
        self.capture_stream = torch.cuda.Stream(beams.lengths.device)
        self.load_state(beams)

    def load_state(self, beams: BeamState) -> None:
        """Copy a state that was changed outside of the graphs: rows were replaced."""
        map_tensors(update_tensor, self.beams, beams)
        columns = self.cache.next_column
        self.row_columns.copy_(columns) if isinstance(columns, Tensor) else self.row_columns.fill_(columns)
        self.cache.row_columns = self.row_columns
        for name in ("ancestors", "memory_lengths"):
            static, current = getattr(self, name), getattr(self.cache, name)
            if static is not None:
                setattr(self.cache, name, update_tensor(static, current))

    def step(self, position: int) -> BeamState:
        """Extend every beam by one token; `position` is that of the longest row."""
        num_positions = -(-(position + 1) // GRAPH_STRIDE) * GRAPH_STRIDE
        num_positions = min(num_positions, self.cache.max_columns // self.cache.beams)
        if num_positions not in self.graphs:
            self.cache.used_columns = (num_positions - 1) * self.cache.beams
            graph = capture_graph(self._run_step, pool=self.graph_pool, stream=self.capture_stream)
            self.cache.row_columns, self.cache.ancestors = self.row_columns, self.ancestors
            self.graphs[num_positions] = graph
        self.graphs[num_positions].replay()
        return self.beams

    def _run_step(self) -> None:
        map_tensors(update_tensor, self.beams, search_step(self.model, self.cache, self.beams, self.context))
        assert self.cache.row_columns is not None
        self.row_columns.copy_(self.cache.row_columns)
        if self.ancestors is not None and self.cache.ancestors is not None:
            self.ancestors.copy_(self.cache.ancestors)


def update_tensor(static: Tensor, new: Tensor) -> Tensor:
    if static is not new:
        static.copy_(new)
    return static
