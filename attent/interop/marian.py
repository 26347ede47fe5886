"""Marian (opus-mt and others) as `transformers` stores it <-> our Seq2Seq: the paper's model with an output bias."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from attent.interop import conversion, hf_folder
from attent.interop.conversion import ConfigKeys, OpenFolder, TensorMapping
from attent.interop.hf_folder import Device, StrPath
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.pruning import restore_heads
from attent.nn import SinusoidalConfig, StackConfig
from attent.storage.errors import AttentError

SOURCE = "model.encoder.embed_tokens.weight"
TARGET = "model.decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
LOGITS_BIAS = "final_logits_bias"
SHARED = "model.shared.weight"  # stands for all of the embeddings that are tied
POSITION_TABLES = tuple(f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder"))  # of sinusoids
LAYER_MAPPINGS = conversion.read_mappings("marian", "layers")
TENSOR_MAPPINGS = [
    *conversion.read_mappings("marian"),
    TensorMapping(("output.bias",), LOGITS_BIAS, conversion.add_leading_axes(1)),
    *LAYER_MAPPINGS,
]
ACTIVATION_TO_HF = conversion.ACTIVATION_TO_HF | {"silu": "swish"}
NORM_EPS = 1e-5  # in transformers' code, not in its config
SHARED_STACK_FIELDS = {  # of both sides
    "activation": "activation_function", "dropout": "dropout", "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SharedKeys:
    vocab_size: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    activation_function: conversion.HFActivation = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    tie_word_embeddings: bool = True
    decoder_start_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class TranslatorKeys(SharedKeys):
    dropout: float = 0.1
    scale_embedding: bool = False
    pad_token_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class MarianKeys(TranslatorKeys):
    decoder_vocab_size: int | None = None
    share_encoder_decoder_embeddings: bool = True


KeysT = TypeVar("KeysT", bound=SharedKeys)

CONFIG_KEYS = ConfigKeys.read("marian", MarianKeys)


def to_config(keys: MarianKeys, *, share: bool, output_bias: bool, where: Path) -> Seq2SeqConfig:
    """`share` and `output_bias` are read from the tensors."""
    with conversion.explain_config_errors(where, CONFIG_KEYS.field_to_key):
        return Seq2SeqConfig(
            target_vocab=None if share else keys.decoder_vocab_size,
            start_id=conversion.get_start_id(keys.decoder_start_token_id, keys.pad_token_id, where),
            **build_shared_fields(keys, share, output_bias, where, positions=SinusoidalConfig(order="halves")),
        )


def build_shared_fields(
    keys: TranslatorKeys, share: bool, output_bias: bool, where: Path, **stack_fields: Any
) -> dict[str, Any]:
    return {
        "vocab": keys.vocab_size,
        "encoder": build_stack(keys, "encoder", where, **stack_fields),
        "decoder": build_stack(keys, "decoder", where, **stack_fields),
        "share_embeddings": share,
        "tie_output": keys.tie_word_embeddings,
        "output_bias": output_bias,
        "scale_embeddings": keys.scale_embedding,
        "end_id": conversion.get_end_id(keys.eos_token_id, where),
    }


def get_stack_field_to_key(side: str) -> dict[str, str]:
    return {
        "width": "d_model",
        "layers": f"{side}_layers",
        "heads": f"{side}_attention_heads",
        "ffn_width": f"{side}_ffn_dim",
    }


def build_stack(keys: SharedKeys, side: str, where: Path, **family_fields: Any) -> StackConfig:
    """`family_fields` are those in which Marian, BART and Whisper differ."""
    field_to_key, is_decoder = get_stack_field_to_key(side), side == "decoder"
    shared = conversion.read_fields(keys, field_to_key | SHARED_STACK_FIELDS)
    with conversion.explain_config_errors(where, field_to_key):
        return StackConfig(**shared, **family_fields, causal=is_decoder, cross_attention=is_decoder, norm_eps=NORM_EPS)


def load(folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> Seq2Seq:
    opened = OpenFolder.open(folder, CONFIG_KEYS, ["encoder_layers", "decoder_layers"], ignored_tensors=POSITION_TABLES)
    opened, share = resolve_ties(opened, opened.keys.share_encoder_decoder_embeddings)
    has_bias = LOGITS_BIAS in opened.stored
    config = to_config(opened.keys, share=share, output_bias=has_bias, where=opened.config_path)
    return opened.load_into(build_empty(config), TENSOR_MAPPINGS, dtype, device)


def resolve_ties(opened: OpenFolder[KeysT], share: bool) -> tuple[OpenFolder[KeysT], bool]:
    """Name both embeddings and the output layer; tell if source and target share theirs (`share`: config.json)."""
    tie, stored = opened.keys.tie_word_embeddings, dict(opened.stored)
    if share and not tie and SOURCE in stored and TARGET in stored:
        # With an untied output, transformers 5 unties all three, and ignores model.shared.weight.
        share = torch.equal(stored[SOURCE].read(), stored[TARGET].read())
        stored.pop(SHARED, None)
    inputs = [[SHARED, SOURCE, TARGET]] if share else [[SOURCE], [TARGET]]
    groups = [*inputs[:-1], [*inputs[-1], OUTPUT]] if tie else [*inputs, [OUTPUT]]
    tie_keys = "`share_encoder_decoder_embeddings` or `tie_word_embeddings`"
    resolved = replace(opened, stored=stored).resolve_ties(groups, tie_keys)
    if share:
        del resolved.stored[SHARED.removeprefix(opened.omitted_prefix)]
    return resolved, share


GENERATION_LENGTH = 512  # generate() stops there; without it, after 20 tokens
MAX_POSITIONS = 1024  # of transformers' table of sinusoids; longer sentences fail there


def save(model: Seq2Seq, folder: StrPath, *, pad: int | None = None) -> None:
    """Write a folder that `MarianMTModel` of `transformers` loads; pruned heads become zeros.

    `pad` fills finished rows, tells masks, and gets no gradient: it must not occur in sentences. The default is the
    start token, as in published models.
    """
    model = restore_heads(model)
    check_expressible(model.config)
    common_vocab = min(model.config.vocab, model.config.output_vocab)  # transformers has one padding for both sides
    pad = conversion.choose_pad(pad, model.config.start_id, common_vocab)
    if pad == model.config.end_id:
        raise AttentError(f"`pad` must not be the token that ends a sentence, {pad}; give another")
    tensors = conversion.collect_cpu_tensors(model)
    if model.config.stacks[0].positions == SinusoidalConfig(order="interleaved"):
        tensors = reorder_features(tensors)
    start, end = model.config.start_id, model.config.end_id
    tokens = {"decoder_start_token_id": start, "eos_token_id": end, "forced_eos_token_id": end, "pad_token_id": pad}
    generation = {  # as in published Marian models: padding is never generated
        **tokens,
        "bad_words_ids": [[token] for token in sorted({pad, start} - {end})],
        "renormalize_logits": True,
        "max_length": GENERATION_LENGTH,
        "num_beams": 4,
    }
    hf_folder.write_folder(
        folder,
        config=to_hf_config(model.config) | tokens | {"dtype": conversion.get_dtype_name(model)},
        extra_files={hf_folder.GENERATION_FILE: generation},
        tensors=name_shared_embedding(conversion.export_tensors(model, TENSOR_MAPPINGS, tensors), model.config),
    )


def check_expressible(config: Seq2SeqConfig) -> None:
    orders = (SinusoidalConfig(order="halves"), SinusoidalConfig(order="interleaved"))
    check_translator(config, "Marian", {"positions": orders})


def check_translator(config: Seq2SeqConfig, family: str, required: conversion.Values) -> None:
    for side, stack in zip(("encoder", "decoder"), config.stacks, strict=True):
        expressed = {"causal", "cross_attention", "activation_dropout"}
        required = {**required, "norm_eps": (NORM_EPS,)}
        conversion.check_stack(stack, family, side=side, expressed=expressed, required=required)
    check_equal_sides(config, family, (*SHARED_STACK_FIELDS, "positions"))
    conversion.check_fields(config, family, {"frontend": None, "scale_output": False, "output_transform": False})


def check_equal_sides(config: Seq2SeqConfig, family: str, names: Iterable[str]) -> None:
    for name in names:
        ours, other = getattr(config.encoder, name), getattr(config.decoder, name)
        if other != ours:
            conversion.reject_field(family, f"decoder.{name}", other, f"that of the encoder, {ours!r},")


def reorder_features(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move the even features before the odd ones: Marian adds all sines before all cosines, the paper interleaves them.

    No other part distinguishes features: permuting all rows and columns of width E leaves every logit unchanged.
    """
    width = tensors["source_embedding.weight"].shape[1]
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    return {
        name: tensor if (axis := find_feature_axis(name)) is None else tensor.index_select(axis, order)
        for name, tensor in tensors.items()
    }


