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
    from attent.data.batches import Batches, Position
    from attent.data.corpus import Reading, corpora
    from attent.data.encode import Recipe, learn_tokenizer
    from attent.data.filters import Filters
    from attent.data.pairs import CorpusError, Languages, Pair
    from attent.data.plan import BatchConfig
    from attent.data.store import Resampled, Store, prepare

__all__ = [
    "BatchConfig",
    "Batches",
    "CorpusError",
    "Filters",
    "Languages",
    "Pair",
    "Position",
    "Reading",
    "Recipe",
    "Resampled",
    "Store",
    "corpora",
    "learn_tokenizer",
    "prepare",
]

_HOMES = {
    "batches": ("Batches", "Position"),
    "corpus": ("Reading", "corpora"),
    "encode": ("Recipe", "learn_tokenizer"),
    "filters": ("Filters",),
    "pairs": ("CorpusError", "Languages", "Pair"),
    "plan": ("BatchConfig",),
    "store": ("Resampled", "Store", "prepare"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"attent.data.{home}"), name)
            return value
    raise AttributeError(f"module 'attent.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
