"""What the folders of GPT-2 and LLaMA have in common: how a decoder alone is read from one, and written to one. Names
and settings of each are in `gpt2` and `llama`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from attent.interop import files, table
from attent.interop.table import Keys, Row
from attent.models import CausalConfig, CausalLM, build_empty

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class Decoders(Generic[F]):
    """A family of models that are a decoder alone."""

    keys: Keys[F]
    names: Sequence[Row]
    unread: Mapping[str, Sequence[str]]
    prefix: str  # of names, which files of a model without its head leave out
    tied: tuple[str, str]  # the embedding, and the output layer that may be the same
    layers: str  # the key that counts them
    to_config: Callable[[F, Path], CausalConfig]
    check: Callable[[CausalConfig], None]  # refuses what the family has no words for
    to_theirs: Callable[[CausalConfig], dict[str, Any]]


def load(
    family: Decoders[F], folder: str | os.PathLike[str], dtype: torch.dtype | None, device: torch.device | str | None
) -> CausalLM:
    root = files.found(folder)
    facts, stored = table.read_facts(root, family.keys), files.open_tensors(root)
    where = files.weights_of(root)
    stored = table.without(stored, family.unread)
    table.check_depth(stored, {family.layers: getattr(facts, family.layers)}, where)
    config = family.to_config(facts, root / files.CONFIG)
    bare = table.missing_prefix(stored, family.prefix)
    if config.tie_output:
        tied = [name.removeprefix(bare) for name in family.tied]
        stored = table.resolve_ties(stored, [tied], where, "`tie_word_embeddings`")
    return table.filled(build_empty(config), family.names, stored, where, dtype=dtype, device=device, bare=bare)


def save(family: Decoders[F], model: CausalLM, folder: str | os.PathLike[str], pad: int | None) -> None:
    """`pad` is the token id that fills up short rows there; we need none."""
    config = model.config
    family.check(config)
    tokens = tokens_of(config, pad)
    files.write_folder(
        folder,
        config={**family.to_theirs(config), "dtype": table.dtype_of(model), **tokens},
        others={files.GENERATION: tokens},
        tensors=table.their_tensors(model, family.names),
    )


def tokens_of(config: CausalConfig, pad: int | None) -> dict[str, Any]:
    """How a text begins and ends, as it stands in config.json and in generation_config.json."""
    ends = list(config.ends)
    end = ends[0] if len(ends) == 1 else ends or None
    return {"bos_token_id": config.start, "eos_token_id": end, "pad_token_id": pad}
