"""Robustness of a translator: the same test set with capitals, typos, tags and the like, each alone.

The changes are those of training with `--augment`, from the same table, applied to every pair.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from attent.data.augment import KINDS, TAGS, Augmenter
from attent.data.formats.placeholders import INLINE_TAG, INLINE_TAGS
from attent.scoring.metrics import METRICS, MetricScore, compute_metrics

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
