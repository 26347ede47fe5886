"""Scores of translations against references, and of word alignments against gold alignments."""

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
