"""The table of metrics (`METRICS`), 95% confidence intervals by bootstrap and paired tests of two systems.

BLEU counts words; for scripts without spaces it counts characters, as published figures do. To add a metric, add an
entry: flags, logs, curves and model cards read the table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

from attent.storage.errors import AttentError, import_package

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as SacreMetric

SCRIPT_SAMPLE = 1_000  # references that tell the script where the language does not
NUM_RESAMPLES = 1_000  # of a bootstrap; the seed is sacreBLEU's (12345, or SACREBLEU_SEED)
SIGNIFICANCE = 0.05

Reference = str | tuple[str, ...]  # of an output: one text, or several


class ScoreError(AttentError):
    """Texts that cannot be scored."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    title: str
    unit: str = ""
    digits: int = 1
    lower_is_better: bool = False
    # (sacreBLEU tokenizer, for single sentences, language of the references)
    build: Callable[[str, bool, str | None], SacreMetric] | None = None
    by_default: bool = False  # computed by `attent score` without -m
    in_validation: bool = False  # computed in every validation; others only if `--metric` names them
    per_sentence: bool = False  # listed for each sentence of a test set

    def format_value(self, value: float, digits: int | None = None) -> str:
        return f"{value:.{self.digits if digits is None else digits}f}{self.unit}"

    @property
    def heading(self) -> str:
        return self.title.capitalize() if self.title.islower() else self.title


def _build_bleu(tokenize: str, per_sentence: bool, language: str | None) -> SacreMetric:
    from sacrebleu.metrics.bleu import BLEU  # imported here: it takes a third of a second

    # `force` silences the warning that a text looks tokenized; the signature is the same.
    return BLEU(tokenize=tokenize, force=True, effective_order=per_sentence)


def _build_tokenized_bleu(tokenize: str, per_sentence: bool, language: str | None) -> SacreMetric:
    """BLEU after Multi30k's own script: lowercase.perl, normalize-punctuation.perl, tokenizer.perl."""
    from attent.text.language_tags import get_primary_subtag

    sacremoses = import_package("sacremoses", "bleu-lc-tok", "'attent[moses]'")
    if language is None:
        raise ScoreError("bleu-lc-tok must know the one language of the references, but does not; give it: --tgt de")
    moses_language = get_primary_subtag(language)
    normalizer, tokenizer = sacremoses.MosesPunctNormalizer(moses_language), sacremoses.MosesTokenizer(moses_language)
    bleu: Any = _build_bleu("none", per_sentence, language)
    bleu.lowercase = True
    bleu.tokenizer = lambda text: tokenizer.tokenize(normalizer.normalize(text), return_str=True)
    bleu.tokenizer_signature = f"normalized-moses-{moses_language}-{sacremoses.__version__}"
    return bleu


def _build_chrf(tokenize: str, per_sentence: bool, language: str | None, word_order: int = 0) -> SacreMetric:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(word_order=word_order)


def _build_ter(tokenize: str, per_sentence: bool, language: str | None) -> SacreMetric:
    from sacrebleu.metrics.ter import TER

    return TER(normalized=tokenize != "13a", asian_support=tokenize != "13a")


def _build_exact(tokenize: str, per_sentence: bool, language: str | None) -> SacreMetric:
    """Percentage of outputs that equal their reference, ignoring leading and trailing spaces."""
    return _build_ratio(lambda output, references: (output in references, 1), {})


def _build_error_rate(tokenize: str, per_sentence: bool, language: str | None, in_words: bool) -> SacreMetric:
    """Edits per 100 words or characters, as jiwer counts them; of several references the one with the fewest counts."""

    def count_errors(output: str, references: Sequence[str]) -> tuple[int, int]:
        texts = [text.split() if in_words else list(text) for text in (output, *references)]
        return min((count_edits(texts[0], reference), len(reference)) for reference in texts[1:])

    return _build_ratio(count_errors, {"case": "mixed", "tok": "space" if in_words else "char"})


