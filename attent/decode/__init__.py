"""From a model to its output: searching for the best target."""

from attent.decode.search import greedy

__all__ = ["greedy"]
