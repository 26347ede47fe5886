"""Marian (opus-mt and its kin) as `transformers` stores it <-> our Seq2Seq.

The paper's model: post-norm, sinusoidal positions (sines first, then cosines), and a bias on the logits.
How tables are read, and what is said of what they do not hold, is in `table`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attent.interop import files, table
from attent.interop.files import Stored
from attent.interop.table import ACTIVATIONS, COMMON, FIXED, LABELS, Keys, Row, TheirActivation
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.folder import FolderError
from attent.models.heads import unpruned
from attent.nn import SinusoidalConfig, StackConfig, sinusoid

# --- names ----------------------------------------------------------------------------------------

SOURCE = "model.encoder.embed_tokens.weight"
TARGET = "model.decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
BIAS = "final_logits_bias"
SHARED = "model.shared.weight"  # stands for all of those above that are tied
TABLES = (  # sinusoids, in some files
    "model.encoder.embed_positions.weight",
    "model.decoder.embed_positions.weight",
)
TABLE = [
    Row("source_embedding.weight", SOURCE),
    Row("target_embedding.weight", TARGET),
    Row("output.weight", OUTPUT),
    Row("output.bias", BIAS, table.row(1)),
    Row("encoder.blocks.{i}.own.query", "model.encoder.layers.{i}.self_attn.q_proj"),
    Row("encoder.blocks.{i}.own.key", "model.encoder.layers.{i}.self_attn.k_proj"),
    Row("encoder.blocks.{i}.own.value", "model.encoder.layers.{i}.self_attn.v_proj"),
    Row("encoder.blocks.{i}.own.output", "model.encoder.layers.{i}.self_attn.out_proj"),
    Row("encoder.blocks.{i}.own_residual.norm", "model.encoder.layers.{i}.self_attn_layer_norm"),
    Row("encoder.blocks.{i}.feedforward.expand", "model.encoder.layers.{i}.fc1"),
    Row("encoder.blocks.{i}.feedforward.contract", "model.encoder.layers.{i}.fc2"),
    Row("encoder.blocks.{i}.feedforward_residual.norm", "model.encoder.layers.{i}.final_layer_norm"),
    Row("decoder.blocks.{i}.own.query", "model.decoder.layers.{i}.self_attn.q_proj"),
    Row("decoder.blocks.{i}.own.key", "model.decoder.layers.{i}.self_attn.k_proj"),
    Row("decoder.blocks.{i}.own.value", "model.decoder.layers.{i}.self_attn.v_proj"),
    Row("decoder.blocks.{i}.own.output", "model.decoder.layers.{i}.self_attn.out_proj"),
    Row("decoder.blocks.{i}.own_residual.norm", "model.decoder.layers.{i}.self_attn_layer_norm"),
    Row("decoder.blocks.{i}.cross.query", "model.decoder.layers.{i}.encoder_attn.q_proj"),
    Row("decoder.blocks.{i}.cross.key", "model.decoder.layers.{i}.encoder_attn.k_proj"),
    Row("decoder.blocks.{i}.cross.value", "model.decoder.layers.{i}.encoder_attn.v_proj"),
    Row("decoder.blocks.{i}.cross.output", "model.decoder.layers.{i}.encoder_attn.out_proj"),
    Row("decoder.blocks.{i}.cross_residual.norm", "model.decoder.layers.{i}.encoder_attn_layer_norm"),
    Row("decoder.blocks.{i}.feedforward.expand", "model.decoder.layers.{i}.fc1"),
    Row("decoder.blocks.{i}.feedforward.contract", "model.decoder.layers.{i}.fc2"),
    Row("decoder.blocks.{i}.feedforward_residual.norm", "model.decoder.layers.{i}.final_layer_norm"),
]


# --- settings -------------------------------------------------------------------------------------

THEIR_ACTIVATIONS = table.THEIR_ACTIVATIONS | {"silu": "swish"}
NORM_EPS = 1e-5  # transformers has it in the code, not in the config


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The keys of a Marian config.json that say what the model is. Defaults are those of `transformers`."""

    vocab_size: int
    decoder_vocab_size: int | None = None
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    activation_function: TheirActivation = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    decoder_start_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