def _build_rouge(tokenize: str, per_sentence: bool, language: str | None, kind: str) -> SacreMetric:
    """Mean F1 of ROUGE (Lin 2004) for English: other letters than a to z separate words.

    By rouge-score, as most published figures, with stemming. It is an extra (its stemmer brings NLTK: 20 MB, 0.3 s to
    import), since figures depend on details of that stemmer, which an implementation of our own would have to copy.
    """
    from importlib.metadata import version

    scorer = import_package("rouge_score.rouge_scorer", "ROUGE", "'attent[rouge]'").RougeScorer(
        [kind], use_stemmer=True
    )
    return _build_ratio(
        lambda output, references: (scorer.score_multi(references, output)[kind].fmeasure, 1),
        {"stem": "porter", "version": f"rouge-score-{version('rouge-score')}"},
    )


def _build_cider(tokenize: str, per_sentence: bool, language: str | None) -> SacreMetric:
    """CIDEr-D of lowercased words without punctuation; the document frequencies are those of the references."""
    split_words: Any = _build_bleu(tokenize, per_sentence, language)
    scorer = CiderScorer(
        lambda text: [word for word in split_words.tokenizer(text.lower()).split() if any(map(str.isalnum, word))]
    )
    items = {"case": "lc", "tok": f"{tokenize}-no-punctuation", "n": "4", "sigma": "6"}
    # Equation 7 has a factor of 10: 100 / 10.
    return _build_ratio(
        lambda output, references: (scorer.score(output, references), 10), items, scorer.count_documents
    )


def _build_ratio(
    count: Callable[[str, Sequence[str]], tuple[float, int]],
    signature_items: dict[str, str],
    read_references: Callable[[list[Sequence[str]]], None] = lambda _: None,
) -> SacreMetric:
    """A ratio in percent of two sums over the outputs; `read_references` gets all references of each output first."""
    from sacrebleu.metrics.base import Metric as SacreMetric
    from sacrebleu.metrics.base import Score, Signature

    class SegmentRatio(SacreMetric):
        def get_signature(self) -> Signature:
            signature = super().get_signature()
            signature.info.update(signature_items)
            return signature

        def _preprocess_segment(self, sent: str) -> str:
            return sent.strip()

        def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
            return {"references": refs}

        def _cache_references(self, references: Sequence[Sequence[str]]) -> list[Any]:
            cache = super()._cache_references(references)
            read_references([info["references"] for info in cache])
            return cache

        def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[float]:
            return list(count(hypothesis, ref_kwargs["references"]))

        def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
            return Score("ratio", 100 * float(stats[0]) / max(1.0, float(stats[1])))

        def _aggregate_and_compute(self, stats: Sequence[Sequence[float]]) -> Score:
            return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

    return SegmentRatio()  # type: ignore[no-untyped-call]


