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

from attent.interop import conversion, hf_folder
from attent.interop.conversion import (
    ACTIVATION_FROM_HF,
    COMMON_IGNORED,
    COMMON_REQUIRED,
    LABEL_KEYS,
    ConfigKeys,
    TensorMapping,
)
from attent.interop.hf_folder import LazyTensor
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.pruning import restore_heads
from attent.nn import RelativeConfig, StackConfig
from attent.nn.feedforward import Activation
from attent.storage.errors import FolderError

FAMILY = "T5"

# --- names ----------------------------------------------------------------------------------------

SHARED = "shared.weight"
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"  # copies of it, in some files
OUTPUT = "lm_head.weight"
TENSOR_MAPPINGS = [
    TensorMapping("source_embedding.weight", SOURCE),
    TensorMapping("target_embedding.weight", TARGET),
    TensorMapping("output.weight", OUTPUT),
    TensorMapping("encoder.positions.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    TensorMapping("encoder.blocks.{i}.self_attn_residual.norm", "encoder.block.{i}.layer.0.layer_norm"),
    TensorMapping("encoder.blocks.{i}.self_attn.query", "encoder.block.{i}.layer.0.SelfAttention.q"),
    TensorMapping("encoder.blocks.{i}.self_attn.key", "encoder.block.{i}.layer.0.SelfAttention.k"),
    TensorMapping("encoder.blocks.{i}.self_attn.value", "encoder.block.{i}.layer.0.SelfAttention.v"),
    TensorMapping("encoder.blocks.{i}.self_attn.output", "encoder.block.{i}.layer.0.SelfAttention.o"),
    TensorMapping("encoder.blocks.{i}.feedforward_residual.norm", "encoder.block.{i}.layer.1.layer_norm"),
    TensorMapping("encoder.blocks.{i}.feedforward.contract", "encoder.block.{i}.layer.1.DenseReluDense.wo"),
    TensorMapping("encoder.norm", "encoder.final_layer_norm"),
    TensorMapping("decoder.positions.weight", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    TensorMapping("decoder.blocks.{i}.self_attn_residual.norm", "decoder.block.{i}.layer.0.layer_norm"),
    TensorMapping("decoder.blocks.{i}.self_attn.query", "decoder.block.{i}.layer.0.SelfAttention.q"),
    TensorMapping("decoder.blocks.{i}.self_attn.key", "decoder.block.{i}.layer.0.SelfAttention.k"),
    TensorMapping("decoder.blocks.{i}.self_attn.value", "decoder.block.{i}.layer.0.SelfAttention.v"),
    TensorMapping("decoder.blocks.{i}.self_attn.output", "decoder.block.{i}.layer.0.SelfAttention.o"),
    TensorMapping("decoder.blocks.{i}.cross_attn_residual.norm", "decoder.block.{i}.layer.1.layer_norm"),
    TensorMapping("decoder.blocks.{i}.cross_attn.query", "decoder.block.{i}.layer.1.EncDecAttention.q"),
    TensorMapping("decoder.blocks.{i}.cross_attn.key", "decoder.block.{i}.layer.1.EncDecAttention.k"),
    TensorMapping("decoder.blocks.{i}.cross_attn.value", "decoder.block.{i}.layer.1.EncDecAttention.v"),
    TensorMapping("decoder.blocks.{i}.cross_attn.output", "decoder.block.{i}.layer.1.EncDecAttention.o"),
    TensorMapping("decoder.blocks.{i}.feedforward_residual.norm", "decoder.block.{i}.layer.2.layer_norm"),
    TensorMapping("decoder.blocks.{i}.feedforward.contract", "decoder.block.{i}.layer.2.DenseReluDense.wo"),
    TensorMapping("decoder.norm", "decoder.final_layer_norm"),
]
UNGATED_MAPPINGS = [
    TensorMapping("encoder.blocks.{i}.feedforward.expand", "encoder.block.{i}.layer.1.DenseReluDense.wi"),
    TensorMapping("decoder.blocks.{i}.feedforward.expand", "decoder.block.{i}.layer.2.DenseReluDense.wi"),
]
GATED_MAPPINGS = [
    TensorMapping("encoder.blocks.{i}.feedforward.expand", "encoder.block.{i}.layer.1.DenseReluDense.wi_0"),
    TensorMapping("encoder.blocks.{i}.feedforward.gate", "encoder.block.{i}.layer.1.DenseReluDense.wi_1"),
    TensorMapping("decoder.blocks.{i}.feedforward.expand", "decoder.block.{i}.layer.2.DenseReluDense.wi_0"),
    TensorMapping("decoder.blocks.{i}.feedforward.gate", "decoder.block.{i}.layer.2.DenseReluDense.wi_1"),
]
IGNORED_TENSORS = {
    "left over in t5-small and its kin: between two texts there are no distances, and transformers drops it too": [
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    ],
}


def build_mappings(config: Seq2SeqConfig) -> list[TensorMapping]:
    return TENSOR_MAPPINGS + (GATED_MAPPINGS if config.encoder.gated else UNGATED_MAPPINGS)


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class T5Keys:
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
    def scales_output(self) -> bool:
        """Whether states are divided by sqrt(d_model) before the output layer: told by T5 in a roundabout way, in that
        1.1 says that its output is not tied; mT5 never does it."""
        told = self.tie_word_embeddings if self.scale_decoder_outputs is None else self.scale_decoder_outputs
        return told and self.model_type == "t5"


CONFIG_KEYS = ConfigKeys(
    family=FAMILY,
    schema=T5Keys,
    token_keys=("decoder_start_token_id", "pad_token_id", "eos_token_id"),
    field_to_key={
        "vocab": "vocab_size",
        "width": "d_model",
        "layers": "num_layers",
        "heads": "num_heads",
        "head_width": "d_kv",
        "ffn_width": "d_ff",
        "dropout": "dropout_rate",
        "norm_eps": "layer_norm_epsilon",
        "start_id": "decoder_start_token_id",
        "end_id": "eos_token_id",
    },
    required_values=COMMON_REQUIRED
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
    ignored=COMMON_IGNORED
    | {
        "first values of weights, and classifiers: not of a stored model": [
            "classifier_dropout",
            "initializer_factor",
            *LABEL_KEYS,
        ],
        "never read by transformers: no length is too long": ["n_positions"],
        "token ids that T5 does not need": ["bos_token_id", "sep_token_id", "unk_token_id"],
    },
)
FEED_FORWARD_FROM_HF: dict[str, Activation] = {
    "gelu_python": "gelu",
    **ACTIVATION_FROM_HF,
}
FEED_FORWARD_TO_HF: dict[tuple[Activation, bool], str] = {
    ("relu", False): "relu",
    ("gelu", False): "gelu",
    ("gelu_tanh", False): "gelu_new",
    ("silu", False): "silu",
    ("relu", True): "gated-relu",
    ("gelu", True): "gated-gelu_python",
    ("gelu_tanh", True): "gated-gelu",
    ("silu", True): "gated-silu",
}


def to_config(keys: T5Keys, *, tied: bool, where: Path) -> Seq2SeqConfig:
    """Our config of a T5 model. `tied` is what the tensors say."""
    check_relative(keys, where)
    return conversion.build_config(
        lambda: Seq2SeqConfig(
            vocab=keys.vocab_size,
            encoder=to_stack(keys, where, decoder=False),
            decoder=to_stack(keys, where, decoder=True),
            tie_output=tied,
            scale_embeddings=False,
            scale_output=keys.scales_output,
            start_id=conversion.get_start_id(keys, where),
            end_id=conversion.get_end_id(keys, where),
        ),
        where,
        CONFIG_KEYS.field_to_key,
    )


def to_stack(keys: T5Keys, where: Path, *, decoder: bool) -> StackConfig:
    activation, gated = parse_feed_forward(keys, where)
    layers = keys.num_decoder_layers if decoder else keys.num_layers
    return StackConfig(
        layers=keys.num_layers if layers is None else layers,
        width=keys.d_model,
        heads=keys.num_heads,
        head_width=keys.d_kv,
        ffn_width=keys.d_ff,
        activation=activation,
        gated=gated,
        causal=decoder,
        cross_attention=decoder,
        positions=RelativeConfig(
            buckets=keys.relative_attention_num_buckets, max_distance=keys.relative_attention_max_distance
        ),
        norm="rms",
        norm_order="pre",
        norm_eps=keys.layer_norm_epsilon,
        bias=False,
        scale=1.0,
        dropout=keys.dropout_rate,
        output_dropout=keys.dropout_rate,
        attention_dropout=keys.dropout_rate,
        activation_dropout=keys.dropout_rate,
    )


def parse_feed_forward(keys: T5Keys, where: Path) -> tuple[Activation, bool]:
    """`gated-gelu` and its kin: which activation, and whether another layer is its gate."""
    told = keys.feed_forward_proj
    first, _, last = told.rpartition("-")
    name = "gelu_new" if told == "gated-gelu" else last
    if first not in ("", "gated") or name not in FEED_FORWARD_FROM_HF:
        known = ", ".join(FEED_FORWARD_FROM_HF)
        raise FolderError(
            f"{where}: `feed_forward_proj` must be one of {known}, or gated- and one of them, for a T5 model that "
            f"attent can compute, but is {hf_folder.quote_value(told)}"
        )
    for key, value, wanted in (
        ("dense_act_fn", keys.dense_act_fn, name),
        ("is_gated_act", keys.is_gated_act, first == "gated"),
    ):
        if value not in (None, wanted):
            raise FolderError(
                f"{where}: `{key}` must be {wanted!r}, as `feed_forward_proj` {hf_folder.quote_value(told)} says, but is "
                f"{hf_folder.quote_value(value)}; find out which one is true of the weights"
            )
    return FEED_FORWARD_FROM_HF[name], first == "gated"


def check_relative(keys: T5Keys, where: Path) -> None:
    """Refuses distances that our rule of buckets is not made for; no published model has them."""
    buckets, reach = keys.relative_attention_num_buckets, keys.relative_attention_max_distance
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
    root = hf_folder.resolve_folder(folder)
    facts, where = conversion.read_config(root, CONFIG_KEYS), hf_folder.get_weights_path(root)
    stored = conversion.drop_ignored(hf_folder.open_tensors(root), IGNORED_TENSORS)
    layers = {"num_layers": facts.num_layers, "num_decoder_layers": facts.num_decoder_layers or 0}
    conversion.check_layer_count(stored, layers, where)
    stored, tied = resolve_ties(stored, where)
    config = to_config(facts, tied=tied, where=root / hf_folder.CONFIG_FILE)
    return conversion.load_weights(
        build_empty(config), build_mappings(config), stored, where, dtype=dtype, device=device
    )


def resolve_ties(stored: Mapping[str, LazyTensor], where: Path) -> tuple[dict[str, LazyTensor], bool]:
    """The tensors, with those of both ends under their own names; and whether the output layer is the embedding.

    As in transformers 5: it is, unless the file holds another one, whatever `tie_word_embeddings` says.
    """
    ends = [SHARED, SOURCE, TARGET]
    shared = conversion.resolve_tied_group(
        ends if any(name in stored for name in ends) else [OUTPUT], stored, where, "T5's embeddings"
    )
    resolved = {name: tensor for name, tensor in stored.items() if name != SHARED} | {SOURCE: shared, TARGET: shared}
    output = resolved.setdefault(OUTPUT, shared)
    return resolved, output is shared or (output.shape == shared.shape and torch.equal(output.read(), shared.read()))


# --- out ------------------------------------------------------------------------------------------

GENERATION_LENGTH = 512  # generate() stops there; without it, after 20 tokens


def save(model: Seq2Seq, folder: str | os.PathLike[str], *, pad: int | None = None) -> None:
    """Writes a new folder that `T5ForConditionalGeneration.from_pretrained` of `transformers` loads; no tokenizer.

    `pad` is the token id that fills up finished rows there: by default the start token, as in the published models.
    Pruned heads are put back as zeros.
    """
    model = restore_heads(model)
    config = model.config
    check_expressible(config)
    pad = config.start_id if pad is None else pad
    if not 0 <= pad < config.vocab:
        raise ValueError(f"`pad` must be a token id, from 0 to {config.vocab - 1}, but is {pad}; give one, or none")
    tensors = conversion.export_tensors(model, build_mappings(config))
    tensors[SHARED] = tensors.pop(SOURCE)
    if config.tie_output and not config.scale_output:
        tensors[OUTPUT] = tensors[SHARED].clone()  # transformers 4 looks for one where states are not scaled
    hf_folder.write_folder(
        folder,
        config=to_hf_config(config, pad, conversion.get_dtype_name(model)),
        extra_files={hf_folder.GENERATION_FILE: get_token_keys(config, pad) | {"max_length": GENERATION_LENGTH}},
        tensors=tensors,
    )


EXPRESSED_FIELDS = {
    "layers",
    "width",
    "heads",
    "head_width",
    "ffn_width",
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
            conversion.reject_field(FAMILY, name, getattr(config, name), repr(wanted))
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        check_stack(stack, side)
    for field in fields(StackConfig):
        ours, other = getattr(config.encoder, field.name), getattr(config.decoder, field.name)
        if field.name not in ("layers", "causal", "cross_attention", "remaining_heads") and ours != other:
            conversion.reject_field(FAMILY, f"decoder.{field.name}", other, f"that of the encoder, {ours!r},")


def check_stack(stack: StackConfig, side: str) -> None:
    decoder = side == "decoder"
    wanted: dict[str, tuple[object, ...]] = {
        "kv_heads": (None, stack.heads),
        "remaining_heads": (None,),
        "causal": (decoder,),
        "cross_attention": (decoder,),
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
    conversion.check_stack(stack, FAMILY, side=side, expressed_fields=EXPRESSED_FIELDS, required_values=wanted)
    if not isinstance(stack.positions, RelativeConfig):
        conversion.reject_field(FAMILY, f"{side}.positions", stack.positions, "relative")


def to_hf_config(config: Seq2SeqConfig, pad: int, dtype: str) -> dict[str, Any]:
    stack = config.encoder
    assert isinstance(stack.positions, RelativeConfig)
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        "d_model": stack.width,
        "d_kv": stack.head_width or stack.width // stack.heads,
        "d_ff": stack.ffn_width,
        "num_layers": stack.layers,
        "num_decoder_layers": config.decoder.layers,
        "num_heads": stack.heads,
        "relative_attention_num_buckets": stack.positions.buckets,
        "relative_attention_max_distance": stack.positions.max_distance,
        "feed_forward_proj": FEED_FORWARD_TO_HF[stack.activation, stack.gated],
        "layer_norm_epsilon": stack.norm_eps,
        "dropout_rate": stack.dropout,
        "tie_word_embeddings": config.scale_output,  # by which transformers tells whether to scale
        "dtype": dtype,
        **get_token_keys(config, pad),
    }


def get_token_keys(config: Seq2SeqConfig, pad: int) -> dict[str, Any]:
    return {"decoder_start_token_id": config.start_id, "eos_token_id": config.end_id, "pad_token_id": pad}
