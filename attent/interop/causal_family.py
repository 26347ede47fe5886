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

from attent.interop import conversion, hf_folder
from attent.interop.conversion import ConfigKeys, TensorMapping
from attent.models import CausalConfig, CausalLM, build_empty

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class CausalFamily(Generic[F]):
    """A family of models that are a decoder alone."""

    keys: ConfigKeys[F]
    mappings: Sequence[TensorMapping]
    ignored_tensors: Mapping[str, Sequence[str]]
    prefix: str  # of names, which files of a model without its head leave out
    tied_names: tuple[str, str]  # the embedding, and the output layer that may be the same
    layers_key: str  # the key that counts them
    to_config: Callable[[F, Path], CausalConfig]
    check_expressible: Callable[[CausalConfig], None]  # refuses what the family has no words for
    to_hf_config: Callable[[CausalConfig], dict[str, Any]]


def load_causal(
    family: CausalFamily[F],
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> CausalLM:
    root = hf_folder.resolve_folder(folder)
    facts, stored = conversion.read_config(root, family.keys), hf_folder.open_tensors(root)
    where = hf_folder.get_weights_path(root)
    stored = conversion.drop_ignored(stored, family.ignored_tensors)
    conversion.check_layer_count(stored, {family.layers_key: getattr(facts, family.layers_key)}, where)
    config = family.to_config(facts, root / hf_folder.CONFIG_FILE)
    bare = conversion.find_omitted_prefix(stored, family.prefix)
    if config.tie_output:
        tied = [name.removeprefix(bare) for name in family.tied_names]
        stored = conversion.resolve_ties(stored, [tied], where, "`tie_word_embeddings`")
    return conversion.load_weights(
        build_empty(config), family.mappings, stored, where, dtype=dtype, device=device, omitted_prefix=bare
    )


def save_causal(family: CausalFamily[F], model: CausalLM, folder: str | os.PathLike[str], pad: int | None) -> None:
    """`pad` is the token id that fills up short rows there; we need none."""
    config = model.config
    family.check_expressible(config)
    tokens = get_token_keys(config, pad)
    hf_folder.write_folder(
        folder,
        config={**family.to_hf_config(config), "dtype": conversion.get_dtype_name(model), **tokens},
        extra_files={hf_folder.GENERATION_FILE: tokens},
        tensors=conversion.export_tensors(model, family.mappings),
    )


def get_token_keys(config: CausalConfig, pad: int | None) -> dict[str, Any]:
    """How a text begins and ends, as it stands in config.json and in generation_config.json."""
    ends = list(config.end_ids)
    end = ends[0] if len(ends) == 1 else ends or None
    return {"bos_token_id": config.start_id, "eos_token_id": end, "pad_token_id": pad}
