"""Writers whose every target can be counted out, and a search on them as one would write it down."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from attent.decode import Hypotheses
from attent.decode.lots import Found
from attent.decode.options import Hypothesis, Search

START, END, PAD = 0, 1, 2
Tokens = tuple[int, ...]


class Prefixes:
    """What a toy keeps: of each row its source, and all that each of its beams has read."""

    def __init__(self, source: Tensor, beams: int, capacity: int) -> None:
        self.source, self.capacity = source.tolist(), capacity
        self.read: list[list[Tokens]] = [[()] * beams for _ in self.source]

    def follow(self, beams: Tensor) -> None:
        self.read = [[read[k] for k in row] for read, row in zip(self.read, beams.tolist(), strict=True)]

    def reorder(self, rows: Tensor) -> None:
        self.source, self.read = ([x[row] for row in rows.tolist()] for x in (self.source, self.read))

    def put(self, rows: Tensor, new: Prefixes) -> None:
        for row, source in zip(rows.tolist(), new.source, strict=True):
            self.source[row] = source

    def rewind(self, places: Sequence[int]) -> None:
        for row, place in enumerate(places):
            assert place in (0, len(self.read[row][0]))
            self.read[row] = [read[:place] for read in self.read[row]]


class Toy:
    """Logits by chance, but always the same for the same source and prefix; `sharp` ones leave less doubt, `even` ones
    are often equal. The source is a row's first token."""

    def __init__(self, vocab: int, sharp: float = 2.0, *, even: bool = False) -> None:
        self.vocab, self.sharp, self.even = vocab, sharp, even
        self.known: dict[Tokens, Tensor] = {}
        self.rows: list[int] = []  # of each step

    def begin(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1) -> Prefixes:
        return Prefixes(source[:, 0], beams, capacity)

    def step(self, target: Tensor, state: Prefixes, /) -> Tensor:
        rows = zip(state.read, target.tolist(), strict=True)
        state.read = [[(*before, token) for before, token in zip(*row, strict=True)] for row in rows]
        assert all(len(read[0]) <= state.capacity for read in state.read)
        self.rows.append(len(target))
        rows = zip(state.source, state.read, strict=True)
        return torch.stack([torch.stack([self.logits(source, one) for one in read]) for source, read in rows])

    def logits(self, source: int, read: Tokens) -> Tensor:
        """In float64, so that a sum in another order is the same in float32."""
        key = (source, *read)
        if key not in self.known:
            chance = torch.Generator().manual_seed(hash(key) % 2**31)  # of numbers: the same in every process
            made = self.sharp * torch.randn(self.vocab, generator=chance, dtype=torch.float64)
            self.known[key] = made.round() if self.even else made
        return self.known[key]

    def log_prob(self, source: int, tokens: Tokens, never: Sequence[int] = ()) -> float:
        """What reading says, if the start and `never` are no words."""
        reads = [(START, *tokens[:i]) for i in range(len(tokens))]
        each = zip(reads, tokens, strict=True)
        return sum(float(log_probs(self.logits(source, read), never)[token]) for read, token in each)


def log_probs(logits: Tensor, never: Sequence[int] = ()) -> Tensor:
    return logits.index_fill(-1, torch.tensor([START, *never], device=logits.device), float("-inf")).log_softmax(-1)


def sources(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None]


def every_target(vocab: int, longest: int, never: set[int]) -> list[Tokens]:
    """All that end, up to a length."""
    words = sorted(set(range(vocab)) - never - {END})
    return [(*body, END) for n in range(longest) for body in product(words, repeat=n)]


def plain(toy: Toy, source: int, limit: int, search: Search, never: Sequence[int] = ()) -> list[Hypothesis]:
    """Beam search of one source that never stops early: sorted lists, nothing kept, sums in float32 as ours are."""
    K, ended, beams = search.beam_size, list[Hypothesis](), [((), torch.tensor(0.0))]
    for _ in range(limit):
        grown = []
        for ids, total in beams:
            logits = toy.logits(source, (START, *ids))
            gains = log_probs(logits, never).float()
            order = sorted(set(range(toy.vocab)) - {START, *never}, key=lambda token: (-float(logits[token]), token))
            grown += [((*ids, token), total + gains[token]) for token in order]
        grown.sort(key=lambda one: -float(one[1]))  # stable: of equal ones, first the better beam's, the lower token
        grown = grown[: 1 if K == 1 else 2 * K]
        ended += [hypothesis(ids, total, search) for ids, total in grown[:K] if ids[-1] == END]
        beams = [one for one in grown if one[0][-1] != END][:K]
        if search.patience is not None and len(ended) >= round(search.patience * K):
            beams = []
    cut = [hypothesis(ids, total, search) for ids, total in beams]
    return [*sorted(ended, key=lambda one: -one.score), *sorted(cut, key=lambda one: -one.score)][: search.n_best]


def hypothesis(ids: Tokens, total: Tensor, search: Search) -> Hypothesis:
    ended = ids[-1] == END
    score = float(total / torch.tensor(search.penalty(len(ids)), dtype=torch.float32))
    return Hypothesis(ids=ids[:-1] if ended else ids, log_prob=float(total), score=score, ended=ended)


def found(hypotheses: Hypotheses, row: int) -> list[Hypothesis]:
    names = ("tokens", "lengths", "scores", "sums")
    rows = zip(*(getattr(hypotheses, name)[row].tolist() for name in names), strict=True)
    return [
        Hypothesis(
            ids=tuple(tokens[: length - (tokens[length - 1] == END)]),
            log_prob=total,
            score=score,
            ended=tokens[length - 1] == END,
        )
        for tokens, length, score, total in rows
        if score > float("-inf")
    ]


def texts(hypotheses: Sequence[Hypothesis]) -> list[tuple[Tokens, bool]]:
    return [(one.ids, one.ended) for one in hypotheses]


def as_found(some: Sequence[Hypothesis]) -> Found:
    """As a lane gives them."""
    longest = max(len(one.ids) for one in some)
    return Found(
        tokens=np.array([[*one.ids, *[0] * (longest - len(one.ids))] for one in some]),
        written=np.array([len(one.ids) for one in some]),
        lengths=np.array([len(one.ids) + one.ended for one in some]),
        sums=np.array([one.log_prob for one in some]),
        scores=np.array([one.score for one in some]),
    )
