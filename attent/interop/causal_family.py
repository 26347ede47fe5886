"""Conversion that families share: decoder-only models (GPT-2, LLaMA), and labels of classifiers (BERT, ViT)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attent.interop import conversion, hf_folder
from attent.interop.conversion import ConfigKeys, OpenFolder, TensorMapping
from attent.interop.hf_folder import Device, StrPath, make_key_error, quote_value
from attent.models import CausalConfig, CausalLM, build_empty
from attent.nn import StackConfig
from attent.storage.errors import FolderError

SINGLE_LABEL = "single_label_classification"


@dataclass(frozen=True, kw_only=True)
class CausalFamily:
    keys: ConfigKeys[Any]
    mappings: Sequence[TensorMapping]
    ignored_tensors: Sequence[str]
    prefix: str  # of tensor names; files of a model without a head leave it out
    tied_names: tuple[str, str]  # the embedding, and the output layer that may be tied to it
    to_stack: Callable[[Any, Path], StackConfig]
    check_expressible: Callable[[CausalConfig], None]
    to_hf_config: Callable[[CausalConfig], dict[str, Any]]

    def load(self, folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> CausalLM:
        field_to_key = self.keys.field_to_key
        opened = OpenFolder.open(
            folder, self.keys, [field_to_key["layers"]], prefix=self.prefix, ignored_tensors=self.ignored_tensors
        )
        keys = opened.keys
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


@dataclass(frozen=True, kw_only=True)
class EncoderKeys:
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: conversion.HFActivation = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    layer_norm_eps: float = 1e-12


def check_architecture(root: Path, known: Sequence[str], family: str) -> None:
    """Reject a class that computes something else, which the tensors alone would not tell."""
    where = root / hf_folder.CONFIG_FILE
    architectures = hf_folder.read_json(where).get("architectures")
    if architectures is not None and architectures not in ([name] for name in known):
        required = f"one of {', '.join(known)}"
        raise make_key_error(where, "architectures", required, f"{family} model", architectures, "; use one of those")


def read_labels(root: Path, count: int) -> tuple[str, ...]:
    """Read the names of a classifier's rows. `transformers` leaves them out where two labels have no names."""
    where = root / hf_folder.CONFIG_FILE
    data = hf_folder.read_json(where)
    problem, names = data.get("problem_type"), data.get("id2label")
    if problem not in (None, SINGLE_LABEL):
        raise make_key_error(where, "problem_type", SINGLE_LABEL, "classifier", problem)
    if count == 1:
        advice = "regression models, such as rerankers, are not supported"
        raise FolderError(f"{where}: a classifier must have two labels or more, but has one: {advice}")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(count))
    expected, texts = {str(i) for i in range(count)}, names.values() if isinstance(names, dict) else [None]
    if not all(isinstance(text, str | int) for text in texts) or names.keys() != expected:
        required = f"name {count} labels, from 0 to {count - 1}, as the classifier has them"
        advice = "take the config and the weights from one model"
        raise FolderError(f"{where}: `id2label` must {required}, but is {quote_value(names)}; {advice}")
    labels = [str(names[str(i)]) for i in range(count)]
    # Number repeated names: ImageNet, for one, has two classes named crane.
    return tuple(f"{label} ({i})" if label in labels[:i] else label for i, label in enumerate(labels))


def build_label_keys(labels: Sequence[str]) -> dict[str, Any]:
    if not labels:
        return {}
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
