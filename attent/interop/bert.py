"""BERT as `transformers` stores it <-> our TextEncoder. The next-sentence head is dropped."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attent.interop import causal_family, conversion, hf_folder
from attent.interop.conversion import ConfigKeys, OpenFolder
from attent.interop.hf_folder import Device, StrPath
from attent.models import EncoderConfig, TextEncoder, build_empty
from attent.nn import LearnedConfig, StackConfig
from attent.storage.errors import FolderError

FAMILY = "BERT"
ARCHITECTURES = ("BertForMaskedLM", "BertForSequenceClassification", "BertModel", "BertForPreTraining")

PREFIX = "bert."  # left out where there is no head
EMBEDDING = "bert.embeddings.word_embeddings.weight"
SEGMENTS = "bert.embeddings.token_type_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
POOLER = "bert.pooler.dense.weight"
OUTPUT = "cls.predictions.decoder.weight"  # tied to the embedding
OUTPUT_BIAS, OUTPUT_BIAS_COPY = "cls.predictions.bias", "cls.predictions.decoder.bias"
MASKED_LM = "cls.predictions.transform.dense.weight"
CLASSIFIER = "classifier.weight"
TENSOR_MAPPINGS = conversion.read_mappings("bert")
IGNORED_TENSORS = [
    "cls.seq_relationship.weight", "cls.seq_relationship.bias",  # next-sentence prediction
    "bert.embeddings.position_ids",  # 0, 1, 2 and so on
]  # fmt: skip
OLD_NAME, NEW_NAMES = re.compile(r"(?<=\.LayerNorm\.)(gamma|beta)$"), {"gamma": "weight", "beta": "bias"}  # of 2018


@dataclass(frozen=True, kw_only=True)
class BertKeys(causal_family.EncoderKeys):
    vocab_size: int = 30_522
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2


CONFIG_KEYS = ConfigKeys.read("bert", BertKeys)


def to_config(keys: BertKeys, heads: Mapping[str, Any], where: Path) -> EncoderConfig:
    """`heads` are the fields that `detect_heads` returns."""
    with conversion.explain_config_errors(where, CONFIG_KEYS.field_to_key):
        stack = StackConfig(
            **conversion.read_fields(keys, CONFIG_KEYS.field_to_key),
            positions=LearnedConfig(max_length=keys.max_position_embeddings),
            embedding_norm=True,
        )
        return EncoderConfig(vocab=keys.vocab_size, stack=stack, segments=keys.type_vocab_size, **heads)


def load(folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> TextEncoder:
    opened = OpenFolder.open(folder, CONFIG_KEYS, ["num_hidden_layers"], prefix=PREFIX, ignored_tensors=IGNORED_TENSORS)
    causal_family.check_architecture(opened.root, ARCHITECTURES, FAMILY)
    stored = {OLD_NAME.sub(lambda old: NEW_NAMES[old[1]], name): tensor for name, tensor in opened.stored.items()}
    opened = replace(opened, stored=stored)
    heads = detect_heads(opened)
    if heads["masked_lm"]:  # it has its own names for the tensors that it shares with the embedding
        opened = opened.resolve_ties([[EMBEDDING, OUTPUT], [OUTPUT_BIAS, OUTPUT_BIAS_COPY]], "`tie_word_embeddings`")
        del opened.stored[OUTPUT_BIAS_COPY]
    model = build_empty(to_config(opened.keys, heads, opened.config_path))
    return opened.load_into(model, TENSOR_MAPPINGS, dtype, device)


def detect_heads(opened: OpenFolder[BertKeys]) -> dict[str, Any]:
    stored, pooler = opened.stored, POOLER.removeprefix(opened.omitted_prefix) in opened.stored
    labels = causal_family.read_labels(opened.root, stored[CLASSIFIER].rows) if CLASSIFIER in stored else ()
    if labels and not pooler:
        problem = f"must hold `{POOLER}`, since it holds `{CLASSIFIER}`, but does not"
        advice = "token classifiers, which have no pooler, are not supported"
        raise FolderError(f"{opened.weights_path}: {problem}; {advice}")
    return {"masked_lm": MASKED_LM in stored, "pooler": pooler, "labels": labels}


def save(model: TextEncoder, folder: StrPath, *, pad: int | None = None) -> None:
    """Write a folder for the class of the last head; other heads are written too, for their classes.

    `pad` is the token whose embedding gets no gradient in `transformers`. A model without segments gets one, of zeros.
    """
    config = model.config
    check_expressible(config)
    if pad is not None:
        conversion.choose_pad(pad, pad, config.vocab)  # raises an error if it is no token
    tensors = conversion.export_tensors(model, TENSOR_MAPPINGS)
    if not config.segments:
        tensors[SEGMENTS] = tensors[EMBEDDING].new_zeros(1, config.stack.width)
    has_head = choose_architecture(config) != "BertModel"
    hf_folder.write_folder(
        folder,
        config=to_hf_config(config, pad, conversion.get_dtype_name(model)),
        tensors=tensors if has_head else {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()},
    )


def check_expressible(config: EncoderConfig) -> None:
    conversion.check_stack(config.stack, FAMILY, required={"embedding_norm": (True,)})
    if not isinstance(config.stack.positions, LearnedConfig):
        conversion.reject_field(FAMILY, "stack.positions", config.stack.positions, "learned")
    conversion.check_fields(config, FAMILY, {"scale_embeddings": False})
    if config.labels and not config.pooler:
        conversion.reject_field(FAMILY, "pooler", config.pooler, "True where there are labels")


def choose_architecture(config: EncoderConfig) -> str:
    if config.labels:
        return "BertForSequenceClassification"
    return "BertForMaskedLM" if config.masked_lm else "BertModel"


def to_hf_config(config: EncoderConfig, pad: int | None, dtype: str) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": [choose_architecture(config)],
        **conversion.write_fields(CONFIG_KEYS.field_to_key, config, config.stack, config.stack.positions),
        "type_vocab_size": config.segments or 1,
        "pad_token_id": pad,
        "dtype": dtype,
        **causal_family.build_label_keys(config.labels),
    }
