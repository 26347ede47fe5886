"""Inspect models of images and recordings: patches with labels, or the search of a caption or transcript."""

import base64
import io
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attent.data.audio import iter_audio
from attent.data.images import ImageShape, read_image
from attent.decoding.loading import resolve_target_lang
from attent.decoding.options import SearchOptions, StopCheck
from attent.decoding.search_trace import SearchTrace
from attent.decoding.source_search import compute_audio_frames
from attent.decoding.speech_timing import STATE_FRAMES, STATE_SECONDS
from attent.decoding.transcriber import Transcriber
from attent.inspection.attention_trace import DisplayToken, PatchImage, SourceAudio, TraceSide
from attent.inspection.inspectors import base
from attent.inspection.inspectors.seq2seq import LoadedSource, Seq2SeqInspector
from attent.models import VisionTransformer
from attent.nn import ImageConfig
from attent.nn.frontends import HOP_SAMPLES, SAMPLE_RATE, normalize_pixels


class VisionInspector(base.Inspector[VisionTransformer]):
    model_kind = "a vision model"
    example_file = "image.png"

    def _run(self, request: base.InspectionRequest, should_stop: StopCheck | None) -> base.RecordedPass:
        pixels = read_image(request.text, ImageShape.from_config(self.model.config))
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
        language = resolve_target_lang(request.to, self.tokenizer.target.tags, Path(self.name))
        config = self.model.config.frontend
        assert isinstance(config, ImageConfig)
        pixels = read_image(request.text, ImageShape.from_config(config))
        source = normalize_pixels(pixels[None], config, next(self.model.parameters()))
        side = build_image_side(pixels, config, Path(request.text).name)
        prompt_ids = (self.tokenizer.target.get_tag_id(language),) if language else ()
        return LoadedSource(tensor=source, lengths=None, side=side, prompt_ids=prompt_ids)


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


MAX_SECONDS = 30.0  # of a recording on a page: 1.3 MB


class SpeechInspector(Seq2SeqInspector):
    model_kind = "a speech model"
    example_file = "recording.wav"
    output_name = "transcript"

    def __init__(
        self, transcriber: Transcriber, *, name: str = "", languages: tuple[str | None, str | None] = (None, None)
    ) -> None:
        super().__init__(transcriber.model, transcriber.tokenizer, name=name, languages=languages)
        self.transcriber = transcriber

    def _load_source(self, request: base.InspectionRequest) -> LoadedSource:
        tags = () if self.transcriber.whisper is None else self.tokenizer.target.tags
        language = resolve_target_lang(request.to or "", tags, Path(self.name))
        samples, is_cut = read_beginning(request.text, min(MAX_SECONDS, self.transcriber.max_seconds))
        frames, lengths = compute_audio_frames([samples], self.transcriber.config, self.transcriber.device)
        name, seconds = Path(request.text).name, len(samples) / SAMPLE_RATE
        text = f"{name} (only the first {seconds:g} s)" if is_cut else f"{name} ({seconds:.1f} s)"
        return LoadedSource(
            tensor=frames,
            lengths=lengths,
            side=build_audio_side(samples, frames[0], text, self.languages[0]),
            prompt_ids=self.transcriber.get_prefix(language or self.transcriber.detect_language(samples.numpy())),
            suppressed_tokens=self.transcriber.suppressed_tokens,
        )

    def _trace_search(
        self, source: LoadedSource, search: SearchOptions, should_stop: StopCheck | None
    ) -> tuple[SearchTrace, bool]:
        return super()._trace_search(source, self.transcriber.ban_first_tokens(search), should_stop)

    def _encode_target(self, text: str) -> list[int]:
        return super()._encode_target(text if self.transcriber.whisper is None else f" {text}")


def read_beginning(path: str, seconds: float) -> tuple[Tensor, bool]:
    blocks = iter_audio(Path(path).expanduser(), seconds)
    samples = torch.from_numpy(np.asarray(next(blocks), dtype=np.float32))
    return samples, next(blocks, None) is not None


def build_audio_side(samples: Tensor, frames: Tensor, text: str, language: str | None = None) -> TraceSide:
    """The recording with a token for each encoder state; those of the padding to a fixed length are left out."""
    num_frames = -(-len(samples) // HOP_SAMPLES)
    spectrogram = frames[:num_frames].T.flip(0)  # low frequencies at the bottom
    low, high = spectrogram.min(), spectrogram.max()
    pixels = ((spectrogram - low) * (255 / (high - low).clamp(min=1e-6))).to(torch.uint8)
    count = -(-num_frames // STATE_FRAMES)
    image = PatchImage(src=encode_data_url(pixels[None]), rows=1, columns=count)
    audio = SourceAudio(src=encode_wav(samples), step=STATE_SECONDS, seconds=len(samples) / SAMPLE_RATE)
    times = (f"{i * STATE_SECONDS:.2f}\N{NO-BREAK SPACE}s" for i in range(count))
    tokens = tuple(DisplayToken(time, time, True) for time in times)
    return TraceSide(label="recording", text=text, tokens=tokens, language=language, image=image, audio=audio)


def encode_wav(samples: Tensor) -> str:
    """Encode samples as a data URL of a WAV file, 16 kHz, mono, 16 bits."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((samples.clamp(-1, 1) * 32767).round().cpu().numpy().astype("<i2").tobytes())
    return "data:audio/wav;base64," + base64.b64encode(content.getvalue()).decode()
