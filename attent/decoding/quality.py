"""The quality of translations without a reference: minimum Bayes risk decoding, and figures of a translation.

Minimum Bayes risk chooses the candidate with the highest expected chrF against all others. chrF (Popovic 2015) compares
character n-grams up to six; it is computed for all pairs at once and equals sacreBLEU's sentence-level `CHRF()`.
`benchmarks/quality.py` measures how well these figures tell good translations:

mean_log_prob     of the tokens, with the end token: the score without a length penalty to choose
agreement         mean chrF of the best hypothesis with the others of the n-best list as references
back_translation  chrF of the translation's translation by a reverse model, with the source as reference
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attent.decoding.options import Hypothesis

if TYPE_CHECKING:
    from attent.decoding.translator import Translation, Translator

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_NGRAM = 6
BETA = 2  # weight of recall against precision
MAX_TABLE_CELLS = 2**22  # of the largest table in memory


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
    for totals, shared in _count_overlaps(texts):
        both = (totals > 0)[:, None] & (totals > 0)
        counts = np.maximum(totals, 1)
        precision += shared / counts[:, None]
        recall += shared / counts
        orders += both  # a text of three characters has no 4-grams and is not penalized for it
    orders = np.maximum(orders, 1)
    precision, recall = precision / orders, recall / orders
    denominator = BETA**2 * precision + recall
    return 100 * (1 + BETA**2) * precision * recall / np.where(denominator > 0, denominator, 1)


def _count_overlaps(texts: Sequence[str]) -> Iterator[tuple[Ints, Floats]]:
    """Yield for n = 1, 2, ...: the n-grams of each text (N,), and those that each two share (N, N)."""
    N = len(texts)
    codes = [np.frombuffer("".join(t.split()).encode("utf-32-le", "surrogatepass"), np.uint32) for t in texts]
    lengths = np.array([len(code) for code in codes])
    char_rows = np.repeat(np.arange(N), lengths)  # the text of each character
    chars_left = np.repeat(lengths.cumsum(), lengths) - np.arange(len(char_rows))  # up to the end of the text
    alphabet, char_ids = np.unique(np.concatenate([np.empty(0, np.uint32), *codes]), return_inverse=True)
    starts, gram_ids = np.arange(len(char_rows)), np.zeros(len(char_rows), np.int64)  # of each n-gram
    for n in range(1, MAX_NGRAM + 1):
        fits = chars_left[starts] >= n
        starts, gram_ids = starts[fits], gram_ids[fits]
        keys = (gram_ids * len(alphabet) + char_ids[starts + n - 1]) * N + char_rows[starts]
        pairs, pair_ids, counts = np.unique(keys, return_inverse=True, return_counts=True)  # of n-gram and text
        pair_keys = pairs // N
        pair_grams = np.cumsum(np.diff(pair_keys, prepend=pair_keys[:1]) != 0)  # the n-gram's id in each pair
        gram_ids = pair_grams[pair_ids]
        totals = np.bincount(char_rows[starts], minlength=N)
        yield totals, _count_shared(pair_grams, pairs % N, counts, totals)


def _count_shared(grams: Ints, rows: Ints, counts: Ints, totals: Ints) -> Floats:
    """Return (N, N) sums of min(a, b), the number of t with a >= t and b >= t: products of 0/1 matrices."""
    N = len(totals)
    shared = np.zeros((N, N))
    while len(grams):
        common = (np.bincount(grams) > 1)[grams]  # in two texts or more
        grams, rows, counts = grams[common], rows[common], counts[common]
        grams = np.cumsum(np.diff(grams, prepend=grams[:1]) != 0)
        for low in range(0, int(grams[-1]) + 1 if len(grams) else 0, max(1, MAX_TABLE_CELLS // N)):
            block = slice(*np.searchsorted(grams, [low, low + max(1, MAX_TABLE_CELLS // N)]))
            table = np.zeros((N, int(grams[block][-1]) - low + 1), np.float32)
            table[rows[block], grams[block] - low] = 1
            shared += table @ table.T
        repeated = counts > 1
        grams, rows, counts = grams[repeated], rows[repeated], counts[repeated] - 1
    np.fill_diagonal(shared, totals)
    return shared


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
