"""From a model to its output: searching for the best target, and text in, text out."""

from attent.decode.control import Control
from attent.decode.generator import Generation, Generator
from attent.decode.glossary import Glossary
from attent.decode.options import Sampling, Search, Writing
from attent.decode.search import Hypotheses, beam, greedy
from attent.decode.translate import Stopped, translate
from attent.decode.translator import Candidate, Translation, Translator

__all__ = [
    "Candidate",
    "Control",
    "Generation",
    "Generator",
    "Glossary",
    "Hypotheses",
    "Sampling",
    "Search",
    "Stopped",
    "Translation",
    "Translator",
    "Writing",
    "beam",
    "greedy",
    "translate",
]
