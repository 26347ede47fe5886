"""ViT as `transformers` stores it, with a convolution of patches, <-> our VisionTransformer, with a linear layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from attent.interop import causal_family, conversion, hf_folder
from attent.interop.conversion import ConfigKeys, OpenFolder, TensorLayout, TensorMapping
from attent.interop.hf_folder import Device, StrPath, make_key_error, quote_value
from attent.models import VisionConfig, VisionTransformer, build_empty
from attent.nn import ImageConfig, LearnedConfig, StackConfig
from attent.storage.errors import FolderError

FAMILY = "ViT"
ARCHITECTURES = ("ViTForImageClassification", "ViTModel")
PREPROCESSOR_FILE = "preprocessor_config.json"
RESAMPLE_MODES: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
REQUIRED_PREPROCESSING = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": False, "crop_pct": None,
}  # fmt: skip
SHORTEST_EDGE_PREFIX = "CLIP"  # in processors of this name, a single number as `size` means the shorter side

PREFIX = "vit."  # left out where there is no head
POOLER = "vit.pooler.dense.weight"
CLASSIFIER = "classifier.weight"
TENSOR_MAPPINGS = [
    *conversion.read_mappings("vit"),
    TensorMapping(("class_token",), "vit.embeddings.cls_token", conversion.add_leading_axes(2)),
    TensorMapping(("encoder.positions.weight",), "vit.embeddings.position_embeddings", conversion.add_leading_axes(1)),
]


def build_mappings(config: ImageConfig) -> list[TensorMapping]:
    """Add the patch embedding: (E, C * P * P) here, (E, C, P, P) there."""
    size = (config.channels, config.patch_size, config.patch_size)
    layout = TensorLayout(lambda theirs: [theirs.flatten(1)], lambda ours: ours[0].unflatten(1, size))
    name = "vit.embeddings.patch_embeddings.projection.weight"
    return [TensorMapping(("patch_embedding.weight",), name, layout), *TENSOR_MAPPINGS]


@dataclass(frozen=True, kw_only=True)
class ViTKeys(causal_family.EncoderKeys):
    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    num_channels: int = 3
    pooler_output_size: int | None = None


CONFIG_KEYS = ConfigKeys.read("vit", ViTKeys)


def to_config(keys: ViTKeys, heads: Mapping[str, Any], preprocessing: Mapping[str, Any], where: Path) -> VisionConfig:
    image, patch = (parse_square_size(key, getattr(keys, key), where) for key in ("image_size", "patch_size"))
    if image % patch:
        problem = f"`image_size` must be a multiple of `patch_size`={patch}, but is {image}"
        raise FolderError(f"{where}: {problem}; correct it")
    if heads["pooler"] and keys.pooler_output_size not in (None, keys.hidden_size):
        required = f"`hidden_size`={keys.hidden_size}"
        raise make_key_error(where, "pooler_output_size", required, "ViT model", keys.pooler_output_size)
    with conversion.explain_config_errors(where, CONFIG_KEYS.field_to_key):
        stack = StackConfig(
            **conversion.read_fields(keys, CONFIG_KEYS.field_to_key),
            positions=LearnedConfig(max_length=(image // patch) ** 2 + 1),  # and the class token
            norm_order="pre",
        )
        return VisionConfig(
            image_size=image, patch_size=patch, channels=keys.num_channels, stack=stack, **heads, **preprocessing
        )


def read_preprocessing(root: Path, channels: int, image: int) -> dict[str, Any]:
    """Read preprocessor_config.json; without one, images are squashed and pixels scaled to -1 .. 1, as is usual."""
    where = root / PREPROCESSOR_FILE
    if not where.exists():
        return {"mean": (0.5,), "std": (0.5,), "fit": "squash", "resize_to": None, "resample": "bilinear"}
    data = hf_folder.read_json(where)
    for key, required in REQUIRED_PREPROCESSING.items():
        if (actual := data.get(key)) not in (None, required):
            raise make_key_error(where, key, str(required).lower(), "ViT model", actual)
    (factor,) = parse_numbers(data.get("rescale_factor", 1 / 255), "rescale_factor", 1, where)
    if not math.isclose(255 * factor, 1.0, rel_tol=1e-6):  # our pixels are from 0 to 1
        raise make_key_error(where, "rescale_factor", "1/255", "ViT model", factor)
    mean = parse_numbers(data.get("image_mean", 0.5), "image_mean", channels, where)
    std = parse_numbers(data.get("image_std", 0.5), "image_std", channels, where, is_positive=True)
    return {"mean": mean, "std": std, **read_resize_options(data, image, where)}


def parse_numbers(value: object, key: str, count: int, where: Path, *, is_positive: bool = False) -> tuple[float, ...]:
    """Return one number per channel, or one if they are all equal."""
    values: list[Any] = value if isinstance(value, list) else [value]
    values = values[:1] if all(each == values[0] for each in values) else values
    is_valid = all(type(each) in (int, float) and (each > 0 or not is_positive) for each in values)
    if len(values) not in (1, count) or not is_valid:
        required = f"{'a number above 0' if is_positive else 'a number'}, or one for each of {count} channels"
        raise FolderError(f"{where}: `{key}` must be {required}, but is {quote_value(value)}; correct it")
    return tuple(map(float, values))


def read_resize_options(data: Mapping[str, Any], image: int, where: Path) -> dict[str, Any]:
    """They resize to `size`, then crop `crop_size` at the center if `do_center_crop`."""
    crops = data.get("do_center_crop") is True
    resample = data.get("resample", 2)
    if isinstance(resample, bool) or not isinstance(resample, int) or resample not in RESAMPLE_MODES:
        known = " or ".join(f"{number} ({name})" for number, name in RESAMPLE_MODES.items())
        raise FolderError(f"{where}: `resample` must be {known}, but is {quote_value(resample)}; correct it")
    fit, size = read_size(data, image, where)
    crop = parse_square_size("crop_size", data.get("crop_size", image), where) if crops else size
    if crop != image:
        key = "crop_size" if crops else "size"
        raise FolderError(f"{where}: `{key}` must be {image}, as `image_size` of the model, but is {crop}; correct it")
    if size < crop:
        raise FolderError(f"{where}: `size` must be at least `crop_size`={crop}, but is {size}; correct it")
    return {"fit": fit, "resize_to": None if size == crop else size, "resample": RESAMPLE_MODES[resample]}


def read_size(data: Mapping[str, Any], image: int, where: Path) -> tuple[Literal["crop", "squash"], int]:
    size = data.get("size", image)
    kind = str(data.get("image_processor_type") or data.get("feature_extractor_type"))
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return "crop", parse_square_size("size", size["shortest_edge"], where)
    shorter = kind.startswith(SHORTEST_EDGE_PREFIX) and not isinstance(size, dict)
    return "crop" if shorter else "squash", parse_square_size("size", size, where)


def parse_square_size(key: str, value: object, where: Path) -> int:
    """Return the side of a square, given as a number, as two equal ones, or as `height` and `width`."""
    sides = [value.get("height"), value.get("width")] if isinstance(value, dict) else value
    side = sides[0] if isinstance(sides, list | tuple) and len(sides) == 2 and sides[0] == sides[1] else sides
    if not isinstance(side, int) or isinstance(side, bool) or side < 1:
        raise FolderError(f"{where}: `{key}` must be of a square, but is {quote_value(value)}; correct it")
    return side


def load(folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> VisionTransformer:
    opened = OpenFolder.open(folder, CONFIG_KEYS, ["num_hidden_layers"], prefix=PREFIX)
    keys, root = opened.keys, opened.root
    causal_family.check_architecture(root, ARCHITECTURES, FAMILY)
    image_size = parse_square_size("image_size", keys.image_size, opened.config_path)
    preprocessing = read_preprocessing(root, keys.num_channels, image_size)
    # The classifier reads the class token: `transformers` has no ViT with both a classifier and a pooler.
    has_labels, pooler = CLASSIFIER in opened.stored, POOLER.removeprefix(opened.omitted_prefix) in opened.stored
    labels = causal_family.read_labels(root, opened.stored[CLASSIFIER].rows) if has_labels else ()
    heads = {"pooler": pooler and not has_labels, "labels": labels}
    config = to_config(keys, heads, preprocessing, opened.config_path)
    return opened.load_into(build_empty(config), build_mappings(config), dtype, device)


def save(model: VisionTransformer, folder: StrPath, *, pad: int | None = None) -> None:
    config = model.config
    check_expressible(config)
    tensors = conversion.export_tensors(model, build_mappings(config))
    hf_folder.write_folder(
        folder,
        config=to_hf_config(config, conversion.get_dtype_name(model)),
        tensors=tensors if config.labels else {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()},
        extra_files={PREPROCESSOR_FILE: to_preprocessor_config(config)},
    )


def check_expressible(config: VisionConfig) -> None:
    conversion.check_fields(config, FAMILY, {"class_token": True, "pooling": "class"})
    if config.pooler and config.labels:
        conversion.reject_field(FAMILY, "pooler", config.pooler, "False where there are labels")
    conversion.check_stack(config.stack, FAMILY, required={"norm_order": ("pre",)})
    positions = LearnedConfig(max_length=config.num_patches + 1)
    if config.stack.positions != positions:
        conversion.reject_field(FAMILY, "stack.positions", config.stack.positions, repr(positions))


def to_hf_config(config: VisionConfig, dtype: str) -> dict[str, Any]:
    return {
        "model_type": "vit",
        "architectures": [ARCHITECTURES[0] if config.labels else ARCHITECTURES[1]],
        **conversion.write_fields(CONFIG_KEYS.field_to_key, config, config.stack),
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "encoder_stride": config.patch_size,
        "qkv_bias": True,
        "dtype": dtype,
        **causal_family.build_label_keys(config.labels),
    }


def to_preprocessor_config(config: VisionConfig) -> dict[str, Any]:
    def each(values: tuple[float, ...]) -> list[float]:
        return list(values) * (config.channels if len(values) == 1 else 1)

    first, crops = config.resize_to or config.image_size, config.fit == "crop" or config.resize_to is not None
    # Processors that honour these keys in every version of `transformers`; ViT's own learned to crop late.
    squashing = "DeiTImageProcessor" if crops else "ViTImageProcessor"
    return {
        "image_processor_type": "CLIPImageProcessor" if config.fit == "crop" else squashing,
        "do_convert_rgb": config.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": first} if config.fit == "crop" else dict.fromkeys(("height", "width"), first),
        "resample": next(number for number, name in RESAMPLE_MODES.items() if name == config.resample),
        "do_center_crop": crops,
        **({"crop_size": dict.fromkeys(("height", "width"), config.image_size)} if crops else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": each(config.mean),
        "image_std": each(config.std),
    }
