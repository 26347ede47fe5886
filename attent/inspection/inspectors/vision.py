"""An image through a model of images (ViT), as a document: the picture as the model reads it, its patches as tokens,
and which label fits. Reading image files is `attent.data.images`'.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attent.data.images import ImageError, ImageShape, is_idx_file, pad_or_resize, read_idx_rows, read_image
from attent.decoding.forced_decoding import eval_mode
from attent.inspection.attention_trace import DisplayToken, PatchImage, TraceSide, build_document
from attent.inspection.head_masking import mask_parts
from attent.inspection.head_stats import measure_document_heads
from attent.inspection.inspectors.base import (
    InspectionError,
    InspectionRequest,
    Inspector,
    LayerFilter,
    describe_labels,
    mark_masked_heads,
    reject_translation_options,
)
from attent.models import VisionConfig, VisionTransformer


class VisionInspector(Inspector[VisionTransformer]):
    """Answers questions about one model of images."""

    def inspect(
        self,
        request: InspectionRequest,
        layer_filter: LayerFilter | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        reject_translation_options(request, "a model of images")
        if request.text_pair is not None:
            raise InspectionError("a second text is for encoders of text, and this is a model of images; leave it out")
        pixels = load_pixels(request.text, self.model.config)
        sides = {"image": build_image_side(pixels, self.model.config, Path(request.text).name)}
        with eval_mode(self.model), mask_parts(self.model, request.masked_parts), torch.no_grad():
            with self.record_layers(sides, layer_filter or LayerFilter()) as layers:
                states = self.model.compute_states(self.model.normalize(pixels[None]))
            said = self._classify(states)
        mark_masked_heads(layers, request.masked_parts)
        found = build_document(Path(request.text).name, sides, layers) | {"model": self.get_model_info()} | said
        found["properties"] = self.head_stats or measure_document_heads(found)
        return found | self.get_model_sections()

    def _classify(self, states: Tensor) -> dict[str, Any]:
        if self.model.classifier is None:
            return {}
        labels = describe_labels(self.model.config.labels, self.model.classifier(self.model.pool(states))[0])
        return {"labels": labels, "outcome": {"label": "label", "text": labels["best"][0]["label"]}}


def load_pixels(location: str, config: VisionConfig) -> Tensor:
    """A picture, or of an idx file the one behind a colon: `t10k-images-idx3-ubyte.gz:17`."""
    name, _, number = location.rpartition(":")
    path = Path(name).expanduser()
    if not (number.isdecimal() and is_idx_file(path, "images")):
        return read_image(location, ImageShape.from_config(config))
    left = int(number)
    for images in read_idx_rows(path, 3):
        if left < len(images):
            return torch.from_numpy(pad_or_resize(images[left : left + 1], ImageShape.from_config(config))[0])
        left -= len(images)
    raise ImageError(f"{name}: has {int(number) - left:,} images, from 0, but {int(number):,} is asked for")


def build_image_side(pixels: Tensor, config: VisionConfig, name: str) -> TraceSide:
    """The picture, and its patches as tokens: the class token, where there is one, then row by row."""
    count = config.image_size // config.patch_size
    first = (DisplayToken("[class]", "class", special="class"),) if config.class_token else ()
    patches = tuple(
        DisplayToken(f"{row},{column}", f"{row},{column}", True) for row in range(count) for column in range(count)
    )
    image = PatchImage(src=encode_data_uri(pixels), rows=count, columns=count, before=len(first))
    return TraceSide(label="picture", text=name, tokens=first + patches, image=image)


def encode_data_uri(pixels: Tensor) -> str:
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode()


def encode_png(pixels: Tensor) -> bytes:
    """Bytes (C, height, width), of one channel (grey) or three, as a PNG: no package is needed for that."""
    if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[0] not in (1, 3):
        raise InspectionError(
            f"a picture must be bytes of one channel or of three to be shown, but is {pixels.dtype} of "
            f"{tuple(pixels.shape)}; give one that is grey or in colours"
        )
    channels, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).reshape(height, width * channels).cpu()
    lines = torch.cat([rows.new_zeros(height, 1), rows], 1).numpy().tobytes()  # each behind its filter: none
    kind = 0 if channels == 1 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(encode_png_chunk(name, data) for name, data in parts)


def encode_png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
