"""LLaMA (1 to 3, and others of the same `model_type`) as `transformers` stores it <-> our CausalLM."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attent.interop import causal_family, conversion
from attent.interop.conversion import ConfigKeys
from attent.interop.hf_folder import make_key_error, quote_value
from attent.models import CausalConfig
from attent.nn import LinearScaling, Llama3Scaling, RotaryConfig, StackConfig
from attent.storage.errors import FolderError

PREFIX = "model."  # files of a model without a head leave it out
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
TENSOR_MAPPINGS = conversion.read_mappings("llama")
IGNORED_TENSORS = [  # rotary frequencies, which we compute from the config, as transformers does
    "model.layers.{i}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeKeys:
    """`rope_scaling`, named `rope_parameters` since transformers 5."""

    rope_type: str | None = None
    type: str | None = None  # its older name
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class LlamaKeys:
    """Sizes are required, since every published file has them; other keys have the defaults of `transformers`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: conversion.HFActivation = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int | None = None  # takes precedence over the one in `rope_scaling`
    rope_theta: float | None = None
    rope_scaling: RopeKeys | None = None
    rope_parameters: RopeKeys | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float | None = 0.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2


CONFIG_KEYS = ConfigKeys.read("llama", LlamaKeys)


def to_stack(keys: LlamaKeys, where: Path) -> StackConfig:
    if keys.attention_bias != keys.mlp_bias:
        problem = f"`attention_bias` must be as `mlp_bias`, {keys.mlp_bias}, but is {keys.attention_bias}"
        raise FolderError(f"{where}: {problem}; a model with biases in some layers only is not supported")
    kv_heads, head_width = keys.num_key_value_heads, keys.head_dim
    values = conversion.read_fields(keys, CONFIG_KEYS.field_to_key) | {
        "kv_heads": None if kv_heads == keys.num_attention_heads else kv_heads,
        "head_width": None if head_width == keys.hidden_size / keys.num_attention_heads else head_width,
    }
    return StackConfig(
        **values,
        gated=True,
        causal=True,
        positions=to_positions(keys, where),
        norm="rms",
        norm_order="pre",
        bias=keys.attention_bias,
        dropout=0.0,
        attention_dropout=keys.attention_dropout or 0.0,
    )


def to_positions(keys: LlamaKeys, where: Path) -> RotaryConfig:
    """Read rotary positions from either table, whose `rope_theta` takes precedence over the top-level key."""
    if keys.rope_scaling and keys.rope_parameters:
        problem = "must have `rope_scaling` or `rope_parameters`, its newer name, but has both; remove one"
        raise FolderError(f"{where}: {problem}")
    rope = keys.rope_scaling or keys.rope_parameters or RopeKeys()
    if rope.partial_rotary_factor not in (None, 1.0):
        raise make_key_error(where, "partial_rotary_factor", "1", "LLaMA model", rope.partial_rotary_factor)
    base = next((base for base in (rope.rope_theta, keys.rope_theta) if base is not None), 10_000.0)
    scaling, length = to_scaling(rope, keys, where), keys.max_position_embeddings
    return RotaryConfig(base=base, order="halves", scaling=scaling, trained_length=length)


def to_scaling(rope: RopeKeys, keys: LlamaKeys, where: Path) -> LinearScaling | Llama3Scaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise FolderError(f"{where}: `rope_type` must be default, linear or llama3, but is {quote_value(kind)}")
    names = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    values = {name: getattr(rope, name) for name in names}
    for name, value in values.items():
        if value is None:
            raise FolderError(f"{where}: `rope_type` {kind} must come with `{name}`, but does not; get the file again")
    if kind == "linear":
        return LinearScaling(**values)
    original = keys.original_max_position_embeddings or rope.original_max_position_embeddings
    return Llama3Scaling(**values, original_length=original or keys.max_position_embeddings)


DEFAULT_LENGTH = 8192  # written where a model has none; transformers requires one, and generates beyond it


def check_expressible(config: CausalConfig) -> None:
    stack = config.stack
    conversion.check_stack(
        stack,
        "LLaMA",
        expressed={"kv_heads", "head_width", "causal", "bias"},
        required={
            "gated": (True,), "window": (None, (None, None), (None, 0)), "norm": ("rms",), "norm_order": ("pre",),
            "dropout": (0,), "embedding_dropout": (None, 0),
        },
    )  # fmt: skip
    if not isinstance(stack.positions, RotaryConfig) or stack.positions.order != "halves":
        conversion.reject_field("LLaMA", "stack.positions", stack.positions, "rotary (RotaryConfig, `order` halves)")
    if stack.width % stack.heads:
        conversion.reject_field("LLaMA", "stack.width", stack.width, f"a multiple of `heads`={stack.heads}")


def to_hf_config(config: CausalConfig) -> dict[str, Any]:
    stack = config.stack
    assert isinstance(stack.positions, RotaryConfig)
    scaling, length = stack.positions.scaling, DEFAULT_LENGTH
    if isinstance(scaling, Llama3Scaling):
        length = int(scaling.factor * scaling.original_length)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **conversion.write_fields(CONFIG_KEYS.field_to_key, config, stack),
        "num_key_value_heads": stack.kv_heads or stack.heads,
        "head_dim": stack.head_width or stack.width // stack.heads,
        "max_position_embeddings": length if (trained := stack.positions.trained_length) is None else trained,
        "attention_bias": stack.bias,
        "mlp_bias": stack.bias,
        "attention_dropout": stack.attention_dropout,
        "tie_word_embeddings": config.tie_output,
        **to_rope_keys(stack.positions),
    }


def to_rope_keys(positions: RotaryConfig) -> dict[str, Any]:
    """Write rotary positions as transformers 4 does, which 5 reads too."""
    rope: dict[str, Any] | None = None if positions.scaling is None else dict(vars(positions.scaling))
    if rope is not None:
        rope["rope_type"] = "linear" if isinstance(positions.scaling, LinearScaling) else "llama3"
        if "original_length" in rope:
            rope["original_max_position_embeddings"] = rope.pop("original_length")
    return {"rope_theta": positions.base, "rope_scaling": rope}


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
