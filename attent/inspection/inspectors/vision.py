"""Inspect Vision Transformers (image, patches, labels) and caption models (image, patches, search of the text)."""

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attent.data.images import ImageError, ImageShape, is_idx_file, pad_or_resize, read_idx, read_image
from attent.decoding.loading import resolve_target_lang
from attent.decoding.options import StopCheck
from attent.inspection.attention_trace import DisplayToken, PatchImage, TraceSide
from attent.inspection.inspectors import base
from attent.inspection.inspectors.seq2seq import LoadedSource, Seq2SeqInspector
from attent.models import VisionTransformer
from attent.nn import ImageConfig
from attent.nn.frontends import normalize_pixels


class VisionInspector(base.Inspector[VisionTransformer]):
    model_kind = "a vision model"
    example_file = "image.png"

    def _run(self, request: base.InspectionRequest, should_stop: StopCheck | None) -> base.RecordedPass:
        pixels = load_pixels(request.text, self.model.config)
        name = Path(request.text).name
        sides = {"image": build_image_side(pixels, self.model.config, name)}
        with self.record_layers(sides, request) as layers:
            states = self.model.compute_states(self.model.normalize(pixels[None]))
        sections: dict[str, Any] = {}
        if self.model.classifier is not None:
            labels = base.describe_labels(self.model.config.labels, self.model.classifier(self.model.pool(states))[0])
            sections = {"labels": labels, "output": {"label": "label", "text": labels["best"][0]["label"]}}
        return base.RecordedPass(title=name, sides=sides, layers=layers, sections=sections)


class CaptioningInspector(Seq2SeqInspector):
    model_kind = "a caption model"
    example_file = "image.png"
    output_name = "caption"

    def _load_source(self, request: base.InspectionRequest) -> LoadedSource:
        base.check_is_file(request.text, self)
        language = resolve_target_lang(request.to, self.tokenizer.target.tags, Path(self.name))
        config = self.model.config.frontend
        assert isinstance(config, ImageConfig)
        pixels = load_pixels(request.text, config)
        source = normalize_pixels(pixels[None], config, next(self.model.parameters()))
        side = build_image_side(pixels, config, Path(request.text).name)
        prompt_ids = (self.tokenizer.target.get_tag_id(language),) if language else ()
        return LoadedSource(tensor=source, lengths=None, side=side, prompt_ids=prompt_ids)


def load_pixels(location: str, config: ImageConfig) -> Tensor:
    """Load an image file, or one image of an idx file by its index: `t10k-images-idx3-ubyte.gz:17`."""
    name, _, number = location.rpartition(":")
    path = Path(name).expanduser()
    if not (number.isdecimal() and is_idx_file(path, "images")):
        return read_image(location, ImageShape.from_config(config))
    index, images = int(number), read_idx(path, 3)
    if index >= len(images):
        raise ImageError(f"{name}: the index must be below {len(images):,}, but is {index:,}")
    return torch.from_numpy(pad_or_resize(images[index : index + 1], ImageShape.from_config(config))[0])


def build_image_side(pixels: Tensor, config: ImageConfig, name: str) -> TraceSide:
    """The image with its tokens: the class token if the model has one, then the patches row by row."""
    count = config.image_size // config.patch_size
    prefix = (DisplayToken("[class]", "class", special="class"),) if config.class_token else ()
    patches = tuple(
        DisplayToken(f"{row},{column}", f"{row},{column}", True) for row in range(count) for column in range(count)
    )
    image = PatchImage(src=encode_data_url(pixels), rows=count, columns=count, num_prefix_tokens=len(prefix))
    return TraceSide(label="image", text=name, tokens=prefix + patches, image=image)


def encode_data_url(pixels: Tensor) -> str:
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode()


def encode_png(pixels: Tensor) -> bytes:
    """Encode uint8 pixels (C, height, width) as a gray or RGB PNG, without an image package."""
    channels, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).reshape(height, width * channels).cpu()
    lines = torch.cat([rows.new_zeros(height, 1), rows], 1).numpy().tobytes()  # a filter byte (0: none) before each row
    color_type = 0 if channels == 1 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