TOKENS = ("decoder_start_token_id", "pad_token_id", "eos_token_id")  # may stand in generation_config.json too

KEYS = Keys(
    family="Marian",
    facts=Facts,
    tokens=TOKENS,
    names={
        "vocab": "vocab_size",
        "target_vocab": "decoder_vocab_size",
        "start": "decoder_start_token_id",
        "end": "eos_token_id",
    },
    fixed=FIXED
    | {
        "model_type": ("marian",),
        "architectures": (["MarianMTModel"], None),
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "add_final_layer_norm": (False,),
        "static_position_embeddings": (True,),
        "encoder_layerdrop": (0,),
        "decoder_layerdrop": (0,),
    },
    aliases={  # transformers lets these overrule the others
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    },
    harmless=COMMON
    | {
        "first values of weights, and classifiers: not of a stored translator": """
            classif_dropout classifier_dropout init_std initializer_range
        """.split()
        + LABELS,
        "how many sinusoids to keep ready; we compute each when it is needed": """
            extra_pos_embeddings max_position_embeddings
        """.split(),
        "never read by transformers, true or false: the bias is there when its tensor is": """
            add_bias_logits
        """.split(),
        "token ids that a translator does not need": """
            bos_token_id sep_token_id unk_token_id
        """.split(),
    },
)


def to_config(facts: Facts, *, share: bool, output_bias: bool, where: Path) -> Seq2SeqConfig:
    """Our config of a Marian model. `share` and `output_bias` are what the tensors say."""
    encoder, decoder = (
        table.built(partial(to_stack, facts, decoder=decoder), where, names_of("decoder" if decoder else "encoder"))
        for decoder in (False, True)
    )
    return table.built(
        lambda: Seq2SeqConfig(
            vocab=facts.vocab_size,
            target_vocab=None if share else facts.decoder_vocab_size,
            encoder=encoder,
            decoder=decoder,
            share_embeddings=share,
            tie_output=facts.tie_word_embeddings,
            output_bias=output_bias,
            scale_embeddings=facts.scale_embedding,
            start=table.start_of(facts, where),
            end=table.end_of(facts, where),
        ),
        where,
        KEYS.names,
    )


def names_of(side: str) -> dict[str, str]:
    """The keys of a stack."""
    heads, inner = f"{side}_attention_heads", f"{side}_ffn_dim"
    return {"width": "d_model", "layers": f"{side}_layers", "heads": heads, "inner": inner}


def to_stack(facts: Facts, *, decoder: bool) -> StackConfig:
    return StackConfig(
        layers=facts.decoder_layers if decoder else facts.encoder_layers,
        width=facts.d_model,
        heads=facts.decoder_attention_heads if decoder else facts.encoder_attention_heads,
        inner=facts.decoder_ffn_dim if decoder else facts.encoder_ffn_dim,
        activation=ACTIVATIONS[facts.activation_function],
        causal=decoder,
        cross=decoder,
        positions=SinusoidalConfig(order="halves"),
        norm_eps=NORM_EPS,
        dropout=facts.dropout,
        attention_dropout=facts.attention_dropout,
        activation_dropout=facts.activation_dropout,
    )


# --- in -------------------------------------------------------------------------------------------


