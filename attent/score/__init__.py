"""How good is it? Translations against references, and alignments against those by hand."""

from attent.score.evaluate import Evaluation, evaluate
from attent.score.metrics import Paired, Score, Scores, measured, paired, scores

__all__ = ["Evaluation", "Paired", "Score", "Scores", "evaluate", "measured", "paired", "scores"]
