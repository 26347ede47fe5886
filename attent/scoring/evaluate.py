"""All that can be said of the translations of a test set: scores with intervals, scores by the length of the source,
each sentence, the worst ones, and the comparison with other translations.

The figures are `metrics`'; here they are put together. Translating is left to `decode`, showing to the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from attent.scoring.metrics import (
    METRICS,
    NUM_RESAMPLES,
    SCRIPT_SAMPLE,
    MetricName,
    MetricScore,
    ScoreError,
    check_same_length,
    compute_metrics,
    exact_match_rate,
    score_sentences,
)
from attent.text import scripts

WORD_LIMITS = (10, 20, 30, 40, 50)  # up to how many a source of each group has
CHARACTER_LIMITS = (20, 40, 60, 80, 100)


PERFECT_CHRF = 100 - 1e-9  # chrF


@dataclass(frozen=True, kw_only=True)
class SentenceScore:
    """One translation. Its own figures are coarse: they tell where to look, not how good it is."""

    number: int  # from 1
    source: str
    reference: str
    output: str
    bleu: float
    chrf: float


@dataclass(frozen=True, kw_only=True)
class LengthGroup:
    """Translations whose sources are of like length."""

    min_length: int
    max_length: int | None  # None: and more
    sentences: int
    scores: tuple[MetricScore, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A test set, its translations, and how good they are."""

    scores: tuple[MetricScore, ...]
    exact: float  # percent that equal their reference
    num_empty: int  # outputs without text where the reference has some
    length_ratio: float  # characters of the outputs to those of the references
    length_unit: str  # of lengths: words, or characters
    groups: tuple[LengthGroup, ...]
    sentences: tuple[SentenceScore, ...]

    def find_worst(self, count: int) -> list[SentenceScore]:
        """By chrF; of equals the first ones. What is as the reference is none of them."""
        wrong = [one for one in self.sentences if one.chrf < PERFECT_CHRF]
        return sorted(wrong, key=lambda one: (one.chrf, one.number))[:count]


def evaluate(
    sources: Sequence[str],
    references: Sequence[str],
    outputs: Sequence[str],
    *,
    metrics: Sequence[MetricName] = METRICS,
    language: str | None = None,
    resamples: int = NUM_RESAMPLES,
) -> Evaluation:
    """`language` is that of the targets, None: as the references look."""
    check_same_length(outputs, references)
    if len(sources) != len(references):
        raise ScoreError(f"there must be a source for each reference, but there are {len(sources)}")
    unit, limits = _choose_length_unit(sources)
    lengths = [_measure_length(source, unit) for source in sources]
    return Evaluation(
        scores=tuple(compute_metrics(outputs, references, metrics, language, resamples=resamples)),
        exact=exact_match_rate(outputs, references),
        num_empty=sum(
            not output.strip() and bool(ref.strip()) for output, ref in zip(outputs, references, strict=True)
        ),
        length_ratio=sum(map(len, outputs)) / max(1, sum(map(len, references))),
        length_unit=unit,
        groups=tuple(_group_by_length(lengths, limits, references, outputs, metrics, language)),
        sentences=tuple(_score_sentences(sources, references, outputs, language)),
    )


def _choose_length_unit(sources: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    written = scripts.detect_scripts(islice(sources, SCRIPT_SAMPLE)) or frozenset()
    return ("characters", CHARACTER_LIMITS) if written & scripts.UNSPACED_SCRIPTS else ("words", WORD_LIMITS)


def _measure_length(text: str, unit: str) -> int:
    return len(text.split()) if unit == "words" else len("".join(text.split()))


def _group_by_length(
    lengths: Sequence[int],
    limits: tuple[int, ...],
    references: Sequence[str],
    outputs: Sequence[str],
    metrics: Sequence[MetricName],
    language: str | None,
) -> Iterator[LengthGroup]:
    for least, most in pairwise((0, *(limit + 1 for limit in limits), None)):
        assert least is not None
        places = [i for i, length in enumerate(lengths) if length >= least and (most is None or length < most)]
        if places:
            some = [outputs[i] for i in places], [references[i] for i in places]
            yield LengthGroup(
                min_length=least or 1,
                max_length=None if most is None else most - 1,
                sentences=len(places),
                scores=tuple(compute_metrics(*some, metrics, language, resamples=0)),
            )


def _score_sentences(
    sources: Sequence[str], references: Sequence[str], outputs: Sequence[str], language: str | None
) -> Iterator[SentenceScore]:
    bleu, chrf = (score_sentences(outputs, references, name, language) for name in ("bleu", "chrf"))
    rows = zip(sources, references, outputs, bleu, chrf, strict=True)
    for number, (source, reference, output, one, other) in enumerate(rows, 1):
        yield SentenceScore(number=number, source=source, reference=reference, output=output, bleu=one, chrf=other)
