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

from attent.decoding.options import SearchRequest

NEG_INF = float("-inf")

# A loop is a unit of up to LONGEST_UNIT tokens that comes for the TIMES-th time in a row and then fills LEAST tokens.
# Sound text repeats as well, but less: "ha ha ha", "very, very, very". A single token may come more often ("........",
# a million digit by digit), hence LEAST. Units longer than a clause would take long to come so often, and are
# `NoRepeat`'s.
MAX_LOOP_PERIOD = 8
MIN_LOOP_REPEATS = 4
MIN_LOOP_TOKENS = 8


@dataclass(frozen=True, eq=False)
class GeneratedTokens:
    """What the rows have written so far."""

    tokens: Tensor  # (R, T) int64, without the start; what stands at `lengths` and behind is filler
    lengths: Tensor  # (R,)
    max_lengths: Tensor  # (R,) tokens that the row may have, its end counted


class Constraint(Protocol):
    """Which tokens a row may not write next. What it knows of a row is its state, (R, S) int64, always as wide."""

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        """The state (len(jobs), S) of a target of which nothing is written."""

    def mask_scores(self, scores: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        """The scores (R, V) with -inf where a token is not allowed; those given may be changed."""

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        """The state (R, S) when each row has written its token (R,)."""


def ban_tokens(scores: Tensor, token_ids: Tensor, mask: Tensor) -> Tensor:
    """-inf at the tokens `ids` (R, N) of each row, `where` (R, N) says so; in place. Other ids may be anything."""
    worst = torch.where(mask, NEG_INF, -NEG_INF).to(scores.dtype)
    return scores.scatter_reduce_(1, token_ids.where(mask, 0), worst, "amin")


def keep_only_tokens(scores: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """In `rows` (R,) nothing but the tokens `ids` (R, N), with their `values`; in place. Ids below 0 are none."""
    scores += torch.where(rows, NEG_INF, 0.0).to(scores.dtype)[:, None]
    return scores.scatter_reduce_(
        1, token_ids.clamp_min(0), values.where(rows[:, None] & (token_ids >= 0), NEG_INF), "amax"
    )


def build_continuation_masks(word_continuations: Tensor) -> Tensor:
    """(2, V) What is forbidden where anything may follow, and where no piece may that goes on with a word. To copy one
    of the two for each row of a search is much faster than to make it."""
    return torch.stack([torch.zeros_like(word_continuations), word_continuations])


class StatelessConstraint:
    """A rule that needs no more than what is written."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        return torch.zeros(len(requests), 0, dtype=torch.int64, device=self.device)

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        return state


class MinLength(StatelessConstraint):
    """No end before so many tokens."""

    def __init__(self, min_length: int, end: int, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.min_length, self.end = min_length, end

    def mask_scores(self, scores: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        scores[:, self.end].masked_fill_(generated.lengths < self.min_length, NEG_INF)
        return scores


class NoRepeatNgram(StatelessConstraint):
    """No sequence of n tokens comes twice."""

    def __init__(self, n: int, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.n = n

    def mask_scores(self, scores: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        tokens, n = generated.tokens, self.n
        if tokens.shape[1] < n:
            return scores
        grams = tokens.unfold(1, n, 1)  # (R, T) -> (R, T-n+1, n)
        ends = torch.arange(n, tokens.shape[1] + 1, device=tokens.device)
        again = ends <= generated.lengths[:, None]
        if n > 1:  # the gram begins like what the row ends with
            last = generated.lengths[:, None] + torch.arange(1 - n, 0, device=tokens.device)
            tail = tokens.gather(1, last.clamp_min(0))
            again = again & (grams[..., :-1] == tail[:, None]).all(-1)
        return ban_tokens(scores, grams[..., -1], again)


# --- loops -----------------------------------------------------------------------------------------------------------


def compute_loop_run(period: int) -> int:
    """How many tokens in a row, each the one that stood `unit` before it, make a loop."""
    return (max(MIN_LOOP_REPEATS, -(-MIN_LOOP_TOKENS // period)) - 1) * period


LOOP_RUNS = tuple(compute_loop_run(unit) for unit in range(1, MAX_LOOP_PERIOD + 1))
MIN_REPEATED_TOKENS = min(LOOP_RUNS)  # tokens that have come before, in any loop


def has_loop(token_ids: Sequence[int]) -> bool:
    """Does a unit of tokens come again and again, as `NoLoops` would not have let it?"""
    if (
        len(token_ids) - len(set(token_ids)) < MIN_REPEATED_TOKENS
        or len(token_ids) - len(set(pairwise(token_ids))) < MIN_REPEATED_TOKENS
    ):
        return False  # they come in a row: but for the first, so do pairs of them
    for unit, enough in enumerate(LOOP_RUNS, 1):
        again = [*map(eq, token_ids, token_ids[unit:])]
        if sum(again) >= enough and enough <= max(len([*run]) for same, run in groupby(again) if same):
            return True
    return False


class NoLoops:
    """No unit of tokens comes again and again: of `every` job, or of those that say so. A state is whether that holds
    and, for units of 1, 2, ... tokens, the token that stands so far back, and how many tokens in a row have been those
    that stood so far before them."""

    def __init__(self, device: torch.device | str = "cpu", all_requests: bool = True) -> None:
        self.run_limits = torch.tensor([enough - 1 for enough in LOOP_RUNS], device=device)
        self.all_requests = all_requests

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        state = self.run_limits.new_zeros(len(requests), 1 + 2 * MAX_LOOP_PERIOD)
        state[:, 0] = torch.tensor([self.all_requests or job.forbid_loops for job in requests])
        state[:, 1 : 1 + MAX_LOOP_PERIOD] = -1
        return state

    def mask_scores(self, scores: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        holds, back, run = self._split_state(state)
        return ban_tokens(scores, back, (run >= self.run_limits) & (holds > 0))

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        holds, back, run = self._split_state(state)
        run = torch.where(back == token[:, None], run + 1, 0)
        return torch.cat([holds, token[:, None], back[:, :-1], run], 1)

    def _split_state(self, state: Tensor) -> tuple[Tensor, ...]:
        return state.split([1, MAX_LOOP_PERIOD, MAX_LOOP_PERIOD], 1)


# --- the beginning ---------------------------------------------------------------------------------------------------


class PrefixError(ValueError):
    """A beginning that cannot be kept; the message says why and what to do."""


class ForcedPrefix:
    """A target begins as its job says. Where that is a whole word, what comes next begins another: the pieces that
    would `continues` (V,) a word are not allowed there. A state is the place of the job's prefix in a table."""

    def __init__(
        self, requests: Sequence[SearchRequest], word_continuations: Tensor | None, device: torch.device | str = "cpu"
    ) -> None:
        for job in requests:
            check_prefix_length(job)
        kinds = dict.fromkeys((tuple(job.prefix_ids), job.prefix_ends_word) for job in requests)
        self.table_rows = {kind: place for place, kind in enumerate(kinds)}
        longest = max((len(prefix) for prefix, _ in kinds), default=0)
        rows = [[*prefix, *[-1] * (longest + 1 - len(prefix))] for prefix, _ in kinds]
        self.token_table = torch.tensor(rows, dtype=torch.int64, device=device).view(len(kinds), longest + 1)
        # How long a prefix is that a new word must follow; -1: none must.
        guarded = [len(prefix) if whole and prefix else -1 for prefix, whole in kinds]
        self.boundary_lengths = torch.tensor(guarded, dtype=torch.int64, device=device)
        self.continuation_masks = (
            build_continuation_masks(word_continuations.to(device))
            if word_continuations is not None and max(guarded, default=-1) >= 0
            else None
        )

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        places = [[self.table_rows[tuple(job.prefix_ids), job.prefix_ends_word]] for job in requests]
        return torch.tensor(places, dtype=torch.int64, device=self.token_table.device).view(len(requests), 1)

    def get_forced_tokens(self, state: Tensor, generated: GeneratedTokens) -> Tensor:
        """(R,) The token that must come next; -1: the row is free."""
        at = generated.lengths.clamp_max(self.token_table.shape[1] - 1)
        return self.token_table[state[:, 0], at]

    def mask_scores(self, scores: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        token = self.get_forced_tokens(state, generated)[:, None]
        value = scores.gather(1, token.clamp_min(0))
        if self.continuation_masks is not None:
            behind = generated.lengths == self.boundary_lengths[state[:, 0]]
            scores.masked_fill_(self.continuation_masks.index_select(0, behind.long()), NEG_INF)
        return keep_only_tokens(scores, token[:, 0] >= 0, token, value)

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        return state


def check_prefix_length(request: SearchRequest) -> None:
    if request.max_length and len(request.prefix_ids) >= request.max_length:
        raise PrefixError(
            f"the prefix must leave room for more, but has {len(request.prefix_ids)} tokens of the {request.max_length} that the "
            f"translation may have; shorten it or raise max_length"
        )


# --- all together ----------------------------------------------------------------------------------------------------


@runtime_checkable
class RequirementConstraint(Protocol):
    """A rule that knows whether something must still come."""

    def is_satisfied(self, state: Tensor) -> Tensor:
        """(R,) Has all come?"""


def apply_constraints(
    constraints: Sequence[Constraint], scores: Tensor, states: Sequence[Tensor], generated: GeneratedTokens, end: int
) -> Tensor:
    """The scores (R, V) with -inf where any of the rules forbids a token; each has its own state. In place.

    What a job's prefix says comes before what any other rule forbids. A row for which nothing at all is left may end,
    unless something that is demanded is missing: then all its scores are -inf.
    """
    before = scores[:, end].clone()
    forced = [
        (token := rule.get_forced_tokens(state, generated)[:, None], scores.gather(1, token.clamp_min(0)))
        for rule, state in zip(constraints, states, strict=True)
        if isinstance(rule, ForcedPrefix)
    ]
    for rule, state in zip(constraints, states, strict=True):
        scores = rule.mask_scores(scores, state, generated)
    stuck = scores.amax(1) == NEG_INF
    for rule, state in zip(constraints, states, strict=True):
        if isinstance(rule, RequirementConstraint):
            stuck = stuck & rule.is_satisfied(state)
    scores[:, end] = torch.where(stuck, before, scores[:, end])
    for token, value in forced:
        scores = keep_only_tokens(scores, token[:, 0] >= 0, token, value)
    return scores
