"""Minimum Bayes risk: of several translations the one that is most like all the others, by expected chrF.

chrF (Popovic 2015) counts the sequences of up to six characters that two texts share. It is counted here for all pairs
of candidates at once; each figure is that of sacreBLEU's `CHRF()` for one sentence. Where the candidates come from,
n-best lists or samples, is left to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_NGRAM = 6  # characters of the longest sequences
BETA = 2  # recall weighs so many times as much as precision
TIE_TOLERANCE = 1e-9  # expectations that differ by less are the same: sums are rounded
MAX_TABLE_CELLS = 2**22  # of the largest table in memory


def select_best(candidates: Sequence[str], weights: Sequence[float] | None = None) -> int:
    """The place of the candidate with the highest expected chrF; of equal ones the first."""
    found = compute_expected_chrf(candidates, weights)
    return int(np.flatnonzero(found >= found.max() - TIE_TOLERANCE)[0])


def compute_expected_chrf(candidates: Sequence[str], weights: Sequence[float] | None = None) -> Floats:
    """What each candidate scores on average, 0 to 100, if each may be the right one, itself included.

    weights  how probable each is, in any unit: None for samples, which come as often as they are probable;
             `probabilities` of their log-probabilities for an n-best list
    """
    if not candidates:
        raise ValueError("there must be at least one candidate, but there is none; search with `n_best` of 2 or more")
    shares = _normalize_weights(weights, len(candidates))
    places = {text: place for place, text in enumerate(dict.fromkeys(candidates))}  # many samples are alike
    which = np.array([places[text] for text in candidates])
    means = compute_pairwise_chrf(list(places)) @ np.bincount(which, shares, len(places))
    return means[which]


def normalize_log_probs(log_probs: Sequence[float]) -> list[float]:
    """Of candidates whose log-probabilities are known, as if there were no others."""
    found = np.asarray(log_probs, np.float64)
    shares = np.exp(found - found.max(initial=-np.inf))
    return [float(share) for share in shares / shares.sum()]


def compute_pairwise_chrf(texts: Sequence[str]) -> Floats:
    """(N, N) sentence chrF, 0 to 100: row i is text i as the hypothesis, column j text j as its reference."""
    N = len(texts)
    precision, recall, orders = np.zeros((N, N)), np.zeros((N, N)), np.zeros((N, N))
    for totals, shared in _count_overlaps(texts):
        both = (totals > 0)[:, None] & (totals > 0)
        some = np.maximum(totals, 1)
        precision += shared / some[:, None]
        recall += shared / some
        orders += both  # a text of three characters has no sequences of four, and is not marked down for it
    orders = np.maximum(orders, 1)
    precision, recall = precision / orders, recall / orders
    below = BETA**2 * precision + recall
    return 100 * (1 + BETA**2) * precision * recall / np.where(below > 0, below, 1)


def _normalize_weights(weights: Sequence[float] | None, count: int) -> Floats:
    if weights is None:
        return np.full(count, 1 / count)
    found = np.asarray(weights, np.float64)
    if found.shape != (count,) or not (np.isfinite(found).all() and (found >= 0).all() and found.sum() > 0):
        raise ValueError(
            f"`weights` must be {count} numbers of 0 or more, one a candidate and not all 0, but are {list(weights)}"
        )
    return found / found.sum()


def _count_overlaps(texts: Sequence[str]) -> Iterator[tuple[Ints, Floats]]:
    """For sequences of 1, 2, ... characters: how many each text has (N,), and how many each two share (N, N)."""
    N = len(texts)
    codes = [np.frombuffer("".join(t.split()).encode("utf-32-le", "surrogatepass"), np.uint32) for t in texts]
    lengths = np.array([len(code) for code in codes])
    row = np.repeat(np.arange(N), lengths)
    left = np.repeat(lengths.cumsum(), lengths) - np.arange(len(row))  # characters from here to the end of the text
    letters, letter = np.unique(np.concatenate([np.empty(0, np.uint32), *codes]), return_inverse=True)
    place, gram = np.arange(len(row)), np.zeros(len(row), np.int64)  # where sequences begin, and a number for each
    for n in range(1, MAX_NGRAM + 1):
        longer = left[place] >= n
        place, gram = place[longer], gram[longer]
        key = (gram * len(letters) + letter[place + n - 1]) * N + row[place]
        pairs, pair, counts = np.unique(key, return_inverse=True, return_counts=True)
        whose = pairs // N
        grams = np.cumsum(np.diff(whose, prepend=whose[:1]) != 0)  # of each pair of sequence and text, from 0 on
        gram = grams[pair]
        totals = np.bincount(row[place], minlength=N)
        yield totals, _count_shared(grams, pairs % N, counts, totals)


def _count_shared(grams: Ints, rows: Ints, counts: Ints, totals: Ints) -> Floats:
    """(N, N) sums of the smaller count of each sequence: as min(a, b) is the number of t with a >= t and b >= t, those
    are products of tables of zeros and ones, one for each t.
    """
    N = len(totals)
    shared = np.zeros((N, N))
    while len(grams):
        common = (np.bincount(grams) > 1)[grams]  # in two texts or more
        grams, rows, counts = grams[common], rows[common], counts[common]
        grams = np.cumsum(np.diff(grams, prepend=grams[:1]) != 0)
        for low in range(0, int(grams[-1]) + 1 if len(grams) else 0, max(1, MAX_TABLE_CELLS // N)):
            here = slice(*np.searchsorted(grams, [low, low + max(1, MAX_TABLE_CELLS // N)]))
            table = np.zeros((N, int(grams[here][-1]) - low + 1), np.float32)
            table[rows[here], grams[here] - low] = 1
            shared += table @ table.T
        again = counts > 1
        grams, rows, counts = grams[again], rows[again], counts[again] - 1
    np.fill_diagonal(shared, totals)
    return shared
