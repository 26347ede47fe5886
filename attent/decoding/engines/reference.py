"""The reference engine: any number of requests through `search`, in batches that are refilled as sources finish.

It supports all options, and hands what the GPU engine supports to that one. Sources are taken longest first: a lack of
memory shows at once, and a source that replaces a finished one is never longer than it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, Constraint
from attent.decoding.constraints.required_phrases import RequiredPhrases
from attent.decoding.constraints.token_rules import MinLength, NoLoops
from attent.decoding.engines.gpu import eligibility
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, Unavailable, search_in_batches
from attent.decoding.loading import pad_token_ids
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest, StopCheck
from attent.decoding.search import (
    BeamState,
    SearchContext,
    State,
    StepModel,
    is_poll_step,
    list_suppressed_tokens,
    make_suppressed_tensor,
    map_tensors,
    search_step,
    select_n_best,
)
from attent.nn import Cache
from attent.nn.kernels.cuda_graphs import capture_graph

SHRINK_THRESHOLD = 0.75  # drop finished rows when at most this share of the batch is active,
GRAPHED_SHRINK_THRESHOLD = 0.5  # or this share, where new CUDA graphs must be captured then
WARMUP_STEPS = 2  # steps before capture: one-time work must not be part of a graph
REFILL_DIVISOR = 8  # refill when 1 / REFILL_DIVISOR of the rows are free
MEAN_LENGTH_SAMPLE = 1024  # sources whose mean length decides how many fit on a GPU
MIN_GROUP_LENGTH = 64  # tokens; shorter sources count as this long, since full batches matter more than narrow ones

Results = Iterator[tuple[int, list[Hypothesis]]]  # (request index, hypotheses), in order of completion


class SearchCancelled(Exception):
    """The caller's `should_stop` returned True."""


