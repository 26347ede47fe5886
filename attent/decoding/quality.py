"""The quality of translations without a reference: minimum Bayes risk decoding, and figures of a translation.

Minimum Bayes risk chooses the candidate with the highest expected chrF against all others. chrF (Popovic 2015) compares
character n-grams up to six; it is computed for all pairs at once and equals sacreBLEU's sentence-level `CHRF()`.
`benchmarks/quality.py` measures how well these figures tell good translations from bad ones:

mean_log_prob     of the tokens, with the end token: the score without a length penalty to choose
agreement         mean chrF of the best hypothesis with the others of the n-best list as references
back_translation  chrF of the translation's translation by a reverse model, with the source as reference
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attent.decoding.options import Hypothesis

if TYPE_CHECKING:
    from attent.decoding.translator import Translation, Translator

Floats = npt.NDArray[np.float64]

MAX_NGRAM = 6
BETA = 2  # weight of recall against precision


def compute_expected_chrf(candidates: Sequence[str], weights: Sequence[float] | None = None) -> Floats:
    """Return each candidate's mean chrF, 0 to 100, with all as references; `weights` in any unit, None: equal."""
    values = np.ones(len(candidates)) if weights is None else np.asarray(weights, np.float64)
    ids = {text: i for i, text in enumerate(dict.fromkeys(candidates))}  # many samples are equal
    text_ids = np.array([ids[text] for text in candidates])
    means = compute_pairwise_chrf(list(ids)) @ np.bincount(text_ids, values / values.sum(), len(ids))
    return means[text_ids]


def normalize_log_probs(log_probs: Sequence[float]) -> list[float]:
    values = np.asarray(log_probs, np.float64)
    probabilities = np.exp(values - values.max(initial=-np.inf))
    return [float(p) for p in probabilities / probabilities.sum()]


def compute_pairwise_chrf(texts: Sequence[str]) -> Floats:
    """Return (N, N) sentence chrF, 0 to 100: rows are hypotheses, columns references."""
    N = len(texts)
    precision, recall, orders = np.zeros((N, N)), np.zeros((N, N)), np.zeros((N, N))
    for n in range(1, MAX_NGRAM + 1):
        totals, shared = count_shared_ngrams(["".join(text.split()) for text in texts], n)
        both = (totals > 0)[:, None] & (totals > 0)
        counts = np.maximum(totals, 1)
        precision += shared / counts[:, None]
        recall += shared / counts
        orders += both  # a text of three characters has no 4-grams and is not penalized for it
    orders = np.maximum(orders, 1)
    precision, recall = precision / orders, recall / orders
    denominator = BETA**2 * precision + recall
    return 100 * (1 + BETA**2) * precision * recall / np.where(denominator > 0, denominator, 1)


def count_shared_ngrams(texts: Sequence[str], n: int) -> tuple[Floats, Floats]:
    """Return the number of n-grams of each text (N,), and of those that each two share (N, N)."""
    counts = [Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in texts]
    totals = np.array([float(count.total()) for count in counts])
    occurrences = Counter(chain.from_iterable(counts))
    columns = {gram: i for i, gram in enumerate(gram for gram, number in occurrences.items() if number > 1)}
    table = np.zeros((len(texts), len(columns)), np.float32)  # of the n-grams in two texts or more
    for row, count in zip(table, counts, strict=True):
        for gram in count.keys() & columns:
            row[columns[gram]] = count[gram]
    shared = np.zeros((len(texts), len(texts)))
    # min(a, b) is the number of t with a >= t and b >= t: products of 0/1 matrices.
    for threshold in range(1, 1 + int(table.max(initial=0))):
        reached = (table >= threshold).astype(np.float32)
        shared += reached @ reached.T
    np.fill_diagonal(shared, totals)
    return totals, shared


@dataclass(frozen=True, kw_only=True)
class Quality:
    mean_log_prob: float | None  # None: no tokens
    agreement: float | None  # 0 to 100; None: only one hypothesis
    back_translation: float | None = None  # 0 to 100; None: no reverse model


def measure_quality(
    translations: Sequence[Translation], reverse: Translator | None = None, reverse_to: str | None = None
) -> list[Quality]:
    """Return the figures of each translation; `reverse_to` is the source language, for a multilingual reverse model."""
    backward: list[float | None] = [None] * len(translations)
    if reverse is not None:
        returned = reverse.translate([each.text for each in translations], to=reverse_to)
        backward = [
            float(compute_pairwise_chrf([back.text, each.source])[0, 1])
            for back, each in zip(returned, translations, strict=True)
        ]
    return [
        Quality(
            mean_log_prob=each.log_prob / (len(each.tokens) + each.is_finished) if each.tokens else None,
            agreement=compute_agreement(each._search_result.hypotheses) if each.tokens else None,
            back_translation=value if each.tokens else None,
        )
        for each, value in zip(translations, backward, strict=True)
    ]


def compute_agreement(segments: Sequence[Sequence[Hypothesis]]) -> float | None:
    """Return the mean over the segments of a text, weighted by their tokens."""
    values, weights = [], []
    for n_best in segments:
        if len(n_best) > 1:
            values.append(float(compute_pairwise_chrf([each.text for each in n_best])[0, 1:].mean()))
            weights.append(1 + len(n_best[0].tokens))
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights) if weights else None
