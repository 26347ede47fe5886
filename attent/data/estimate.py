"""Estimate of how many tokens a corpus has, from a sample of its pairs, and the figures of a corpus estimate.

Training time is measured by `attent.training.autoconfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer

MIN_PAIRS = 200  # an estimate from fewer would be meaningless

TextPairs = Sequence[tuple[str, str]]
TokenRows = list[list[int]]


@dataclass(frozen=True)
class TokenEstimate:
    """Tokens of a corpus; the end token of each sentence counts."""

    vocab_size: int
    sampled_pairs: int
    source_tokens: int
    target_tokens: int
    source_tokens_per_word: float
    target_tokens_per_word: float

    @property
    def total(self) -> int:
        return self.source_tokens + self.target_tokens


@dataclass(frozen=True)
class TrainingEstimate:
    """Training time on this machine."""

    size: str  # a preset
    parameters: int
    epochs: float  # that are often enough
    planned_epochs: float  # fewer where the default time limit of a CPU ends training
    device: str
    tokens_per_second: int  # of both sides, measured
    seconds: tuple[int, int]  # from, to


@dataclass(frozen=True)
class CorpusEstimate:
    tokens: TokenEstimate
    training: TrainingEstimate


@dataclass(frozen=True)
class TokenizedSample:
    """A sample of pairs with the tokenizer that was trained on it."""

    tokenizer: Tokenizer
    rows: tuple[TokenRows, TokenRows]  # source, target
    estimate: TokenEstimate


def estimate_tokens(texts: TextPairs, num_pairs: int, num_characters: int) -> TokenizedSample | None:
    """Tokenize a sample of a corpus, and extrapolate to its size; None if the sample is too small."""
    if len(texts) < MIN_PAIRS:
        return None
    sources, targets = ([pair[side] for pair in texts] for side in (0, 1))
    tokenizer = _train_tokenizer(sources, targets, num_characters)
    rows = tokenizer.encode_source(sources), tokenizer.encode_target(targets)
    counts = [sum(map(len, side)) for side in rows]
    words = [max(sum(len(text.split()) for text in side), 1) for side in (sources, targets)]
    scale = num_pairs / len(texts)
    estimate = TokenEstimate(
        vocab_size=tokenizer.target.size,
        sampled_pairs=len(texts),
        source_tokens=round(counts[0] * scale),
        target_tokens=round(counts[1] * scale),
        source_tokens_per_word=round((counts[0] - len(texts)) / words[0], 2),
        target_tokens_per_word=round((counts[1] - len(texts)) / words[1], 2),
    )
    return TokenizedSample(tokenizer, rows, estimate)


def _train_tokenizer(sources: list[str], targets: list[str], num_characters: int) -> Tokenizer:
    """Train on the sample, with the vocabulary size of the whole corpus where the sample is large enough for it."""
    from attent.text import tokenizer_training as training
    from attent.text.vocabulary import TokenizerError

    sample = training.CorpusSample([*sources, *targets], num_characters)
    vocab = training.choose_vocab_size(sample, training.count_characters(sample))
    try:
        return training.train_tokenizer(sources, targets, training.TokenizerConfig(vocab=vocab))
    except TokenizerError:
        return training.train_tokenizer(sources, targets)
