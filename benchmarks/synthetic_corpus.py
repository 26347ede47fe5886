"""Synthetic parallel text: Zipf-distributed words, sentences as long as image captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

VOCAB_SIZE = 30_000
LINES_PER_WRITE = 100_000
ONSETS = "b d f g h k l m n p r s t v z br dr fl gr kl pr sch st tr".split()
VOWELS = "a e i o u au ei ie".split()


def write_corpus(path: Path, pairs: int, mean_words: float = 12.0, seed: int = 0) -> None:
    """Write a TSV file of pairs; the target has a word for nearly every word of the source."""
    rng = np.random.default_rng(seed)
    source, target = (np.array(build_vocabulary(rng), dtype=object) for _ in range(2))
    with open(path, "w", encoding="utf-8") as file:
        for start in range(0, pairs, LINES_PER_WRITE):
            count = min(LINES_PER_WRITE, pairs - start)
            lengths = (
                np.exp(np.log(mean_words) - 0.08 + 0.4 * rng.standard_normal(count)).round().clip(2, 80).astype(int)
            )
            word_ids = sample_zipf(rng, int(lengths.sum()))
            file.writelines(format_lines(source[word_ids], target[word_ids], lengths, rng.random(len(word_ids)) < 0.95))


def build_vocabulary(rng: np.random.Generator) -> list[str]:
    """Return distinct words of one to four syllables; frequent words are short."""
    words: dict[str, None] = {}
    while len(words) < VOCAB_SIZE:
        syllables = 1 + int(len(words) > 200) + int(len(words) > 3000) + int(rng.integers(2))
        word = "".join(str(rng.choice(ONSETS)) + str(rng.choice(VOWELS)) for _ in range(syllables))
        words.setdefault(word)
    return list(words)


def sample_zipf(rng: np.random.Generator, count: int) -> np.ndarray:
    share = 1 / np.arange(1, VOCAB_SIZE + 1)
    return np.searchsorted(np.cumsum(share / share.sum()), rng.random(count)).clip(0, VOCAB_SIZE - 1)


def format_lines(source: np.ndarray, target: np.ndarray, lengths: np.ndarray, keep: np.ndarray) -> list[str]:
    ends = np.cumsum(lengths)
    return [
        f"{' '.join(source[end - n : end])}.\t{' '.join(target[end - n : end][keep[end - n : end]])}.\n"
        for end, n in zip(ends.tolist(), lengths.tolist(), strict=True)
    ]
