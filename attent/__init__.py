"""attent: train a translator from parallel text, look inside it, trust it and serve it.

This file holds the version and the public names, nothing else. The names arrive when first used (PEP 562),
so that `import attent` and `attent --help` stay quick: torch is imported by the part that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attent.decoding import Translator
    from attent.decoding.encoder_inference import Predictor
    from attent.decoding.generation.generator import Generator
    from attent.inspection import record
    from attent.interop import load
    from attent.models import build, presets

__version__ = "0.1.0"

__all__ = ["Generator", "Predictor", "Translator", "__version__", "build", "load", "presets", "record"]

# Public name -> the module that defines it. A module that is itself public stands under its own last name.
_PUBLIC_MODULES = {
    "Generator": "attent.decoding.generation.generator",
    "Predictor": "attent.decoding.encoder_inference",
    "Translator": "attent.decoding",
    "build": "attent.models",
    "load": "attent.interop",
    "presets": "attent.models.presets",
    "record": "attent.inspection",
}


def __getattr__(name: str) -> object:
    home = _PUBLIC_MODULES.get(name)
    if home is None:
        raise AttributeError(f"module 'attent' has no attribute {name!r}")
    module = import_module(home)
    value = module if home.endswith(f".{name}") else getattr(module, name)
    globals()[name] = value  # the next use does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
