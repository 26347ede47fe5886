"""VisionEncoderDecoder (ViT and BERT, ViT and GPT-2) as `transformers` stores it <-> our Seq2Seq of an image front-end.

The encoder is that of `vit`, the decoder that of `bert` or `gpt2`: tensors behind a prefix, keys in a section of
config.json. Here are the cross-attention, the projection between widths, and the decoder's first and last token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from attent.interop import bert, conversion, gpt2, hf_folder, vit
from attent.interop.conversion import ConfigKeys, OpenFolder, TensorMapping
from attent.interop.hf_folder import Device, LazyTensor, StrPath, make_key_error, quote_value
from attent.models import CausalConfig, EncoderConfig, Seq2Seq, Seq2SeqConfig, VisionConfig, build_empty
from attent.models.folder import check_tensors
from attent.models.pruning import restore_heads
from attent.nn import ImageConfig, LearnedConfig
from attent.storage.errors import FolderError

FAMILY = "VisionEncoderDecoder"
ARCHITECTURE = "VisionEncoderDecoderModel"
MODEL_TYPES = {"encoder": ("vit",), "decoder": ("bert", "gpt2")}  # of the two sections


def move_mappings(
    mappings: Sequence[TensorMapping], prefix: str, renames: Mapping[str, str], old_prefix: str = ""
) -> list[TensorMapping]:
    """Return another family's table with `prefix` before their names and the beginnings of ours renamed."""

    def rename(name: str) -> str:
        old = next((old for old in renames if name == old or name.startswith(f"{old}.")), "")
        return renames.get(old, "") + name.removeprefix(old)

    return [
        TensorMapping(tuple(map(rename, ours)), prefix + theirs.removeprefix(old_prefix), layout)
        for ours, theirs, layout in mappings
    ]


CROSS_ATTENTION = "decoder.blocks.{i}.cross_attn"
CROSS_ATTENTION_NORM = "decoder.blocks.{i}.cross_attn_residual.norm"
GPT2_LAYER = "decoder.transformer.h.{i}"
VIT_RENAMES = {"patch_embedding": "source_embedding.patch_embedding", "class_token": "source_embedding.class_token"}
BERT_RENAMES = {
    "embedding": "target_embedding",
    "encoder": "decoder",
    "masked_lm.output": "output",
    "masked_lm": "output.transform",
}
DECODER_MAPPINGS = {
    "bert": [
        *move_mappings(bert.TENSOR_MAPPINGS, "decoder.", BERT_RENAMES),
        *conversion.read_mappings("vision_encoder_decoder", "bert_cross_attention"),
    ],
    "gpt2": [
        *move_mappings(gpt2.TENSOR_MAPPINGS, "decoder.", {"embedding": "target_embedding"}),
        TensorMapping((CROSS_ATTENTION_NORM,), f"{GPT2_LAYER}.ln_cross_attn"),
        TensorMapping((f"{CROSS_ATTENTION}.query",), f"{GPT2_LAYER}.crossattention.q_attn", conversion.TRANSPOSED),
        TensorMapping(
            (f"{CROSS_ATTENTION}.key", f"{CROSS_ATTENTION}.value"),
            f"{GPT2_LAYER}.crossattention.c_attn",
            conversion.concat_transposed(2),
        ),
        TensorMapping((f"{CROSS_ATTENTION}.output",), f"{GPT2_LAYER}.crossattention.c_proj", conversion.TRANSPOSED),
    ],
}
TIED_NAMES = {  # where the decoder's section ties them
    "bert": [(bert.EMBEDDING, bert.OUTPUT), (bert.OUTPUT_BIAS, bert.OUTPUT_BIAS_COPY)],
    "gpt2": [(gpt2.EMBEDDING, gpt2.OUTPUT)],
}
IGNORED_TENSORS = [
    "encoder.pooler.dense.weight", "encoder.pooler.dense.bias",  # the decoder reads the states, not their pooling
    f"{GPT2_LAYER}.crossattention.bias", f"{GPT2_LAYER}.crossattention.masked_bias",  # a mask
    *(f"decoder.{name}" for name in (*bert.IGNORED_TENSORS, *gpt2.IGNORED_TENSORS)),
]  # fmt: skip
SEGMENTS, POSITIONS = f"decoder.{bert.SEGMENTS}", f"decoder.{bert.POSITIONS}"


def build_mappings(frontend: ImageConfig, family: str) -> list[TensorMapping]:
    return [
        *move_mappings(vit.build_mappings(frontend), "encoder.", VIT_RENAMES, vit.PREFIX),
        TensorMapping(("memory_projection",), "enc_to_dec_proj"),
        *DECODER_MAPPINGS[family],
    ]


