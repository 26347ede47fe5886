"""Pairs to batches: parallel text of any format is read, looked at, filtered, turned into numbers and batched.

The way of a pair: `corpus` finds the files that a person named and `readers` read them; `filters` drops what would
teach nothing; `store` keeps the token ids in arrays on disk; `batches` lays them into batches. `report` tells what a
corpus is like before hours are spent on it. Words become numbers in `attent.text`. Text that is read by itself goes by
`texts` or `labels`, `encoded` and `rows`; spans are taken out of it by `spans`; images are `images`' own.

The public names arrive when first used, so that reading a corpus does not wait for torch.
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
    "BatchConfig",
    "CorpusError",
    "EncodingConfig",
    "FilterConfig",
    "LanguagePair",
    "LoaderPosition",
    "Pair",
    "PairLoader",
    "ReadOptions",
    "ResampledStores",
    "TokenStore",
    "learn_tokenizer",
    "open_corpora",
    "prepare_store",
]

_PUBLIC_NAMES = {
    "loader": ("PairLoader", "LoaderPosition"),
    "corpus": ("ReadOptions", "open_corpora"),
    "encode": ("EncodingConfig", "learn_tokenizer"),
    "filters": ("FilterConfig",),
    "pairs": ("CorpusError", "LanguagePair", "Pair"),
    "batch_plan": ("BatchConfig",),
    "token_store": ("ResampledStores", "TokenStore", "prepare_store"),
}


def __getattr__(name: str) -> object:
    for home, names in _PUBLIC_NAMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"attent.data.{home}"), name)
            return value
    raise AttributeError(f"module 'attent.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
