"""What can be asked of a search, and what it gives back. Facts only: no torch, no model, no text.

A hypothesis is ranked by its score: the sum of the model's log-probabilities, divided by a penalty of its length. The
length counts the end, where the hypothesis has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

LengthPenaltyType = Literal["avg", "wu", "none"]

SCORE_FORMULAS: dict[LengthPenaltyType, str] = {
    "avg": "score = log_prob / length^alpha",
    "wu": "score = log_prob / ((5 + length) / 6)^alpha",
    "none": "score = log_prob",
}
MAX_EXTRA_TOKENS = 50  # tokens that a target may have beyond its source (section 6.1 of the paper)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Draw each token by chance. The same seed, text and place give the same tokens, whatever stands beside them."""

    temperature: float = 1.0  # below 1: nearer to the likeliest token; above: bolder
    top_k: int = 0  # draw among this many likeliest tokens; 0: among all
    top_p: float = 1.0  # draw among the fewest tokens that have this much probability together
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"`temperature` must be greater than 0, but is {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"`top_k` must be 1 or more, or 0 for all tokens, but is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be greater than 0 and at most 1, but is {self.top_p}")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to look for the best target. The defaults are those of section 6.1 of the paper."""

    beam_size: int = 4  # hypotheses followed side by side; 1: the likeliest token at each step (greedy)
    length_penalty: float = 0.6  # alpha of FORMULAS
    length_penalty_type: LengthPenaltyType = "avg"
    n_best: int = 1  # how many to give
    max_length: int | None = None  # tokens of a target at most, its end counted; None: those of its source + 50
    min_length: int = 0  # tokens of a target at least, its end not counted
    patience: float | None = None  # stop when beam_size * patience have ended; None: when no better one can come
    beam_groups: int = 1  # diverse beam search: groups of beams that avoid one another's tokens
    diversity_penalty: float = 0.5  # what a token costs for each earlier group that took it at this step
    sampling: SamplingOptions | None = None  # draw `n_best` targets by chance instead of searching for the best
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens comes twice; 0: any may
    forbid_loops: bool = False  # no sequence of tokens comes again and again, one behind the other
    rank_truncated_equally: bool = (
        False  # what is cut at the limit ranks with what has ended, by its score; False: behind it
    )

    def __post_init__(self) -> None:
        for name in ("beam_size", "n_best", "beam_groups"):
            check_minimum(name, getattr(self, name), 1)
        for name in ("length_penalty", "min_length", "no_repeat_ngram_size", "diversity_penalty"):
            check_minimum(name, getattr(self, name), 0)
        if self.max_length is not None:
            check_minimum("max_length", self.max_length, 1)
        if self.patience is not None:
            check_minimum("patience", self.patience, 1)
        if self.length_penalty_type not in get_args(LengthPenaltyType):
            choices = ", ".join(get_args(LengthPenaltyType))
            raise ValueError(f"`length_penalty_type` must be one of {choices}, but is {self.length_penalty_type!r}")
        if self.max_length is not None and self.min_length >= self.max_length:
            raise ValueError(
                f"`min_length` must be less than `max_length`={self.max_length}, which counts the end, but is "
                f"{self.min_length}"
            )
        if self.sampling is None and self.n_best > self.beam_size:
            raise ValueError(
                f"`n_best` must be at most `beam_size`={self.beam_size}, but is {self.n_best}; widen the beam"
            )
        if self.beam_size % self.beam_groups:
            raise ValueError(
                f"`beam_size`={self.beam_size} must be a multiple of `beam_groups`, but that is {self.beam_groups}"
            )

    @property
    def score_formula(self) -> str:
        """How scores are made, as a person reads it."""
        formula = SCORE_FORMULAS[self.length_penalty_type]
        return formula if self.length_penalty_type == "none" else f"{formula}, alpha = {self.length_penalty:g}"

    def compute_length_penalty(self, length: int) -> float:
        """What a sum of log-probabilities is divided by."""
        match self.length_penalty_type:
            case "avg":
                return float(max(length, 1) ** self.length_penalty)
            case "wu":
                return float(((5 + length) / 6) ** self.length_penalty)
            case "none":
                return 1.0

    def compute_max_length(self, source_length: int) -> int:
        """Tokens that the target of a source of so many tokens (its end not counted) may have, its end counted."""
        return source_length + MAX_EXTRA_TOKENS if self.max_length is None else self.max_length


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How a text goes on behind a prompt. By default each token is drawn by chance, among the likely ones."""

    max_new_tokens: int = 200  # the end counted
    temperature: float = 0.8  # 0: the likeliest token at each step
    top_k: int = 0  # draw among this many likeliest tokens; 0: among all
    top_p: float = 0.95  # draw among the fewest tokens that have this much probability together
    seed: int = 1  # the same seed, prompt and place among the prompts give the same text
    n: int = 1  # texts for each prompt
    stop: tuple[str, ...] = ()  # a text ends before the first of these
    beam_size: int = 1  # more than 1: search for the likeliest text instead
    length_penalty: float = 1.0  # of that search: score = log_prob / length^alpha
    min_new_tokens: int = 0
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens comes twice in what is written; 0: any may

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "n", "beam_size"):
            check_minimum(name, getattr(self, name), 1)
        for name in ("temperature", "min_new_tokens", "no_repeat_ngram_size", "length_penalty"):
            check_minimum(name, getattr(self, name), 0)
        if not all(self.stop):
            raise ValueError("`stop` must be words to stop at, but one is empty; leave it out")
        if self.n > 1 and self.beam_size == 1 and not self.temperature:
            raise ValueError(
                f"`n` must be 1 where each token is the likeliest, since all texts would be the same, but is {self.n}; "
                f"give a `temperature` above 0, or a `beam_size`"
            )
        if self.min_new_tokens >= self.max_new_tokens:
            raise ValueError(
                f"`min_new_tokens` must be less than `max_new_tokens`={self.max_new_tokens}, but is "
                f"{self.min_new_tokens}"
            )
        if self.beam_size > 1:
            _ = self.search_options
        elif self.temperature:
            _ = self.sampling

    @property
    def sampling(self) -> SamplingOptions | None:
        if self.beam_size > 1 or not self.temperature:
            return None
        return SamplingOptions(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    @property
    def search_options(self) -> SearchOptions:
        """The search for the likeliest text."""
        if self.n > self.beam_size:
            raise ValueError(f"`n` must be at most `beam_size`={self.beam_size}, but is {self.n}; widen the beam")
        return SearchOptions(
            beam_size=self.beam_size,
            n_best=self.n,
            length_penalty=self.length_penalty,
            min_length=self.min_new_tokens,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            rank_truncated_equally=True,  # a text may go on for ever, unlike a translation
        )


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """One source to search a target for, in ids."""

    source_ids: Sequence[int]  # with its end, as `Tokenizer.encode_source` gives it
    prefix_ids: Sequence[int] = ()  # what the target must begin with
    required_phrases: tuple[tuple[int, ...], ...] = ()  # sequences that must come in the target
    banned_phrases: tuple[str, ...] = ()  # words, as text, that must not
    prefix_ends_word: bool = False  # the prefix ends with a word: what comes next must begin another
    rng_key: int = 0  # its place among all: chance depends on it
    max_length: int = 0  # tokens that the target may have, its end counted
    forbid_loops: bool = False  # as a search may have it for all


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One target that was found."""

    token_ids: tuple[int, ...]  # without the end
    log_prob: float  # the sum of the model's log-probabilities, that of the end included
    score: float  # with the length penalty
    is_finished: bool  # False: cut at the limit


class SearchEngine(Protocol):
    """Whoever can search: our own PyTorch one is the reference, CTranslate2 the quick one on a CPU."""

    def find_unsupported_reason(self, options: SearchOptions, requests: Sequence[SearchRequest]) -> str | None:
        """Why it cannot do this, as the end of a sentence; None: it can."""

    def search(
        self, requests: Sequence[SearchRequest], options: SearchOptions
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """For each job its place among `jobs` and its best hypotheses, the best first; in the order of finishing."""


def check_minimum(name: str, value: float, minimum: float) -> None:
    if not minimum <= value < float("inf"):
        raise ValueError(f"`{name}` must be {minimum} or more, but is {value}")
