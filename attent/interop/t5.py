"""T5 (1.0, 1.1 and flan-t5, and mT5, which has the shape of 1.1) as `transformers` stores it <-> our Seq2Seq.

Pre-norm with RMS, no biases, unscaled scores, and positions as a bias on them that all layers of a side share. Whether
the output layer is the embedding is told by the tensors; whether states are scaled before it, by the config.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from attent.interop import files, table
from attent.interop.files import Stored
from attent.interop.table import ACTIVATIONS, COMMON, FIXED, LABELS, Keys, Row
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.folder import FolderError
from attent.models.heads import unpruned
from attent.nn import RelativeConfig, StackConfig
from attent.nn.feedforward import Activation

FAMILY = "T5"

# --- names ----------------------------------------------------------------------------------------

SHARED = "shared.weight"
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"  # copies of it, in some files
OUTPUT = "lm_head.weight"
TABLE = [
    Row("source_embedding.weight", SOURCE),
    Row("target_embedding.weight", TARGET),
    Row("output.weight", OUTPUT),
    Row("encoder.positions.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    Row("encoder.blocks.{i}.own_residual.norm", "encoder.block.{i}.layer.0.layer_norm"),
    Row("encoder.blocks.{i}.own.query", "encoder.block.{i}.layer.0.SelfAttention.q"),
    Row("encoder.blocks.{i}.own.key", "encoder.block.{i}.layer.0.SelfAttention.k"),
    Row("encoder.blocks.{i}.own.value", "encoder.block.{i}.layer.0.SelfAttention.v"),
    Row("encoder.blocks.{i}.own.output", "encoder.block.{i}.layer.0.SelfAttention.o"),
    Row("encoder.blocks.{i}.feedforward_residual.norm", "encoder.block.{i}.layer.1.layer_norm"),
    Row("encoder.blocks.{i}.feedforward.contract", "encoder.block.{i}.layer.1.DenseReluDense.wo"),
    Row("encoder.norm", "encoder.final_layer_norm"),
    Row("decoder.positions.weight", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    Row("decoder.blocks.{i}.own_residual.norm", "decoder.block.{i}.layer.0.layer_norm"),
    Row("decoder.blocks.{i}.own.query", "decoder.block.{i}.layer.0.SelfAttention.q"),
    Row("decoder.blocks.{i}.own.key", "decoder.block.{i}.layer.0.SelfAttention.k"),
    Row("decoder.blocks.{i}.own.value", "decoder.block.{i}.layer.0.SelfAttention.v"),
    Row("decoder.blocks.{i}.own.output", "decoder.block.{i}.layer.0.SelfAttention.o"),
    Row("decoder.blocks.{i}.cross_residual.norm", "decoder.block.{i}.layer.1.layer_norm"),
    Row("decoder.blocks.{i}.cross.query", "decoder.block.{i}.layer.1.EncDecAttention.q"),
    Row("decoder.blocks.{i}.cross.key", "decoder.block.{i}.layer.1.EncDecAttention.k"),
    Row("decoder.blocks.{i}.cross.value", "decoder.block.{i}.layer.1.EncDecAttention.v"),
    Row("decoder.blocks.{i}.cross.output", "decoder.block.{i}.layer.1.EncDecAttention.o"),
    Row("decoder.blocks.{i}.feedforward_residual.norm", "decoder.block.{i}.layer.2.layer_norm"),
    Row("decoder.blocks.{i}.feedforward.contract", "decoder.block.{i}.layer.2.DenseReluDense.wo"),
    Row("decoder.norm", "decoder.final_layer_norm"),
]
PLAIN = [
    Row("encoder.blocks.{i}.feedforward.expand", "encoder.block.{i}.layer.1.DenseReluDense.wi"),
    Row("decoder.blocks.{i}.feedforward.expand", "decoder.block.{i}.layer.2.DenseReluDense.wi"),
]
GATED = [
    Row("encoder.blocks.{i}.feedforward.expand", "encoder.block.{i}.layer.1.DenseReluDense.wi_0"),
    Row("encoder.blocks.{i}.feedforward.gate", "encoder.block.{i}.layer.1.DenseReluDense.wi_1"),
    Row("decoder.blocks.{i}.feedforward.expand", "decoder.block.{i}.layer.2.DenseReluDense.wi_0"),
    Row("decoder.blocks.{i}.feedforward.gate", "decoder.block.{i}.layer.2.DenseReluDense.wi_1"),
]
UNREAD = {
    "left over in t5-small and its kin: between two texts there are no distances, and transformers drops it too": [
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    ],
}


def names(config: Seq2SeqConfig) -> list[Row]:
    return TABLE + (GATED if config.encoder.gated else PLAIN)


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The keys of a T5 config.json that say what the model is. Defaults are those of `transformers`."""

    model_type: Literal["t5", "mt5"] = "t5"
    vocab_size: int = 32_128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    feed_forward_proj: str = "relu"
    dense_act_fn: str | None = None  # what transformers makes of the last one
    is_gated_act: bool | None = None
    layer_norm_epsilon: float = 1e-6
    dropout_rate: float = 0.1
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None
    decoder_start_token_id: int | None = None
    pad_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1

    @property
    def scaled(self) -> bool:
        """Whether states are divided by sqrt(d_model) before the output layer: told by T5 in a roundabout way, in that
        1.1 says that its output is not tied; mT5 never does it."""
        told = self.tie_word_embeddings if self.scale_decoder_outputs is None else self.scale_decoder_outputs
        return told and self.model_type == "t5"


