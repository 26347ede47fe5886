"""Which tokens a hypothesis may not write next: rules that a search asks at every step.

A rule works on the rows of a search all at once, on their device, and never makes the host wait. What it has to
remember of a row is a row of numbers that the search moves about with its beams. Words as text are `forbidden`'s,
sequences that must come are `demand`'s, what a piece writes is `spelling`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import eq
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attent.decode.options import Job

NEVER = float("-inf")

# A loop is a unit of up to LONGEST_UNIT tokens that comes for the TIMES-th time in a row and then fills LEAST tokens.
# Sound text repeats as well, but less: "ha ha ha", "very, very, very". A single token may come more often ("........",
# a million digit by digit), hence LEAST. Units longer than a clause would take long to come so often, and are
# `NoRepeat`'s.
LONGEST_UNIT = 8
TIMES = 4
LEAST = 8


@dataclass(frozen=True, eq=False)
class Written:
    """What the rows have written so far."""

    tokens: Tensor  # (R, T) int64, without the start; what stands at `lengths` and behind is filler
    lengths: Tensor  # (R,)
    limits: Tensor  # (R,) tokens that the row may have, its end counted


class Rule(Protocol):
    """Which tokens a row may not write next. What it knows of a row is its state, (R, S) int64, always as wide."""

    def begin(self, jobs: Sequence[Job]) -> Tensor:
        """The state (len(jobs), S) of a target of which nothing is written."""

    def forbid(self, scores: Tensor, state: Tensor, written: Written) -> Tensor:
        """The scores (R, V) with -inf where a token is not allowed; those given may be changed."""

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        """The state (R, S) when each row has written its token (R,)."""


def ban(scores: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """-inf at the tokens `ids` (R, N) of each row, `where` (R, N) says so; in place. Other ids may be anything."""
    worst = torch.where(where, NEVER, -NEVER).to(scores.dtype)
    return scores.scatter_reduce_(1, ids.where(where, 0), worst, "amin")


def only(scores: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """In `rows` (R,) nothing but the tokens `ids` (R, N), with their `values`; in place. Ids below 0 are none."""
    scores += torch.where(rows, NEVER, 0.0).to(scores.dtype)[:, None]
    return scores.scatter_reduce_(1, ids.clamp_min(0), values.where(rows[:, None] & (ids >= 0), NEVER), "amax")


def guard(continues: Tensor) -> Tensor:
    """(2, V) What is forbidden where anything may follow, and where no piece may that goes on with a word. To copy one
    of the two for each row of a search is much faster than to make it."""
    return torch.stack([torch.zeros_like(continues), continues])


class Stateless:
    """A rule that needs no more than what is written."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device

    def begin(self, jobs: Sequence[Job]) -> Tensor:
        return torch.zeros(len(jobs), 0, dtype=torch.int64, device=self.device)

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        return state


