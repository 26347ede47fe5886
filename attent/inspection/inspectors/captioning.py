"""Inspect a caption model: the preprocessed image, its patches as tokens, and the search of the text."""

from __future__ import annotations

from pathlib import Path

from attent.decoding.loading import resolve_target_lang
from attent.inspection.inspectors import base
from attent.inspection.inspectors.seq2seq import LoadedSource, Seq2SeqInspector
from attent.inspection.inspectors.vision import build_image_side, load_pixels
from attent.nn import ImageConfig
from attent.nn.frontends import normalize_pixels


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
