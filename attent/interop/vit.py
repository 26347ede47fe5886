"""ViT as `transformers` stores it <-> our Vision.

The encoder over patches, which are cut out by a convolution there and by a linear layer here: the same numbers in
another shape. How pictures are brought to size and pixels are normalised stands in preprocessor_config.json; doing it
is left to whoever reads images.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from attent.interop import encoders, files, table
from attent.interop.files import Stored
from attent.interop.table import ACTIVATIONS, COMMON, LABELS, Keys, Layout, Row, TheirActivation
from attent.models import Vision, VisionConfig, build_empty
from attent.models.folder import FolderError
from attent.nn import LearnedConfig, StackConfig

FAMILY = "ViT"
ARCHITECTURES = ("ViTForImageClassification", "ViTModel")
PREPROCESSOR = "preprocessor_config.json"
RESAMPLING: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
SHORTER = "CLIP"  # processors of this name mean the shorter side where `size` is one number

# --- names ----------------------------------------------------------------------------------------

PREFIX = "vit."  # left out where there is no head
POOLER = "vit.pooler.dense.weight"
CLASSIFIER = "classifier.weight"
TABLE = [
    Row("patches.bias", "vit.embeddings.patch_embeddings.projection.bias"),
    Row("class_token", "vit.embeddings.cls_token", table.row(2)),
    Row("encoder.positions.weight", "vit.embeddings.position_embeddings", table.row(1)),
    Row("encoder.blocks.{i}.own_residual.norm", "vit.encoder.layer.{i}.layernorm_before"),
    Row("encoder.blocks.{i}.own.query", "vit.encoder.layer.{i}.attention.attention.query"),
    Row("encoder.blocks.{i}.own.key", "vit.encoder.layer.{i}.attention.attention.key"),
    Row("encoder.blocks.{i}.own.value", "vit.encoder.layer.{i}.attention.attention.value"),
    Row("encoder.blocks.{i}.own.output", "vit.encoder.layer.{i}.attention.output.dense"),
    Row("encoder.blocks.{i}.feedforward_residual.norm", "vit.encoder.layer.{i}.layernorm_after"),
    Row("encoder.blocks.{i}.feedforward.expand", "vit.encoder.layer.{i}.intermediate.dense"),
    Row("encoder.blocks.{i}.feedforward.contract", "vit.encoder.layer.{i}.output.dense"),
    Row("encoder.norm", "vit.layernorm"),
    Row("pooler.dense", "vit.pooler.dense"),
    Row("classifier", "classifier"),
]


def names(config: VisionConfig) -> list[Row]:
    """The table, with the layer that reads patches: (E, C * P * P) here, (E, C, P, P) there."""
    size = (config.channels, config.patch, config.patch)
    patches = Layout(lambda theirs: [theirs.flatten(1)], lambda ours: ours[0].unflatten(1, size))
    return [Row("patches.weight", "vit.embeddings.patch_embeddings.projection.weight", patches), *TABLE]


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The keys of a ViT config.json that say what the model is. Defaults are those of `transformers`."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: TheirActivation = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    layer_norm_eps: float = 1e-12
    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    num_channels: int = 3
    pooler_output_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What the tensors say."""

    pooler: bool
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """How a picture becomes a square, as `VisionConfig` tells it."""

    fit: Literal["crop", "squash"] = "crop"
    resized: int | None = None
    resample: Literal["bilinear", "bicubic"] = "bilinear"


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """How the model wants pixels from 0 to 1: (pixel - mean) / std, for each channel or alike for all."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    sizing: Sizing = Sizing()


KEYS = Keys(
    family=FAMILY,
    facts=Facts,
    names=encoders.NAMES | {"image": "image_size", "patch": "patch_size", "channels": "num_channels"},
    fixed=table.FIXED
    | {
        "model_type": ("vit",),
        "qkv_bias": (True,),
        "pooler_act": ("tanh",),
        "is_decoder": (False,),
        "is_encoder_decoder": (False,),
    },
    aliases={},
    harmless=COMMON
    | {
        "read with the tensors that they speak of": ["architectures", *LABELS],
        "first values of weights": ["initializer_range"],
        "of a head that paints images: not of these": ["encoder_stride"],
        "of models with words: not of these": """
            bos_token_id eos_token_id pad_token_id sep_token_id tie_word_embeddings unk_token_id
        """.split(),
    },
)


def to_config(facts: Facts, heads: Heads, pixels: Pixels, where: Path) -> VisionConfig:
    image, patch = (side(key, getattr(facts, key), where) for key in ("image_size", "patch_size"))
    if patch < 1 or image % patch:
        raise FolderError(
            f"{where}: `image_size` must be a multiple of `patch_size`={patch}, but is {image}; correct it"
        )
    if heads.pooler and facts.pooler_output_size not in (None, facts.hidden_size):
        raise FolderError(
            f"{where}: `pooler_output_size` must be `hidden_size`={facts.hidden_size} for a ViT model that attent can "
            f"compute, but is {facts.pooler_output_size}"
        )
    return table.built(
        lambda: VisionConfig(
            image=image,
            patch=patch,
            channels=facts.num_channels,
            stack=to_stack(facts, patches=(image // patch) ** 2),
            pooler=heads.pooler,
            labels=heads.labels,
            mean=pixels.mean,
            std=pixels.std,
            fit=pixels.sizing.fit,
            resized=pixels.sizing.resized,
            resample=pixels.sizing.resample,
        ),
        where,
        KEYS.names,
    )


def side(key: str, size: int | tuple[int, int], where: Path) -> int:
    """Of a square."""
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise FolderError(
            f"{where}: `{key}` must be of a square for a ViT model that attent can compute, but is {height} by {width}"
        )
    return height


def to_stack(facts: Facts, *, patches: int) -> StackConfig:
    return StackConfig(
        layers=facts.num_hidden_layers,
        width=facts.hidden_size,
        heads=facts.num_attention_heads,
        inner=facts.intermediate_size,
        activation=ACTIVATIONS[facts.hidden_act],
        positions=LearnedConfig(max_length=patches + 1),  # and the class token
        norm_order="pre",
        norm_eps=facts.layer_norm_eps,
        dropout=facts.hidden_dropout_prob,
        attention_dropout=facts.attention_probs_dropout_prob,
    )


# --- pixels ---------------------------------------------------------------------------------------


def read_pixels(root: Path, channels: int, image: int) -> Pixels:
    """What preprocessor_config.json says; where there is none, a picture is squashed, and pixels go from -1 to 1, as
    ViT's usually do."""
    where = root / PREPROCESSOR
    if not where.exists():
        return Pixels(sizing=Sizing(fit="squash"))
    data = files.read_json(where)
    return replace(read_scale(data, channels, where), sizing=read_sizing(data, image, where))