def load(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Seq2Seq:
    """The MarianMTModel of a Hugging Face folder, in eval mode, in the precision it was stored in or another."""
    root = files.found(folder)
    facts, stored = table.read_facts(root, KEYS), files.open_tensors(root)
    where = files.weights_of(root)
    layers = {key: getattr(facts, key) for key in ("encoder_layers", "decoder_layers")}
    table.check_depth(stored, layers, where)
    stored = without_sinusoids(stored, facts.d_model, where)
    stored, share = resolve_ties(stored, facts, where)
    config = to_config(facts, share=share, output_bias=BIAS in stored, where=root / files.CONFIG)
    return table.filled(build_empty(config), TABLE, stored, where, dtype=dtype, device=device)


def without_sinusoids(stored: Mapping[str, Stored], width: int, where: Path) -> dict[str, Stored]:
    """The tensors but for the sinusoids, which we compute ourselves: stored ones must be the same."""
    for name in TABLES:
        if name in stored:
            check_sinusoids(stored[name], width, where)
    return {name: tensor for name, tensor in stored.items() if name not in TABLES}


def check_sinusoids(stored: Stored, width: int, where: Path) -> None:
    if len(stored.shape) != 2 or stored.shape[1] != width:
        raise FolderError(f"{where}: `{stored.name}` must be (positions, {width}), but is {tuple(stored.shape)}")
    theirs = stored.read()
    worst = (
        float((theirs.float() - sinusoid(torch.arange(len(theirs)), width, "halves")).abs().max())
        if len(theirs)
        else 0.0
    )
    if not worst <= max(1e-5, torch.finfo(theirs.dtype).eps):
        raise FolderError(
            f"{where}: `{stored.name}` must hold the sinusoids of Marian, but differs from them by up to "
            f"{worst:.2g}; learned or other positions are not supported for Marian"
        )


def resolve_ties(stored: dict[str, Stored], facts: Facts, where: Path) -> tuple[dict[str, Stored], bool]:
    """The tensors, with those of both ends under their own names; and whether source and target share theirs."""
    share, tie = facts.share_encoder_decoder_embeddings, facts.tie_word_embeddings
    if share and not tie and SOURCE in stored and TARGET in stored:
        # Told not to tie the output, transformers 5 unties all three, and reads model.shared.weight nowhere.
        share = torch.equal(stored[SOURCE].read(), stored[TARGET].read())
        stored = {name: tensor for name, tensor in stored.items() if name != SHARED}
    inputs = [[SHARED, SOURCE, TARGET]] if share else [[SOURCE], [TARGET]]
    groups = [*inputs[:-1], [*inputs[-1], OUTPUT]] if tie else [*inputs, [OUTPUT]]
    keys = "`share_encoder_decoder_embeddings` or `tie_word_embeddings`"
    resolved = table.resolve_ties(stored, groups, where, keys)
    return {name: tensor for name, tensor in resolved.items() if not share or name != SHARED}, share


# --- out ------------------------------------------------------------------------------------------

SEARCH_LENGTH = 512  # generate() stops there; without it, after 20 tokens
SAID = set(
    """
    layers width heads inner activation causal cross dropout attention_dropout activation_dropout
    """.split()
)
POSITIONS = 1024  # of transformers' table of sinusoids; longer sentences fail there


def save(model: Seq2Seq, folder: str | os.PathLike[str], *, pad: int | None = None) -> None:
    """Writes a new folder that `MarianMTModel.from_pretrained` of `transformers` loads; without a tokenizer.

    `pad` is the token id that fills up short rows. We need none (padding is told by lengths), but
    `transformers` fills finished rows with it, guesses masks from it, and gives its embedding no gradient. It
    must not occur in sentences: the default is the start token, as in the published Marian models.

    Pruned heads are put back as zeros, since Marian has as many in each layer: it translates the same, no quicker.
    """
    model = unpruned(model)
    check_expressible(model.config)
    pad = checked_pad(model.config, pad)
    tensors = table.our_tensors(model)
    if model.config.encoder.positions == SinusoidalConfig(order="interleaved"):
        tensors = halves_from_interleaved(tensors)
    files.write_folder(
        folder,
        config=to_their_config(model.config, pad, table.dtype_of(model)),
        others={files.GENERATION: generation_config(model.config, pad)},
        tensors=tied_once(table.renamed(tensors, model, TABLE), model.config),
    )


def check_expressible(config: Seq2SeqConfig) -> None:
    """Refuses a model that Marian has no words for, naming the field."""
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        head_width = stack.width // stack.heads
        wanted: dict[str, tuple[object, ...]] = {
            "kv_heads": (None, stack.heads),
            "head_width": (None, head_width),
            "kept": (None,),
            "gated": (False,),
            "window": (None, (None, None)),
            "positions": (SinusoidalConfig(order="halves"), SinusoidalConfig(order="interleaved")),
            "norm": ("layer",),
            "norm_order": ("post",),
            "norm_eps": (NORM_EPS,),
            "bias": (True,),
            "scale": (None, head_width**-0.5),
            "scale_by_layer": (False,),
            "embedding_norm": (False,),
            "embedding_dropout": (None, stack.dropout),
            "output_dropout": (0,),
        }
        table.check_stack(stack, "Marian", side=side, said=SAID, wanted=wanted)
    for name in ("activation", "dropout", "attention_dropout", "activation_dropout", "positions"):
        ours = getattr(config.encoder, name)
        if getattr(config.decoder, name) != ours:
            table.refuse("Marian", f"decoder.{name}", getattr(config.decoder, name), f"that of the encoder, {ours!r},")
    if config.scale_output:
        table.refuse("Marian", "scale_output", True, "False")


def checked_pad(config: Seq2SeqConfig, pad: int | None) -> int:
    pad = config.start if pad is None else pad
    both = min(config.vocab, config.targets)  # transformers has one pad for both sides
    if not 0 <= pad < both:
        raise ValueError(
            f"`pad` must be a token id of both sides, from 0 to {both - 1}, but is {pad}; "
            f"give one that occurs in no sentence"
        )
    if pad == config.end:
        raise ValueError(f"`pad` must not be the token that ends a sentence, {config.end}; give another")
    return pad


def halves_from_interleaved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same model with its features in another order: even ones first, then odd ones.

    Marian adds all sines before all cosines, the paper takes turns. Nothing else knows one feature from
    another, so that moving each row and column of width E alike leaves every logit as it was.
    """
    width = tensors["source_embedding.weight"].shape[1]
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    axes = {name: feature_axis(name) for name in tensors}
    return {
        name: tensor if (axis := axes[name]) is None else tensor.index_select(axis, order)
        for name, tensor in tensors.items()
    }


def feature_axis(name: str) -> int | None:
    """Along which axis a tensor has the model's features: 0 writes them, 1 reads them, None neither."""
    if name == "output.bias":
        return None
    if name == "output.weight" or name.endswith("_embedding.weight"):
        return 1
    part = name.split(".")[-2]
    if part in ("norm", "contract", "output"):
        return 0
    assert part in ("query", "key", "value", "expand"), name
    return 1 if name.endswith(".weight") else None


def tied_once(theirs: dict[str, Tensor], config: Seq2SeqConfig) -> dict[str, Tensor]:
    """What `transformers` expects to find: of tied tensors one name, unless it would not tie them again."""
    if config.tie_output:
        del theirs[OUTPUT]
    if config.share_embeddings:
        theirs[SHARED] = theirs[SOURCE]
        for name in (SOURCE, TARGET):
            if config.tie_output:
                del theirs[name]
            else:
                theirs[name] = theirs[name].clone()  # safetensors stores no memory twice
    return theirs


def to_their_config(config: Seq2SeqConfig, pad: int, dtype: str) -> dict[str, Any]:
    encoder, decoder = config.encoder, config.decoder
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        "decoder_vocab_size": config.targets,
        "d_model": encoder.width,
        "encoder_layers": encoder.layers,
        "encoder_attention_heads": encoder.heads,
        "encoder_ffn_dim": encoder.inner,
        "decoder_layers": decoder.layers,
        "decoder_attention_heads": decoder.heads,
        "decoder_ffn_dim": decoder.inner,
        "activation_function": THEIR_ACTIVATIONS[encoder.activation],
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "activation_dropout": encoder.activation_dropout,
        "scale_embedding": config.scale_embeddings,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "tie_word_embeddings": config.tie_output,
        "static_position_embeddings": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "max_position_embeddings": POSITIONS,
        "decoder_start_token_id": config.start,
        "eos_token_id": config.end,
        "forced_eos_token_id": config.end,
        "bos_token_id": None,
        "pad_token_id": pad,
        "dtype": dtype,
    }


def generation_config(config: Seq2SeqConfig, pad: int) -> dict[str, Any]:
    """How generate() searches unless told otherwise: like published Marian models, never writing padding."""
    return {
        "decoder_start_token_id": config.start,
        "eos_token_id": config.end,
        "forced_eos_token_id": config.end,
        "pad_token_id": pad,
        "bad_words_ids": [[token] for token in sorted({pad, config.start} - {config.end})],
        "renormalize_logits": True,
        "max_length": SEARCH_LENGTH,
        "num_beams": 4,
    }
