"""All that can be said of the translations of a test set: scores with intervals, scores by the length of the source,
each sentence, the worst ones, and the comparison with other translations.

The figures are `metrics`'; here they are put together. Translating is left to `decode`, showing to the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from attent.data import scripts
from attent.score.metrics import (
    METRICS,
    RESAMPLES,
    SAMPLE,
    MetricName,
    Score,
    ScoreError,
    by_sentence,
    check,
    exact,
    measured,
)

WORDS = (10, 20, 30, 40, 50)  # up to how many a source of each group has
CHARACTERS = (20, 40, 60, 80, 100)


PERFECT = 100 - 1e-9  # chrF


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """One translation. Its own figures are coarse: they tell where to look, not how good it is."""

    number: int  # from 1
    source: str
    reference: str
    output: str
    bleu: float
    chrf: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """Translations whose sources are of like length."""

    least: int
    most: int | None  # None: and more
    sentences: int
    scores: tuple[Score, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A test set, its translations, and how good they are."""

    scores: tuple[Score, ...]
    exact: float  # percent that equal their reference
    empty: int  # outputs without text where the reference has some
    ratio: float  # characters of the outputs to those of the references
    unit: str  # of lengths: words, or characters
    groups: tuple[Group, ...]
    sentences: tuple[Sentence, ...]

    def worst(self, count: int) -> list[Sentence]:
        """By chrF; of equals the first ones. What is as the reference is none of them."""
        wrong = [one for one in self.sentences if one.chrf < PERFECT]
        return sorted(wrong, key=lambda one: (one.chrf, one.number))[:count]


def evaluate(
    sources: Sequence[str],
    references: Sequence[str],
    outputs: Sequence[str],
    *,
    names: Sequence[MetricName] = METRICS,
    language: str | None = None,
    resamples: int = RESAMPLES,
) -> Evaluation:
    """`language` is that of the targets, None: as the references look."""
    check(outputs, references)
    if len(sources) != len(references):
        raise ScoreError(f"there must be a source for each reference, but there are {len(sources)}")
    unit, limits = _unit(sources)
    lengths = [_length(source, unit) for source in sources]
    return Evaluation(
        scores=tuple(measured(outputs, references, names, language, resamples=resamples)),
        exact=exact(outputs, references),
        empty=sum(not output.strip() and bool(ref.strip()) for output, ref in zip(outputs, references, strict=True)),
        ratio=sum(map(len, outputs)) / max(1, sum(map(len, references))),
        unit=unit,
        groups=tuple(_groups(lengths, limits, references, outputs, names, language)),
        sentences=tuple(_sentences(sources, references, outputs, language)),
    )


def _unit(sources: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    written = scripts.of_texts(islice(sources, SAMPLE)) or frozenset()
    return ("characters", CHARACTERS) if written & scripts.UNSPACED else ("words", WORDS)


def _length(text: str, unit: str) -> int:
    return len(text.split()) if unit == "words" else len("".join(text.split()))


def _groups(
    lengths: Sequence[int],
    limits: tuple[int, ...],
    references: Sequence[str],
    outputs: Sequence[str],
    names: Sequence[MetricName],
    language: str | None,
) -> Iterator[Group]:
    for least, most in pairwise((0, *(limit + 1 for limit in limits), None)):
        assert least is not None
        places = [i for i, length in enumerate(lengths) if length >= least and (most is None or length < most)]
        if places:
            some = [outputs[i] for i in places], [references[i] for i in places]
            yield Group(
                least=least or 1,
                most=None if most is None else most - 1,
                sentences=len(places),
                scores=tuple(measured(*some, names, language, resamples=0)),
            )


def _sentences(
    sources: Sequence[str], references: Sequence[str], outputs: Sequence[str], language: str | None
) -> Iterator[Sentence]:
    bleu, chrf = (by_sentence(outputs, references, name, language) for name in ("bleu", "chrf"))
    rows = zip(sources, references, outputs, bleu, chrf, strict=True)
    for number, (source, reference, output, one, other) in enumerate(rows, 1):
        yield Sentence(number=number, source=source, reference=reference, output=output, bleu=one, chrf=other)
