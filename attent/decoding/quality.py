"""Figures that may say how good a translation is, without a reference: `benchmarks/quality.py` measures how well.

mean_log_prob     of the tokens, with the end token: the score without a length penalty to choose
agreement         mean chrF of the best hypothesis with the others of the n-best list as references
back_translation  chrF of the translation's translation by a reverse model, with the source as reference
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attent.decoding.mbr import compute_pairwise_chrf
from attent.decoding.options import Hypothesis

if TYPE_CHECKING:
    from attent.decoding.translator import Translation, Translator


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