KEYS = Keys(
    family=FAMILY,
    facts=Facts,
    tokens=("decoder_start_token_id", "pad_token_id", "eos_token_id"),
    names={
        "vocab": "vocab_size",
        "width": "d_model",
        "layers": "num_layers",
        "heads": "num_heads",
        "head_width": "d_kv",
        "inner": "d_ff",
        "dropout": "dropout_rate",
        "norm_eps": "layer_norm_epsilon",
        "start": "decoder_start_token_id",
        "end": "eos_token_id",
    },
    fixed=FIXED
    | {
        "architectures": (
            ["T5ForConditionalGeneration"],
            ["MT5ForConditionalGeneration"],
            ["T5WithLMHeadModel"],
            None,
        ),
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
    },
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    harmless=COMMON
    | {
        "first values of weights, and classifiers: not of a stored model": [
            "classifier_dropout",
            "initializer_factor",
            *LABELS,
        ],
        "never read by transformers: no length is too long": ["n_positions"],
        "token ids that T5 does not need": ["bos_token_id", "sep_token_id", "unk_token_id"],
    },
)
FEED_FORWARD: dict[str, Activation] = {
    "gelu_python": "gelu",
    **ACTIVATIONS,
}
THEIR_FEED_FORWARD: dict[tuple[Activation, bool], str] = {
    ("relu", False): "relu",
    ("gelu", False): "gelu",
    ("gelu_tanh", False): "gelu_new",
    ("silu", False): "silu",
    ("relu", True): "gated-relu",
    ("gelu", True): "gated-gelu_python",
    ("gelu_tanh", True): "gated-gelu",
    ("silu", True): "gated-silu",
}


def to_config(facts: Facts, *, tied: bool, where: Path) -> Seq2SeqConfig:
    """Our config of a T5 model. `tied` is what the tensors say."""
    check_relative(facts, where)
    return table.built(
        lambda: Seq2SeqConfig(
            vocab=facts.vocab_size,
            encoder=to_stack(facts, where, decoder=False),
            decoder=to_stack(facts, where, decoder=True),
            tie_output=tied,
            scale_embeddings=False,
            scale_output=facts.scaled,
            start=table.start_of(facts, where),
            end=table.end_of(facts, where),
        ),
        where,
        KEYS.names,
    )


