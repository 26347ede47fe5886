"""GPT-2 as `transformers` stores it <-> our CausalLM. Matrices are stored as (inputs, outputs)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attent.interop import causal_family, conversion
from attent.interop.conversion import ConfigKeys, TensorMapping, concat_transposed
from attent.models import CausalConfig
from attent.nn import LearnedConfig, StackConfig

PREFIX = "transformer."  # the first published weights leave it out
EMBEDDING, OUTPUT = "transformer.wte.weight", "lm_head.weight"
QKV = tuple(f"decoder.blocks.{{i}}.self_attn.{part}" for part in ("query", "key", "value"))
TENSOR_MAPPINGS = [
    *conversion.read_mappings("gpt2"),
    TensorMapping(QKV, "transformer.h.{i}.attn.c_attn", concat_transposed(3)),
]
IGNORED_TENSORS = ["transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"]  # the causal mask


@dataclass(frozen=True, kw_only=True)
class GPT2Keys:
    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: conversion.HFActivation = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50_256
    eos_token_id: int | tuple[int, ...] | None = 50_256


CONFIG_KEYS = ConfigKeys.read("gpt2", GPT2Keys)


def to_stack(keys: GPT2Keys, where: Path) -> StackConfig:
    values = conversion.read_fields(keys, CONFIG_KEYS.field_to_key) | {
        "ffn_width": 4 * keys.n_embd if keys.n_inner is None else keys.n_inner,
        "embedding_dropout": None if keys.embd_pdrop == keys.resid_pdrop else keys.embd_pdrop,
    }
    return StackConfig(
        **values,
        causal=True,
        positions=LearnedConfig(max_length=keys.n_positions),
        norm_order="pre",
        scale=None if keys.scale_attn_weights else 1.0,
        scale_by_layer=keys.scale_attn_by_inverse_layer_idx,
    )


ACTIVATION_TO_HF = conversion.ACTIVATION_TO_HF | {"gelu_tanh": "gelu_new"}


def check_expressible(config: CausalConfig) -> None:
    stack = config.stack
    conversion.check_stack(
        stack,
        "GPT-2",
        expressed={"causal", "scale", "scale_by_layer", "embedding_dropout"},
        required={"norm_order": ("pre",), "window": (None, (None, None), (None, 0))},
    )
    if not isinstance(stack.positions, LearnedConfig):
        conversion.reject_field("GPT-2", "stack.positions", stack.positions, "learned (LearnedConfig)")
    if stack.scale not in (None, (stack.width // stack.heads) ** -0.5, 1.0):
        conversion.reject_field("GPT-2", "stack.scale", stack.scale, "None or 1.0")


def to_hf_config(config: CausalConfig) -> dict[str, Any]:
    stack = config.stack
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **conversion.write_fields(CONFIG_KEYS.field_to_key, config, stack, stack.positions),
        "activation_function": ACTIVATION_TO_HF[stack.activation],
        "embd_pdrop": stack.dropout if stack.embedding_dropout is None else stack.embedding_dropout,
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
    to_stack=to_stack,
    check_expressible=check_expressible,
    to_hf_config=to_hf_config,
)
load, save = FAMILY.load, FAMILY.save