@dataclass(frozen=True, kw_only=True)
class TorchEngine(Generic[State]):
    model: StepModel[State]
    start_id: int
    end_id: int
    suppressed_tokens: tuple[int, ...]  # besides the start
    pad: int  # of sources
    device: torch.device
    choose_batch_size: Callable[[int, int, int], int]  # (source length, target length, beams) -> sources at once
    build_constraints: Callable[
        [SearchOptions, Sequence[SearchRequest]], tuple[tuple[Constraint, ...], RequiredPhrases | None]
    ]
    num_given: int = 0  # tokens at the start of each request's prefix that have no share in the scores
    should_stop: StopCheck | None = None  # called at every step
    use_gpu_engine: bool = True  # the fused engine, and CUDA graphs of this one
    notify: Callable[[str], None] | None = None  # receives messages for the user
    device_lock: AbstractContextManager[Any] | None = None  # held while the device is used: threads take turns

    def search(self, requests: Sequence[SearchRequest], options: SearchOptions) -> Results:
        context = self.build_context(options, requests)
        remaining = set(range(len(requests)))
        may_support = self.use_gpu_engine and eligibility.may_support(self.model, context)
        if may_support and eligibility.supports_requests(requests):
            for index, hypotheses in search_in_batches(
                requests, options, lambda batch: self._search_gpu_batch(batch, context)
            ):
                remaining.remove(index)
                yield index, hypotheses
        results = self._run_sessions(requests, remaining, context)
        if remaining and self.device_lock is not None:  # release it before the caller gets the results
            with self.device_lock:
                results = iter(list(results))
        yield from results

    def build_context(self, options: SearchOptions, requests: Sequence[SearchRequest]) -> SearchContext:
        constraints, required_phrases = self.build_constraints(options, requests)
        return SearchContext(
            options=options,
            start_id=self.start_id,
            end_id=self.end_id,
            suppressed_tokens=make_suppressed_tensor(self.start_id, self.end_id, self.suppressed_tokens, self.device),
            num_given=self.num_given,
            constraints=constraints,
            required_phrases=required_phrases,
        )

    def check_cancelled(self) -> None:
        if self.should_stop is not None and self.should_stop():
            raise SearchCancelled

    # --- on the GPU engine -------------------------------------------------------------------------------------------

    def search_batch(self, batch: RequestBatch, options: SearchOptions) -> HypothesisBatch | Unavailable:
        """Search a batch that was built elsewhere, without prefixes or phrases."""
        if not self.use_gpu_engine or self.num_given:
            return Unavailable.UNSUPPORTED
        request = SearchRequest(source_ids=(), forbid_loops=bool(batch.forbid_loops.any()))  # stands for all of them
        return self._search_gpu_batch(batch, self.build_context(options, [request]))

    def _search_gpu_batch(self, batch: RequestBatch, context: SearchContext) -> HypothesisBatch | Unavailable:
        with self.device_lock or nullcontext():
            try:
                suppressed_tokens = list_suppressed_tokens(self.start_id, self.end_id, self.suppressed_tokens)
                search = eligibility.get_gpu_search(self.model, batch, context, suppressed_tokens)
                if search is None:
                    return Unavailable.UNSUPPORTED
                if not search.has_room_for(batch, context):
                    return Unavailable.OUT_OF_MEMORY
                max_rows = self._choose_max_rows(batch, context.num_beams)
                result = search.search(batch, context, max_rows, self.check_cancelled)
                return result or Unavailable.OUT_OF_MEMORY
            except eligibility.get_recoverable_errors() as error:
                eligibility.drop_cached_searches(self.model, failed=not isinstance(error, torch.OutOfMemoryError))
                if self.notify is not None:
                    reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                    self.notify(f"the GPU kernels failed ({reason}); using the slower torch search")
                return Unavailable.UNSUPPORTED

    def _choose_max_rows(self, batch: RequestBatch, num_beams: int) -> int:
        """The GPU engine does not pad, so use the mean length of the longest rows."""
        lengths = np.stack([batch.max_target_lengths, batch.decoder_order_lengths])[:, :MEAN_LENGTH_SAMPLE]
        while True:
            target_length, source_length = (-(-int(row.sum()) // len(row)) for row in lengths)
            max_rows = self.choose_batch_size(source_length, target_length, num_beams)
            if max_rows >= lengths.shape[1]:
                return max_rows
            lengths = lengths[:, :max_rows]

    # --- in sessions -------------------------------------------------------------------------------------------------

    def _run_sessions(self, requests: Sequence[SearchRequest], remaining: set[int], context: SearchContext) -> Results:
        for indices in group_by_length(requests, remaining):
            session = SearchSession(self, requests, indices, context)
            while session.row_requests:
                self.check_cancelled()
                session.step()
                if is_poll_step(session.num_steps - 1, self.device) or max(session.row_steps) == session.capacity:
                    yield from session.collect_and_refill()

    def pad_sources(self, requests: Sequence[SearchRequest]) -> tuple[Tensor, Tensor]:
        return pad_token_ids([request.source_ids for request in requests], self.device, self.pad)


class SearchSession(Generic[State]):
    """One batch. `row_requests` are the request indices of its rows, None for a finished row."""

    def __init__(
        self, engine: TorchEngine[State], requests: Sequence[SearchRequest], indices: list[int], context: SearchContext
    ) -> None:
        """`indices` are sorted by source length, longest first."""
        self.engine, self.requests, self.context = engine, requests, context
        self.capacity = max(requests[index].max_length for index in indices)
        size = engine.choose_batch_size(len(requests[indices[0]].source_ids), self.capacity, context.num_beams)
        self.pending = indices[size:]
        self.row_requests: list[int | None] = list(indices[:size])
        self.row_steps = [0] * len(self.row_requests)
        self.num_steps = 0
        self.graphed_step: GraphedSearchStep | None = None
        self.beams, self.decoder_state = self._start_rows(indices[:size], self.capacity)

    def _start_rows(self, indices: Sequence[int], capacity: int) -> tuple[BeamState, State]:
        requests = [self.requests[index] for index in indices]
        source, lengths = self.engine.pad_sources(requests)
        state = self.engine.model.init_decoder_state(source, lengths, capacity=capacity, beams=self.context.num_beams)
        return BeamState.from_requests(requests, self.capacity, self.context), state

    def step(self) -> None:
        state: object = self.decoder_state
        may_capture = self.engine.use_gpu_engine and self.num_steps >= WARMUP_STEPS and can_capture(state, self.context)
        if self.graphed_step is None and may_capture and type(state) is Cache:  # not a subclass: prompts differ per row
            self.graphed_step = GraphedSearchStep(self.engine.model, state, self.beams, self.context)
        if self.graphed_step is None:
            self.beams = search_step(self.engine.model, self.decoder_state, self.beams, self.context)
        else:
            self.beams = self.graphed_step.step(max(self.row_steps))
        self.num_steps += 1
        self.row_steps = [steps + 1 for steps in self.row_steps]

    def collect_and_refill(self) -> Results:
        """Yield the hypotheses of finished rows, then refill these rows or drop them."""
        finished = [i for i, done in enumerate(self.beams.done.tolist()) if done and self.row_requests[i] is not None]
        if finished:
            beams = self.beams.select_rows(torch.tensor(finished, device=self.engine.device))
            best = select_n_best(beams, self.context).to_hypotheses(self.engine.end_id)
            for row, hypotheses in zip(finished, best, strict=True):
                index, self.row_requests[row] = self.row_requests[row], None
                assert index is not None
                yield index, hypotheses
        if max(self.row_steps) == self.capacity:
            self._update_row_lengths()
        size, free = len(self.row_requests), [row for row, index in enumerate(self.row_requests) if index is None]
        if self.pending:
            if len(free) * REFILL_DIVISOR >= min(size, REFILL_DIVISOR * len(self.pending)):
                self._refill(free)
        else:
            threshold = SHRINK_THRESHOLD if self.graphed_step is None else GRAPHED_SHRINK_THRESHOLD
            if size - len(free) <= threshold * size:
                self._shrink()

    def list_candidates(self) -> list[list[int]]:
        """For streaming: the tokens of all hypotheses of the first row that may still win."""
        live, finished = self.beams.log_probs[0] > NEG_INF, self.beams.finished
        candidates: list[list[int]] = self.beams.tokens[0, live, : int(self.beams.lengths[0])].tolist()
        real = finished.scores[0] > NEG_INF
        rows = zip(finished.tokens[0, real].tolist(), finished.lengths[0, real].tolist(), strict=True)
        return candidates + [tokens[: length - 1] for tokens, length in rows]

    def _refill(self, free_rows: list[int]) -> None:
        indices, self.pending = self.pending[: len(free_rows)], self.pending[len(free_rows) :]
        rows = torch.tensor(free_rows[: len(indices)], device=self.engine.device)
        beams, state = self._start_rows(indices, capacity=1)  # they will write into the existing cache
        for row, index in zip(free_rows, indices, strict=False):
            self.row_requests[row], self.row_steps[row] = index, 0
        self.decoder_state.replace_sources(rows, state)
        self.beams = self.beams.replace_rows(rows, beams)
        self._update_row_lengths()

    def _update_row_lengths(self) -> None:
        """Finished rows keep stepping; reset their cache position so that they never overflow."""
        rows = zip(self.row_requests, self.row_steps, strict=True)
        self.row_steps = [0 if index is None else steps for index, steps in rows]
        self.decoder_state.set_row_lengths(self.row_steps)
        if self.graphed_step is not None:
            self.graphed_step.load_state(self.beams)

    def _shrink(self) -> None:
        active = [row for row, index in enumerate(self.row_requests) if index is not None]
        self.row_requests = [self.row_requests[row] for row in active]
        self.row_steps = [self.row_steps[row] for row in active]
        if active:
            rows = torch.tensor(active, device=self.engine.device)
            self.beams = self.beams.select_rows(rows)
            self.decoder_state.reorder(rows)
            self.decoder_state.set_row_lengths(self.row_steps)
            self.graphed_step = None


def group_by_length(requests: Sequence[SearchRequest], indices: Iterable[int]) -> Iterator[list[int]]:
    """Yield groups of indices, longest sources first; the longest of a group has up to twice the shortest's tokens."""
    lengths = [len(request.source_ids) for request in requests]
    group: list[int] = []
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        if group and 2 * max(lengths[index], MIN_GROUP_LENGTH) < lengths[group[0]]:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


# --- CUDA graphs -----------------------------------------------------------------------------------------------------


GRAPH_STRIDE = 32  # cache positions: a new graph is captured after this number of steps


def can_capture(state: object, context: SearchContext) -> bool:
    """True if a step is known not to need the host; constraints that look things up in tables may."""
    on_cuda = isinstance(state, Cache) and context.device.type == "cuda"
    return on_cuda and all(isinstance(each, MinLength | NoLoops) for each in context.all_constraints)


class GraphedSearchStep:
    """Search steps as CUDA graphs: a step is some 400 small kernels, which the host launches more slowly than a GPU
    runs them; captured once, they are launched as one.

    A graph reads and writes the same memory at each replay, so the beams are copied into static tensors, and each graph
    ends by writing the next state into them. The number of cache columns that attention reads is part of a graph: there
    is one graph for each `GRAPH_STRIDE` positions.
    """

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
