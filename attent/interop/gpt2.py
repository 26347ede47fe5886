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

from attent.interop import decoders, table
from attent.interop.table import (
    ACTIVATIONS,
    COMMON,
    FIXED,
    LABELS,
    TRANSPOSED,
    Keys,
    Row,
    TheirActivation,
    side_by_side,
)
from attent.models import CausalConfig, CausalLM
from attent.nn import LearnedConfig, StackConfig

# --- names ----------------------------------------------------------------------------------------

PREFIX = "transformer."  # the first published weights leave it out
EMBEDDING, OUTPUT = "transformer.wte.weight", "lm_head.weight"
QKV = ("decoder.blocks.{i}.own.query", "decoder.blocks.{i}.own.key", "decoder.blocks.{i}.own.value")
TABLE = [
    Row("embedding.weight", EMBEDDING),
    Row("decoder.positions.weight", "transformer.wpe.weight"),
    Row("decoder.blocks.{i}.own_residual.norm", "transformer.h.{i}.ln_1"),
    Row(QKV, "transformer.h.{i}.attn.c_attn", side_by_side(3)),
    Row("decoder.blocks.{i}.own.output", "transformer.h.{i}.attn.c_proj", TRANSPOSED),
    Row("decoder.blocks.{i}.feedforward_residual.norm", "transformer.h.{i}.ln_2"),
    Row("decoder.blocks.{i}.feedforward.expand", "transformer.h.{i}.mlp.c_fc", TRANSPOSED),
    Row("decoder.blocks.{i}.feedforward.contract", "transformer.h.{i}.mlp.c_proj", TRANSPOSED),
    Row("decoder.norm", "transformer.ln_f"),
    Row("output.weight", OUTPUT),
]
UNREAD = {
    "which tokens see which, as a table: we compute it": [
        prefix + name for prefix in ("", PREFIX) for name in ("h.{i}.attn.bias", "h.{i}.attn.masked_bias")
    ],
}


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The keys of a GPT-2 config.json that say what the model is. Defaults are those of `transformers`."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: TheirActivation = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50_256
    eos_token_id: int | tuple[int, ...] | None = 50_256


KEYS = Keys(
    family="GPT-2",
    facts=Facts,
    overruled=("bos_token_id", "eos_token_id"),
    names={
        "vocab": "vocab_size",
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "inner": "n_inner",
        "max_length": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "resid_pdrop",
        "embedding_dropout": "embd_pdrop",
        "attention_dropout": "attn_pdrop",
    },
    fixed=FIXED
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
    harmless=COMMON
    | {
        "a head that classifies, which a language model does not have": """
            summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
        """.split()
        + LABELS,
        "first values of weights": ["initializer_range"],
        "the same numbers in another order, for half precision": ["reorder_and_upcast_attn"],
        "token ids that a language model does not need": """
            decoder_start_token_id pad_token_id sep_token_id unk_token_id
        """.split(),
    },
)


def to_config(facts: Facts, where: Path) -> CausalConfig:
    return table.built(
        lambda: CausalConfig(
            vocab=facts.vocab_size,
            stack=to_stack(facts),
            tie_output=facts.tie_word_embeddings,
            start=table.known_id(facts.bos_token_id, facts.vocab_size),
            ends=table.known_ids(facts.eos_token_id, facts.vocab_size),
        ),
        where,
        KEYS.names,
    )


def to_stack(facts: Facts) -> StackConfig:
    return StackConfig(
        layers=facts.n_layer,
        width=facts.n_embd,
        heads=facts.n_head,
        inner=4 * facts.n_embd if facts.n_inner is None else facts.n_inner,
        activation=ACTIVATIONS[facts.activation_function],
        causal=True,
        positions=LearnedConfig(max_length=facts.n_positions),
        norm_order="pre",
        norm_eps=facts.layer_norm_epsilon,
        scale=None if facts.scale_attn_weights else 1.0,
        scale_by_layer=facts.scale_attn_by_inverse_layer_idx,
        dropout=facts.resid_pdrop,
        embedding_dropout=None if facts.embd_pdrop == facts.resid_pdrop else facts.embd_pdrop,
        attention_dropout=facts.attn_pdrop,
    )


# --- in -------------------------------------------------------------------------------------------


def load(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> CausalLM:
    """The GPT2LMHeadModel of a Hugging Face folder, in eval mode, in the precision it was stored in or another."""
    return decoders.load(FAMILY, folder, dtype, device)


# --- out ------------------------------------------------------------------------------------------

THEIR_ACTIVATIONS = table.THEIR_ACTIVATIONS | {"gelu_tanh": "gelu_new"}
SAID = set(
    """
    layers width heads inner activation causal positions norm_eps scale scale_by_layer dropout embedding_dropout
    attention_dropout
    """.split()
)


def save(model: CausalLM, folder: str | os.PathLike[str], *, pad: int | None = None) -> None:
    """Writes a new folder that `GPT2LMHeadModel.from_pretrained` of `transformers` loads; without a tokenizer.

    `pad` is the token id that fills up short rows there; we need none.
    """
    decoders.save(FAMILY, model, folder, pad)


def check_expressible(config: CausalConfig) -> None:
    """Refuses a model that GPT-2 has no words for, naming the field."""
    stack = config.stack
    head_width = stack.width // stack.heads
    wanted: dict[str, tuple[object, ...]] = {
        "kv_heads": (None, stack.heads),
        "head_width": (None, head_width),
        "kept": (None,),
        "gated": (False,),
        "cross": (False,),
        "window": (None, (None, None), (None, 0)),
        "norm": ("layer",),
        "norm_order": ("pre",),
        "bias": (True,),
        "embedding_norm": (False,),
        "output_dropout": (0,),
        "activation_dropout": (0,),
    }
    table.check_stack(stack, "GPT-2", side="stack", said=SAID, wanted=wanted)
    if not isinstance(stack.positions, LearnedConfig):
        table.refuse("GPT-2", "stack.positions", stack.positions, "learned (LearnedConfig)")
    if stack.scale not in (None, head_width**-0.5, 1.0):
        table.refuse("GPT-2", "stack.scale", stack.scale, "None or 1.0")
    for name in ("output_bias", "scale_embeddings"):
        if getattr(config, name):
            table.refuse("GPT-2", name, True, "False")


def to_their_config(config: CausalConfig) -> dict[str, Any]:
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
        "n_inner": stack.inner,
        "activation_function": THEIR_ACTIVATIONS[stack.activation],
        "resid_pdrop": stack.dropout,
        "embd_pdrop": stack.dropout if stack.embedding_dropout is None else stack.embedding_dropout,
        "attn_pdrop": stack.attention_dropout,
        "layer_norm_epsilon": stack.norm_eps,
        "scale_attn_weights": stack.scale != 1.0,
        "scale_attn_by_inverse_layer_idx": stack.scale_by_layer,
        "tie_word_embeddings": config.tie_output,
    }


FAMILY = decoders.Decoders(
    keys=KEYS,
    names=TABLE,
    unread=UNREAD,
    prefix=PREFIX,
    tied=(EMBEDDING, OUTPUT),
    layers="n_layer",
    to_config=to_config,
    check=check_expressible,
    to_theirs=to_their_config,
)