def find_feature_axis(name: str) -> int | None:
    """Return the axis of the model's features: 0 for output features, 1 for input features, None for neither."""
    if name == "output.bias":
        return None
    if name == "output.weight" or name.endswith("_embedding.weight"):
        return 1
    part = name.split(".")[-2]
    if part in ("norm", "contract", "output"):
        return 0
    assert part in ("query", "key", "value", "expand"), name
    return 1 if name.endswith(".weight") else None


def name_shared_embedding(tensors: dict[str, Tensor], config: Seq2SeqConfig) -> dict[str, Tensor]:
    """Rename the embedding of both sides; add theirs if the output is untied, since `transformers` then unties all."""
    if config.share_embeddings:
        shared = tensors[SHARED] = tensors.pop(SOURCE)
        if not config.tie_output:  # copies, since safetensors stores no memory twice
            tensors |= {name: shared.clone() for name in (SOURCE, TARGET)}
    return tensors


def write_stacks(config: Seq2SeqConfig) -> dict[str, Any]:
    encoder, decoder = (
        conversion.write_fields(get_stack_field_to_key(side), stack)
        for side, stack in zip(("encoder", "decoder"), config.stacks, strict=True)
    )
    return encoder | decoder | conversion.write_fields(SHARED_STACK_FIELDS, config.stacks[0])


def to_hf_config(config: Seq2SeqConfig) -> dict[str, Any]:
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        "decoder_vocab_size": config.output_vocab,
        **write_stacks(config),
        "activation_function": ACTIVATION_TO_HF[config.stacks[0].activation],
        "scale_embedding": config.scale_embeddings,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "tie_word_embeddings": config.tie_output,
        "static_position_embeddings": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
    }
