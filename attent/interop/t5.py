"""T5 (1.0, 1.1, flan-t5, and mT5, which has the shape of 1.1) as `transformers` stores it <-> our Seq2Seq.

Pre-norm with RMS, no biases, unscaled scores, and a relative bias that all layers of a side share. The tensors tell
whether the output layer is tied to the embedding; the config tells whether states are scaled before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from attent.interop import conversion, hf_folder, marian
from attent.interop.conversion import ACTIVATION_FROM_HF, ConfigKeys, OpenFolder, TensorMapping
from attent.interop.hf_folder import Device, LazyTensor, StrPath, make_key_error, quote_value
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.pruning import restore_heads
from attent.nn import RelativeConfig, StackConfig
from attent.nn.config import Activation
from attent.storage.errors import FolderError

FAMILY = "T5"

SHARED = "shared.weight"
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"  # copies of it, in some files
OUTPUT = "lm_head.weight"
TENSOR_MAPPINGS = conversion.read_mappings("t5")
IGNORED_TENSORS = [  # in t5-small and others: cross-attention has no relative positions, and transformers drops it too
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
]


def build_mappings(config: Seq2SeqConfig) -> list[TensorMapping]:
    layers = {"expand": "wi_0", "gate": "wi_1"} if config.stacks[0].gated else {"expand": "wi"}
    return TENSOR_MAPPINGS + [
        TensorMapping(
            (f"{side}.blocks.{{i}}.feedforward.{ours}",), f"{side}.block.{{i}}.layer.{ffn}.DenseReluDense.{name}"
        )
        for side, ffn in (("encoder", 1), ("decoder", 2))
        for ours, name in layers.items()
    ]


@dataclass(frozen=True, kw_only=True)
class T5Keys:
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
    dense_act_fn: str | None = None  # derived from `feed_forward_proj` by transformers
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
        """True if states are divided by sqrt(d_model) before a tied output layer (T5 1.0); mT5 never does it."""
        scales = self.tie_word_embeddings if self.scale_decoder_outputs is None else self.scale_decoder_outputs
        return scales and self.model_type == "t5"


CONFIG_KEYS = ConfigKeys.read("t5", T5Keys)
FEED_FORWARD_FROM_HF: dict[str, Activation] = {"gelu_python": "gelu", **ACTIVATION_FROM_HF}
FEED_FORWARD_TO_HF: dict[Activation, str] = {**conversion.ACTIVATION_TO_HF, "gelu_tanh": "gelu_new"}
GATED_TO_HF = FEED_FORWARD_TO_HF | {"gelu": "gelu_python", "gelu_tanh": "gelu"}


def to_config(keys: T5Keys, *, tied: bool, where: Path) -> Seq2SeqConfig:
    with conversion.explain_config_errors(where, CONFIG_KEYS.field_to_key):
        return Seq2SeqConfig(
            vocab=keys.vocab_size,
            encoder=to_stack(keys, where, decoder=False),
            decoder=to_stack(keys, where, decoder=True),
            tie_output=tied,
            scale_embeddings=False,
            scale_output=keys.scales_output,
            start_id=conversion.get_start_id(keys.decoder_start_token_id, keys.pad_token_id, where),
            end_id=conversion.get_end_id(keys.eos_token_id, where),
        )


def to_stack(keys: T5Keys, where: Path, *, decoder: bool) -> StackConfig:
    same_values = conversion.read_fields(keys, CONFIG_KEYS.field_to_key)
    if decoder and keys.num_decoder_layers is not None:
        same_values["layers"] = keys.num_decoder_layers
    activation, gated = parse_feed_forward(keys, where)
    return StackConfig(
        **same_values,
        activation=activation,
        gated=gated,
        causal=decoder,
        cross_attention=decoder,
        positions=RelativeConfig(
            buckets=keys.relative_attention_num_buckets, max_distance=keys.relative_attention_max_distance
        ),
        norm="rms",
        norm_order="pre",
        bias=False,
        scale=1.0,
        output_dropout=keys.dropout_rate,
        attention_dropout=keys.dropout_rate,
        activation_dropout=keys.dropout_rate,
    )


def parse_feed_forward(keys: T5Keys, where: Path) -> tuple[Activation, bool]:
    """Parse `gated-gelu` and the like into an activation, and whether it is gated."""
    value = keys.feed_forward_proj
    first, _, last = value.rpartition("-")
    name = "gelu_new" if value == "gated-gelu" else last
    if first not in ("", "gated") or name not in FEED_FORWARD_FROM_HF:
        required = f"one of {', '.join(FEED_FORWARD_FROM_HF)}, or gated- and one of them,"
        raise make_key_error(where, "feed_forward_proj", required, "T5 model", value)
    gated = first == "gated"
    for key, expected in (("dense_act_fn", name), ("is_gated_act", gated)):
        if (actual := getattr(keys, key)) not in (None, expected):
            required = f"{expected!r}, as `feed_forward_proj` {quote_value(value)} says"
            advice = "find out which one is true of the weights"
            raise FolderError(f"{where}: `{key}` must be {required}, but is {quote_value(actual)}; {advice}")
    return FEED_FORWARD_FROM_HF[name], gated


def load(folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> Seq2Seq:
    opened = OpenFolder.open(folder, CONFIG_KEYS, ["num_layers", "num_decoder_layers"], ignored_tensors=IGNORED_TENSORS)
    stored, tied = resolve_ties(opened.stored, opened.weights_path)
    config = to_config(opened.keys, tied=tied, where=opened.config_path)
    return replace(opened, stored=stored).load_into(build_empty(config), build_mappings(config), dtype, device)


def resolve_ties(stored: Mapping[str, LazyTensor], where: Path) -> tuple[dict[str, LazyTensor], bool]:
    """Name both embeddings and the output layer, which is tied unless the file holds another (as in transformers 5)."""
    names = [name for name in (SHARED, SOURCE, TARGET) if name in stored] or [OUTPUT]
    shared = conversion.resolve_tied_group(names, stored, where, "T5's embeddings")
    resolved = {name: tensor for name, tensor in stored.items() if name != SHARED} | {SOURCE: shared, TARGET: shared}
    output = resolved.setdefault(OUTPUT, shared)
    return resolved, output is shared or (output.shape == shared.shape and torch.equal(output.read(), shared.read()))


GENERATION_LENGTH = 512  # generate() stops there; without it, after 20 tokens


def save(model: Seq2Seq, folder: StrPath, *, pad: int | None = None) -> None:
    """Write a folder of `transformers`. `pad`: by default the start token, as published. Pruned heads: zeros."""
    model = restore_heads(model)
    config = model.config
    check_expressible(config)
    pad = conversion.choose_pad(pad, config.start_id, config.vocab)
    tensors = conversion.export_tensors(model, build_mappings(config))
    tensors[SHARED] = tensors.pop(SOURCE)
    if config.tie_output and not config.scale_output:
        tensors[OUTPUT] = tensors[SHARED].clone()  # transformers 4 expects one where states are not scaled
    tokens = {"decoder_start_token_id": config.start_id, "eos_token_id": config.end_id, "pad_token_id": pad}
    hf_folder.write_folder(
        folder,
        config=to_hf_config(config) | {"dtype": conversion.get_dtype_name(model)} | tokens,
        extra_files={hf_folder.GENERATION_FILE: tokens | {"max_length": GENERATION_LENGTH}},
        tensors=tensors,
    )


def check_expressible(config: Seq2SeqConfig) -> None:
    required = {"frontend": None, "share_embeddings": True, "output_bias": False, "scale_embeddings": False}
    conversion.check_fields(config, FAMILY, {**required, "output_transform": False})
    for side, stack in zip(("encoder", "decoder"), config.stacks, strict=True):
        decoder, rate = side == "decoder", stack.dropout
        conversion.check_stack(
            stack,
            FAMILY,
            side=side,
            expressed={"head_width", "gated"},
            required={
                "causal": (decoder,), "cross_attention": (decoder,), "norm": ("rms",), "norm_order": ("pre",),
                "bias": (False,), "scale": (1.0, 1), "output_dropout": (rate,), "attention_dropout": (rate,),
                "activation_dropout": (rate,),
            },
        )  # fmt: skip
        if not isinstance(stack.positions, RelativeConfig):
            conversion.reject_field(FAMILY, f"{side}.positions", stack.positions, "relative")
    differing = {"layers", "causal", "cross_attention", "remaining_heads"}
    marian.check_equal_sides(config, FAMILY, [f.name for f in fields(StackConfig) if f.name not in differing])


def to_hf_config(config: Seq2SeqConfig) -> dict[str, Any]:
    stack = config.stacks[0]
    assert isinstance(stack.positions, RelativeConfig)
    activation = FEED_FORWARD_TO_HF[stack.activation]
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        **conversion.write_fields(CONFIG_KEYS.field_to_key, config, stack, stack.positions),
        "d_kv": stack.head_width or stack.width // stack.heads,
        "num_decoder_layers": config.decoder.layers,
        "feed_forward_proj": f"gated-{GATED_TO_HF[stack.activation]}" if stack.gated else activation,
        "tie_word_embeddings": config.scale_output,  # by which transformers decides whether to scale
    }