def to_stack(facts: Facts, where: Path, *, decoder: bool) -> StackConfig:
    activation, gated = feed_forward(facts, where)
    layers = facts.num_decoder_layers if decoder else facts.num_layers
    return StackConfig(
        layers=facts.num_layers if layers is None else layers,
        width=facts.d_model,
        heads=facts.num_heads,
        head_width=facts.d_kv,
        inner=facts.d_ff,
        activation=activation,
        gated=gated,
        causal=decoder,
        cross=decoder,
        positions=RelativeConfig(
            buckets=facts.relative_attention_num_buckets, reach=facts.relative_attention_max_distance
        ),
        norm="rms",
        norm_order="pre",
        norm_eps=facts.layer_norm_epsilon,
        bias=False,
        scale=1.0,
        dropout=facts.dropout_rate,
        output_dropout=facts.dropout_rate,
        attention_dropout=facts.dropout_rate,
        activation_dropout=facts.dropout_rate,
    )


def feed_forward(facts: Facts, where: Path) -> tuple[Activation, bool]:
    """`gated-gelu` and its kin: which activation, and whether another layer is its gate."""
    told = facts.feed_forward_proj
    first, _, last = told.rpartition("-")
    name = "gelu_new" if told == "gated-gelu" else last
    if first not in ("", "gated") or name not in FEED_FORWARD:
        known = ", ".join(FEED_FORWARD)
        raise FolderError(
            f"{where}: `feed_forward_proj` must be one of {known}, or gated- and one of them, for a T5 model that "
            f"attent can compute, but is {files.quoted(told)}"
        )
    for key, value, wanted in (
        ("dense_act_fn", facts.dense_act_fn, name),
        ("is_gated_act", facts.is_gated_act, first == "gated"),
    ):
        if value not in (None, wanted):
            raise FolderError(
                f"{where}: `{key}` must be {wanted!r}, as `feed_forward_proj` {files.quoted(told)} says, but is "
                f"{files.quoted(value)}; find out which one is true of the weights"
            )
    return FEED_FORWARD[name], first == "gated"


def check_relative(facts: Facts, where: Path) -> None:
    """Refuses distances that our rule of buckets is not made for; no published model has them."""
    buckets, reach = facts.relative_attention_num_buckets, facts.relative_attention_max_distance
    if buckets < 4 or buckets % 4:
        raise FolderError(
            f"{where}: `relative_attention_num_buckets` must be a multiple of 4 for a T5 model that attent can "
            f"compute, but is {buckets}"
        )
    if reach <= buckets:
        raise FolderError(
            f"{where}: `relative_attention_max_distance` must be more than `relative_attention_num_buckets`={buckets} "
            f"for a T5 model that attent can compute, but is {reach}"
        )


# --- in -------------------------------------------------------------------------------------------