@dataclass(frozen=True, kw_only=True)
class VisionEncoderDecoderKeys:
    """Token ids of the whole model; where one is missing, that of the decoder's section counts."""

    decoder_start_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


TOKEN_KEYS = tuple(field.name for field in fields(VisionEncoderDecoderKeys))
CONFIG_KEYS = ConfigKeys.read("vision_encoder_decoder", VisionEncoderDecoderKeys)
REQUIRED_VALUES = {"is_decoder": (True,), "add_cross_attention": (True,)}
DECODER_KEYS: dict[str, ConfigKeys[Any]] = {
    family: replace(keys, family=FAMILY, required_values={**keys.required_values, **REQUIRED_VALUES})
    for family, keys in (("bert", bert.CONFIG_KEYS), ("gpt2", gpt2.CONFIG_KEYS))
}


def read_section(side: str, path: Path) -> tuple[dict[str, Any], Path]:
    data = hf_folder.read_json(path).get(side)
    if not isinstance(data, dict):
        raise FolderError(f"{path}: `{side}` must be the config of a model, but is {quote_value(data)}; correct it")
    if data.get("model_type") not in MODEL_TYPES[side]:
        required = " or ".join(MODEL_TYPES[side])
        raise make_key_error(path, f"{side}.model_type", required, f"{FAMILY} model", data.get("model_type"))
    return data, path.with_name(f"{path.name}, `{side}`")


def to_text_config(section: Mapping[str, Any], where: Path, opened: OpenFolder[Any]) -> EncoderConfig | CausalConfig:
    table = DECODER_KEYS[section["model_type"]]
    data = {"is_decoder": False, "add_cross_attention": False, **section}  # the defaults of transformers
    keys: Any = conversion.parse_section(data, table, where)
    opened.check_layer_count(keys, table.field_to_key["layers"])
    if section["model_type"] == "bert":
        return bert.to_config(keys, {"masked_lm": True}, where)
    with conversion.explain_config_errors(where, table.field_to_key):
        return CausalConfig(
            vocab=keys.vocab_size, stack=gpt2.to_stack(keys, where), tie_output=keys.tie_word_embeddings
        )


def join_configs(vision: VisionConfig, text: EncoderConfig | CausalConfig, start_id: int, end_id: int) -> Seq2SeqConfig:
    is_bert = isinstance(text, EncoderConfig)
    return Seq2SeqConfig(
        vocab=text.vocab,
        frontend=ImageConfig(**{field.name: getattr(vision, field.name) for field in fields(ImageConfig)}),
        encoder=vision.stack,
        decoder=replace(text.stack, causal=True, cross_attention=True),
        share_embeddings=False,
        tie_output=text.tie_output if isinstance(text, CausalConfig) else True,
        output_bias=is_bert,
        output_transform=is_bert,
        scale_embeddings=False,
        start_id=start_id,
        end_id=end_id,
    )


def read_tokens(opened: OpenFolder[Any], decoder: Mapping[str, Any], where: Path) -> tuple[int, int]:
    """Return the decoder's first token and the one that ends a text, as generate() of `transformers` finds them."""
    data = {key: decoder[key] for key in TOKEN_KEYS if key in decoder}
    defaults = conversion.build_schema(data, CONFIG_KEYS, where)
    start, bos, end = (
        getattr(defaults if getattr(opened.keys, key) is None else opened.keys, key) for key in TOKEN_KEYS
    )
    return conversion.get_start_id(start, bos, opened.config_path), conversion.get_end_id(end, opened.config_path)