def read_scale(data: Mapping[str, Any], channels: int, where: Path) -> Pixels:
    # Theirs are bytes times a factor, ours go from 0 to 1: a factor of 1/255 is the same.
    factor = number(data.get("rescale_factor", 1 / 255), "rescale_factor", where) if data.get("do_rescale", True) else 1
    ours = 1.0 if math.isclose(255 * factor, 1.0) else 255 * factor
    if data.get("do_normalize", True) is False:
        return Pixels(mean=(0.0,), std=(1 / ours,))
    mean = by_channel(data.get("image_mean", 0.5), "image_mean", channels, where)
    std = by_channel(data.get("image_std", 0.5), "image_std", channels, where)
    for value in std:
        number(value, "image_std", where)
    return Pixels(mean=tuple(value / ours for value in mean), std=tuple(value / ours for value in std))


def number(value: object, key: str, where: Path) -> float:
    if not is_number(value) or not float(value) > 0:  # type: ignore[arg-type]  # it is one
        raise FolderError(f"{where}: `{key}` must be more than 0, but is {files.quoted(value)}; correct it")
    return float(value)  # type: ignore[arg-type]


def by_channel(value: object, key: str, channels: int, where: Path) -> tuple[float, ...]:
    """A number for each channel; one, where they are all the same."""
    several = value if isinstance(value, list) else [value]
    several = several[:1] if all(each == several[0] for each in several) else several
    if len(several) not in (1, channels) or not all(is_number(each) for each in several):
        raise FolderError(
            f"{where}: `{key}` must be a number, or one for each of the {channels} channels, but is "
            f"{files.quoted(value)}; correct it"
        )
    return tuple(map(float, several))


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_sizing(data: Mapping[str, Any], image: int, where: Path) -> Sizing:
    """They bring a picture to `size`, then, where they crop, cut `crop_size` out of its middle."""
    crops = data.get("do_center_crop") is True
    check_prepares(data, where, crops=crops)
    fit, first = read_size(data, image, where)
    key, last = ("crop_size", length("crop_size", data.get("crop_size", image), where)) if crops else ("size", first)
    if last != image:
        raise FolderError(f"{where}: `{key}` must be {image}, as `image_size` of the model, but is {last}; correct it")
    if first < last:
        raise FolderError(f"{where}: `size` must be at least `crop_size`={last}, but is {first}; correct it")
    return Sizing(fit=fit, resized=None if first == last else first, resample=RESAMPLING[data.get("resample", 2)])