class MinLength(Stateless):
    """No end before so many tokens."""

    def __init__(self, least: int, end: int, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.least, self.end = least, end

    def forbid(self, scores: Tensor, state: Tensor, written: Written) -> Tensor:
        scores[:, self.end].masked_fill_(written.lengths < self.least, NEVER)
        return scores


class NoRepeat(Stateless):
    """No sequence of n tokens comes twice."""

    def __init__(self, n: int, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.n = n

    def forbid(self, scores: Tensor, state: Tensor, written: Written) -> Tensor:
        tokens, n = written.tokens, self.n
        if tokens.shape[1] < n:
            return scores
        grams = tokens.unfold(1, n, 1)  # (R, T) -> (R, T-n+1, n)
        ends = torch.arange(n, tokens.shape[1] + 1, device=tokens.device)
        again = ends <= written.lengths[:, None]
        if n > 1:  # the gram begins like what the row ends with
            last = written.lengths[:, None] + torch.arange(1 - n, 0, device=tokens.device)
            tail = tokens.gather(1, last.clamp_min(0))
            again = again & (grams[..., :-1] == tail[:, None]).all(-1)
        return ban(scores, grams[..., -1], again)


# --- loops -----------------------------------------------------------------------------------------------------------


def needed(unit: int) -> int:
    """How many tokens in a row, each the one that stood `unit` before it, make a loop."""
    return (max(TIMES, -(-LEAST // unit)) - 1) * unit


NEEDED = tuple(needed(unit) for unit in range(1, LONGEST_UNIT + 1))
FEWEST_AGAIN = min(NEEDED)  # tokens that have come before, in any loop


def looping(ids: Sequence[int]) -> bool:
    """Does a unit of tokens come again and again, as `NoLoops` would not have let it?"""
    if len(ids) - len(set(ids)) < FEWEST_AGAIN or len(ids) - len(set(pairwise(ids))) < FEWEST_AGAIN:
        return False  # they come in a row: but for the first, so do pairs of them
    for unit, enough in enumerate(NEEDED, 1):
        again = [*map(eq, ids, ids[unit:])]
        if sum(again) >= enough and enough <= max(len([*run]) for same, run in groupby(again) if same):
            return True
    return False


class NoLoops:
    """No unit of tokens comes again and again: of `every` job, or of those that say so. A state is whether that holds
    and, for units of 1, 2, ... tokens, the token that stands so far back, and how many tokens in a row have been those
    that stood so far before them."""

    def __init__(self, device: torch.device | str = "cpu", every: bool = True) -> None:
        self.enough = torch.tensor([enough - 1 for enough in NEEDED], device=device)
        self.every = every

    def begin(self, jobs: Sequence[Job]) -> Tensor:
        state = self.enough.new_zeros(len(jobs), 1 + 2 * LONGEST_UNIT)
        state[:, 0] = torch.tensor([self.every or job.no_loops for job in jobs])
        state[:, 1 : 1 + LONGEST_UNIT] = -1
        return state

    def forbid(self, scores: Tensor, state: Tensor, written: Written) -> Tensor:
        holds, back, run = self._parts(state)
        return ban(scores, back, (run >= self.enough) & (holds > 0))

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        holds, back, run = self._parts(state)
        run = torch.where(back == token[:, None], run + 1, 0)
        return torch.cat([holds, token[:, None], back[:, :-1], run], 1)

    def _parts(self, state: Tensor) -> tuple[Tensor, ...]:
        return state.split([1, LONGEST_UNIT, LONGEST_UNIT], 1)


# --- the beginning ---------------------------------------------------------------------------------------------------


class PrefixError(ValueError):
    """A beginning that cannot be kept; the message says why and what to do."""


class Prefix:
    """A target begins as its job says. Where that is a whole word, what comes next begins another: the pieces that
    would `continues` (V,) a word are not allowed there. A state is the place of the job's prefix in a table."""

    def __init__(self, jobs: Sequence[Job], continues: Tensor | None, device: torch.device | str = "cpu") -> None:
        for job in jobs:
            check_prefix(job)
        kinds = dict.fromkeys((tuple(job.prefix), job.whole_words) for job in jobs)
        self.places = {kind: place for place, kind in enumerate(kinds)}
        longest = max((len(prefix) for prefix, _ in kinds), default=0)
        rows = [[*prefix, *[-1] * (longest + 1 - len(prefix))] for prefix, _ in kinds]
        self.table = torch.tensor(rows, dtype=torch.int64, device=device).view(len(kinds), longest + 1)
        # How long a prefix is that a new word must follow; -1: none must.
        guarded = [len(prefix) if whole and prefix else -1 for prefix, whole in kinds]
        self.guarded = torch.tensor(guarded, dtype=torch.int64, device=device)
        self.guard = guard(continues.to(device)) if continues is not None and max(guarded, default=-1) >= 0 else None

    def begin(self, jobs: Sequence[Job]) -> Tensor:
        places = [[self.places[tuple(job.prefix), job.whole_words]] for job in jobs]
        return torch.tensor(places, dtype=torch.int64, device=self.table.device).view(len(jobs), 1)

    def forced(self, state: Tensor, written: Written) -> Tensor:
        """(R,) The token that must come next; -1: the row is free."""
        at = written.lengths.clamp_max(self.table.shape[1] - 1)
        return self.table[state[:, 0], at]

    def forbid(self, scores: Tensor, state: Tensor, written: Written) -> Tensor:
        token = self.forced(state, written)[:, None]
        value = scores.gather(1, token.clamp_min(0))
        if self.guard is not None:
            behind = written.lengths == self.guarded[state[:, 0]]
            scores.masked_fill_(self.guard.index_select(0, behind.long()), NEVER)
        return only(scores, token[:, 0] >= 0, token, value)

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        return state


def check_prefix(job: Job) -> None:
    if job.limit and len(job.prefix) >= job.limit:
        raise PrefixError(
            f"the prefix must leave room for more, but has {len(job.prefix)} tokens of the {job.limit} that the "
            f"translation may have; shorten it or raise max_length"
        )


# --- all together ----------------------------------------------------------------------------------------------------


@runtime_checkable
class Demanding(Protocol):
    """A rule that knows whether something must still come."""

    def full(self, state: Tensor) -> Tensor:
        """(R,) Has all come?"""


def apply(rules: Sequence[Rule], scores: Tensor, states: Sequence[Tensor], written: Written, end: int) -> Tensor:
    """The scores (R, V) with -inf where any of the rules forbids a token; each has its own state. In place.

    What a job's prefix says comes before what any other rule forbids. A row for which nothing at all is left may end,
    unless something that is demanded is missing: then all its scores are -inf.
    """
    before = scores[:, end].clone()
    forced = [
        (token := rule.forced(state, written)[:, None], scores.gather(1, token.clamp_min(0)))
        for rule, state in zip(rules, states, strict=True)
        if isinstance(rule, Prefix)
    ]
    for rule, state in zip(rules, states, strict=True):
        scores = rule.forbid(scores, state, written)
    stuck = scores.amax(1) == NEVER
    for rule, state in zip(rules, states, strict=True):
        if isinstance(rule, Demanding):
            stuck = stuck & rule.full(state)
    scores[:, end] = torch.where(stuck, before, scores[:, end])
    for token, value in forced:
        scores = only(scores, token[:, 0] >= 0, token, value)
    return scores
