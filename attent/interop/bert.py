"""BERT as `transformers` stores it <-> our Encoder.

The paper's encoder with learned positions, segments and a norm on the embeddings. Which heads there are is told by the
tensors: masked words, the pooler, labels. BERT's head for "is this the next sentence?" is known and left out, since
nothing here asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attent.interop import encoders, files, table
from attent.interop.files import Stored
from attent.interop.table import ACTIVATIONS, COMMON, FIXED, LABELS, Keys, Row, TheirActivation
from attent.models import Encoder, EncoderConfig, build_empty
from attent.models.folder import FolderError
from attent.nn import LearnedConfig, StackConfig

FAMILY = "BERT"
ARCHITECTURES = ("BertForMaskedLM", "BertForSequenceClassification", "BertModel", "BertForPreTraining")

# --- names ----------------------------------------------------------------------------------------

PREFIX = "bert."  # left out where there is no head
EMBEDDING = "bert.embeddings.word_embeddings.weight"
SEGMENTS = "bert.embeddings.token_type_embeddings.weight"
POOLER = "bert.pooler.dense.weight"
OUTPUT = "cls.predictions.decoder.weight"  # the embedding once more
OUTPUT_BIAS, COPY = "cls.predictions.bias", "cls.predictions.decoder.bias"  # one and the same
MASKED = "cls.predictions.transform.dense.weight"
CLASSIFIER = "classifier.weight"
TABLE = [
    Row("embedding.weight", EMBEDDING),
    Row("segment_embedding.weight", SEGMENTS),
    Row("encoder.positions.weight", "bert.embeddings.position_embeddings.weight"),
    Row("encoder.embedding_norm", "bert.embeddings.LayerNorm"),
    Row("encoder.blocks.{i}.own.query", "bert.encoder.layer.{i}.attention.self.query"),
    Row("encoder.blocks.{i}.own.key", "bert.encoder.layer.{i}.attention.self.key"),
    Row("encoder.blocks.{i}.own.value", "bert.encoder.layer.{i}.attention.self.value"),
    Row("encoder.blocks.{i}.own.output", "bert.encoder.layer.{i}.attention.output.dense"),
    Row("encoder.blocks.{i}.own_residual.norm", "bert.encoder.layer.{i}.attention.output.LayerNorm"),
    Row("encoder.blocks.{i}.feedforward.expand", "bert.encoder.layer.{i}.intermediate.dense"),
    Row("encoder.blocks.{i}.feedforward.contract", "bert.encoder.layer.{i}.output.dense"),
    Row("encoder.blocks.{i}.feedforward_residual.norm", "bert.encoder.layer.{i}.output.LayerNorm"),
    Row("masked.dense", "cls.predictions.transform.dense"),
    Row("masked.norm", "cls.predictions.transform.LayerNorm"),
    Row("masked.output.weight", OUTPUT),
    Row("masked.output.bias", OUTPUT_BIAS),
    Row("pooler.dense", "bert.pooler.dense"),
    Row("classifier", "classifier"),
]
UNREAD = {
    "whether one sentence follows the other: nothing here asks": [
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    ],
    "0, 1, 2 and so on": ["bert.embeddings.position_ids", "embeddings.position_ids"],
}
OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}  # of files of 2018


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The keys of a BERT config.json that say what the model is. Defaults are those of `transformers`."""

    vocab_size: int = 30_522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: TheirActivation = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What the tensors say."""

    masked: bool
    pooler: bool
    labels: tuple[str, ...]


KEYS = Keys(
    family=FAMILY,
    facts=Facts,
    names=encoders.NAMES
    | {"vocab": "vocab_size", "segments": "type_vocab_size", "max_length": "max_position_embeddings"},
    fixed=FIXED
    | {
        "model_type": ("bert",),
        "is_decoder": (False,),
        "is_encoder_decoder": (False,),
        "position_embedding_type": ("absolute", None),
        "tie_word_embeddings": (True,),
    },
    aliases={},
    harmless=COMMON
    | {
        "read with the tensors that they speak of": ["architectures", *LABELS],
        "first values of weights": ["initializer_range"],
        "dropout before the labels: here it is that of the stack": ["classifier_dropout"],
        "token ids that are the tokenizer's business": """
            bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
        """.split(),
        "of Google's first program, never read by transformers": """
            directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
            pooler_type
        """.split(),
    },
)


def to_config(facts: Facts, heads: Heads, where: Path) -> EncoderConfig:
    return table.built(
        lambda: EncoderConfig(
            vocab=facts.vocab_size,
            stack=to_stack(facts),
            segments=facts.type_vocab_size,
            masked=heads.masked,
            pooler=heads.pooler,
            labels=heads.labels,
        ),
        where,
        KEYS.names,
    )


def to_stack(facts: Facts) -> StackConfig:
    return StackConfig(
        layers=facts.num_hidden_layers,
        width=facts.hidden_size,
        heads=facts.num_attention_heads,
        inner=facts.intermediate_size,
        activation=ACTIVATIONS[facts.hidden_act],
        positions=LearnedConfig(max_length=facts.max_position_embeddings),
        norm_eps=facts.layer_norm_eps,
        embedding_norm=True,
        dropout=facts.hidden_dropout_prob,
        attention_dropout=facts.attention_probs_dropout_prob,
    )


# --- in -------------------------------------------------------------------------------------------


def load(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Encoder:
    """The BERT of a Hugging Face folder, in eval mode, in the precision it was stored in or another."""
    root = files.found(folder)
    facts, where = table.read_facts(root, KEYS), files.weights_of(root)
    encoders.check_architecture(root, ARCHITECTURES, FAMILY)
    stored = table.without(renamed(files.open_tensors(root)), UNREAD)
    table.check_depth(stored, {"num_hidden_layers": facts.num_hidden_layers}, where)
    bare = table.missing_prefix(stored, PREFIX)
    heads = heads_of(stored, bare, root)
    if heads.masked:
        stored = with_output(stored, bare, where)
    model = build_empty(to_config(facts, heads, root / files.CONFIG))
    return table.filled(model, TABLE, stored, where, dtype=dtype, device=device, bare=bare)


def renamed(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors under the names of today."""
    names = {}
    for name, tensor in stored.items():
        old = next((old for old in OLD_NAMES if name.endswith(old)), "")
        names[name.removesuffix(old) + OLD_NAMES.get(old, "")] = tensor
    return names


