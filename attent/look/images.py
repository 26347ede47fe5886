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

from attent.data.images import ImageError, Shape, framed, idx_rows, is_idx, read_image
from attent.decode.force import evaluating
from attent.look.properties import measure_document
from attent.look.reading import Filter, LookError, Question, Reading, labelled, mark_silent, reads_only
from attent.look.silence import silenced
from attent.look.trace import Image, Side, Token, document
from attent.models import Vision, VisionConfig


class ImageLooker(Reading[Vision]):
    """Answers questions about one model of images."""

    def look(
        self, question: Question, chosen: Filter | None = None, stop: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        reads_only(question, "a model of images")
        if question.pair is not None:
            raise LookError("a second text is for encoders of text, and this is a model of images; leave it out")
        pixels = pixels_at(question.text, self.model.config)
        sides = {"image": side_of(pixels, self.model.config, Path(question.text).name)}
        with evaluating(self.model), silenced(self.model, question.silence), torch.no_grad():
            with self.written_down(sides, chosen or Filter()) as layers:
                states = self.model.states(self.model.normalised(pixels[None]))
            said = self._said(states)
        mark_silent(layers, question.silence)
        found = document(Path(question.text).name, sides, layers) | {"model": self.facts()} | said
        found["properties"] = self.properties or measure_document(found)
        return found | self.known()

    def _said(self, states: Tensor) -> dict[str, Any]:
        if self.model.classifier is None:
            return {}
        labels = labelled(self.model.config.labels, self.model.classifier(self.model.pooled(states))[0])
        return {"labels": labels, "outcome": {"label": "label", "text": labels["best"][0]["label"]}}


def pixels_at(where: str, config: VisionConfig) -> Tensor:
    """A picture, or of an idx file the one behind a colon: `t10k-images-idx3-ubyte.gz:17`."""
    name, _, number = where.rpartition(":")
    path = Path(name).expanduser()
    if not (number.isdecimal() and is_idx(path, "images")):
        return read_image(where, Shape.of(config))
    left = int(number)
    for images in idx_rows(path, 3):
        if left < len(images):
            return torch.from_numpy(framed(images[left : left + 1], Shape.of(config))[0])
        left -= len(images)
    raise ImageError(f"{name}: has {int(number) - left:,} images, from 0, but {int(number):,} is asked for")


def side_of(pixels: Tensor, config: VisionConfig, name: str) -> Side:
    """The picture, and its patches as tokens: the class token, where there is one, then row by row."""
    count = config.image // config.patch
    first = (Token("[class]", "class", special="class"),) if config.class_token else ()
    patches = tuple(
        Token(f"{row},{column}", f"{row},{column}", True) for row in range(count) for column in range(count)
    )
    image = Image(src=data_uri(pixels), rows=count, columns=count, before=len(first))
    return Side(label="picture", text=name, tokens=first + patches, image=image)


def data_uri(pixels: Tensor) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def png(pixels: Tensor) -> bytes:
    """Bytes (C, height, width), of one channel (grey) or three, as a PNG: no package is needed for that."""
    if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[0] not in (1, 3):
        raise LookError(
            f"a picture must be bytes of one channel or of three to be shown, but is {pixels.dtype} of "
            f"{tuple(pixels.shape)}; give one that is grey or in colours"
        )
    channels, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).reshape(height, width * channels).cpu()
    lines = torch.cat([rows.new_zeros(height, 1), rows], 1).numpy().tobytes()  # each behind its filter: none
    kind = 0 if channels == 1 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in parts)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
