"""Corpora to batches: `corpus` and `formats` read parallel text, `filters` drops bad pairs, `token_store` caches token
ids on disk, `batch_plan` and `loader` make batches. `report` describes a corpus before training.

Public names are imported on first use, so that reading a corpus does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attent.data.batch_plan import BatchConfig
    from attent.data.corpus import ReadOptions, open_corpora
    from attent.data.encode import EncodingConfig, learn_tokenizer
    from attent.data.filters import FilterConfig
    from attent.data.loader import LoaderPosition, PairLoader
    from attent.data.pairs import CorpusError, LanguagePair, Pair
    from attent.data.token_store import ResampledStores, TokenStore, prepare_store

__all__ = [
    "BatchConfig", "CorpusError", "EncodingConfig", "FilterConfig", "LanguagePair", "LoaderPosition", "Pair",
    "PairLoader", "ReadOptions", "ResampledStores", "TokenStore", "learn_tokenizer", "open_corpora", "prepare_store",
]  # fmt: skip

_PUBLIC_NAMES = {
    "batch_plan": ("BatchConfig",),
    "corpus": ("ReadOptions", "open_corpora"),
    "encode": ("EncodingConfig", "learn_tokenizer"),
    "filters": ("FilterConfig",),
    "loader": ("LoaderPosition", "PairLoader"),
    "pairs": ("CorpusError", "LanguagePair", "Pair"),
    "token_store": ("ResampledStores", "TokenStore", "prepare_store"),
}


def __getattr__(name: str) -> object:
    for module, names in _PUBLIC_NAMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"attent.data.{module}"), name)
            return value
    raise AttributeError(f"module 'attent.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
