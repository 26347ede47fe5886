"""Writers whose every target can be counted out, and a search on them as one would write it down."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from attent.decoding import SearchOutput
from attent.decoding.engines.gpu.request_batch import HypothesisBatch
from attent.decoding.options import Hypothesis, SearchOptions

START, END, PAD = 0, 1, 2
Tokens = tuple[int, ...]


class ToyState:
    """What a toy keeps: of each row its source, and all that each of its beams has read."""

    def __init__(self, source: Tensor, beams: int, capacity: int) -> None:
        self.source, self.capacity = source.tolist(), capacity
        self.prefixes: list[list[Tokens]] = [[()] * beams for _ in self.source]

    def reorder_beams(self, parents: Tensor) -> None:
        self.prefixes = [[read[k] for k in row] for read, row in zip(self.prefixes, parents.tolist(), strict=True)]

    def reorder(self, rows: Tensor) -> None:
        self.source, self.prefixes = ([x[row] for row in rows.tolist()] for x in (self.source, self.prefixes))

    def replace_rows(self, rows: Tensor, new: ToyState) -> None:
        for row, source in zip(rows.tolist(), new.source, strict=True):
            self.source[row] = source

    def rewind(self, lengths: Sequence[int]) -> None:
        for row, place in enumerate(lengths):
            assert place in (0, len(self.prefixes[row][0]))
            self.prefixes[row] = [read[:place] for read in self.prefixes[row]]


class ToyModel:
    """Logits by chance, but always the same for the same source and prefix; `sharp` ones leave less doubt, `even` ones
    are often equal. The source is a row's first token."""

    def __init__(self, vocab: int, sharp: float = 2.0, *, has_ties: bool = False) -> None:
        self.vocab, self.sharp, self.has_ties = vocab, sharp, has_ties
        self.cached_logits: dict[Tokens, Tensor] = {}
        self.step_rows: list[int] = []  # of each step

    def begin(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1) -> ToyState:
        return ToyState(source[:, 0], beams, capacity)

    def step(self, target: Tensor, state: ToyState, /) -> Tensor:
        rows = zip(state.prefixes, target.tolist(), strict=True)
        state.prefixes = [[(*before, token) for before, token in zip(*row, strict=True)] for row in rows]
        assert all(len(read[0]) <= state.capacity for read in state.prefixes)
        self.step_rows.append(len(target))
        rows = zip(state.source, state.prefixes, strict=True)
        return torch.stack([torch.stack([self.logits(source, one) for one in read]) for source, read in rows])

    def logits(self, source: int, read: Tokens) -> Tensor:
        """In float64, so that a sum in another order is the same in float32."""
        key = (source, *read)
        if key not in self.cached_logits:
            chance = torch.Generator().manual_seed(hash(key) % 2**31)  # of numbers: the same in every process
            made = self.sharp * torch.randn(self.vocab, generator=chance, dtype=torch.float64)
            self.cached_logits[key] = made.round() if self.has_ties else made
        return self.cached_logits[key]

    def log_prob(self, source: int, tokens: Tokens, suppressed_tokens: Sequence[int] = ()) -> float:
        """What reading says, if the start and `never` are no words."""
        reads = [(START, *tokens[:i]) for i in range(len(tokens))]
        each = zip(reads, tokens, strict=True)
        return sum(
            float(compute_log_probs(self.logits(source, read), suppressed_tokens)[token]) for read, token in each
        )


def compute_log_probs(logits: Tensor, suppressed_tokens: Sequence[int] = ()) -> Tensor:
    return logits.index_fill(
        -1, torch.tensor([START, *suppressed_tokens], device=logits.device), float("-inf")
    ).log_softmax(-1)


def make_sources(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None]


def list_all_targets(vocab: int, max_length: int, suppressed_tokens: set[int]) -> list[Tokens]:
    """All that end, up to a length."""
    words = sorted(set(range(vocab)) - suppressed_tokens - {END})
    return [(*body, END) for n in range(max_length) for body in product(words, repeat=n)]


def search_plainly(
    toy: ToyModel, source: int, max_length: int, options: SearchOptions, suppressed_tokens: Sequence[int] = ()
) -> list[Hypothesis]:
    """Beam search of one source that never stops early: sorted lists, nothing kept, sums in float32 as ours are."""
    K, ended, beams = options.beam_size, list[Hypothesis](), [((), torch.tensor(0.0))]
    for _ in range(max_length):
        grown = []
        for ids, total in beams:
            logits = toy.logits(source, (START, *ids))
            gains = compute_log_probs(logits, suppressed_tokens).float()
            order = sorted(
                set(range(toy.vocab)) - {START, *suppressed_tokens}, key=lambda token: (-float(logits[token]), token)
            )
            grown += [((*ids, token), total + gains[token]) for token in order]
        grown.sort(key=lambda one: -float(one[1]))  # stable: of equal ones, first the better beam's, the lower token
        grown = grown[: 1 if K == 1 else 2 * K]
        ended += [make_hypothesis(ids, total, options) for ids, total in grown[:K] if ids[-1] == END]
        beams = [one for one in grown if one[0][-1] != END][:K]
        if options.patience is not None and len(ended) >= round(options.patience * K):
            beams = []
    cut = [make_hypothesis(ids, total, options) for ids, total in beams]
    return [*sorted(ended, key=lambda one: -one.score), *sorted(cut, key=lambda one: -one.score)][: options.n_best]


def make_hypothesis(ids: Tokens, total: Tensor, options: SearchOptions) -> Hypothesis:
    ended = ids[-1] == END
    score = float(total / torch.tensor(options.compute_length_penalty(len(ids)), dtype=torch.float32))
    return Hypothesis(token_ids=ids[:-1] if ended else ids, log_prob=float(total), score=score, is_finished=ended)


def to_hypotheses(output: SearchOutput, row: int) -> list[Hypothesis]:
    names = ("tokens", "lengths", "scores", "log_probs")
    rows = zip(*(getattr(output, name)[row].tolist() for name in names), strict=True)
    return [
        Hypothesis(
            token_ids=tuple(tokens[: length - (tokens[length - 1] == END)]),
            log_prob=total,
            score=score,
            is_finished=tokens[length - 1] == END,
        )
        for tokens, length, score, total in rows
        if score > float("-inf")
    ]


def to_ids(hypotheses: Sequence[Hypothesis]) -> list[tuple[Tokens, bool]]:
    return [(one.token_ids, one.is_finished) for one in hypotheses]


def make_hypothesis_batch(hypotheses: Sequence[Hypothesis]) -> HypothesisBatch:
    """As a lane gives them."""
    longest = max(len(one.token_ids) for one in hypotheses)
    return HypothesisBatch(
        token_ids=np.array([[*one.token_ids, *[0] * (longest - len(one.token_ids))] for one in hypotheses]),
        token_counts=np.array([len(one.token_ids) for one in hypotheses]),
        lengths=np.array([len(one.token_ids) + one.is_finished for one in hypotheses]),
        log_probs=np.array([one.log_prob for one in hypotheses]),
        scores=np.array([one.score for one in hypotheses]),
    )
