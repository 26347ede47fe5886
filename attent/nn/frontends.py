"""Front-ends of encoder-decoders: modules that embed a source (token ids, audio frames, image patches)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.argument_checks import can_read_values, check_choice, check_size, is_count
from attent.nn.init import init_normal

SAMPLE_RATE = 16_000  # of all audio
FRAME_SAMPLES, HOP_SAMPLES = 400, 160  # a frame is 25 ms long, and one starts every 10 ms


@dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """A source of log-mel frames (see `LogMelSpectrogram`), which two convolutions reduce to one state per 20 ms."""

    kind: ClassVar[str] = "audio"
    mel_bins: int = 80
    fixed_frames: int | None = None  # every recording is padded to this many frames (Whisper: 3,000); None: its own
    max_frames: int | None = None  # of most training recordings; longer ones are transcribed in segments

    def __post_init__(self) -> None:
        check_size("mel_bins", self.mel_bins)
        for name in ("fixed_frames", "max_frames"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """A source of square image patches, and how images are resized and normalized."""

    kind: ClassVar[str] = "image"
    image_size: int = 224  # pixels of a side; images are square
    patch_size: int = 16
    channels: int = 3
    class_token: bool = True  # a learned vector before the patches
    mean: tuple[float, ...] = (0.5,)  # of pixels from 0 to 1, one per channel or one for all:
    std: tuple[float, ...] = (0.5,)  # the model's input is (pixel - mean) / std
    fit: Literal["crop", "squash"] = "crop"  # an image that is not square is cropped at its center, or distorted
    resize_to: int | None = None  # pixels of a side before the center crop; None: no crop after resizing
    resample: Literal["bilinear", "bicubic"] = "bilinear"  # interpolation of the resize

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "channels"):
            check_size(name, getattr(self, name))
        check_choice("fit", self.fit, Literal["crop", "squash"])
        check_choice("resample", self.resample, Literal["bilinear", "bicubic"])
        if self.resize_to is not None and (not is_count(self.resize_to) or self.resize_to < self.image_size):
            raise ValueError(f"`resize_to` must be at least `image_size`={self.image_size}, but is {self.resize_to!r}")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"`image_size` must be a multiple of `patch_size`={self.patch_size}, but is {self.image_size}"
            )
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise ValueError(f"`{name}` must have a number for each of {self.channels} channels, or one for all")
        if not all(std > 0 for std in self.std):
            raise ValueError(f"`std` must be more than 0, but is {self.std}")

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


FrontEndConfig = AudioConfig | ImageConfig


class FrontEnd(nn.Module):
    """The source side of an encoder-decoder model."""

    def embed_source(self, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return states (B, T, E) and their lengths (None: no padding). T may differ from the source's length."""
        raise NotImplementedError

    def check_source(self, source: Tensor) -> None:
        """Raise a ValueError for a source that this front-end cannot embed."""


