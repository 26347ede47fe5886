"""The common part of BERT and ViT folders: the class of `transformers`, and the labels of a classifier."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attent.interop import conversion, hf_folder
from attent.interop.hf_folder import make_key_error, quote_value
from attent.storage.errors import FolderError

FIELD_TO_KEY = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
}
SINGLE_LABEL = "single_label_classification"


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
