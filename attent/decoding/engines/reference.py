"""Our own engine: any number of sources through a search, in batches that are refilled as sources finish.

Sources are taken by length, the longest first: if memory is short, that is known at once, and a source that comes into
the place of a finished one is never longer than it. The search itself is `search`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from attent.decoding.constraints.base import Constraint
from attent.decoding.constraints.required_phrases import RequiredPhrases
from attent.decoding.engines.cuda_graphs import GraphedSearchStep, can_capture
from attent.decoding.engines.gpu import eligibility
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, Unavailable, search_in_batches
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.decoding.search import (
    NEG_INF,
    BeamState,
    SearchContext,
    State,
    StepModel,
    can_poll_device,
    collect_output,
    list_suppressed_tokens,
    make_suppressed_tensor,
    search_step,
)
from attent.nn import Cache

SHRINK_THRESHOLD = 0.75  # finished sources are cleared away when no more than this share of a batch is left,
GRAPHED_SHRINK_THRESHOLD = 0.5  # and where that means to record anew, this share
WARMUP_STEPS = 2  # steps before one is recorded: what is only done once must not be part of it
REFILL_DIVISOR = 8  # ... or replaced, as soon as there is one for every so many of a batch
MEAN_LENGTH_SAMPLE = 1024  # sources whose mean length tells how many find room on a GPU
MIN_GROUP_LENGTH = (
    64  # tokens: sources up to twice as long are taken together, since full batches are worth more than narrow ones
)


class SearchCancelled(Exception):
    """The caller's `stop` said so; nothing was translated further."""


