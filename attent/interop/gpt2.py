"""GPT-2 as `transformers` stores it <-> our CausalLM.

A decoder alone: the norm first, learned positions, and matrices stored as (inputs, outputs), those of query, key and
value in one. How tables are read, and what is said of what they do not hold, is in `table`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attent.interop import causal_family, conversion
from attent.interop.conversion import (
    ACTIVATION_FROM_HF,
    COMMON_IGNORED,
    COMMON_REQUIRED,
    LABEL_KEYS,
    TRANSPOSED,
    ConfigKeys,
    HFActivation,
    TensorMapping,
    concat_transposed,
)
from attent.models import CausalConfig, CausalLM
from attent.nn import LearnedConfig, StackConfig

# --- names ----------------------------------------------------------------------------------------

PREFIX = "transformer."  # the first published weights leave it out
EMBEDDING, OUTPUT = "transformer.wte.weight", "lm_head.weight"
QKV = ("decoder.blocks.{i}.self_attn.query", "decoder.blocks.{i}.self_attn.key", "decoder.blocks.{i}.self_attn.value")
TENSOR_MAPPINGS = [
    TensorMapping("embedding.weight", EMBEDDING),
    TensorMapping("decoder.positions.weight", "transformer.wpe.weight"),
    TensorMapping("decoder.blocks.{i}.self_attn_residual.norm", "transformer.h.{i}.ln_1"),
    TensorMapping(QKV, "transformer.h.{i}.attn.c_attn", concat_transposed(3)),
    TensorMapping("decoder.blocks.{i}.self_attn.output", "transformer.h.{i}.attn.c_proj", TRANSPOSED),
    TensorMapping("decoder.blocks.{i}.feedforward_residual.norm", "transformer.h.{i}.ln_2"),
    TensorMapping("decoder.blocks.{i}.feedforward.expand", "transformer.h.{i}.mlp.c_fc", TRANSPOSED),
    TensorMapping("decoder.blocks.{i}.feedforward.contract", "transformer.h.{i}.mlp.c_proj", TRANSPOSED),
    TensorMapping("decoder.norm", "transformer.ln_f"),
    TensorMapping("output.weight", OUTPUT),
]
IGNORED_TENSORS = {
    "which tokens see which, as a table: we compute it": [
        prefix + name for prefix in ("", PREFIX) for name in ("h.{i}.attn.bias", "h.{i}.attn.masked_bias")
    ],
}


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GPT2Keys:
    """The keys of a GPT-2 config.json that say what the model is. Defaults are those of `transformers`."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: HFActivation = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50_256
    eos_token_id: int | tuple[int, ...] | None = 50_256