def count_edits(output: Sequence[str], reference: Sequence[str]) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions between two sequences."""
    import numpy as np  # imported here: this module is part of `attent score --help`

    ids: dict[str, int] = {}
    rows, columns = (np.array([ids.setdefault(item, len(ids)) for item in side]) for side in (output, reference))
    steps = np.arange(len(columns) + 1)
    distances = steps  # from the items of `output` so far to each prefix of `reference`
    for item in rows:
        best = np.append(distances[0] + 1, np.minimum(distances[1:] + 1, distances[:-1] + (columns != item)))
        distances = np.minimum.accumulate(best - steps) + steps
    return int(distances[-1])


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(name="bleu", title="BLEU", build=_build_bleu, by_default=True, in_validation=True, per_sentence=True),
        Metric(name="bleu-lc-tok", title="BLEU (lowercased, tokenized)", build=_build_tokenized_bleu),
        Metric(name="chrf", title="chrF", build=_build_chrf, by_default=True, in_validation=True, per_sentence=True),
        Metric(name="chrf++", title="chrF++", build=partial(_build_chrf, word_order=2)),
        Metric(name="ter", title="TER", build=_build_ter, by_default=True, lower_is_better=True),
        Metric(name="rouge-1", title="ROUGE-1", build=partial(_build_rouge, kind="rouge1")),
        Metric(name="rouge-2", title="ROUGE-2", build=partial(_build_rouge, kind="rouge2")),
        Metric(name="rouge-l", title="ROUGE-L", build=partial(_build_rouge, kind="rougeL")),
        Metric(name="cider", title="CIDEr-D", digits=3, build=_build_cider),
        Metric(
            name="wer", title="WER", unit="%", build=partial(_build_error_rate, in_words=True), lower_is_better=True
        ),
        Metric(
            name="cer", title="CER", unit="%", build=partial(_build_error_rate, in_words=False), lower_is_better=True
        ),
        Metric(name="exact", title="exact", unit="%", build=_build_exact, in_validation=True),
        Metric(name="accuracy", title="accuracy", unit="%", digits=2),
    )
}
SCORE_METRICS = tuple(name for name, metric in METRICS.items() if metric.build)
DEFAULT_SCORE_METRICS = tuple(name for name, metric in METRICS.items() if metric.by_default)
SELECTION_METRICS = tuple(name for name in SCORE_METRICS if not METRICS[name].lower_is_better)  # of checkpoints
VALIDATION_METRICS = tuple(name for name, metric in METRICS.items() if metric.in_validation)
SENTENCE_METRICS = tuple(name for name, metric in METRICS.items() if metric.per_sentence)
SPEECH_METRICS = ("wer", "cer")  # by default, of transcripts
CAPTION_METRICS = ("cider", "bleu", "chrf")  # by default, of captions
DEFAULT_METRIC = "chrf"  # selects the best checkpoint and the worst sentences


def format_metrics(metrics: Mapping[str, float], digits: int | None = None) -> str:
    """`BLEU 31.2, chrF 50.0, exact 4.1%`: the metrics of the table, in its order."""
    known = [metric for metric in METRICS.values() if metric.name in metrics]
    return ", ".join(f"{metric.title} {metric.format_value(metrics[metric.name], digits)}" for metric in known)


def format_headline(metrics: Mapping[str, float]) -> str:
    """The most informative metric, such as `38.6 BLEU`; empty without any.

    BLEU counts runs of four words. Where few references are that long (labels, dates) it is near 0 however good the
    outputs are; the rate of exact matches is then the larger of the two.
    """
    bleu, exact = metrics.get("bleu"), metrics.get("exact")
    if "wer" in metrics and not bleu:
        name = "wer"
    elif exact and exact >= (bleu or 0.0):
        name = "exact"
    else:
        name = next((name for name in ("accuracy", "bleu", "chrf") if metrics.get(name)), "bleu")
    return f"{METRICS[name].format_value(metrics[name])} {METRICS[name].title}" if name in metrics else ""


@dataclass(frozen=True, kw_only=True)
class MetricScore:
    metric: str
    value: float
    mean: float | None  # over the resamples of a bootstrap
    ci_half_width: float | None  # 95% of the resamples are within mean +- this
    signature: str

    @property
    def title(self) -> str:
        return METRICS[self.metric].title

    @property
    def interval(self) -> tuple[float, float] | None:
        if self.mean is None or self.ci_half_width is None:
            return None
        return self.mean - self.ci_half_width, self.mean + self.ci_half_width


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    metric: str
    value: float
    baseline: float
    p_value: float
    signature: str

    @property
    def title(self) -> str:
        return METRICS[self.metric].title

    @property
    def difference(self) -> float:
        return self.value - self.baseline

    @property
    def is_better(self) -> bool | None:
        """None where the difference is not significant."""
        if self.p_value >= SIGNIFICANCE or not self.difference:
            return None
        return (self.difference > 0) != METRICS[self.metric].lower_is_better


def add_selected_metric(names: Sequence[str], selected: str | None) -> list[str]:
    """Return the metrics of a validation with the one that selects the best model, in the order of the table."""
    return [name for name, metric in METRICS.items() if name in names or (name == selected and metric.build)]


def compute_metrics(
    outputs: Sequence[str],
    references: Sequence[Reference],
    metrics: Sequence[str] = DEFAULT_SCORE_METRICS,
    language: str | None = None,
    *,
    resamples: int = NUM_RESAMPLES,
) -> list[MetricScore]:
    check_same_length(outputs, references)
    scores = []
    for name in metrics:
        mean = half_width = None
        if resamples:
            ((value, mean, half_width, _),), signature = _bootstrap([outputs], references, name, language, resamples)
        else:
            metric = make_metric(name, language, references)
            value = metric.corpus_score(outputs, list_reference_streams(references)).score
            signature = str(metric.get_signature())
        scores.append(MetricScore(metric=name, value=value, mean=mean, ci_half_width=half_width, signature=signature))
    return scores


def compare_outputs(
    outputs: Sequence[str],
    baseline_outputs: Sequence[str],
    references: Sequence[Reference],
    metrics: Sequence[str] = DEFAULT_SCORE_METRICS,
    language: str | None = None,
    *,
    resamples: int = NUM_RESAMPLES,
) -> list[PairedComparison]:
    """Compare two systems by a paired bootstrap test (Koehn 2004)."""
    check_same_length(outputs, references)
    check_same_length(baseline_outputs, references)
    comparisons = []
    for name in metrics:
        (baseline, system), signature = _bootstrap([baseline_outputs, outputs], references, name, language, resamples)
        # For equal scores, the test reports its smallest p if no resample differs: there is no difference to test.
        is_same = system[0] == baseline[0] and system[3] <= 1 / (resamples + 1)
        p_value = 1.0 if is_same else system[3]
        comparisons.append(
            PairedComparison(metric=name, value=system[0], baseline=baseline[0], p_value=p_value, signature=signature)
        )
    return comparisons


def _bootstrap(
    systems: Sequence[Sequence[str]], references: Sequence[Reference], name: str, language: str | None, resamples: int
) -> tuple[list[tuple[float, float, float, float]], str]:
    """Return (score, mean, half width, p against the first) of each system, and the signature.

    A single system takes the test for several too: the figures are those of `corpus_score(n_bootstrap=...)`, which
    fails (sacreBLEU 2.6.0, mixed float and float32) where a metric is 0 for some of the resamples.
    """
    from sacrebleu.significance import PairedTest, Result

    named: list[tuple[str, Sequence[str]]] = [(str(i), list(outputs)) for i, outputs in enumerate(systems)]
    metric = make_metric(name, language, references)
    streams = list_reference_streams(references)
    signatures, results = PairedTest(named, {name: metric}, streams, test_type="bs", n_samples=resamples)()
    ((title, signature),) = signatures.items()
    figures = [
        (r.score, float(r.mean or 0), float(r.ci or 0), 1.0 if r.p_value is None else float(r.p_value))
        for r in results[title]
        if isinstance(r, Result)
    ]
    return figures, str(signature)


def score_sentences(
    outputs: Sequence[str], references: Sequence[Reference], name: str, language: str | None = None
) -> list[float]:
    """Score each output alone; BLEU with effective order, as is usual for sentences."""
    check_same_length(outputs, references)
    metric = make_metric(name, language, references, per_sentence=True)
    pairs = zip(outputs, references, strict=True)
    return [metric.sentence_score(output, list_references(reference)).score for output, reference in pairs]


def list_references(reference: Reference) -> tuple[str, ...]:
    return (reference,) if isinstance(reference, str) else reference


def list_reference_streams(references: Sequence[Reference]) -> list[list[str]]:
    """Return the references as sacreBLEU takes them: the first of each output, the second, ...; None: it has fewer."""
    return [list(stream) for stream in zip_longest(*map(list_references, references))]


def check_same_length(outputs: Sequence[str], references: Sequence[Reference]) -> None:
    if len(outputs) != len(references):
        counts = f"{len(references)} references and {len(outputs)} outputs"
        raise ScoreError(f"there must be a reference for each output, but there are {counts}; give both in one order")
    if not outputs:
        raise ScoreError("there must be at least one output to score, but there is none; give a test set with pairs")


def check_metrics(names: Sequence[str]) -> tuple[str, ...]:
    if not names or not set(names) <= set(SCORE_METRICS):
        raise ScoreError(f"`metrics` must be some of {', '.join(SCORE_METRICS)}, but is {list(names)}")
    return tuple(names)


def make_metric(
    name: str, language: str | None, references: Sequence[Reference], *, per_sentence: bool = False
) -> SacreMetric:
    build = METRICS[name].build
    assert build is not None, name
    return build(choose_bleu_tokenizer(language, references), per_sentence, language)


def choose_bleu_tokenizer(language: str | None, references: Sequence[Reference] = ()) -> str:
    """Return sacreBLEU's tokenizer for a language; `13a` is that of the published figures of most.

    Japanese by characters, since words would need MeCab. Korean too: it has spaces, but a word between them includes
    its particles, and one wrong particle would count as a wrong word.
    """
    from attent.text import scripts  # imported here: this module is part of `attent score --help`

    texts = chain.from_iterable(map(list_references, references))
    used = scripts.get_language_scripts(language) or scripts.detect_scripts(islice(texts, SCRIPT_SAMPLE))
    used = used or frozenset()
    if "Hani" in used and not used & {"Kana", "Hang"}:
        return "zh"
    return "char" if used & (scripts.UNSPACED_SCRIPTS | {"Hang"}) else "13a"


MAX_ORDER = 4  # words of the longest n-grams
SIGMA = 6.0  # of the penalty for another length than the reference's, in words

Ngram = tuple[str, ...]


class CiderScorer:
    """CIDEr-D (Vedantam et al. 2015): captions against references by n-grams, rare ones counting most."""

    def __init__(self, tokenize: Callable[[str], list[str]]) -> None:
        self.tokenize = tokenize
        self.num_documents, self.document_counts = 0, Counter[Ngram]()

    def count_documents(self, references: Iterable[Sequence[str]]) -> None:
        documents = [{ngram for text in texts for ngram in count_ngrams(self.tokenize(text))} for texts in references]
        self.num_documents, self.document_counts = len(documents), Counter(chain.from_iterable(documents))

    def score(self, output: str, references: Sequence[str]) -> float:
        """Return the mean similarity to the references, from 0 to 1 (equation 7, without its factor of 10)."""
        words = self.tokenize(output)
        return sum(self._compute_similarity(words, self.tokenize(text)) for text in references) / len(references)

    def _compute_similarity(self, output: list[str], reference: list[str]) -> float:
        """Return the mean over orders of the cosine, with n-gram counts clipped, times the penalty for the length."""
        cosines = 0.0
        for weights, others in zip(self._weigh_ngrams(output), self._weigh_ngrams(reference), strict=True):
            if norms := math.hypot(*weights.values()) * math.hypot(*others.values()):
                shared = [ngram for ngram in weights if ngram in others]
                cosines += sum(min(weights[ngram], others[ngram]) * others[ngram] for ngram in shared) / norms
        return cosines / MAX_ORDER * math.exp(-((len(output) - len(reference)) ** 2) / (2 * SIGMA**2))

    def _weigh_ngrams(self, words: list[str]) -> list[dict[Ngram, float]]:
        """Return the TF-IDF of each n-gram, by their order."""
        weights: list[dict[Ngram, float]] = [{} for _ in range(MAX_ORDER)]
        for ngram, count in count_ngrams(words).items():
            rarity = math.log(max(1, self.num_documents) / max(1, self.document_counts[ngram]))
            weights[len(ngram) - 1][ngram] = count * rarity
        return weights


def count_ngrams(words: list[str]) -> Counter[Ngram]:
    orders = range(1, MAX_ORDER + 1)
    return Counter(tuple(words[start : start + n]) for n in orders for start in range(len(words) - n + 1))
