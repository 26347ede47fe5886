"""How good is it? Translations against references, and alignments against those by hand."""

from attent.scoring.evaluate import Evaluation, evaluate
from attent.scoring.metrics import (
    CorpusScores,
    MetricScore,
    PairedComparison,
    compare_outputs,
    compute_metrics,
    score_corpus,
)

__all__ = [
    "CorpusScores",
    "Evaluation",
    "MetricScore",
    "PairedComparison",
    "compare_outputs",
    "compute_metrics",
    "evaluate",
    "score_corpus",
]
