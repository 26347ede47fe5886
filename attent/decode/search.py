"""Search over what a model may write. It knows no architecture: only `begin` from a source, `step` by a token and, for
beams, `reorder` of the rows. Words are left to `translate`.

A hypothesis is scored by the sum of the model's log-probabilities over ((5 + length) / 6) ** length_penalty (Wu et al.
2016, equation 14; section 6.1 of the paper takes 0.6), where the length counts its end as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS_UNSEEN = 8  # on an accelerator the host asks no more often than this who is done: to ask is to wait
NEVER = float("-inf")


class Rows(Protocol):
    """What a model keeps between steps, row by row: row i becomes what row `rows[i]` was; rows may be fewer or more."""

    def reorder(self, rows: Tensor) -> None: ...


State = TypeVar("State")  # whatever the model keeps between steps
Kept = TypeVar("Kept", bound=Rows)


class Writer(Protocol[State]):
    """What search asks of a model: begin from a source, then logits (B, T, V) behind the next tokens, step by step."""

    def begin(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int) -> State: ...

    def step(self, target: Tensor, state: State, /) -> Tensor: ...


@torch.no_grad()
def greedy(
    model: Writer[State],
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    start: int,
    end: int,
    max_length: int,
    never: Sequence[int] = (),
) -> Tensor:
    """The likeliest next token, again and again: (B, Ts) -> (B, max_length). A finished row is filled up with `end`.

    `start` and the tokens of `never` are not written.
    """
    _check(end, max_length)
    state = model.begin(source, lengths, capacity=max_length)
    token = source.new_full((source.shape[0], 1), start)
    banned = _banned(start, end, never, source.device)
    finished = torch.zeros_like(token, dtype=torch.bool)
    written = []
    for t in range(max_length):
        logits = model.step(token, state)[:, -1:].index_fill_(-1, banned, NEVER)
        token = logits.argmax(-1).masked_fill(finished, end)
        finished = finished | (token == end)
        written.append(token)
        if _may_ask(t, source.device) and bool(finished.all()):
            break
    return F.pad(torch.cat(written, 1), (0, max_length - len(written)), value=end)


def _check(end: int, max_length: int) -> None:
    if max_length < 1:
        raise ValueError(f"`max_length` must be 1 or more tokens, but is {max_length}")
    if end < 0:
        raise ValueError(f"`end` must be the id of a token, 0 or more, but is {end}")


def _banned(start: int, end: int, never: Sequence[int], device: torch.device) -> Tensor:
    """No target holds the start, yet published Marian models would often write it."""
    return torch.tensor(sorted({start, *never} - {end}), dtype=torch.int64, device=device)


def _may_ask(t: int, device: torch.device) -> bool:
    """After step t, may the host look at numbers of the device?"""
    if torch.compiler.is_compiling():
        return False
    return device.type == "cpu" or t % STEPS_UNSEEN == STEPS_UNSEEN - 1


# --- beams ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Hypotheses:
    """The best targets of each source, the best first; one that was cut at `max_length` comes behind all with an end.

    tokens   (B, N, max_length) filled up with `end`
    scores   (B, N) with the length penalty; -inf where there are no more hypotheses
    lengths  (B, N) tokens up to the end, with it
    """

    tokens: Tensor
    scores: Tensor
    lengths: Tensor


@torch.no_grad()
def beam(
    model: Writer[Kept],
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    start: int,
    end: int,
    max_length: int,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    n_best: int | None = None,
    never: Sequence[int] = (),
) -> Hypotheses:
    """Follow the `beam_size` likeliest beginnings of each source side by side; give its `n_best` (None: all of them).

    One that ends keeps its place among them, so that a beam of one is `greedy`. A source is done as soon as nothing
    that goes on can still come among its `n_best`; then its rows are given up. `start` and `never` are not written.
    """
    _check(end, max_length)
    rules = _Rules(end, max_length, beam_size, length_penalty, n_best or beam_size)
    banned = _banned(start, end, never, source.device)
    at = torch.arange(source.shape[0], device=source.device)  # which sources are still searched for
    state = model.begin(source, lengths, capacity=max_length)
    state.reorder(at.repeat_interleave(beam_size))
    live = settled = _Beams.new(len(at), rules, source)
    token = source.new_full((len(at) * beam_size, 1), start)
    for t in range(max_length):
        logits = model.step(token, state)[:, -1]
        live, rows = _grown(live, *_best_tokens(logits, banned, beam_size), t, rules)
        if t + 1 == max_length or _may_ask(t, source.device):
            settled = settled.updated(at, live)
            going = _going(live, rules).nonzero()[:, 0]
            if t + 1 == max_length or not len(going):
                break
            live, at, rows = live.of(going), at[going], rows[going]
        _follow(state, rows.flatten(), len(token))
        token = live.tokens[:, :, t].reshape(-1, 1)
    return _ranked(settled, rules)


@dataclass(frozen=True)
class _Rules:
    end: int
    max_length: int
    beam_size: int
    length_penalty: float
    n_best: int

    def __post_init__(self) -> None:
        if self.beam_size < 1:
            raise ValueError(f"`beam_size` must be 1 or more, but is {self.beam_size}")
        if not 1 <= self.n_best <= self.beam_size:
            raise ValueError(f"`n_best` must be from 1 to `beam_size`={self.beam_size}, but is {self.n_best}")
        if not 0 <= self.length_penalty < float("inf"):
            raise ValueError(f"`length_penalty` must be 0 or more, but is {self.length_penalty}")

    def normalised(self, scores: Tensor, lengths: Tensor | int) -> Tensor:
        return scores / ((5 + lengths) / 6) ** self.length_penalty


@dataclass(frozen=True, eq=False)
class _Beams:
    """K places a source, each with a hypothesis that grows, one that has ended, or (score -inf) none."""

    tokens: Tensor  # (B, K, max_length), `end` where nothing is written
    scores: Tensor  # (B, K) sums of log-probabilities
    lengths: Tensor  # (B, K)
    ended: Tensor  # (B, K)

    @classmethod
    def new(cls, B: int, rules: _Rules, like: Tensor) -> _Beams:
        """The empty beginning, once: if every place had it, all would stay the same."""
        tokens = like.new_full((B, rules.beam_size, rules.max_length), rules.end)
        scores = torch.full(tokens.shape[:2], NEVER, dtype=torch.float32, device=like.device)
        scores[:, 0] = 0
        lengths = torch.zeros_like(scores, dtype=torch.int64)
        return cls(tokens, scores, lengths, torch.zeros_like(lengths, dtype=torch.bool))

    def of(self, sources: Tensor) -> _Beams:
        return _Beams(*(getattr(self, f.name)[sources] for f in fields(self)))

    def moved(self, place: Tensor) -> _Beams:
        """Place i of each source has what place `place[i]` had: (B, K) of places."""
        tokens = self.tokens.gather(1, place[:, :, None].expand(-1, -1, self.tokens.shape[2]))
        return _Beams(tokens, *(x.gather(1, place) for x in (self.scores, self.lengths, self.ended)))

    def updated(self, sources: Tensor, new: _Beams) -> _Beams:
        return _Beams(*(getattr(self, f.name).index_copy(0, sources, getattr(new, f.name)) for f in fields(self)))


def _follow(state: Rows, rows: Tensor, count: int) -> None:
    """Reorder, unless it is known that each of the `count` rows stays: a cache is large."""
    if not (rows.device.type == "cpu" and torch.equal(rows, torch.arange(count))):
        state.reorder(rows)


def _best_tokens(logits: Tensor, banned: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest next tokens of every row with their log-probabilities: (R, V) -> (R, k), (R, k).

    The probabilities are the model's own, with those of banned tokens, so that they can be checked by reading the text.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    logits = logits.index_fill_(-1, banned, NEVER)
    if k == 1:  # of equal ones `greedy` takes the first, `topk` any
        best, token = logits.max(-1, keepdim=True)
    else:
        best, token = logits.topk(min(k, logits.shape[-1]), -1)
    return (best - total).float(), token


def _grown(beams: _Beams, gains: Tensor, tokens: Tensor, t: int, rules: _Rules) -> tuple[_Beams, Tensor]:
    """Every hypothesis one token longer, the best of all continuations; and the rows (B, K) that they continue."""
    B, K = beams.scores.shape
    gains, tokens = gains.view(B, K, -1), tokens.view(B, K, -1)
    n = gains.shape[2]
    totals = beams.scores[:, :, None] + gains
    first = torch.arange(n, device=gains.device) == 0
    staying = torch.where(first, -NEVER, NEVER)  # what has ended stays, once, before all others
    rank, chosen = torch.where(beams.ended[:, :, None], staying, totals).flatten(1).topk(K)
    place = chosen // n
    old = beams.moved(place)
    stays, exists = rank == -NEVER, rank > NEVER
    token = tokens.flatten(1).gather(1, chosen).where(exists & ~stays, rules.end)
    old.tokens[:, :, t] = token
    scores = old.scores.where(stays, rank)
    ended = stays | (exists & (token == rules.end))
    grown = _Beams(old.tokens, scores, old.lengths + (exists & ~stays), ended)
    return grown, place + K * torch.arange(B, device=place.device)[:, None]


def _going(beams: _Beams, rules: _Rules) -> Tensor:
    """(B,) Can what goes on still come among the best? Its sum only falls; no length helps it more than max_length."""
    ended = rules.normalised(beams.scores, beams.lengths).masked_fill(~beams.ended, NEVER)
    to_beat = ended.topk(rules.n_best).values[:, -1]
    hope = rules.normalised(beams.scores, rules.max_length).masked_fill(beams.ended, NEVER).amax(1)
    return hope > to_beat


def _ranked(beams: _Beams, rules: _Rules) -> Hypotheses:
    scores = rules.normalised(beams.scores, beams.lengths)
    order = scores.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~beams.ended).gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
    best = beams.moved(order[:, : rules.n_best])
    return Hypotheses(best.tokens, rules.normalised(best.scores, best.lengths), best.lengths)