def load(folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> Seq2Seq:
    opened = OpenFolder.open(folder, CONFIG_KEYS, [], ignored_tensors=IGNORED_TENSORS)
    (encoder, encoder_where), (decoder, decoder_where) = (read_section(s, opened.config_path) for s in MODEL_TYPES)
    keys = conversion.parse_section(encoder, vit.CONFIG_KEYS, encoder_where)
    opened.check_layer_count(keys, "num_hidden_layers")
    image_size = vit.parse_square_size("image_size", keys.image_size, encoder_where)
    preprocessing = vit.read_preprocessing(opened.root, keys.num_channels, image_size)
    vision = vit.to_config(keys, {"pooler": False, "labels": ()}, preprocessing, encoder_where)
    text = to_text_config(decoder, decoder_where, opened)
    with conversion.explain_config_errors(opened.config_path, CONFIG_KEYS.field_to_key):
        config = join_configs(vision, text, *read_tokens(opened, decoder, decoder_where))
    if config.tie_output:
        groups = [[f"decoder.{name}" for name in group] for group in TIED_NAMES[decoder["model_type"]]]
        opened = opened.resolve_ties(groups, "`tie_word_embeddings` of `decoder`")
    segments = pop_segments(opened, text) if isinstance(text, EncoderConfig) else None
    model = opened.load_into(build_empty(config), build_mappings(vision, decoder["model_type"]), dtype, device)
    if segments is not None:  # every token of a decoder is of type 0, so its embedding can be part of the positions
        with torch.no_grad():
            table = model.get_parameter("decoder.positions.weight")
            table.copy_(opened.stored[POSITIONS].read() + segments.read()[0])
    return model


def pop_segments(opened: OpenFolder[Any], text: EncoderConfig) -> LazyTensor:
    """Remove the tensors of BERT that have no place in our model; return the embeddings of token types."""
    shape = torch.Size([max(1, text.segments), text.stack.width])
    stored = {SEGMENTS: opened.stored.pop(SEGMENTS)} if SEGMENTS in opened.stored else {}
    meta = {name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()}
    check_tensors({SEGMENTS: shape}, meta, opened.weights_path)
    del opened.stored[f"decoder.{bert.OUTPUT_BIAS_COPY}"]
    return stored[SEGMENTS]


def save(model: Seq2Seq, folder: StrPath, *, pad: int | None = None) -> None:
    """Write a folder of `transformers`: a GPT-2 decoder if it is pre-norm, else BERT. `pad` is by default the end."""
    model = restore_heads(model)
    config = model.config
    vision, text = split_config(config)
    family = "bert" if isinstance(text, EncoderConfig) else "gpt2"
    tensors = conversion.export_tensors(model, build_mappings(vision, family))
    if family == "bert":
        tensors[SEGMENTS] = tensors[POSITIONS].new_zeros(1, text.stack.width)
    pad = conversion.choose_pad(pad, config.end_id, config.output_vocab)
    positions = config.stacks[1].positions
    assert isinstance(positions, LearnedConfig)
    generation = {  # neither the start token nor padding is generated, as in our search
        "decoder_start_token_id": config.start_id,
        "eos_token_id": config.end_id,
        "pad_token_id": pad,
        "bad_words_ids": [[token] for token in sorted({pad, config.start_id} - {config.end_id})] or None,
        "renormalize_logits": True,
        "max_length": positions.max_length,
    }
    hf_folder.write_folder(
        folder,
        config=to_hf_config(config, vision, text, pad, conversion.get_dtype_name(model)),
        tensors=tensors,
        extra_files={
            hf_folder.GENERATION_FILE: generation,
            vit.PREPROCESSOR_FILE: vit.to_preprocessor_config(vision),
        },
    )


def split_config(config: Seq2SeqConfig) -> tuple[VisionConfig, EncoderConfig | CausalConfig]:
    encoder, decoder = config.stacks
    frontend = config.frontend
    if not isinstance(frontend, ImageConfig):
        conversion.reject_field(FAMILY, "frontend", frontend, "of images (ImageConfig)")
    vision = VisionConfig(**vars(frontend), stack=encoder, pooling="class" if frontend.class_token else "mean")
    text: EncoderConfig | CausalConfig
    if decoder.norm_order == "pre":
        text = CausalConfig(
            vocab=config.output_vocab, stack=replace(decoder, cross_attention=False), tie_output=config.tie_output
        )
    else:
        stack = replace(decoder, causal=False, cross_attention=False)
        text = EncoderConfig(vocab=config.output_vocab, stack=stack, masked_lm=True)
    vit.check_expressible(vision)
    bert.check_expressible(text) if isinstance(text, EncoderConfig) else gpt2.check_expressible(text)
    joined = join_configs(vision, text, config.start_id, config.end_id)
    names = ("tie_output", "output_bias", "output_transform", "scale_embeddings", "scale_output")
    conversion.check_fields(config, FAMILY, {name: getattr(joined, name) for name in names})
    return vision, text


def to_hf_config(
    config: Seq2SeqConfig, vision: VisionConfig, text: EncoderConfig | CausalConfig, pad: int, dtype: str
) -> dict[str, Any]:
    if isinstance(text, EncoderConfig):
        decoder = {**bert.to_hf_config(text, pad, dtype), "architectures": ["BertLMHeadModel"]}
    else:
        decoder = gpt2.to_hf_config(text)
    tokens = {"bos_token_id": None, "eos_token_id": config.end_id, "pad_token_id": pad}
    return {
        "model_type": "vision-encoder-decoder",
        "architectures": [ARCHITECTURE],
        "is_encoder_decoder": True,
        "encoder": vit.to_hf_config(vision, dtype),
        "decoder": {**decoder, "is_decoder": True, "add_cross_attention": True, **tokens},
        "decoder_start_token_id": config.start_id,
        **tokens,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
