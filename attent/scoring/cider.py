"""CIDEr-D (Vedantam et al. 2015): captions against references by n-grams, rare ones counting most."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

MAX_ORDER = 4  # words of the longest n-grams
SIGMA = 6.0  # of the penalty for another length than the reference's, in words

Ngram = tuple[str, ...]


class CaptionVector(NamedTuple):
    weights: list[dict[Ngram, float]]  # TF-IDF of each n-gram, by their order
    norms: list[float]
    num_words: int


class CiderScorer:
    def __init__(self, tokenize: Callable[[str], list[str]]) -> None:
        self.tokenize = tokenize
        self.num_documents, self.document_counts = 0, Counter[Ngram]()

    def count_documents(self, references: Iterable[Sequence[str]]) -> None:
        documents = [set(chain.from_iterable(map(self._count_ngrams, texts))) for texts in references]
        self.num_documents, self.document_counts = len(documents), Counter(chain.from_iterable(documents))

    def score(self, output: str, references: Sequence[str]) -> float:
        """Return the mean similarity to the references, from 0 to 1 (equation 7, without its factor of 10)."""
        vector = self._vectorize(output)
        return sum(compute_similarity(vector, self._vectorize(text)) for text in references) / len(references)

    def _vectorize(self, text: str) -> CaptionVector:
        weights: list[dict[Ngram, float]] = [{} for _ in range(MAX_ORDER)]
        for ngram, count in self._count_ngrams(text).items():
            rarity = math.log(max(1, self.num_documents) / max(1, self.document_counts[ngram]))
            weights[len(ngram) - 1][ngram] = count * rarity
        norms = [math.hypot(*of_order.values()) for of_order in weights]
        return CaptionVector(weights, norms, len(self.tokenize(text)))

    def _count_ngrams(self, text: str) -> Counter[Ngram]:
        words = self.tokenize(text)
        orders = range(1, MAX_ORDER + 1)
        return Counter(tuple(words[start : start + n]) for n in orders for start in range(len(words) - n + 1))


def compute_similarity(output: CaptionVector, reference: CaptionVector) -> float:
    """Return the mean over orders of the cosine, with n-gram counts clipped, times the penalty for the length."""
    cosines = 0.0
    rows = zip(output.weights, reference.weights, output.norms, reference.norms, strict=True)
    for weights, others, norm, other in rows:
        if norm and other:
            shared = sum(
                min(weight, others[ngram]) * others[ngram] for ngram, weight in weights.items() if ngram in others
            )
            cosines += shared / (norm * other)
    difference = output.num_words - reference.num_words
    return cosines / MAX_ORDER * math.exp(-(difference**2) / (2 * SIGMA**2))
