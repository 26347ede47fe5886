"""Captions of images by an encoder-decoder model with image patches as its source."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from attent.data.images import ImageError, ImageShape, read_image
from attent.decoding.loading import load_tokenizer, resolve_device_and_dtype, resolve_target_lang
from attent.decoding.options import Hypothesis, SearchOptions, StopCheck
from attent.decoding.source_search import search_sources
from attent.interop import load_as
from attent.models import Seq2Seq
from attent.nn import ImageConfig
from attent.nn.frontends import normalize_pixels
from attent.storage.errors import AttentError
from attent.storage.hub import locate_model
from attent.text.tokenizer import Tokenizer

BATCH_IMAGES = {"cpu": 16, "cuda": 256}


class Captioner:
    """A caption model with its tokenizer.

    >>> captioner = attent.Captioner.load("runs/captions")
    >>> captioner.caption(["picture.png"])
    [Hypothesis('...', score=-...)]
    """

    def __init__(self, model: Seq2Seq, tokenizer: Tokenizer, *, name: str = "the model") -> None:
        """`name` is that of the model in error messages."""
        config = model.config.frontend
        if not isinstance(config, ImageConfig):
            raise AttentError(f"{name}: must be a caption model, whose source is an image, but is not")
        self.model, self.tokenizer, self.name, self.image_config = model, tokenizer, name, config

    @classmethod
    def load(cls, folder: str | Path, *, device: str | torch.device | None = None, dtype: str | None = None) -> Self:
        """Load a model folder; `dtype` None: float32."""
        path = locate_model(folder)
        placed, precision = resolve_device_and_dtype(device, dtype or "float32")
        model = load_as(path, Seq2Seq, frontend=ImageConfig, dtype=precision, device=placed)
        return cls(model, load_tokenizer(path), name=str(folder))

    @property
    def languages(self) -> tuple[str, ...]:
        return self.tokenizer.target.tags

    def resolve_language(self, to: str | None) -> str | None:
        return resolve_target_lang(to, self.languages, Path(self.name))

    def read_image(self, file: str | Path) -> Tensor:
        """Return an image as the model takes it, (C, S, S) of uint8; raises `ImageError`."""
        return read_image(file, ImageShape.from_config(self.image_config))

    def caption(
        self,
        images: Sequence[str | Path | Tensor],
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        should_stop: StopCheck | None = None,
    ) -> list[Hypothesis]:
        """Caption image files, or images that `read_image` has returned.

        to           the language, for a model of several
        should_stop  polled during the search; True raises `SearchCancelled`
        """
        captions: list[Hypothesis] = []
        for result in self.caption_all(images, options, to=to, should_stop=should_stop):
            if isinstance(result, ImageError):
                raise result
            captions.append(result)
        return captions

    def caption_all(
        self,
        images: Sequence[str | Path | Tensor],
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        should_stop: StopCheck | None = None,
    ) -> Iterator[Hypothesis | ImageError]:
        """Yield the caption of each image in their order, or the error for one that cannot be read."""
        language = self.resolve_language(to)
        prefix_ids = () if language is None else (self.tokenizer.target.get_tag_id(language),)
        parameter = next(self.model.parameters())
        batch_size = BATCH_IMAGES.get(parameter.device.type, 64)
        for start in range(0, len(images), batch_size):
            batch: list[Tensor | ImageError] = []
            for image in images[start : start + batch_size]:
                try:
                    batch.append(image if isinstance(image, Tensor) else self.read_image(image))
                except ImageError as error:
                    batch.append(error)
            pixels = [image for image in batch if isinstance(image, Tensor)]
            captions: list[Hypothesis] = []
            if pixels:
                source = normalize_pixels(torch.stack(pixels), self.image_config, parameter)
                captions = search_sources(
                    self.model, self.tokenizer, source, None, options, prefix_ids=prefix_ids, should_stop=should_stop
                )
            yield from (captions.pop(0) if isinstance(image, Tensor) else image for image in batch)
