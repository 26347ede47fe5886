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

from attent.decode import lanes
from attent.decode.demand import Demands
from attent.decode.graphs import Recorder, can_record
from attent.decode.lots import Found, Lot, No, in_lots
from attent.decode.options import Hypothesis, Job, Search
from attent.decode.rules import Rule
from attent.decode.search import NEVER, Beams, Plan, State, Writer, banned, may_ask, results, step, unwritten
from attent.nn import Cache

FEWER = 0.75  # finished sources are cleared away when no more than this share of a batch is left,
FEWER_RECORDED = 0.5  # and where that means to record anew, this share
WARM = 2  # steps before one is recorded: what is only done once must not be part of it
REFILL = 8  # ... or replaced, as soon as there is one for every so many of a batch
TOGETHER = 1024  # sources whose mean length tells how many find room on a GPU
SHORT = 64  # tokens: sources up to twice as long are taken together, since full batches are worth more than narrow ones


class Stopped(Exception):
    """The caller's `stop` said so; nothing was translated further."""


@dataclass(frozen=True, kw_only=True)
class TorchEngine(Generic[State]):
    """Searches with a model of ours, on its device."""

    model: Writer[State]
    start: int
    end: int
    never: tuple[int, ...]  # besides the start, tokens that are not written
    pad: int  # of sources
    device: torch.device
    batch_size: Callable[[int, int, int], int]  # (longest source, longest target, beams) -> sources at once
    make_rules: Callable[[Search, Sequence[Job]], tuple[tuple[Rule, ...], Demands | None]]
    stop: Callable[[], bool] | None = None  # asked at every step: is the rest no longer wanted?
    record: bool = True  # let an NVIDIA GPU repeat steps by itself
    say: Callable[[str], None] | None = None  # is told what a person may want to know
    # Of several threads, whose turn it is to have the device. Until then they get ready.
    turn: AbstractContextManager[Any] | None = None

    def refuses(self, search: Search, jobs: Sequence[Job]) -> str | None:
        return None

    def search(self, jobs: Sequence[Job], search: Search) -> Iterator[tuple[int, list[Hypothesis]]]:
        plan = self._plan(search, jobs)
        left = set(range(len(jobs)))
        for place, found in self._in_lane(jobs, plan):
            left.remove(place)
            yield place, found
        rest = self._sessions(jobs, left, plan)
        if left and self.turn is not None:  # which must be over before what was found is given away
            with self.turn:
                rest = iter(list(rest))
        yield from rest

    def _sessions(self, jobs: Sequence[Job], left: set[int], plan: Plan) -> Iterator[tuple[int, list[Hypothesis]]]:
        for places in alike(jobs, left):
            yield from self._session(jobs, places, plan)

    def _plan(self, search: Search, jobs: Sequence[Job]) -> Plan:
        rules, demands = self.make_rules(search, jobs)
        never = banned(self.start, self.end, self.never, self.device)
        return Plan(search=search, start=self.start, end=self.end, never=never, rules=rules, demands=demands)

    def _in_lane(self, jobs: Sequence[Job], plan: Plan) -> Iterator[tuple[int, list[Hypothesis]]]:
        """All of it on an NVIDIA GPU, where the search is plain and the model one that our kernels know. Should that
        fail, as where kernels cannot be compiled, what is not found yet is left to the others."""
        if self.record and lanes.may_have(self.model, plan):
            yield from in_lots(jobs, plan.search, lambda lot: self._asked(lot, plan))

    def search_lot(self, lot: Lot, search: Search) -> Found | No:
        """For who has made a lot of jobs without wishes, and reads what was found."""
        like_all = Job(source=(), no_loops=bool(lot.no_loops.any()))  # as far as rules go
        return self._asked(lot, self._plan(search, [like_all])) if self.record else No.LANE

    def _asked(self, lot: Lot, plan: Plan) -> Found | No:
        with self.turn or nullcontext():
            try:
                never = unwritten(self.start, self.end, self.never)
                lane = lanes.lane_of(self.model, lot.widths, lot.limits, plan, never)
                if lane is None:
                    return No.LANE
                if not lane.takes(lot, plan):
                    return No.ROOM
                return lane.found(self.model, lot, plan, self._most(lot, plan.beams), self._stop) or No.ROOM
            except lanes.failures() as error:
                self._left_lane(error)
                return No.LANE

    def _left_lane(self, error: Exception) -> None:
        lanes.forget(self.model, failed=not isinstance(error, torch.OutOfMemoryError))
        if self.say is not None:
            reason = next(iter(str(error).splitlines()), "")
            self.say(f"our own kernels fail here ({type(error).__name__}: {reason}); a slower way is taken")

    def _most(self, lot: Lot, beams: int) -> int:
        """Sources at once: nothing is filled up there, so that it is the longest together that count."""
        some = np.stack([lot.limits, lot.widths])[:, :TOGETHER]
        while True:
            limit, longest = (-(-int(numbers.sum()) // len(numbers)) for numbers in some)
            most = self.batch_size(longest, limit, beams)
            if most >= some.shape[1]:
                return most
            some = some[:, :most]

    def _stop(self) -> None:
        if self.stop is not None and self.stop():
            raise Stopped

    def _session(self, jobs: Sequence[Job], places: list[int], plan: Plan) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Jobs of like length, through one batch that is refilled."""
        session = Session(self, jobs, places, plan)
        while session.rows:
            self._stop()
            session.step()
            if may_ask(session.steps - 1, self.device) or max(session.ages) == session.capacity:
                yield from session.finished()

    def sources(self, jobs: Sequence[Job]) -> tuple[Tensor, Tensor]:
        lengths = [len(job.source) for job in jobs]
        rows = [[*job.source, *[self.pad] * (max(lengths) - len(job.source))] for job in jobs]
        return torch.tensor(rows, device=self.device), torch.tensor(lengths, device=self.device)


class Session(Generic[State]):
    """One batch at work. A row is a source; `rows` are their places among the jobs, None where one has finished."""

    def __init__(self, engine: TorchEngine[State], jobs: Sequence[Job], places: list[int], plan: Plan) -> None:
        self.engine, self.jobs, self.plan = engine, jobs, plan
        longest = len(jobs[places[0]].source)
        self.capacity = max(jobs[place].limit for place in places)
        size = engine.batch_size(longest, self.capacity, plan.beams)
        self.waiting = places[size:]
        self.rows: list[int | None] = list(places[:size])
        self.ages = [0] * len(self.rows)  # steps of each
        self.steps = 0
        self.recorder: Recorder | None = None
        self.beams, self.state = self._begun(places[:size], self.capacity)

    def _begun(self, places: Sequence[int], capacity: int) -> tuple[Beams, State]:
        jobs = [self.jobs[place] for place in places]
        source, lengths = self.engine.sources(jobs)
        state = self.engine.model.begin(source, lengths, capacity=capacity, beams=self.plan.beams)
        return Beams.new(jobs, self.capacity, self.plan), state

    def step(self) -> None:
        if self.recorder is None and self.steps >= WARM and self.engine.record:
            self.recorder = self._recorder()
        if self.recorder is None:
            self.beams = step(self.engine.model, self.state, self.beams, self.plan)
        else:
            self.beams = self.recorder.step(max(self.ages))
        self.steps += 1
        self.ages = [age + 1 for age in self.ages]

    def _recorder(self) -> Recorder | None:
        state: object = self.state
        if type(state) is not Cache or not can_record(state, self.plan):  # a prompt is no place in a recording
            return None
        return Recorder(self.engine.model, state, self.beams, self.plan)

    def finished(self) -> Iterator[tuple[int, list[Hypothesis]]]:
        """What is done; its rows are given to others, or given up."""
        over = [row for row, done in enumerate(self.beams.done.tolist()) if done and self.rows[row] is not None]
        if over:
            yield from self._found(over)
            for row in over:
                self.rows[row] = None
        if max(self.ages) == self.capacity:
            self._rewind()
        free = [row for row, place in enumerate(self.rows) if place is None]
        if self.waiting and len(free) * REFILL >= min(len(self.rows), REFILL * len(self.waiting)):
            self._refill(free)
        elif not self.waiting and len(self.rows) - len(free) <= self._fewer * len(self.rows):
            self._shrink()

    @property
    def _fewer(self) -> float:
        return FEWER if self.recorder is None else FEWER_RECORDED

    def candidates(self) -> list[list[int]]:
        """For streaming, the tokens of all that may still win in the first row."""
        live, pool = self.beams.sums[0] > NEVER, self.beams.ended.scores[0] > NEVER
        length = int(self.beams.lengths[0])
        going: list[list[int]] = self.beams.tokens[0, live, :length].tolist()
        ended = zip(self.beams.ended.tokens[0, pool].tolist(), self.beams.ended.lengths[0, pool].tolist(), strict=True)
        return going + [tokens[: n - 1] for tokens, n in ended]

    def _found(self, over: list[int]) -> Iterator[tuple[int, list[Hypothesis]]]:
        chosen = self.beams.reordered(torch.tensor(over, device=self.engine.device))
        best = results(chosen, self.plan)
        rows = zip(over, *(x.tolist() for x in (best.tokens, best.scores, best.sums, best.lengths)), strict=True)
        for row, tokens, scores, sums, lengths in rows:
            place = self.rows[row]
            assert place is not None
            some = zip(tokens, scores, sums, lengths, strict=True)
            yield place, [self._hypothesis(*one) for one in some if one[1] > NEVER]

    def _hypothesis(self, tokens: list[int], score: float, log_prob: float, length: int) -> Hypothesis:
        ended = tokens[length - 1] == self.engine.end
        ids = tuple(tokens[: length - 1 if ended else length])
        return Hypothesis(ids=ids, log_prob=log_prob, score=score, ended=ended)

    def _refill(self, free: list[int]) -> None:
        next_ones, self.waiting = self.waiting[: len(free)], self.waiting[len(free) :]
        rows = torch.tensor(free[: len(next_ones)], device=self.engine.device)
        beams, state = self._begun(next_ones, capacity=1)  # they will write into the room that is there
        for row, place in zip(free, next_ones, strict=False):
            self.rows[row], self.ages[row] = place, 0
        self.state.put(rows, state)
        self.beams = self.beams.put(rows, beams)
        self._rewind()

    def _rewind(self) -> None:
        """What is empty begins again with nothing: it goes on with the others, and must not run out of room."""
        self.ages = [0 if place is None else age for place, age in zip(self.rows, self.ages, strict=True)]
        self.state.rewind(self.ages)
        if self.recorder is not None:
            self.recorder.take(self.beams)

    def _shrink(self) -> None:
        left = [row for row, place in enumerate(self.rows) if place is not None]
        self.rows, self.ages = [self.rows[row] for row in left], [self.ages[row] for row in left]
        if left:
            kept = torch.tensor(left, device=self.engine.device)
            self.beams = self.beams.reordered(kept)
            self.state.reorder(kept)
            self.state.rewind(self.ages)
            self.recorder = None


def alike(jobs: Sequence[Job], places: Iterable[int]) -> Iterator[list[int]]:
    """Places of jobs, the longest first, in groups whose longest has at most twice the tokens of its shortest; what is
    shorter than `SHORT` counts as that long."""
    order = sorted(places, key=lambda place: (-len(jobs[place].source), place))
    group: list[int] = []
    for place in order:
        if group and 2 * max(len(jobs[place].source), SHORT) < len(jobs[group[0]].source):
            yield group
            group = []
        group.append(place)
    if group:
        yield group