class TokenEmbedding(FrontEnd):
    """Token ids (B, T) -> vectors (B, T, E), times sqrt(E) as in the paper (section 3.4) if `scaled`.

    Initialized from N(0, 1 / E). After the factor sqrt(E) each entry has variance 1, as the sinusoids have about 1/2;
    and the tied output layer, unscaled, gives logits of variance 1, so the first loss is near ln V. If that layer
    scales its input (T5), N(0, 1) gives the same: `unit_variance`.
    """

    def __init__(self, vocab: int, width: int, *, scaled: bool, unit_variance: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))
        init_normal(self.weight, std=1.0 if unit_variance else width**-0.5)
        self.scale = width**0.5 if scaled else 1.0

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.weight.shape[0])
        return F.embedding(ids, self.weight) * self.scale

    def embed_source(self, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self(source), lengths

    def check_source(self, source: Tensor) -> None:
        check_id_shape(source, "source")


def check_ids(ids: Tensor, vocab: int) -> None:
    check_id_shape(ids, "token ids")
    if ids.numel() and can_read_values(ids) and not bool(((ids >= 0) & (ids < vocab)).all()):
        raise ValueError(
            f"token ids must be from 0 to {vocab - 1}, the vocabulary, but range from {int(ids.min())} to "
            f"{int(ids.max())}; were they made by another model's tokenizer?"
        )


def check_id_shape(ids: Tensor, name: str) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        is_now = f"{ids.dtype} of {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise ValueError(f"{name} must be a tensor of int64 or int32 of (B, T), but is {is_now}")


class LogMelSpectrogram(nn.Module):
    """Samples (B, S) at 16 kHz, from -1 to 1 -> log-mel frames (B, T, M) and the number of frames of each row, as
    Whisper computes them (Radford et al. 2022): Hann windows of 25 ms every 10 ms, Slaney's mel filters, log10 of the
    power, at most 8 below the maximum of the recording, scaled to about -1 to 1."""

    filters: Tensor
    window: Tensor

    def __init__(self, mel_bins: int = 80) -> None:
        super().__init__()
        self.register_buffer("filters", make_mel_filters(mel_bins), persistent=False)  # (frequencies, M)
        self.register_buffer("window", torch.hann_window(FRAME_SAMPLES, dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def forward(self, samples: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`lengths` counts each row's samples, beyond which frames are 0; None: all, the end mirrored as the start."""
        B, S = samples.shape
        # Whisper mirrors the start, and the end of a recording that was padded with silence.
        mirrored = FRAME_SAMPLES // 2
        if lengths is not None:
            is_padding = torch.arange(S, device=samples.device) >= lengths[:, None]
            samples = F.pad(samples.masked_fill(is_padding, 0), (0, FRAME_SAMPLES))
        if samples.shape[1] <= mirrored:
            samples = F.pad(samples, (0, mirrored + 1 - samples.shape[1]))
        count = S // HOP_SAMPLES if lengths is None else -(-S // HOP_SAMPLES)
        padded = F.pad(samples[:, None].to(self.window.dtype), (mirrored, mirrored), mode="reflect")[:, 0]
        frames = padded.unfold(1, FRAME_SAMPLES, HOP_SAMPLES)[:, :count]  # (B, T, samples of a frame)
        power = torch.fft.rfft(frames * self.window).abs().square()
        x = (power @ self.filters).clamp(min=1e-10).log10()
        num_frames = torch.full((B,), count, device=samples.device)
        if lengths is not None:
            num_frames = (lengths + (HOP_SAMPLES - 1)) // HOP_SAMPLES
            is_padding = (torch.arange(count, device=samples.device) >= num_frames[:, None])[..., None]
            x = x.masked_fill(is_padding, -torch.inf)
        if count:
            x = torch.maximum(x, x.amax((1, 2), keepdim=True).clamp(min=-10) - 8)
        x = (x + 4) / 4
        return (x if lengths is None else x.masked_fill(is_padding, 0)).float(), num_frames


def make_mel_filters(mel_bins: int) -> Tensor:
    """Slaney's triangular filters (frequencies, M): linear below 1,000 Hz, then logarithmic; each of area 1."""
    highest = 15 + 27 * math.log(SAMPLE_RATE / 2 / 1000) / math.log(6.4)  # in mel
    mel = torch.linspace(0, highest, mel_bins + 2, dtype=torch.float64)
    edges = torch.where(mel < 15, mel * (200 / 3), 1000 * torch.exp((mel - 15) * (math.log(6.4) / 27)))  # in Hz
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, FRAME_SAMPLES // 2 + 1, dtype=torch.float64)[:, None]
    left, center, right = edges[:-2], edges[1:-1], edges[2:]
    triangles = torch.minimum((frequencies - left) / (center - left), (right - frequencies) / (right - center))
    return triangles.clamp(min=0) * (2 / (right - left))


class AudioFrontEnd(FrontEnd):
    """Log-mel frames (B, T, M) -> states (B, ceil(T / 2), E): two convolutions over 3 frames, the second with stride 2.
    Frames beyond the length of a row count as zeros, as do those outside of the tensor. As those of tokens, embeddings
    are multiplied by sqrt(E) if `scaled`: else they would be small compared with the sinusoids."""

    def __init__(self, config: AudioConfig, width: int, *, scaled: bool) -> None:
        super().__init__()
        self.config, self.scale = config, width**0.5 if scaled else 1.0
        self.conv1 = nn.Conv1d(config.mel_bins, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1, stride=2)

    def embed_source(self, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        is_padding = None
        if lengths is not None:
            is_padding = torch.arange(source.shape[1], device=source.device) >= lengths[:, None, None]  # (B, 1, T)
        x = source.to(self.conv1.weight.dtype).transpose(1, 2)
        for convolution in (self.conv1, self.conv2):
            x = F.gelu(convolution(x if is_padding is None else x.masked_fill(is_padding, 0)))
        return x.transpose(1, 2) * self.scale, None if lengths is None else (lengths + 1) // 2

    def check_source(self, source: Tensor) -> None:
        bins = self.config.mel_bins
        if not isinstance(source, Tensor) or source.dim() != 3 or source.shape[2] != bins:
            is_now = f"of {tuple(source.shape)}" if isinstance(source, Tensor) else f"a {type(source).__name__}"
            raise ValueError(f"source must be log-mel frames of (B, T, {bins}), but is {is_now}")


class PatchEmbedding(nn.Module):
    """(B, C, height, width) -> one vector per patch, (B, T, E), row by row."""

    def __init__(self, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        size = channels * patch_size * patch_size
        self.weight, self.bias = nn.Parameter(torch.empty(width, size)), nn.Parameter(torch.zeros(width))
        init_normal(self.weight, std=size**-0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        P = self.patch_size
        x = pixels.unfold(2, P, P).unfold(3, P, P)  # (B, C, rows, columns, P, P)
        x = x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # (B, T, C * P * P)
        return F.linear(x, self.weight, self.bias)


class ImageFrontEnd(FrontEnd):
    """Normalized pixels (B, C, S, S) -> the class token, if there is one, then the patches row by row, (B, T, E)."""

    def __init__(self, config: ImageConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = PatchEmbedding(config.channels, config.patch_size, width)
        self.class_token = nn.Parameter(torch.empty(width)) if config.class_token else None
        if self.class_token is not None:
            init_normal(self.class_token, std=0.02)

    def embed_source(self, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        pixels = source.to(self.patch_embedding.weight.dtype)
        return add_class_token(self.patch_embedding(pixels), self.class_token), None

    def check_source(self, source: Tensor) -> None:
        check_pixels(source, self.config)


def add_class_token(patches: Tensor, class_token: Tensor | None) -> Tensor:
    if class_token is None:
        return patches
    return torch.cat([class_token.expand(len(patches), 1, -1).to(patches.dtype), patches], 1)


def normalize_pixels(pixels: Tensor, config: ImageConfig, like: Tensor) -> Tensor:
    """Convert bytes, or values from 0 to 1, to (pixel - mean) / std, with the device and dtype of `like`."""
    pixels = pixels.to(like.device, like.dtype) / (255 if pixels.dtype == torch.uint8 else 1)
    # Filled on the device, since CUDA graphs cannot hold copies from the host.
    mean, std = (torch.cat([pixels.new_full((1, 1, 1), x) for x in values]) for values in (config.mean, config.std))
    return (pixels - mean) / std


def check_pixels(pixels: Tensor, config: ImageConfig) -> None:
    shape = (config.channels, config.image_size, config.image_size)
    if not isinstance(pixels, Tensor) or pixels.shape[1:] != shape or not pixels.is_floating_point():
        is_now = f"{pixels.dtype} of {tuple(pixels.shape)}" if isinstance(pixels, Tensor) else repr(type(pixels))
        raise ValueError(f"pixels must be floating numbers of (B, {', '.join(map(str, shape))}), but are {is_now}")


def build_frontend(config: FrontEndConfig, width: int, *, scaled: bool) -> FrontEnd:
    return (
        AudioFrontEnd(config, width, scaled=scaled) if isinstance(config, AudioConfig) else ImageFrontEnd(config, width)
    )
