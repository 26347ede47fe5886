"""From a model to text: search, generation, constraints, alignment.

Public names are imported on first use (PEP 562), so that reading the options does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attent.decoding.engines.reference import SearchCancelled
    from attent.decoding.generation.generator import Generation, Generator
    from attent.decoding.glossary import Glossary
    from attent.decoding.options import GenerationOptions, PhraseConstraints, SamplingOptions, SearchOptions
    from attent.decoding.search import HypothesisTensors, beam_search
    from attent.decoding.translator import Translation, Translator, translate_texts

_MODULES = {
    "engines.reference": ("SearchCancelled",),
    "generation.generator": ("Generation", "Generator"),
    "glossary": ("Glossary",),
    "options": ("GenerationOptions", "PhraseConstraints", "SamplingOptions", "SearchOptions"),
    "search": ("HypothesisTensors", "beam_search"),
    "translator": ("Translation", "Translator", "translate_texts"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Generation", "GenerationOptions", "Generator", "Glossary", "HypothesisTensors", "PhraseConstraints",
    "SamplingOptions", "SearchCancelled", "SearchOptions", "Translation", "Translator", "beam_search",
    "translate_texts",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
