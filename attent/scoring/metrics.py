"""BLEU, chrF, chrF++ and TER of translations by sacreBLEU, with the signatures by which others can repeat them, 95%
confidence intervals, and paired tests of two outputs; and how many are exactly right. Translating is left to `decode`.

BLEU counts words. A script without spaces has none to count, so that there it counts characters, in the way that
published figures do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal, get_args

from attent.text import scripts

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

SCRIPT_SAMPLE = 1_000  # references that tell the script where the language does not
NUM_RESAMPLES = 1_000  # of a bootstrap; the seed is sacreBLEU's (12345, or SACREBLEU_SEED)

MetricName = Literal["bleu", "chrf", "chrf++", "ter"]
METRICS: tuple[MetricName, ...] = get_args(MetricName)
METRIC_TITLES: dict[MetricName, str] = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER"}
LOWER_IS_BETTER: frozenset[str] = frozenset({"ter"})


class ScoreError(ValueError):
    """Texts that cannot be scored, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class CorpusScores:
    """All from 0 to 100, more is better."""

    bleu: float
    chrf: float
    exact: float  # percent of outputs that equal their reference, spaces at the ends aside
    bleu_signature: str
    chrf_signature: str


@dataclass(frozen=True, kw_only=True)
class MetricScore:
    """One metric of a whole test set. Of TER less is better, of the others more."""

    metric: MetricName
    value: float
    mean: float | None  # over the resamples of a bootstrap
    ci_half_width: float | None  # 95% of them are within mean +- spread
    signature: str

    @property
    def title(self) -> str:
        return METRIC_TITLES[self.metric]


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """One metric of two outputs of the same sources, by a paired bootstrap."""

    metric: MetricName
    value: float
    baseline: float
    p_value: float  # how probable such a difference, or a larger one, would be by chance
    signature: str

    @property
    def title(self) -> str:
        return METRIC_TITLES[self.metric]

    @property
    def difference(self) -> float:
        return self.value - self.baseline

    @property
    def is_better(self) -> bool | None:
        """None: it may well be chance."""
        if self.p_value >= 0.05 or not self.difference:
            return None
        return (self.difference > 0) != (self.metric in LOWER_IS_BETTER)


def score_corpus(outputs: Sequence[str], references: Sequence[str], language: str | None = None) -> CorpusScores:
    """Outputs against one reference each; `language` is the one that they are in, None: as the references look."""
    bleu, chrf = compute_metrics(outputs, references, ("bleu", "chrf"), language, resamples=0)
    return CorpusScores(
        bleu=bleu.value,
        chrf=chrf.value,
        exact=exact_match_rate(outputs, references),
        bleu_signature=bleu.signature,
        chrf_signature=chrf.signature,
    )


