"""From a model to its output: searching for the best target, and text in, text out."""

from attent.decoding.constraints.builder import Constraints
from attent.decoding.generation.generator import Generation, Generator
from attent.decoding.glossary import Glossary
from attent.decoding.in_memory import SearchCancelled, translate_texts
from attent.decoding.options import GenerationOptions, SamplingOptions, SearchOptions
from attent.decoding.search import SearchOutput, beam_search, greedy_search
from attent.decoding.translator import Candidate, Translation, Translator

__all__ = [
    "Candidate",
    "Constraints",
    "Generation",
    "GenerationOptions",
    "Generator",
    "Glossary",
    "SamplingOptions",
    "SearchCancelled",
    "SearchOptions",
    "SearchOutput",
    "Translation",
    "Translator",
    "beam_search",
    "greedy_search",
    "translate_texts",
]
