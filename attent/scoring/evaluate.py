"""Scores of the translations of a test set with confidence intervals, by source length, and of each sentence."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import mean

from attent.data.augment import KINDS, TAGS, Augmenter
from attent.data.formats.placeholders import INLINE_TAG, INLINE_TAGS
from attent.scoring import metrics as scoring
from attent.scoring.metrics import DEFAULT_METRIC, METRICS, SPEECH_METRICS, MetricScore, Reference, compute_metrics
from attent.text import scripts

WORD_LIMITS = (10, 20, 30, 40, 50)  # the maximum length of each group
CHARACTER_LIMITS = (20, 40, 60, 80, 100)
PERFECT_SCORE = 100 - 1e-9


@dataclass(frozen=True, kw_only=True)
class SentenceScore:
    """One translation. Metrics of a single sentence are coarse: they show where to look, not how good it is."""

    number: int  # from 1
    source: str
    reference: str  # several are joined by " | "
    output: str
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class LengthGroup:
    min_length: int
    max_length: int | None  # None: no limit
    sentences: int
    scores: tuple[MetricScore, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    scores: tuple[MetricScore, ...]
    exact: float  # percentage of outputs that equal their reference
    num_empty: int  # outputs without text where the reference has some
    length_ratio: float  # characters of the outputs to those of the references
    length_unit: str  # words, or characters
    groups: tuple[LengthGroup, ...]
    sentences: tuple[SentenceScore, ...]
    ranking_metric: str = DEFAULT_METRIC  # of sentences

    def find_worst(self, count: int) -> list[SentenceScore]:
        sign, perfect = (-1, 0.0) if scoring.METRICS[self.ranking_metric].lower_is_better else (1, PERFECT_SCORE)
        ranked = sorted((sign * sentence.metrics[self.ranking_metric], sentence.number) for sentence in self.sentences)
        return [self.sentences[number - 1] for value, number in ranked if value < perfect][:count]


def evaluate(
    sources: Sequence[str],
    references: Sequence[Reference],
    outputs: Sequence[str],
    *,
    metrics: Sequence[str] = scoring.DEFAULT_SCORE_METRICS,
    language: str | None = None,
    resamples: int = scoring.NUM_RESAMPLES,
    by_length: bool = True,
) -> Evaluation:
    """`language`: of the references; None: judged by their script. `by_length`: also by the length of the sources."""
    scoring.check_same_length(outputs, references)
    in_words = scripts.has_word_spaces(scripts.detect_scripts(islice(sources, scoring.SCRIPT_SAMPLE)))
    lengths = [len(source.split()) if in_words else len("".join(source.split())) for source in sources]
    limits = WORD_LIMITS if in_words else CHARACTER_LIMITS
    texts = list(map(scoring.list_references, references))
    groups = []
    for minimum, end in pairwise((0, *(limit + 1 for limit in limits), None) if by_length else ()):
        assert minimum is not None
        indices = [i for i, length in enumerate(lengths) if length >= minimum and (end is None or length < end)]
        if indices:
            pairs = [outputs[i] for i in indices], [references[i] for i in indices]
            group = LengthGroup(
                min_length=minimum or 1,
                max_length=None if end is None else end - 1,
                sentences=len(indices),
                scores=tuple(scoring.compute_metrics(*pairs, metrics, language, resamples=0)),
            )
            groups.append(group)
    ranking_metric = metrics[0] if metrics[0] in SPEECH_METRICS else DEFAULT_METRIC
    names = SPEECH_METRICS if ranking_metric in SPEECH_METRICS else scoring.SENTENCE_METRICS
    columns = [scoring.score_sentences(outputs, references, name, language) for name in names]
    rows = zip(sources, map(" | ".join, texts), outputs, zip(*columns, strict=True), strict=True)
    return Evaluation(
        scores=tuple(scoring.compute_metrics(outputs, references, metrics, language, resamples=resamples)),
        exact=scoring.compute_metrics(outputs, references, ("exact",), resamples=0)[0].value,
        num_empty=sum(
            not output.strip() and bool(text[0].strip()) for output, text in zip(outputs, texts, strict=True)
        ),
        length_ratio=sum(map(len, outputs)) / max(1, sum(mean(map(len, text)) for text in texts)),
        length_unit="words" if in_words else "characters",
        groups=tuple(groups),
        sentences=tuple(
            SentenceScore(
                number=number,
                source=source,
                reference=reference,
                output=output,
                metrics=dict(zip(names, values, strict=True)),
            )
            for number, (source, reference, output, values) in enumerate(rows, 1)
        ),
        ranking_metric=ranking_metric,
    )


# --- robustness: the same test set with the changes of `attent train --augment`, each alone, applied to every pair ----


SEED = 1
TAG = re.compile("|".join(map(re.escape, INLINE_TAGS)))
TAG_WITH_SPACE = re.compile(  # an opening tag has its space after it, a closing one before it
    " ?{close}|{open} ?|{standalone} ?".format(**{role: form.format(r"\d") for role, form in INLINE_TAG.items()})
)


@dataclass(frozen=True, kw_only=True)
class RobustnessScore:
    """The scores of one kind of change, of which `differences` are those to the clean test set."""

    name: str
    description: str
    scores: tuple[MetricScore, ...]
    differences: tuple[float, ...]
    tags_kept: float | None = None  # percentage of the translations with the tags of their reference

    def list_cells(self) -> list[str]:
        values = zip(self.scores, self.differences, strict=True)
        cells = [cell for score, difference in values for cell in (f"{score.value:.2f}", f"{difference:+.2f}")]
        return [self.description, *cells, "" if self.tags_kept is None else f"{self.tags_kept:.1f}%"]


def measure_robustness(
    translate: Callable[[list[str]], list[str]],
    sources: Sequence[str],
    references: Sequence[str],
    clean: Sequence[MetricScore],
    language: str | None,
) -> Iterator[RobustnessScore]:
    """Translate and score the test set once for each kind of change; tags are removed before scoring."""
    learned = Augmenter.learn({TAGS: 1.0}, zip(sources, references, strict=True))
    for name, kind in KINDS.items():
        if not kind.is_tested:
            continue
        augmenter = Augmenter({name: 1.0}, learned.letters, learned.lexicon)
        changed_sources, changed_references = augmenter.augment(sources, references, SEED)
        outputs, tags_kept = translate(changed_sources), None
        if name == TAGS:
            pairs = list(zip(outputs, changed_references, strict=True))
            num_equal = sum(Counter(TAG.findall(output)) == Counter(TAG.findall(text)) for output, text in pairs)
            tags_kept = 100 * num_equal / len(pairs)
            outputs, changed_references = ([remove_inline_tags(side[i]) for side in pairs] for i in range(2))
        scores = compute_metrics(outputs, changed_references, [s.metric for s in clean], language, resamples=0)
        yield RobustnessScore(
            name=name,
            description=kind.help,
            scores=tuple(scores),
            differences=tuple(score.value - old.value for score, old in zip(scores, clean, strict=True)),
            tags_kept=tags_kept,
        )


def remove_inline_tags(text: str) -> str:
    return TAG_WITH_SPACE.sub("", text)


def list_robustness_rows(clean: Sequence[MetricScore], rows: Sequence[RobustnessScore]) -> list[list[str]]:
    """Return a table with its header; the first row is the clean test set."""
    titles = [cell for score in clean for cell in (METRICS[score.metric].title, "")]
    values = [cell for score in clean for cell in (f"{score.value:.2f}", "")]
    return [["", *titles, "tags kept"], ["clean", *values, ""], *(row.list_cells() for row in rows)]