def check_prepares(data: Mapping[str, Any], where: Path, *, crops: bool) -> None:
    """Refuses what is done to pictures and cannot be done here, by name."""
    for key in ("do_pad", "crop_pct"):
        if data.get(key):
            raise FolderError(f"{where}: `{key}` must be left out for pictures that attent can prepare; correct it")
    if crops and data.get("do_resize") is False:
        raise FolderError(f"{where}: `do_resize` must be true where `do_center_crop` is, but is false; correct it")
    resample = data.get("resample", 2)
    if isinstance(resample, bool) or not isinstance(resample, int) or resample not in RESAMPLING:
        known = " or ".join(f"{number} ({name})" for number, name in RESAMPLING.items())
        raise FolderError(f"{where}: `resample` must be {known}, but is {files.quoted(resample)}; correct it")


def read_size(data: Mapping[str, Any], image: int, where: Path) -> tuple[Literal["crop", "squash"], int]:
    """Of all sides, or of the shorter one."""
    size = image if data.get("do_resize") is False else data.get("size", image)
    kind = str(data.get("image_processor_type") or data.get("feature_extractor_type"))
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return "crop", length("size", size["shortest_edge"], where)
    shorter = kind.startswith(SHORTER) and not isinstance(size, dict)
    return "crop" if shorter else "squash", length("size", size, where)


def length(key: str, value: object, where: Path) -> int:
    """Of a square: a number, two that are the same, or `height` and `width`."""
    both = [value.get("height"), value.get("width")] if isinstance(value, dict) else value
    one = both[0] if isinstance(both, list) and len(both) == 2 and both[0] == both[1] else both
    if not isinstance(one, int) or isinstance(one, bool) or one < 1:
        raise FolderError(f"{where}: `{key}` must be of a square, but is {files.quoted(value)}; correct it")
    return one


# --- in -------------------------------------------------------------------------------------------


