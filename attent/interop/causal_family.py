"""Load and save decoder-only models (GPT-2, LLaMA). The names and keys of each are in `gpt2` and `llama`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from attent.interop import conversion, hf_folder
from attent.interop.conversion import ConfigKeys, OpenFolder, TensorMapping
from attent.interop.hf_folder import Device, StrPath
from attent.models import CausalConfig, CausalLM, build_empty
from attent.nn import StackConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound="DataclassInstance")
IGNORED_KEYS = {  # in both families
    "a classifier, which a language model does not have": conversion.LABEL_KEYS,
    "token ids that a language model does not need": "decoder_start_token_id pad_token_id sep_token_id unk_token_id",
}


@dataclass(frozen=True, kw_only=True)
class CausalFamily(Generic[F]):
    keys: ConfigKeys[F]
    mappings: Sequence[TensorMapping]
    ignored_tensors: Sequence[str]
    prefix: str  # of tensor names; files of a model without a head leave it out
    tied_names: tuple[str, str]  # the embedding, and the output layer that may be tied to it
    to_stack: Callable[[F, Path], StackConfig]
    check_expressible: Callable[[CausalConfig], None]
    to_hf_config: Callable[[CausalConfig], dict[str, Any]]

    def load(self, folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> CausalLM:
        field_to_key = self.keys.field_to_key
        opened = OpenFolder.open(
            folder, self.keys, [field_to_key["layers"]], prefix=self.prefix, ignored_tensors=self.ignored_tensors
        )
        keys: Any = opened.keys  # all families have these
        with conversion.explain_config_errors(opened.config_path, field_to_key):
            config = CausalConfig(
                vocab=keys.vocab_size,
                stack=self.to_stack(keys, opened.config_path),
                tie_output=keys.tie_word_embeddings,
                start_id=next(iter(conversion.drop_invalid_ids(keys.bos_token_id, keys.vocab_size)), None),
                end_ids=conversion.drop_invalid_ids(keys.eos_token_id, keys.vocab_size),
            )
        if config.tie_output:
            opened = opened.resolve_ties([self.tied_names], "`tie_word_embeddings`")
        return opened.load_into(build_empty(config), self.mappings, dtype, device)

    def save(self, model: CausalLM, folder: StrPath, *, pad: int | None = None) -> None:
        config = model.config
        self.check_expressible(config)
        conversion.check_fields(config, self.keys.family, {"output_bias": False, "scale_embeddings": False})
        ends = list(config.end_ids)
        end = ends[0] if len(ends) == 1 else ends or None
        tokens = {"bos_token_id": config.start_id, "eos_token_id": end, "pad_token_id": pad}
        hf_folder.write_folder(
            folder,
            config={**self.to_hf_config(config), "dtype": conversion.get_dtype_name(model), **tokens},
            extra_files={hf_folder.GENERATION_FILE: tokens},
            tensors=conversion.export_tensors(model, self.mappings),
        )