CONFIG_KEYS = ConfigKeys(
    family="GPT-2",
    schema=GPT2Keys,
    generation_overrides=("bos_token_id", "eos_token_id"),
    field_to_key={
        "vocab": "vocab_size",
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "ffn_width": "n_inner",
        "max_length": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "resid_pdrop",
        "embedding_dropout": "embd_pdrop",
        "attention_dropout": "attn_pdrop",
    },
    required_values=COMMON_REQUIRED
    | {
        "model_type": ("gpt2",),
        "architectures": (["GPT2LMHeadModel"], ["GPT2Model"], None),
        "is_encoder_decoder": (False,),
        "is_decoder": (False, True),
    },
    aliases={
        "n_ctx": "n_positions",
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    ignored=COMMON_IGNORED
    | {
        "a head that classifies, which a language model does not have": """
            summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
        """.split()
        + LABEL_KEYS,
        "first values of weights": ["initializer_range"],
        "the same numbers in another order, for half precision": ["reorder_and_upcast_attn"],
        "token ids that a language model does not need": """
            decoder_start_token_id pad_token_id sep_token_id unk_token_id
        """.split(),
    },
)


def to_config(keys: GPT2Keys, where: Path) -> CausalConfig:
    return conversion.build_config(
        lambda: CausalConfig(
            vocab=keys.vocab_size,
            stack=to_stack(keys),
            tie_output=keys.tie_word_embeddings,
            start_id=conversion.drop_invalid_id(keys.bos_token_id, keys.vocab_size),
            end_ids=conversion.drop_invalid_ids(keys.eos_token_id, keys.vocab_size),
        ),
        where,
        CONFIG_KEYS.field_to_key,
    )


def to_stack(keys: GPT2Keys) -> StackConfig:
    return StackConfig(
        layers=keys.n_layer,
        width=keys.n_embd,
        heads=keys.n_head,
        ffn_width=4 * keys.n_embd if keys.n_inner is None else keys.n_inner,
        activation=ACTIVATION_FROM_HF[keys.activation_function],
        causal=True,
        positions=LearnedConfig(max_length=keys.n_positions),
        norm_order="pre",
        norm_eps=keys.layer_norm_epsilon,
        scale=None if keys.scale_attn_weights else 1.0,
        scale_by_layer=keys.scale_attn_by_inverse_layer_idx,
        dropout=keys.resid_pdrop,
        embedding_dropout=None if keys.embd_pdrop == keys.resid_pdrop else keys.embd_pdrop,
        attention_dropout=keys.attn_pdrop,
    )


# --- in -------------------------------------------------------------------------------------------


def load(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> CausalLM:
    """The GPT2LMHeadModel of a Hugging Face folder, in eval mode, in the precision it was stored in or another."""
    return causal_family.load_causal(FAMILY, folder, dtype, device)


# --- out ------------------------------------------------------------------------------------------

ACTIVATION_TO_HF = conversion.ACTIVATION_TO_HF | {"gelu_tanh": "gelu_new"}
EXPRESSED_FIELDS = set(
    """
    layers width heads ffn_width activation causal positions norm_eps scale scale_by_layer dropout embedding_dropout
    attention_dropout
    """.split()
)


def save(model: CausalLM, folder: str | os.PathLike[str], *, pad: int | None = None) -> None:
    """Writes a new folder that `GPT2LMHeadModel.from_pretrained` of `transformers` loads; without a tokenizer.

    `pad` is the token id that fills up short rows there; we need none.
    """
    causal_family.save_causal(FAMILY, model, folder, pad)


def check_expressible(config: CausalConfig) -> None:
    """Refuses a model that GPT-2 has no words for, naming the field."""
    stack = config.stack
    head_width = stack.width // stack.heads
    wanted: dict[str, tuple[object, ...]] = {
        "kv_heads": (None, stack.heads),
        "head_width": (None, head_width),
        "remaining_heads": (None,),
        "gated": (False,),
        "cross_attention": (False,),
        "window": (None, (None, None), (None, 0)),
        "norm": ("layer",),
        "norm_order": ("pre",),
        "bias": (True,),
        "embedding_norm": (False,),
        "output_dropout": (0,),
        "activation_dropout": (0,),
    }
    conversion.check_stack(stack, "GPT-2", side="stack", expressed_fields=EXPRESSED_FIELDS, required_values=wanted)
    if not isinstance(stack.positions, LearnedConfig):
        conversion.reject_field("GPT-2", "stack.positions", stack.positions, "learned (LearnedConfig)")
    if stack.scale not in (None, head_width**-0.5, 1.0):
        conversion.reject_field("GPT-2", "stack.scale", stack.scale, "None or 1.0")
    for name in ("output_bias", "scale_embeddings"):
        if getattr(config, name):
            conversion.reject_field("GPT-2", name, True, "False")


def to_hf_config(config: CausalConfig) -> dict[str, Any]:
    stack = config.stack
    assert isinstance(stack.positions, LearnedConfig)
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab,
        "n_positions": stack.positions.max_length,
        "n_embd": stack.width,
        "n_layer": stack.layers,
        "n_head": stack.heads,
        "n_inner": stack.ffn_width,
        "activation_function": ACTIVATION_TO_HF[stack.activation],
        "resid_pdrop": stack.dropout,
        "embd_pdrop": stack.dropout if stack.embedding_dropout is None else stack.embedding_dropout,
        "attn_pdrop": stack.attention_dropout,
        "layer_norm_epsilon": stack.norm_eps,
        "scale_attn_weights": stack.scale != 1.0,
        "scale_attn_by_inverse_layer_idx": stack.scale_by_layer,
        "tie_word_embeddings": config.tie_output,
    }


FAMILY = causal_family.CausalFamily(
    keys=CONFIG_KEYS,
    mappings=TENSOR_MAPPINGS,
    ignored_tensors=IGNORED_TENSORS,
    prefix=PREFIX,
    tied_names=(EMBEDDING, OUTPUT),
    layers_key="n_layer",
    to_config=to_config,
    check_expressible=check_expressible,
    to_hf_config=to_hf_config,
)
