"""Word translations learned from parallel text: IBM model 1 in both directions (Brown et al. 1993), with the fixed
diagonal prior of fast_align (Dyer et al. 2013), in NumPy and in seconds.

A link is kept if each word is the best one of the other. It serves to place tags and to find pairs of single words.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from attent.data.arrays import Array, concatenate_ranges

MAX_LINKS = 6_000_000  # of each word of a source with each of its target: half a gigabyte, and a few seconds
MAX_WORDS = 60  # of a sentence to learn from
NUM_ITERATIONS = 5
DIAGONAL = 2.0  # strength of the prior: exp(-DIAGONAL |i / m - j / n|)
MIN_PROBABILITY = 0.02  # of a translation that is stored, both directions multiplied
MIN_ENTRY_PROBABILITY, MIN_ENTRY_COUNT = 0.25, 3  # of a pair of single words
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+(?:[-'’.,]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class Lexicon:
    # (source, target) in lower case -> p(target|source) p(source|target)
    probabilities: dict[tuple[str, str], float] = field(default_factory=dict)
    entries: tuple[tuple[str, str], ...] = ()  # reliable translations of single words, as they are usually written

    @classmethod
    def learn(cls, pairs: Iterable[tuple[str, str]]) -> Self:
        """Learn from the first pairs, up to `MAX_LINKS` possible links."""
        sides: tuple[list[list[str]], list[list[str]]] = ([], [])
        forms: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        num_links = 0
        for pair in pairs:
            words = [WORD.findall(text) for text in pair]
            if all(0 < len(side) <= MAX_WORDS for side in words):
                for side, side_words, side_forms in zip(sides, words, forms, strict=True):
                    side.append([word.lower() for word in side_words])
                    side_forms.update(side_words[1:])  # the first word of a sentence may have a capital
                num_links += len(words[0]) * len(words[1])
            if num_links > MAX_LINKS:
                break
        if not num_links:
            return cls()
        table = _estimate(*sides)
        counts = [Counter(word for sentence in side for word in sentence) for side in sides]
        written = [{word.lower(): word for word, _ in reversed(side.most_common())} for side in forms]
        entries = tuple(
            (written[0][source], written[1][target])
            for (source, target), probability in table.items()
            if probability >= MIN_ENTRY_PROBABILITY
            and min(counts[0][source], counts[1][target]) >= MIN_ENTRY_COUNT
            and all(word.isalpha() and word in side for word, side in zip((source, target), written, strict=True))
        )
        return cls(table, entries)

    def align(self, source: Sequence[str], target: Sequence[str]) -> list[tuple[int, int]]:
        """Return the links of two lists of words by index, in order of the source."""
        scores = np.zeros((len(source), len(target)))
        for i, word in enumerate(map(str.lower, source)):
            for j, other in enumerate(map(str.lower, target)):
                scores[i, j] = 1.0 if word == other else self.probabilities.get((word, other), 0.0)
        if not scores.any():
            return []
        rows, columns = np.indices(scores.shape)
        scores *= np.exp(-DIAGONAL * _diagonal_distance(rows, columns, len(source), len(target)))
        is_best = (scores == scores.max(0)) & (scores == scores.max(1, keepdims=True)) & (scores > 0)
        return [(i, j) for i, j in np.argwhere(is_best).tolist()]


def _diagonal_distance(i: Array, j: Array, source_length: Array | int, target_length: Array | int) -> Array:
    distance: Array = abs((i + 0.5) / source_length - (j + 0.5) / target_length)
    return distance


def _estimate(sources: list[list[str]], targets: list[list[str]]) -> dict[tuple[str, str], float]:
    """Return p(target|source) p(source|target) of the probable word pairs."""
    ids, lengths, words = [], [], []
    for side in (sources, targets):
        words.append(list(dict.fromkeys(word for sentence in side for word in sentence)))
        index = {word: number for number, word in enumerate(words[-1])}
        ids.append(np.fromiter((index[word] for sentence in side for word in sentence), np.int64))
        lengths.append(np.fromiter(map(len, side), np.int64, len(side)))
    starts = [counts.cumsum() - counts for counts in lengths]
    # A link for each source word i and each target word j of its sentence, sorted by i.
    per_word = np.repeat(lengths[1], lengths[0])
    i = np.repeat(np.arange(len(ids[0]), dtype=np.int32), per_word)
    j = concatenate_ranges(np.repeat(starts[1], lengths[0]), per_word).astype(np.int32)
    sentence = np.repeat(np.arange(len(sources)), lengths[0] * lengths[1])
    distance = _diagonal_distance(
        i - starts[0][sentence], j - starts[1][sentence], lengths[0][sentence], lengths[1][sentence]
    )
    prior = np.exp(-DIAGONAL * distance).astype(np.float32)
    keys, links = np.unique(ids[0][i] << 32 | ids[1][j], return_inverse=True)
    product = np.ones(len(keys))
    # A target word is generated by one of the source words, and the reverse.
    for given, position in ((keys >> 32, j), (keys & 0xFFFFFFFF, i)):
        probabilities = np.ones(len(keys))
        for _ in range(NUM_ITERATIONS):
            expected = probabilities[links] * prior
            expected /= np.bincount(position, expected)[position]
            counts = np.bincount(links, expected, len(keys))
            probabilities = counts / np.bincount(given, counts)[given]
        product *= probabilities
    is_probable = product >= MIN_PROBABILITY
    pairs = zip(keys[is_probable].tolist(), product[is_probable].tolist(), strict=True)
    return {(words[0][key >> 32], words[1][key & 0xFFFFFFFF]): probability for key, probability in pairs}
