"""From a model to its output: searching for the best target, and text in, text out."""

from attent.decode.search import Hypotheses, beam, greedy
from attent.decode.translate import Stopped, translate

__all__ = ["Hypotheses", "Stopped", "beam", "greedy", "translate"]
