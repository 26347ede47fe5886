"""attent: train translation models and other Transformers, inspect their attention, score and serve them.

>>> translator = attent.Translator.load("runs/en-de")  # a folder that `attent.train` has written
>>> print(translator("A dog sleeps."))
Ein Hund schläft.
>>> report = attent.score(translator, "test.tsv")  # prints as a table
>>> inspection = attent.look(translator, "A dog sleeps.")  # every attention head; in a notebook, an interactive page

Start with `help(attent.train)`, then `help(attent.Translator)`, `help(attent.look)` and `help(attent.score)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attent import nn
    from attent.decoding.generation.generator import Generator
    from attent.decoding.predictor import Predictor
    from attent.decoding.source_search import Captioner
    from attent.decoding.transcriber import Transcriber
    from attent.decoding.translator import Translator
    from attent.inspection.ablate import mask_heads
    from attent.inspection.attention_trace import record
    from attent.inspection.head_stats import measure_heads
    from attent.inspection.session import Inspection, look
    from attent.interop import load
    from attent.models import build, presets
    from attent.scoring.pipeline import score
    from attent.serving.run import serve
    from attent.storage.errors import AttentError
    from attent.training.distillation import distil
    from attent.training.run import train

__version__ = "0.1.0"

__all__ = [
    "AttentError", "Captioner", "Generator", "Inspection", "Predictor", "Transcriber", "Translator", "__version__",
    "build", "distil", "load", "look", "mask_heads", "measure_heads", "nn", "presets", "record", "score", "serve",
    "train",
]  # fmt: skip

# Public name -> the module that defines it, or that is itself public. It is imported on first use (PEP 562), so that
# `import attent` and `attent --help` do not import torch.
_PUBLIC_MODULES = {
    "AttentError": "attent.storage.errors",
    "Captioner": "attent.decoding.source_search",
    "Generator": "attent.decoding.generation.generator",
    "Inspection": "attent.inspection.session",
    "Predictor": "attent.decoding.predictor",
    "Transcriber": "attent.decoding.transcriber",
    "Translator": "attent.decoding.translator",
    "build": "attent.models",
    "distil": "attent.training.distillation",
    "load": "attent.interop",
    "look": "attent.inspection.session",
    "mask_heads": "attent.inspection.ablate",
    "measure_heads": "attent.inspection.head_stats",
    "nn": "attent.nn",
    "presets": "attent.models.presets",
    "record": "attent.inspection",
    "score": "attent.scoring.pipeline",
    "serve": "attent.serving.run",
    "train": "attent.training.run",
}


def __getattr__(name: str) -> object:
    path = _PUBLIC_MODULES.get(name)
    if path is None:
        raise AttributeError(f"module 'attent' has no attribute {name!r}")
    module = import_module(path)
    value = module if path.endswith(f".{name}") else getattr(module, name)
    globals()[name] = value  # so that the next use is a plain attribute
    return value


def __dir__() -> list[str]:
    return __all__