def heads_of(stored: Mapping[str, Stored], bare: str, root: Path) -> Heads:
    pooler = POOLER.removeprefix(bare) in stored
    labels = encoders.read_labels(root, len_of(stored[CLASSIFIER])) if CLASSIFIER in stored else ()
    if labels and not pooler:
        raise FolderError(
            f"{files.weights_of(root)}: must hold `{POOLER}`, since it holds `{CLASSIFIER}`, but does not; a "
            f"classifier without the pooler is for each token, and attent has those for whole texts alone"
        )
    return Heads(masked=MASKED in stored, pooler=pooler, labels=labels)


def len_of(stored: Stored) -> int:
    return stored.shape[0] if stored.shape else 0


def with_output(stored: Mapping[str, Stored], bare: str, where: Path) -> dict[str, Stored]:
    """The head for masked words under its own names; what it shares with the embedding may stand there twice."""
    groups = [[EMBEDDING.removeprefix(bare), OUTPUT], [OUTPUT_BIAS, COPY]]
    resolved = table.resolve_ties(stored, groups, where, "`tie_word_embeddings`")
    del resolved[COPY]
    return resolved


# --- out ------------------------------------------------------------------------------------------


def save(model: Encoder, folder: str | os.PathLike[str], *, pad: int | None = None) -> None:
    """Writes a new folder that BERT's classes of `transformers` load; without a tokenizer.

    It is said to be of the class of its last head; any other head is there too, for the class that has it. `pad` is the
    token id whose embedding `transformers` is to give no gradient. A model without segments gets one, of zeros.
    """
    config = model.config
    check_expressible(config)
    if pad is not None and not 0 <= pad < config.vocab:
        raise ValueError(f"`pad` must be a token id, from 0 to {config.vocab - 1}, but is {pad}; give one, or none")
    tensors = table.their_tensors(model, TABLE)
    if not config.segments:
        tensors[SEGMENTS] = tensors[EMBEDDING].new_zeros(1, config.stack.width)
    files.write_folder(
        folder,
        config=to_their_config(config, pad, table.dtype_of(model)),
        tensors=table.without_prefix(tensors, PREFIX) if architecture(config) == "BertModel" else tensors,
    )


def check_expressible(config: EncoderConfig) -> None:
    """Refuses a model that BERT has no words for, naming the field."""
    encoders.check_stack(config.stack, FAMILY, {"norm_order": ("post",), "embedding_norm": (True,)})
    if not isinstance(config.stack.positions, LearnedConfig):
        table.refuse(FAMILY, "stack.positions", config.stack.positions, "learned")
    if config.scale_embeddings:
        table.refuse(FAMILY, "scale_embeddings", config.scale_embeddings, "False")
    if config.labels and not config.pooler:
        table.refuse(FAMILY, "pooler", config.pooler, "True where there are labels")


def architecture(config: EncoderConfig) -> str:
    if config.labels:
        return "BertForSequenceClassification"
    return "BertForMaskedLM" if config.masked else "BertModel"


def to_their_config(config: EncoderConfig, pad: int | None, dtype: str) -> dict[str, Any]:
    stack = config.stack
    assert isinstance(stack.positions, LearnedConfig)
    return {
        "model_type": "bert",
        "architectures": [architecture(config)],
        "vocab_size": config.vocab,
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "intermediate_size": stack.inner,
        "hidden_act": table.THEIR_ACTIVATIONS[stack.activation],
        "hidden_dropout_prob": stack.dropout,
        "attention_probs_dropout_prob": stack.attention_dropout,
        "max_position_embeddings": stack.positions.max_length,
        "type_vocab_size": config.segments or 1,
        "layer_norm_eps": stack.norm_eps,
        "pad_token_id": pad,
        "dtype": dtype,
        **encoders.label_keys(config.labels),
    }