def load(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Vision:
    """The ViT of a Hugging Face folder, in eval mode, in the precision it was stored in or another."""
    root = files.found(folder)
    facts, where = table.read_facts(root, KEYS), files.weights_of(root)
    encoders.check_architecture(root, ARCHITECTURES, FAMILY)
    stored = files.open_tensors(root)
    table.check_depth(stored, {"num_hidden_layers": facts.num_hidden_layers}, where)
    bare = table.missing_prefix(stored, PREFIX)
    heads, config_at = heads_of(stored, bare, root), root / files.CONFIG
    pixels = read_pixels(root, facts.num_channels, side("image_size", facts.image_size, config_at))
    config = to_config(facts, heads, pixels, config_at)
    return table.filled(build_empty(config), names(config), stored, where, dtype=dtype, device=device, bare=bare)


def heads_of(stored: Mapping[str, Stored], bare: str, root: Path) -> Heads:
    """Of a classifier, which reads the class token itself, or of a pooler: `transformers` has no ViT with both."""
    if CLASSIFIER in stored:
        rows = stored[CLASSIFIER].shape[:1]
        return Heads(pooler=False, labels=encoders.read_labels(root, rows[0] if rows else 0))
    return Heads(pooler=POOLER.removeprefix(bare) in stored, labels=())


# --- out ------------------------------------------------------------------------------------------


def save(model: Vision, folder: str | os.PathLike[str]) -> None:
    """Writes a new folder that ViT's classes of `transformers` load, and what prepares images for them."""
    config = model.config
    check_expressible(config)
    tensors = table.their_tensors(model, names(config))
    files.write_folder(
        folder,
        config=to_their_config(config, table.dtype_of(model)),
        tensors=tensors if config.labels else table.without_prefix(tensors, PREFIX),
        others={PREPROCESSOR: preprocessor(config)},
    )


def check_expressible(config: VisionConfig) -> None:
    """Refuses a model that ViT has no words for, naming the field."""
    if not config.class_token:
        table.refuse(FAMILY, "class_token", config.class_token, "True")
    if config.pooling != "class":
        table.refuse(FAMILY, "pooling", config.pooling, "'class'")
    if config.pooler and config.labels:
        table.refuse(FAMILY, "pooler", config.pooler, "False where there are labels")
    encoders.check_stack(config.stack, FAMILY, {"norm_order": ("pre",), "embedding_norm": (False,)})
    positions = LearnedConfig(max_length=config.patches + 1)
    if config.stack.positions != positions:
        table.refuse(FAMILY, "stack.positions", config.stack.positions, repr(positions))


def to_their_config(config: VisionConfig, dtype: str) -> dict[str, Any]:
    stack = config.stack
    return {
        "model_type": "vit",
        "architectures": [ARCHITECTURES[0] if config.labels else ARCHITECTURES[1]],
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "intermediate_size": stack.inner,
        "hidden_act": table.THEIR_ACTIVATIONS[stack.activation],
        "hidden_dropout_prob": stack.dropout,
        "attention_probs_dropout_prob": stack.attention_dropout,
        "layer_norm_eps": stack.norm_eps,
        "image_size": config.image,
        "patch_size": config.patch,
        "num_channels": config.channels,
        "encoder_stride": config.patch,
        "qkv_bias": True,
        "dtype": dtype,
        **encoders.label_keys(config.labels),
    }


def preprocessor(config: VisionConfig) -> dict[str, Any]:
    """How `transformers` makes an image ready."""

    def each(values: tuple[float, ...]) -> list[float]:
        return list(values) * (config.channels if len(values) == 1 else 1)

    def square(side: int) -> dict[str, int]:
        return {"height": side, "width": side}

    first, crops = config.resized or config.image, config.fit == "crop" or config.resized is not None
    # Each does what is said below in every version of `transformers`; ViT's own learned to crop late.
    squashing = "DeiTImageProcessor" if crops else "ViTImageProcessor"
    return {
        "image_processor_type": "CLIPImageProcessor" if config.fit == "crop" else squashing,
        "do_convert_rgb": config.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": first} if config.fit == "crop" else square(first),
        "resample": next(number for number, name in RESAMPLING.items() if name == config.resample),
        "do_center_crop": crops,
        **({"crop_size": square(config.image)} if crops else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": each(config.mean),
        "image_std": each(config.std),
    }
