"""How good is it? Translations against references."""

from attent.score.metrics import Scores, scores

__all__ = ["Scores", "scores"]
