"""Toy models whose targets can be enumerated, and a plain beam search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from attent.decoding.engines.gpu.request_batch import HypothesisBatch
from attent.decoding.options import Hypothesis, SearchOptions
from attent.decoding.search import HypothesisTensors

START, END, PAD = 0, 1, 2
Tokens = tuple[int, ...]


class ToyState:
    """The source of each row and the prefix of each beam."""

    def __init__(self, source: Tensor, beams: int, capacity: int) -> None:
        self.source, self.capacity = source.tolist(), capacity
        self.prefixes: list[list[Tokens]] = [[()] * beams for _ in self.source]

    def reorder_beams(self, parents: Tensor) -> None:
        self.prefixes = [[read[k] for k in row] for read, row in zip(self.prefixes, parents.tolist(), strict=True)]

    def reorder(self, rows: Tensor) -> None:
        self.source, self.prefixes = ([x[row] for row in rows.tolist()] for x in (self.source, self.prefixes))

    def replace_sources(self, rows: Tensor, new: ToyState) -> None:
        for row, source in zip(rows.tolist(), new.source, strict=True):
            self.source[row] = source

    def set_row_lengths(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            assert length in (0, len(self.prefixes[row][0]))
            self.prefixes[row] = [read[:length] for read in self.prefixes[row]]


class ToyModel:
    """Random logits that depend on source and prefix; `sharp` makes them peaked, `has_ties` often equal. The source is
    a row's first token."""

    def __init__(self, vocab: int, sharp: float = 2.0, *, has_ties: bool = False) -> None:
        self.vocab, self.sharp, self.has_ties = vocab, sharp, has_ties
        self.cached_logits: dict[Tokens, Tensor] = {}
        self.step_rows: list[int] = []  # rows of each step

    def init_decoder_state(
        self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1
    ) -> ToyState:
        return ToyState(source[:, 0], beams, capacity)

    def step(self, target: Tensor, state: ToyState, /) -> Tensor:
        rows = zip(state.prefixes, target.tolist(), strict=True)
        state.prefixes = [[(*before, token) for before, token in zip(*row, strict=True)] for row in rows]
        assert all(len(read[0]) <= state.capacity for read in state.prefixes)
        self.step_rows.append(len(target))
        rows = zip(state.source, state.prefixes, strict=True)
        return torch.stack([torch.stack([self.logits(source, prefix) for prefix in read]) for source, read in rows])

    def logits(self, source: int, read: Tokens) -> Tensor:
        """In float64, so that the order of summation does not matter in float32."""
        key = (source, *read)
        if key not in self.cached_logits:
            generator = torch.Generator().manual_seed(
                hash(key) % 2**31
            )  # a hash of integers is the same in every process
            logits = self.sharp * torch.randn(self.vocab, generator=generator, dtype=torch.float64)
            self.cached_logits[key] = logits.round() if self.has_ties else logits
        return self.cached_logits[key]

    def log_prob(self, source: int, tokens: Tokens, suppressed_tokens: Sequence[int] = ()) -> float:
        """The log-probability by forced decoding."""
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
    """All finished targets up to a length."""
    tokens = sorted(set(range(vocab)) - suppressed_tokens - {END})
    return [(*body, END) for n in range(max_length) for body in product(tokens, repeat=n)]


def search_plainly(
    toy: ToyModel, source: int, max_length: int, options: SearchOptions, suppressed_tokens: Sequence[int] = ()
) -> list[Hypothesis]:
    """Beam search for one source that never stops early: sorted lists, no cache, sums in float32 as in `search`."""
    K, finished, beams = options.beam_size, list[Hypothesis](), [((), torch.tensor(0.0))]
    for _ in range(max_length):
        candidates = []
        for ids, total in beams:
            logits = toy.logits(source, (START, *ids))
            gains = compute_log_probs(logits, suppressed_tokens).float()
            order = sorted(
                set(range(toy.vocab)) - {START, *suppressed_tokens}, key=lambda token: (-float(logits[token]), token)
            )
            candidates += [((*ids, token), total + gains[token]) for token in order]
        candidates.sort(key=lambda each: -float(each[1]))  # stable: on ties, the better beam, then the lower token
        candidates = candidates[: 1 if K == 1 else 2 * K]
        finished += [make_hypothesis(ids, total, options) for ids, total in candidates[:K] if ids[-1] == END]
        beams = [hypothesis for hypothesis in candidates if hypothesis[0][-1] != END][:K]
        if options.patience is not None and len(finished) >= round(options.patience * K):
            beams = []
    truncated = [make_hypothesis(ids, total, options) for ids, total in beams]
    return [
        *sorted(finished, key=lambda hypothesis: -hypothesis.score),
        *sorted(truncated, key=lambda hypothesis: -hypothesis.score),
    ][: options.n_best]


def make_hypothesis(ids: Tokens, total: Tensor, options: SearchOptions) -> Hypothesis:
    finished = ids[-1] == END
    score = float(total / torch.tensor(options.compute_score_divisor(len(ids)), dtype=torch.float32))
    return Hypothesis(token_ids=ids[:-1] if finished else ids, log_prob=float(total), score=score, is_finished=finished)


def to_hypotheses(output: HypothesisTensors, row: int) -> list[Hypothesis]:
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
    return [(hypothesis.token_ids, hypothesis.is_finished) for hypothesis in hypotheses]


def make_hypothesis_batch(hypotheses: Sequence[Hypothesis]) -> HypothesisBatch:
    longest = max(len(hypothesis.token_ids) for hypothesis in hypotheses)
    return HypothesisBatch(
        token_ids=np.array(
            [[*hypothesis.token_ids, *[0] * (longest - len(hypothesis.token_ids))] for hypothesis in hypotheses]
        ),
        token_counts=np.array([len(hypothesis.token_ids) for hypothesis in hypotheses]),
        lengths=np.array([len(hypothesis.token_ids) + hypothesis.is_finished for hypothesis in hypotheses]),
        log_probs=np.array([hypothesis.log_prob for hypothesis in hypotheses]),
        scores=np.array([hypothesis.score for hypothesis in hypotheses]),
    )
