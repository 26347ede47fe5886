"""Load and save decoder-only models (GPT-2, LLaMA). The names and keys of each are in `gpt2` and `llama`."""

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
    keys: ConfigKeys[F]
    mappings: Sequence[TensorMapping]
    ignored_tensors: Mapping[str, Sequence[str]]
    prefix: str  # of tensor names; files of a model without a head leave it out
    tied_names: tuple[str, str]  # the embedding, and the output layer that may be tied to it
    layers_key: str
    to_config: Callable[[F, Path], CausalConfig]
    check_expressible: Callable[[CausalConfig], None]
    to_hf_config: Callable[[CausalConfig], dict[str, Any]]

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> CausalLM:
        root = hf_folder.resolve_folder(folder)
        keys, where = conversion.read_config(root, self.keys), hf_folder.get_weights_path(root)
        stored = conversion.drop_ignored(hf_folder.open_tensors(root), self.ignored_tensors)
        conversion.check_layer_count(stored, {self.layers_key: getattr(keys, self.layers_key)}, where)
        config = self.to_config(keys, root / hf_folder.CONFIG_FILE)
        prefix = conversion.find_omitted_prefix(stored, self.prefix)
        if config.tie_output:
            tied = [name.removeprefix(prefix) for name in self.tied_names]
            stored = conversion.resolve_ties(stored, [tied], where, "`tie_word_embeddings`")
        return conversion.load_weights(
            build_empty(config), self.mappings, stored, where, dtype=dtype, device=device, omitted_prefix=prefix
        )

    def save(self, model: CausalLM, folder: str | os.PathLike[str], *, pad: int | None = None) -> None:
        """Write a folder that `transformers` loads, without a tokenizer. `pad` is its padding token."""
        config = model.config
        self.check_expressible(config)
        ends = list(config.end_ids)
        end = ends[0] if len(ends) == 1 else ends or None
        tokens = {"bos_token_id": config.start_id, "eos_token_id": end, "pad_token_id": pad}
        hf_folder.write_folder(
            folder,
            config={**self.to_hf_config(config), "dtype": conversion.get_dtype_name(model), **tokens},
            extra_files={hf_folder.GENERATION_FILE: tokens},
            tensors=conversion.export_tensors(model, self.mappings),
        )


def check_output(config: CausalConfig, family: str) -> None:
    for name in ("output_bias", "scale_embeddings"):
        if getattr(config, name):
            conversion.reject_field(family, name, True, "False")


def build_causal_config(
    keys: Any, where: Path, field_to_key: Mapping[str, str], to_stack: Callable[[], Any]
) -> CausalConfig:
    return conversion.build_config(
        lambda: CausalConfig(
            vocab=keys.vocab_size,
            stack=to_stack(),
            tie_output=keys.tie_word_embeddings,
            start_id=conversion.drop_invalid_id(keys.bos_token_id, keys.vocab_size),
            end_ids=conversion.drop_invalid_ids(keys.eos_token_id, keys.vocab_size),
        ),
        where,
        field_to_key,
    )
