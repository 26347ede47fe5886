"""Sequences of tokens that must come in a target, and how a beam search makes room for them: dynamic beam allocation
(Post and Vilar 2018).

A sequence is met as soon as its tokens have come one behind the other, whoever chose them; one that is demanded twice
must come twice, without overlap. Different sequences may overlap: `New York` holds `York`. How words become tokens is
left to the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attent.decode.options import Job
from attent.decode.rules import NEVER, Written, guard, only

Tokens = tuple[int, ...]


class DemandError(ValueError):
    """Demands that cannot be met; the message says why and what to do."""


def counted(job: Job) -> Counter[Tokens]:
    """How often each sequence is demanded."""
    return Counter(tuple(one) for one in job.demanded if one)


def check(jobs: Iterable[Job]) -> None:
    """Is there room for all that is demanded?"""
    for job in jobs:
        wanted = counted(job)
        there = {one: min(occurrences(job.prefix, one), times) for one, times in wanted.items()}
        missing = sum(len(one) * (times - there[one]) for one, times in wanted.items())
        needed = len(job.prefix) + missing + 1
        if missing and job.limit and needed > job.limit:
            prefix = f", behind a prefix of {len(job.prefix)}," if job.prefix else ""
            raise DemandError(
                f"what is demanded must fit into the {job.limit} tokens that the translation may have, but {missing} "
                f"tokens{prefix} and the end are {needed}; demand less or raise max_length"
            )


def occurrences(tokens: Sequence[int], one: Tokens) -> int:
    """How often a sequence comes, without overlap."""
    count, at = 0, 0
    while at + len(one) <= len(tokens):
        found = tuple(tokens[at : at + len(one)]) == one
        count, at = count + found, at + (len(one) if found else 1)
    return count


def borders(one: Tokens, length: int) -> list[list[bool]]:
    """[n][m]: do the first m tokens also stand at the end of the first n? If n break off, m of them still count."""
    return [[m <= n < len(one) and one[:m] == one[n - m : n] for m in range(length)] for n in range(length)]


class Demands:
    """What each job demands comes in its target. A state has, for each of C demanded sequences, which one it is, how
    often it must still come and how many of its tokens have just been written; then how many tokens are demanded in
    all, and whether a sequence has just been met.

    Behind a sequence that has just been met, pieces that would `continues` (V,) a word are not allowed: `Haus` is not
    met by `Hausboot`. None: any may follow.
    """

    def __init__(
        self, jobs: Sequence[Job], *, end: int, continues: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        check(jobs)
        every = list(dict.fromkeys(one for job in jobs for one in counted(job)))
        length = max(map(len, every), default=1)
        self.end = end
        self.guard = None if continues is None else guard(continues.to(device))
        self.places = {one: place for place, one in enumerate(every, 1)}  # 0 is no sequence
        self.count = max((len(counted(job)) for job in jobs), default=0) or 1
        rows: list[Tokens] = [(), *every]
        self.tokens = torch.tensor([[*one, *[-1] * (length - len(one))] for one in rows], device=device)  # (D, L)
        self.sizes = torch.tensor([len(one) for one in rows], device=device)
        self.borders = torch.tensor([borders(one, length) for one in rows], device=device)  # (D, L, L)
        self.steps = torch.arange(1, length + 1, device=device)

    def begin(self, jobs: Sequence[Job]) -> Tensor:
        rows = []
        for job in jobs:
            wanted = counted(job)
            fill = [0] * (self.count - len(wanted))
            total = sum(len(one) * times for one, times in wanted.items())
            rows.append(
                [*(self.places[one] for one in wanted), *fill, *wanted.values(), *fill, *[0] * self.count, total, 0]
            )
        return torch.tensor(rows, dtype=torch.int64, device=self.sizes.device).view(len(jobs), 3 * self.count + 2)

    def _parts(self, state: Tensor) -> tuple[Tensor, ...]:
        """(R, C) which, times left, tokens written; (R, 1) tokens in all, just met."""
        return state.split([self.count, self.count, self.count, 1, 1], 1)

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        which, left, done, total, _ = self._parts(state)
        fits = (self.tokens[which] == token[:, None, None]) & self.borders[which, done]  # (R, C, L)
        done = torch.where(fits, self.steps, 0).amax(-1).where(left > 0, 0)
        met = (done == self.sizes[which]) & (left > 0)
        return torch.cat([which, left - met.long(), done.where(~met, 0), total, met.any(1, keepdim=True).long()], 1)

    def wanted(self, state: Tensor) -> Tensor:
        """(R, C) The next token of each sequence that is not met, -1 where there is none."""
        which, left, done, _, _ = self._parts(state)
        return self.tokens[which, done].where(left > 0, -1)

    def missing(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) Tokens that must still come: if what is begun is finished first, and if it is broken off."""
        which, left, done, _, _ = self._parts(state)
        anew = (left * self.sizes[which]).sum(1)
        return anew - done.amax(1), anew

    def banks(self, state: Tensor) -> Tensor:
        """(R,) How many of the demanded tokens have come."""
        return state[:, -2] - self.missing(state)[0]

    def full(self, state: Tensor) -> Tensor:
        """(R,) Has all come?"""
        return self._parts(state)[1].sum(1) == 0

    def forbid(self, scores: Tensor, state: Tensor, written: Written) -> Tensor:
        """No end before all has come. Any other token only while there is room enough; what is missing goes first."""
        missing, anew = self.missing(state)
        room = written.limits - written.lengths - 2  # for tokens behind the next one and before the end
        wanted = self.wanted(state)
        values = scores.gather(1, wanted.clamp_min(0))
        helps = self._missing_behind(state, wanted) <= torch.maximum(room, missing - 1)[:, None]
        scores[:, self.end].masked_fill_(missing > 0, NEVER)
        if self.guard is not None:
            scores.masked_fill_(self.guard.index_select(0, state[:, -1]), NEVER)
        return only(scores, (missing > 0) & (anew > room), wanted.where(helps, -1), values)

    def _missing_behind(self, state: Tensor, wanted: Tensor) -> Tensor:
        """(R, C) How many tokens would be missing behind each of those wanted?"""
        each = state.repeat_interleave(wanted.shape[1], 0)
        return self.missing(self.advance(each, wanted.flatten()))[0].view_as(wanted)


def choose(totals: Tensor, banks: Tensor, k: int) -> Tensor:
    """(B, N), (B, N) -> (B, k) places: the best of each bank, the fullest bank first, then the second best of each, and
    so on; what has -inf comes behind all others."""
    order = totals.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, banks.gather(1, order).argsort(dim=1, descending=True, stable=True))
    sorted_banks = banks.gather(1, order)  # bank by bank, each from its best to its worst
    place = torch.arange(totals.shape[1], device=totals.device).expand_as(order)
    begins = torch.ones_like(sorted_banks, dtype=torch.bool)
    begins[:, 1:] = sorted_banks[:, 1:] != sorted_banks[:, :-1]
    rank = place - torch.where(begins, place, 0).cummax(1).values  # among its bank
    rank = torch.where(totals.gather(1, order) == NEVER, totals.shape[1], rank)
    return order.gather(1, rank.argsort(dim=1, stable=True)[:, :k])