@dataclass(frozen=True, kw_only=True)
class TorchEngine(Generic[State]):
    """Searches with a model of ours, on its device."""

    model: StepModel[State]
    start: int
    end: int
    suppressed_tokens: tuple[int, ...]  # besides the start, tokens that are not written
    pad: int  # of sources
    device: torch.device
    choose_batch_size: Callable[[int, int, int], int]  # (longest source, longest target, beams) -> sources at once
    build_constraints: Callable[
        [SearchOptions, Sequence[SearchRequest]], tuple[tuple[Constraint, ...], RequiredPhrases | None]
    ]
    should_stop: Callable[[], bool] | None = None  # asked at every step: is the rest no longer wanted?
    use_cuda_graphs: bool = True  # let an NVIDIA GPU repeat steps by itself
    notify: Callable[[str], None] | None = None  # is told what a person may want to know
    # Of several threads, whose turn it is to have the device. Until then they get ready.
    device_lock: AbstractContextManager[Any] | None = None

    def find_unsupported_reason(self, options: SearchOptions, requests: Sequence[SearchRequest]) -> str | None:
        return None

    def search(
        self, requests: Sequence[SearchRequest], options: SearchOptions
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        plan = self._build_context(options, requests)
        left = set(range(len(requests)))
        for place, found in self._search_on_gpu(requests, plan):
            left.remove(place)
            yield place, found
        rest = self._run_sessions(requests, left, plan)
        if left and self.device_lock is not None:  # which must be over before what was found is given away
            with self.device_lock:
                rest = iter(list(rest))
        yield from rest

    def _run_sessions(
        self, requests: Sequence[SearchRequest], remaining: set[int], context: SearchContext
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        for places in group_by_length(requests, remaining):
            yield from self._run_session(requests, places, context)

    def _build_context(self, options: SearchOptions, requests: Sequence[SearchRequest]) -> SearchContext:
        rules, demands = self.build_constraints(options, requests)
        never = make_suppressed_tensor(self.start, self.end, self.suppressed_tokens, self.device)
        return SearchContext(
            options=options,
            start=self.start,
            end=self.end,
            suppressed_tokens=never,
            constraints=rules,
            required_phrases=demands,
        )

    def _search_on_gpu(
        self, requests: Sequence[SearchRequest], context: SearchContext
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """All of it on an NVIDIA GPU, where the search is plain and the model one that our kernels know. Should that
        fail, as where kernels cannot be compiled, what is not found yet is left to the others."""
        if self.use_cuda_graphs and eligibility.can_try(self.model, context):
            yield from search_in_batches(requests, context.options, lambda lot: self._search_gpu_batch(lot, context))

    def search_batch(self, batch: RequestBatch, options: SearchOptions) -> HypothesisBatch | Unavailable:
        """For who has made a lot of jobs without wishes, and reads what was found."""
        like_all = SearchRequest(source_ids=(), forbid_loops=bool(batch.forbid_loops.any()))  # as far as rules go
        return (
            self._search_gpu_batch(batch, self._build_context(options, [like_all]))
            if self.use_cuda_graphs
            else Unavailable.UNSUPPORTED
        )

    def _search_gpu_batch(self, batch: RequestBatch, context: SearchContext) -> HypothesisBatch | Unavailable:
        with self.device_lock or nullcontext():
            try:
                never = list_suppressed_tokens(self.start, self.end, self.suppressed_tokens)
                lane = eligibility.get_gpu_search(
                    self.model, batch.memory_lengths, batch.max_target_lengths, context, never
                )
                if lane is None:
                    return Unavailable.UNSUPPORTED
                if not lane.has_room_for(batch, context):
                    return Unavailable.OUT_OF_MEMORY
                return (
                    lane.search(
                        self.model,
                        batch,
                        context,
                        self._choose_max_rows(batch, context.num_beams),
                        self._check_cancelled,
                    )
                    or Unavailable.OUT_OF_MEMORY
                )
            except eligibility.recoverable_errors() as error:
                self._disable_gpu_search(error)
                return Unavailable.UNSUPPORTED

    def _disable_gpu_search(self, error: Exception) -> None:
        eligibility.release_model(self.model, failed=not isinstance(error, torch.OutOfMemoryError))
        if self.notify is not None:
            reason = next(iter(str(error).splitlines()), "")
            self.notify(f"our own kernels fail here ({type(error).__name__}: {reason}); a slower way is taken")

    def _choose_max_rows(self, batch: RequestBatch, num_beams: int) -> int:
        """Sources at once: nothing is filled up there, so that it is the longest together that count."""
        some = np.stack([batch.max_target_lengths, batch.memory_lengths])[:, :MEAN_LENGTH_SAMPLE]
        while True:
            limit, longest = (-(-int(numbers.sum()) // len(numbers)) for numbers in some)
            most = self.choose_batch_size(longest, limit, num_beams)
            if most >= some.shape[1]:
                return most
            some = some[:, :most]

    def _check_cancelled(self) -> None:
        if self.should_stop is not None and self.should_stop():
            raise SearchCancelled

    def _run_session(
        self, requests: Sequence[SearchRequest], indices: list[int], context: SearchContext
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Jobs of like length, through one batch that is refilled."""
        session = SearchSession(self, requests, indices, context)
        while session.row_requests:
            self._check_cancelled()
            session.step()
            if can_poll_device(session.num_steps - 1, self.device) or max(session.row_steps) == session.capacity:
                yield from session.pop_finished()

    def pad_sources(self, requests: Sequence[SearchRequest]) -> tuple[Tensor, Tensor]:
        lengths = [len(job.source_ids) for job in requests]
        rows = [[*job.source_ids, *[self.pad] * (max(lengths) - len(job.source_ids))] for job in requests]
        return torch.tensor(rows, device=self.device), torch.tensor(lengths, device=self.device)


class SearchSession(Generic[State]):
    """One batch at work. A row is a source; `rows` are their places among the jobs, None where one has finished."""

    def __init__(
        self, engine: TorchEngine[State], requests: Sequence[SearchRequest], indices: list[int], context: SearchContext
    ) -> None:
        self.engine, self.requests, self.context = engine, requests, context
        longest = len(requests[indices[0]].source_ids)
        self.capacity = max(requests[place].max_length for place in indices)
        size = engine.choose_batch_size(longest, self.capacity, context.num_beams)
        self.pending = indices[size:]
        self.row_requests: list[int | None] = list(indices[:size])
        self.row_steps = [0] * len(self.row_requests)  # steps of each
        self.num_steps = 0
        self.graphed_step: GraphedSearchStep | None = None
        self.beams, self.state = self._start_rows(indices[:size], self.capacity)

    def _start_rows(self, indices: Sequence[int], capacity: int) -> tuple[BeamState, State]:
        jobs = [self.requests[place] for place in indices]
        source, lengths = self.engine.pad_sources(jobs)
        state = self.engine.model.begin(source, lengths, capacity=capacity, beams=self.context.num_beams)
        return BeamState.from_requests(jobs, self.capacity, self.context), state

    def step(self) -> None:
        if self.graphed_step is None and self.num_steps >= WARMUP_STEPS and self.engine.use_cuda_graphs:
            self.graphed_step = self._make_graphed_step()
        if self.graphed_step is None:
            self.beams = search_step(self.engine.model, self.state, self.beams, self.context)
        else:
            self.beams = self.graphed_step.step(max(self.row_steps))
        self.num_steps += 1
        self.row_steps = [age + 1 for age in self.row_steps]

    def _make_graphed_step(self) -> GraphedSearchStep | None:
        state: object = self.state
        if type(state) is not Cache or not can_capture(state, self.context):  # a prompt is no place in a recording
            return None
        return GraphedSearchStep(self.engine.model, state, self.beams, self.context)

    def pop_finished(self) -> Iterator[tuple[int, list[Hypothesis]]]:
        """What is done; its rows are given to others, or given up."""
        over = [row for row, done in enumerate(self.beams.done.tolist()) if done and self.row_requests[row] is not None]
        if over:
            yield from self._collect_hypotheses(over)
            for row in over:
                self.row_requests[row] = None
        if max(self.row_steps) == self.capacity:
            self._rewind()
        free = [row for row, place in enumerate(self.row_requests) if place is None]
        if self.pending and len(free) * REFILL_DIVISOR >= min(
            len(self.row_requests), REFILL_DIVISOR * len(self.pending)
        ):
            self._refill(free)
        elif not self.pending and len(self.row_requests) - len(free) <= self._shrink_threshold * len(self.row_requests):
            self._shrink()

    @property
    def _shrink_threshold(self) -> float:
        return SHRINK_THRESHOLD if self.graphed_step is None else GRAPHED_SHRINK_THRESHOLD

    def list_candidates(self) -> list[list[int]]:
        """For streaming, the tokens of all that may still win in the first row."""
        live, pool = self.beams.log_probs[0] > NEG_INF, self.beams.finished.scores[0] > NEG_INF
        length = int(self.beams.lengths[0])
        going: list[list[int]] = self.beams.tokens[0, live, :length].tolist()
        ended = zip(
            self.beams.finished.tokens[0, pool].tolist(), self.beams.finished.lengths[0, pool].tolist(), strict=True
        )
        return going + [tokens[: n - 1] for tokens, n in ended]

    def _collect_hypotheses(self, finished_rows: list[int]) -> Iterator[tuple[int, list[Hypothesis]]]:
        chosen = self.beams.select_rows(torch.tensor(finished_rows, device=self.engine.device))
        best = collect_output(chosen, self.context)
        rows = zip(
            finished_rows, *(x.tolist() for x in (best.tokens, best.scores, best.log_probs, best.lengths)), strict=True
        )
        for row, tokens, scores, sums, lengths in rows:
            place = self.row_requests[row]
            assert place is not None
            some = zip(tokens, scores, sums, lengths, strict=True)
            yield place, [self._make_hypothesis(*one) for one in some if one[1] > NEG_INF]

    def _make_hypothesis(self, tokens: list[int], score: float, log_prob: float, length: int) -> Hypothesis:
        ended = tokens[length - 1] == self.engine.end
        ids = tuple(tokens[: length - 1 if ended else length])
        return Hypothesis(token_ids=ids, log_prob=log_prob, score=score, is_finished=ended)

    def _refill(self, free_rows: list[int]) -> None:
        next_ones, self.pending = self.pending[: len(free_rows)], self.pending[len(free_rows) :]
        rows = torch.tensor(free_rows[: len(next_ones)], device=self.engine.device)
        beams, state = self._start_rows(next_ones, capacity=1)  # they will write into the room that is there
        for row, place in zip(free_rows, next_ones, strict=False):
            self.row_requests[row], self.row_steps[row] = place, 0
        self.state.replace_rows(rows, state)
        self.beams = self.beams.replace_rows(rows, beams)
        self._rewind()

    def _rewind(self) -> None:
        """What is empty begins again with nothing: it goes on with the others, and must not run out of room."""
        self.row_steps = [
            0 if place is None else age for place, age in zip(self.row_requests, self.row_steps, strict=True)
        ]
        self.state.rewind(self.row_steps)
        if self.graphed_step is not None:
            self.graphed_step.load_state(self.beams)

    def _shrink(self) -> None:
        left = [row for row, place in enumerate(self.row_requests) if place is not None]
        self.row_requests, self.row_steps = (
            [self.row_requests[row] for row in left],
            [self.row_steps[row] for row in left],
        )
        if left:
            kept = torch.tensor(left, device=self.engine.device)
            self.beams = self.beams.select_rows(kept)
            self.state.reorder(kept)
            self.state.rewind(self.row_steps)
            self.graphed_step = None


def group_by_length(requests: Sequence[SearchRequest], indices: Iterable[int]) -> Iterator[list[int]]:
    """Places of jobs, the longest first, in groups whose longest has at most twice the tokens of its shortest; what is
    shorter than `SHORT` counts as that long."""
    order = sorted(indices, key=lambda place: (-len(requests[place].source_ids), place))
    group: list[int] = []
    for place in order:
        if group and 2 * max(len(requests[place].source_ids), MIN_GROUP_LENGTH) < len(requests[group[0]].source_ids):
            yield group
            group = []
        group.append(place)
    if group:
        yield group