def exact_match_rate(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Percent of outputs that equal their reference, spaces at the ends aside."""
    right = sum(output.strip() == reference.strip() for output, reference in zip(outputs, references, strict=True))
    return 100 * right / len(outputs)


def compute_metrics(
    outputs: Sequence[str],
    references: Sequence[str],
    metrics: Sequence[MetricName] = METRICS,
    language: str | None = None,
    *,
    resamples: int = NUM_RESAMPLES,
) -> list[MetricScore]:
    """Each metric of the whole; with `resamples` of the test set, how far it would vary with another one."""
    check_same_length(outputs, references)
    if not resamples:
        return [_score_once(outputs, references, name, language) for name in metrics]
    found = []
    for name in metrics:
        ((value, mean, spread, _),), signature = _bootstrap([outputs], references, name, language, resamples)
        found.append(MetricScore(metric=name, value=value, mean=mean, ci_half_width=spread, signature=signature))
    return found


def _score_once(
    outputs: Sequence[str], references: Sequence[str], name: MetricName, language: str | None
) -> MetricScore:
    metric = make_metric(name, language, references)
    value = metric.corpus_score(outputs, [references]).score
    return MetricScore(metric=name, value=value, mean=None, ci_half_width=None, signature=str(metric.get_signature()))


def compare_outputs(
    outputs: Sequence[str],
    baseline_outputs: Sequence[str],
    references: Sequence[str],
    metrics: Sequence[MetricName] = METRICS,
    language: str | None = None,
    *,
    resamples: int = NUM_RESAMPLES,
) -> list[PairedComparison]:
    """Is the difference between two outputs more than chance? By a paired bootstrap (Koehn 2004)."""
    check_same_length(outputs, references)
    check_same_length(baseline_outputs, references)
    found = []
    for name in metrics:
        (other, this), signature = _bootstrap([baseline_outputs, outputs], references, name, language, resamples)
        p = 1.0 if this[0] == other[0] else this[3]  # which the test would call a sure difference of nothing
        found.append(PairedComparison(metric=name, value=this[0], baseline=other[0], p_value=p, signature=signature))
    return found


def _bootstrap(
    systems: Sequence[Sequence[str]], references: Sequence[str], name: MetricName, language: str | None, resamples: int
) -> tuple[list[tuple[float, float, float, float]], str]:
    """For each system its score, mean, spread and p against the first; and the signature.

    By the test for several systems also where there is one: the figures are those of `corpus_score(n_bootstrap=...)`,
    which fails (sacreBLEU 2.6.0, float beside float32) where a metric is 0 of some of the resamples.
    """
    from sacrebleu.significance import PairedTest, Result

    named: list[tuple[str, Sequence[str]]] = [(str(number), list(each)) for number, each in enumerate(systems)]
    metric = make_metric(name, language, references)
    signatures, results = PairedTest(named, {name: metric}, [list(references)], test_type="bs", n_samples=resamples)()
    ((title, signature),) = signatures.items()
    found = [each for each in results[title] if isinstance(each, Result)]
    numbers = [
        (each.score, float(each.mean or 0), float(each.ci or 0), 1.0 if each.p_value is None else float(each.p_value))
        for each in found
    ]
    return numbers, str(signature)


def score_sentences(
    outputs: Sequence[str], references: Sequence[str], name: MetricName, language: str | None = None
) -> list[float]:
    """The metric of each output alone; of BLEU with the orders of n-grams that there are, as is usual for sentences."""
    check_same_length(outputs, references)
    metric = make_metric(name, language, references, sentences=True)
    pairs = zip(outputs, references, strict=True)
    return [metric.sentence_score(output, [reference]).score for output, reference in pairs]


def check_same_length(outputs: Sequence[str], references: Sequence[str]) -> None:
    if len(outputs) != len(references):
        counts = f"{len(references)} references and {len(outputs)} outputs"
        raise ScoreError(f"there must be a reference for each output, but there are {counts}; give both in one order")
    if not outputs:
        raise ScoreError("there must be at least one output to score, but there is none; give a test set with pairs")


def make_metric(
    name: MetricName, language: str | None, references: Sequence[str], *, sentences: bool = False
) -> Metric:
    """sacreBLEU's own, for texts in this language."""
    from sacrebleu.metrics.bleu import BLEU  # here, since it takes a third of a second
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    tokenize = choose_bleu_tokenizer(language, references)
    match name:
        case "bleu":  # `force` keeps it from warning that a text looks tokenised: the signature is the same.
            return BLEU(tokenize=tokenize, force=True, effective_order=sentences)
        case "chrf":
            return CHRF()
        case "chrf++":
            return CHRF(word_order=2)
        case "ter":
            unspaced = tokenize != "13a"
            return TER(normalized=unspaced, asian_support=unspaced)


def choose_bleu_tokenizer(language: str | None, references: Sequence[str] = ()) -> str:
    """sacreBLEU's name for the way to find words: `13a` is that of the published figures of most languages.

    Japanese by characters, since its words would need MeCab. Korean too: it has spaces, but a word between them holds
    its particles as well, and one wrong particle would count as a wrong word.
    """
    written = (
        scripts.get_language_scripts(language)
        or scripts.detect_scripts(islice(references, SCRIPT_SAMPLE))
        or frozenset()
    )
    if "Hani" in written and not written & {"Kana", "Hang"}:
        return "zh"
    return "char" if written & (scripts.UNSPACED_SCRIPTS | {"Hang"}) else "13a"