def load(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Seq2Seq:
    """The T5 of a Hugging Face folder, in eval mode, in the precision it was stored in or another."""
    root = files.found(folder)
    facts, where = table.read_facts(root, KEYS), files.weights_of(root)
    stored = table.without(files.open_tensors(root), UNREAD)
    layers = {"num_layers": facts.num_layers, "num_decoder_layers": facts.num_decoder_layers or 0}
    table.check_depth(stored, layers, where)
    stored, tied = resolve_ties(stored, where)
    config = to_config(facts, tied=tied, where=root / files.CONFIG)
    return table.filled(build_empty(config), names(config), stored, where, dtype=dtype, device=device)


def resolve_ties(stored: Mapping[str, Stored], where: Path) -> tuple[dict[str, Stored], bool]:
    """The tensors, with those of both ends under their own names; and whether the output layer is the embedding.

    As in transformers 5: it is, unless the file holds another one, whatever `tie_word_embeddings` says.
    """
    ends = [SHARED, SOURCE, TARGET]
    shared = table.the_one(ends if any(name in stored for name in ends) else [OUTPUT], stored, where, "T5's embeddings")
    resolved = {name: tensor for name, tensor in stored.items() if name != SHARED} | {SOURCE: shared, TARGET: shared}
    output = resolved.setdefault(OUTPUT, shared)
    return resolved, output is shared or (output.shape == shared.shape and torch.equal(output.read(), shared.read()))


# --- out ------------------------------------------------------------------------------------------

SEARCH_LENGTH = 512  # generate() stops there; without it, after 20 tokens


def save(model: Seq2Seq, folder: str | os.PathLike[str], *, pad: int | None = None) -> None:
    """Writes a new folder that `T5ForConditionalGeneration.from_pretrained` of `transformers` loads; no tokenizer.

    `pad` is the token id that fills up finished rows there: by default the start token, as in the published models.
    Pruned heads are put back as zeros.
    """
    model = unpruned(model)
    config = model.config
    check_expressible(config)
    pad = config.start if pad is None else pad
    if not 0 <= pad < config.vocab:
        raise ValueError(f"`pad` must be a token id, from 0 to {config.vocab - 1}, but is {pad}; give one, or none")
    tensors = table.their_tensors(model, names(config))
    tensors[SHARED] = tensors.pop(SOURCE)
    if config.tie_output and not config.scale_output:
        tensors[OUTPUT] = tensors[SHARED].clone()  # transformers 4 looks for one where states are not scaled
    files.write_folder(
        folder,
        config=to_their_config(config, pad, table.dtype_of(model)),
        others={files.GENERATION: tokens_of(config, pad) | {"max_length": SEARCH_LENGTH}},
        tensors=tensors,
    )


SAID = {
    "layers",
    "width",
    "heads",
    "head_width",
    "inner",
    "activation",
    "gated",
    "positions",
    "norm_eps",
    "dropout",
}


def check_expressible(config: Seq2SeqConfig) -> None:
    """Refuses a model that T5 has no words for, naming the field."""
    for name, wanted in (("share_embeddings", True), ("output_bias", False), ("scale_embeddings", False)):
        if getattr(config, name) != wanted:
            table.refuse(FAMILY, name, getattr(config, name), repr(wanted))
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        check_stack(stack, side)
    for field in fields(StackConfig):
        ours, other = getattr(config.encoder, field.name), getattr(config.decoder, field.name)
        if field.name not in ("layers", "causal", "cross", "kept") and ours != other:
            table.refuse(FAMILY, f"decoder.{field.name}", other, f"that of the encoder, {ours!r},")


def check_stack(stack: StackConfig, side: str) -> None:
    decoder = side == "decoder"
    wanted: dict[str, tuple[object, ...]] = {
        "kv_heads": (None, stack.heads),
        "kept": (None,),
        "causal": (decoder,),
        "cross": (decoder,),
        "window": (None, (None, None)),
        "norm": ("rms",),
        "norm_order": ("pre",),
        "bias": (False,),
        "scale": (1.0, 1),
        "scale_by_layer": (False,),
        "embedding_norm": (False,),
        "embedding_dropout": (None, stack.dropout),
        "output_dropout": (stack.dropout,),
        "attention_dropout": (stack.dropout,),
        "activation_dropout": (stack.dropout,),
    }
    table.check_stack(stack, FAMILY, side=side, said=SAID, wanted=wanted)
    if not isinstance(stack.positions, RelativeConfig):
        table.refuse(FAMILY, f"{side}.positions", stack.positions, "relative")


def to_their_config(config: Seq2SeqConfig, pad: int, dtype: str) -> dict[str, Any]:
    stack = config.encoder
    assert isinstance(stack.positions, RelativeConfig)
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        "d_model": stack.width,
        "d_kv": stack.head_width or stack.width // stack.heads,
        "d_ff": stack.inner,
        "num_layers": stack.layers,
        "num_decoder_layers": config.decoder.layers,
        "num_heads": stack.heads,
        "relative_attention_num_buckets": stack.positions.buckets,
        "relative_attention_max_distance": stack.positions.reach,
        "feed_forward_proj": THEIR_FEED_FORWARD[stack.activation, stack.gated],
        "layer_norm_epsilon": stack.norm_eps,
        "dropout_rate": stack.dropout,
        "tie_word_embeddings": config.scale_output,  # by which transformers tells whether to scale
        "dtype": dtype,
        **tokens_of(config, pad),
    }


def tokens_of(config: Seq2SeqConfig, pad: int) -> dict[str, Any]:
    return {"decoder_start_token_id": config.start, "eos_token_id": config.end, "pad_token_id": pad}
