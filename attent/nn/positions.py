"""Positional encodings (section 3.5 and later work). A scheme acts at one of three places and leaves the others
unchanged, so no other code needs to know which one is in use:

    embed           adds to the embeddings, before the first block     sinusoidal (the paper), learned
    compute_angles  rotates queries and keys in every self-attention   rotary
    compute_bias    adds to the scores of every self-attention         T5's relative bias, ALiBi

Positions are integers, (T,) if all rows have the same, else (B, T) (a cache with ragged rows, packed rows).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.argument_checks import check_choice, check_positive, check_size
from attent.nn.init import init_normal

FeatureOrder = Literal["interleaved", "halves"]


class Positions(nn.Module):
    """The identity in all three places: each scheme overrides one."""

    max_length: int | None = None  # number of positions; None: no limit

    def embed(self, x: Tensor, positions: Tensor, table_size: int | None = None) -> Tensor:
        """Add positional embeddings to x. All positions are below `table_size`, where it is given."""
        return x

    def precompute(self, table_size: int, width: int, device: torch.device) -> None:
        """Compute the tables of `embed` now: inside a compiled graph they would be computed in every step."""

    def compute_angles(self, positions: Tensor) -> "Angles | None":
        return None

    def compute_bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        return None


SinusoidOrder = Literal["interleaved", "halves", "fairseq", "marian"]
FAIRSEQ_START = 2  # fairseq numbers positions from here: 1 is padding


@dataclass(frozen=True, kw_only=True)
class SinusoidalConfig:
    """`interleaved` as printed in the paper (sin, cos, sin ...); `halves`: sines first, as in MarianMTModel; `marian`:
    with slightly longer wavelengths, as in Marian itself; `fairseq`: also positions from 2, as in M2M-100 and NLLB."""

    kind: ClassVar[str] = "sinusoidal"
    order: SinusoidOrder = "interleaved"

    def __post_init__(self) -> None:
        check_choice("order", self.order, SinusoidOrder)


class SinusoidalPositions(Positions):
    def __init__(self, config: SinusoidalConfig) -> None:
        super().__init__()
        self.order = config.order
        self.table: Tensor | None = None  # of the first positions; not part of the state_dict
        self.old_tables: list[Tensor] = []  # smaller ones, which a captured CUDA graph may still read

    def embed(self, x: Tensor, positions: Tensor, table_size: int | None = None) -> Tensor:
        if table_size is None or positions.dim() == 1:
            return x + make_sinusoids(positions, x.shape[-1], self.order).to(x.dtype)
        # Packed rows repeat each position many times: sines in float64 would take longer than two layers.
        table = self.table if self.has_table(table_size, x.device) else None
        if table is None:
            table = make_sinusoids(torch.arange(table_size, device=positions.device), x.shape[-1], self.order)
        return x + F.embedding(positions, table).to(x.dtype)

    def precompute(self, table_size: int, width: int, device: torch.device) -> None:
        if not self.has_table(table_size, device):
            if self.table is not None:
                self.old_tables.append(self.table)
            self.table = make_sinusoids(torch.arange(table_size, device=device), width, self.order)

    def has_table(self, table_size: int, device: torch.device) -> bool:
        return self.table is not None and self.table.device == device and len(self.table) >= table_size


def make_sinusoids(positions: Tensor, width: int, order: SinusoidOrder = "interleaved") -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same: (..., T) -> (..., T, E).

    Computed in float64 and rounded to float32, as the published tables are: in float32 the angle of a late position
    would be off in its fifth digit. fairseq's and Marian's tables are computed in float32.
    """
    if order in ("fairseq", "marian"):
        spacing = math.log(10000) / max(width // 2 - 1, 1)
        frequencies = torch.exp(torch.arange(width // 2, device=positions.device).float() * -spacing)
        start = FAIRSEQ_START if order == "fairseq" else 0
        angle = (positions[..., None] + start).float() * frequencies
        return F.pad(torch.cat([angle.sin(), angle.cos()], -1), (0, width % 2))
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    feature = torch.arange(0, width, 2, device=positions.device, dtype=dtype)  # 2i
    angle = positions[..., None].to(dtype) / 10000.0 ** (feature / width)  # (..., T, ceil(E / 2))
    sin, cos = angle.sin(), angle.cos()[..., : width // 2]
    if order == "halves":
        return torch.cat([sin, cos], -1).float()
    table = angle.new_empty(*angle.shape[:-1], width)
    table[..., 0::2], table[..., 1::2] = sin, cos
    return table.float()


@dataclass(frozen=True, kw_only=True)
class LearnedConfig:
    kind: ClassVar[str] = "learned"
    max_length: int = 512

    def __post_init__(self) -> None:
        check_size("max_length", self.max_length)


class LearnedPositions(Positions):
    """One vector per position, up to `max_length` (row E of the paper's table 3; BERT, GPT-2, ViT)."""

    def __init__(self, config: LearnedConfig, width: int) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.weight = nn.Parameter(torch.empty(config.max_length, width))
        init_normal(self.weight, std=width**-0.5)

    def embed(self, x: Tensor, positions: Tensor, table_size: int | None = None) -> Tensor:
        return x + self.weight[positions]


@dataclass(frozen=True, eq=False)
class Angles:
    """Cosine and sine of each position's angles, (1 or B, 1, T, D / 2), and which features form a pair."""

    cos: Tensor
    sin: Tensor
    order: FeatureOrder

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate each pair of features of x (B, H, T, D) by its angle."""
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        if self.order == "halves":
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divide all frequencies by a factor: longer texts map to the range of angles seen in training."""

    kind: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)

    def scale(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """LLaMA 3.1: divide frequencies of fewer than `low_freq_factor` periods in `original_length` tokens by `factor`,
    keep those of more than `high_freq_factor`, interpolate between."""

    kind: ClassVar[str] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192  # tokens of a sequence in the first pre-training

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        check_size("original_length", self.original_length)
        low, high = self.low_freq_factor, self.high_freq_factor
        if high <= low:
            raise ValueError(f"`high_freq_factor` must be more than `low_freq_factor`={low:g}, but is {high:g}")

    def scale(self, frequencies: Tensor) -> Tensor:
        low, high, length = self.low_freq_factor, self.high_freq_factor, self.original_length
        wavelength = 2 * math.pi / frequencies  # in tokens
        share = (length / wavelength - low) / (high - low)
        interpolated = (1 - share) * frequencies / self.factor + share * frequencies
        mixed = torch.where(wavelength < length / high, frequencies, interpolated)
        return torch.where(wavelength > length / low, frequencies / self.factor, mixed)


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """`halves` pairs feature i with i + D/2 (LLaMA as published); `interleaved` pairs neighbours (RoFormer)."""

    kind: ClassVar[str] = "rotary"
    base: float = 10_000.0
    order: FeatureOrder = "halves"
    scaling: LinearScaling | Llama3Scaling | None = None  # for texts longer than those of pre-training
    trained_length: int | None = None  # tokens of the longest training texts; quality drops beyond

    def __post_init__(self) -> None:
        check_positive("base", self.base)
        check_choice("order", self.order, FeatureOrder)
        if self.trained_length is not None:
            check_size("trained_length", self.trained_length)


class RotaryPositions(Positions):
    """Rotary positions (Su et al. 2021): q.k depends on the distance between the two tokens only."""

    def __init__(self, config: RotaryConfig, head_width: int) -> None:
        super().__init__()
        self.config, self.head_width = config, head_width

    def compute_angles(self, positions: Tensor) -> Angles:
        feature = torch.arange(0, self.head_width, 2, device=positions.device, dtype=torch.float32)
        frequencies = 1.0 / self.config.base ** (feature / self.head_width)  # rounded as in published models
        if self.config.scaling is not None:
            frequencies = self.config.scaling.scale(frequencies)
        angle = (positions[..., None] * frequencies).unsqueeze(-3)  # (1, T, D / 2) or (B, 1, T, D / 2)
        return Angles(angle.cos(), angle.sin(), self.config.order)


@dataclass(frozen=True, kw_only=True)
class RelativeConfig:
    kind: ClassVar[str] = "relative"
    buckets: int = 32
    max_distance: int = 128  # distances from here on share the last bucket

    def __post_init__(self) -> None:
        check_size("buckets", self.buckets)
        check_size("max_distance", self.max_distance)
        if self.buckets % 4:
            raise ValueError(f"`buckets` must be a multiple of 4, but is {self.buckets}")
        if self.max_distance <= self.buckets:
            raise ValueError(f"`max_distance` must be more than `buckets`={self.buckets}, but is {self.max_distance}")


class RelativePositions(Positions):
    """T5's relative bias (Raffel et al. 2020): one learned scalar per head and bucket of distances."""

    def __init__(self, config: RelativeConfig, heads: int, causal: bool) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.weight = nn.Parameter(torch.empty(config.buckets, heads))
        init_normal(self.weight, std=0.02)

    def compute_bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = k_positions[..., None, :] - q_positions[..., :, None]  # (Tq, Tk) or (B, Tq, Tk)
        bucket = compute_buckets(distance, self.config.buckets, self.config.max_distance, self.causal)
        return move_heads_first(self.weight[bucket])  # (..., Tq, Tk, H) -> (1 or B, H, Tq, Tk)


def compute_buckets(distance: Tensor, buckets: int, max_distance: int, causal: bool) -> Tensor:
    """One bucket each for small distances, logarithmic ones beyond; separate per direction unless causal."""
    if causal:
        later, away = torch.zeros_like(distance), (-distance).clamp(min=0)
    else:
        buckets //= 2
        later, away = (distance > 0).long() * buckets, distance.abs()
    near = buckets // 2
    growth = torch.log(away.clamp(min=1).float() / near) / math.log(max_distance / near)
    far = (near + (growth * (buckets - near)).long()).clamp(max=buckets - 1)
    return later + torch.where(away < near, away, far)


@dataclass(frozen=True, kw_only=True)
class AlibiConfig:
    kind: ClassVar[str] = "alibi"


class AlibiPositions(Positions):
    """ALiBi (Press et al. 2022): a penalty proportional to the distance, with another slope for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def compute_bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = (k_positions[..., None, :] - q_positions[..., :, None]).abs()  # (Tq, Tk) or (B, Tq, Tk)
        return move_heads_first(-distance[..., None] * compute_alibi_slopes(self.heads, distance.device))


def compute_alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """2^(-8/H), 2^(-16/H) ... for a power of two; other head counts continue with slopes between those. (H,)"""
    power = 2 ** int(math.log2(heads))
    head = torch.arange(heads, device=device)
    exponent = torch.where(head < power, head + 1, head - power + 0.5)
    return 2.0 ** (-8 * exponent / power)


def move_heads_first(bias: Tensor) -> Tensor:
    """(Tq, Tk, H) or (B, Tq, Tk, H) -> (1 or B, H, Tq, Tk)"""
    bias = bias.movedim(-1, -3)
    return bias if bias.dim() == 4 else bias[None]


PositionsConfig = SinusoidalConfig | LearnedConfig | RotaryConfig | RelativeConfig | AlibiConfig


def build_positions(config: PositionsConfig, width: int, heads: int, head_width: int, causal: bool) -> Positions:
    match config:
        case SinusoidalConfig():
            return SinusoidalPositions(config)
        case LearnedConfig():
            return LearnedPositions(config, width)
        case RotaryConfig():
            return RotaryPositions(config, head_width)
        case RelativeConfig():
            return RelativePositions(config, heads, causal)
        case AlibiConfig():
            return AlibiPositions(heads)
