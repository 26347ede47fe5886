"""Rules on the tokens of a target: a minimum length, no n-gram twice, and no short unit of tokens over and over."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import eq
from typing import Self

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, Constraint, ConstraintSetup, GeneratedTokens, ban_tokens
from attent.decoding.options import SearchRequest


class MinLength(Constraint):
    def __init__(self, min_length: int, end_ids: Sequence[int]) -> None:
        self.min_length, self.end_ids = min_length, tuple(end_ids)

    @classmethod
    def build(cls, setup: ConstraintSetup) -> Self | None:
        min_length, vocabulary = setup.options.min_length, setup.vocabulary
        return cls(min_length, vocabulary.end_ids) if min_length else None

    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        for end in self.end_ids:
            logits[:, end].masked_fill_(generated.lengths < self.min_length, NEG_INF)
        return logits


# A loop is a unit of up to MAX_LOOP_PERIOD tokens that occurs MIN_LOOP_REPEATS times in a row and then fills at least
# MIN_LOOP_TOKENS tokens. Good text repeats too, but less: "ha ha ha", "very, very, very". A single token may occur
# more often ("........", a million digit by digit), hence MIN_LOOP_TOKENS. Longer units are left to NoRepeatNgram.
MAX_LOOP_PERIOD = 8
MIN_LOOP_REPEATS = 4
MIN_LOOP_TOKENS = 8


class NoRepeatNgram(Constraint):
    def __init__(self, n: int) -> None:
        self.n = n

    @classmethod
    def build(cls, setup: ConstraintSetup) -> Self | None:
        n = setup.options.no_repeat_ngram_size
        return cls(n) if n else None

    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        tokens, n = generated.tokens, self.n
        if tokens.shape[1] < n:
            return logits
        ngrams = tokens.unfold(1, n, 1)  # (R, T) -> (R, T-n+1, n)
        ends = torch.arange(n, tokens.shape[1] + 1, device=tokens.device)
        is_repeat = ends <= generated.lengths[:, None]
        if n > 1:  # an n-gram that starts like the row ends
            last = generated.lengths[:, None] + torch.arange(1 - n, 0, device=tokens.device)
            tail = tokens.gather(1, last.clamp_min(0))
            is_repeat = is_repeat & (ngrams[..., :-1] == tail[:, None]).all(-1)
        return ban_tokens(logits, ngrams[..., -1], is_repeat)


# For periods 1, 2, ...: how many consecutive tokens, each equal to the one a period before it, make a loop.
LOOP_RUNS = tuple(
    (max(MIN_LOOP_REPEATS, -(-MIN_LOOP_TOKENS // period)) - 1) * period for period in range(1, MAX_LOOP_PERIOD + 1)
)
MIN_REPEATED_TOKENS = min(LOOP_RUNS)  # in any loop


def has_loop(token_ids: Sequence[int]) -> bool:
    """True if the tokens contain a loop that `NoLoops` would have prevented."""
    count = len(token_ids)
    # A loop repeats tokens, and all but its first also as pairs: a cheap test first.
    if count - len(set(token_ids)) < MIN_REPEATED_TOKENS or count - len(set(pairwise(token_ids))) < MIN_REPEATED_TOKENS:
        return False
    for period, run_length in enumerate(LOOP_RUNS, 1):
        repeats = [*map(eq, token_ids, token_ids[period:])]
        longest = max((len([*run]) for same, run in groupby(repeats) if same), default=0)
        if longest >= run_length:
            return True
    return False


class NoLoops(Constraint):
    """Forbid the token that would complete a loop, in requests with `forbid_loops`.

    State: whether it applies; for periods 1, 2, ... the token that far back, and the length of the run of tokens that
    equal the one that far before them.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.run_limits = torch.tensor([run_length - 1 for run_length in LOOP_RUNS], device=device)

    @classmethod
    def build(cls, setup: ConstraintSetup) -> Self | None:
        return cls(setup.vocabulary.device) if any(request.forbid_loops for request in setup.requests) else None

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        state = self.run_limits.new_zeros(len(requests), 1 + 2 * MAX_LOOP_PERIOD)
        state[:, 0] = torch.tensor([request.forbid_loops for request in requests])
        state[:, 1 : 1 + MAX_LOOP_PERIOD] = -1
        return state

    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        applies, previous, run = self._split_state(state)
        return ban_tokens(logits, previous, (run >= self.run_limits) & (applies > 0))

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        applies, previous, run = self._split_state(state)
        run = torch.where(previous == token[:, None], run + 1, 0)
        return torch.cat([applies, token[:, None], previous[:, :-1], run], 1)

    def _split_state(self, state: Tensor) -> tuple[Tensor, ...]:
        return state.split([1, MAX_LOOP_PERIOD, MAX_LOOP_PERIOD], 1)
