"""How order enters the model (section 3.5 and what came after). A scheme acts at one of three places and leaves the
others as they are, so that nothing else needs to know which scheme is in use:

    embed   adds to the embeddings, before the first block     sinusoidal (the paper), learned
    angles  turns queries and keys inside each attention       rotary
    bias    adds to the scores of each self-attention          T5's relative bias, ALiBi

Positions are integers, (T,) when every row has the same and (B, T) when not (a cache with ragged rows, packed rows).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.checks import check_choice, check_even, check_positive, check_size
from attent.nn.init import normal

Order = Literal["interleaved", "halves"]


class Positions(nn.Module):
    """No order at all: each scheme overrides one of the three."""

    max_length: int | None = None  # how many positions there are; None: any number

    def embed(self, x: Tensor, at: Tensor, below: int | None = None) -> Tensor:
        """`below` all of `at` lies, where that is known."""
        return x

    def prepare(self, below: int, width: int, device: torch.device) -> None:
        """Work out now what `embed` will need for places below this: a compiled graph would do so each time."""

    def angles(self, at: Tensor) -> Angles | None:
        return None

    def bias(self, q_at: Tensor, k_at: Tensor) -> Tensor | None:
        return None


# --- added to the embeddings ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SinusoidalConfig:
    """`interleaved` as printed in the paper (sin, cos, sin, cos ...); `halves` as Marian and fairseq (sines first)."""

    kind: ClassVar[str] = "sinusoidal"
    order: Order = "interleaved"

    def __post_init__(self) -> None:
        check_choice("order", self.order, Order)


class Sinusoidal(Positions):
    def __init__(self, config: SinusoidalConfig) -> None:
        super().__init__()
        self.order = config.order
        self.table: Tensor | None = None  # of the first places; not part of the model
        self.smaller: list[Tensor] = []  # tables of before, which a recording (CUDA graph) may still read

    def embed(self, x: Tensor, at: Tensor, below: int | None = None) -> Tensor:
        if below is None or at.dim() == 1:
            return x + sinusoid(at, x.shape[-1], self.order).to(x.dtype)
        # Rows of packed sentences have each place many times: sines of float64 would take longer than two layers.
        known = self.knows(below, x.device)
        table = self.table if known else sinusoid(torch.arange(below, device=at.device), x.shape[-1], self.order)
        assert table is not None
        return x + F.embedding(at, table).to(x.dtype)

    def prepare(self, below: int, width: int, device: torch.device) -> None:
        if not self.knows(below, device):
            if self.table is not None:
                self.smaller.append(self.table)
            self.table = sinusoid(torch.arange(below, device=device), width, self.order)

    def knows(self, below: int, device: torch.device) -> bool:
        return self.table is not None and self.table.device == device and len(self.table) >= below


def sinusoid(at: Tensor, width: int, order: Order = "interleaved") -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same: (..., T) -> (..., T, E).

    Computed in float64 and rounded to float32, as the published tables are: in float32 the angle of a late position
    would be off in its fifth digit. Nothing is stored, so no length is too long.
    """
    exact = torch.float32 if at.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    pair = torch.arange(0, width, 2, device=at.device, dtype=exact)  # 2i
    angle = at[..., None].to(exact) / 10000.0 ** (pair / width)  # (..., T, ceil(E / 2))
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


class Learned(Positions):
    """One vector per position, up to `max_length` (the paper's row E of table 3; BERT, GPT-2, ViT)."""

    def __init__(self, config: LearnedConfig, width: int) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.weight = nn.Parameter(torch.empty(config.max_length, width))
        normal(self.weight, std=width**-0.5)

    def embed(self, x: Tensor, at: Tensor, below: int | None = None) -> Tensor:
        return x + self.weight[at]


# --- turning queries and keys --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Angles:
    """The cosine and sine of each position's angles, (1 or B, 1, T, D / 2), and which features pair up."""

    cos: Tensor
    sin: Tensor
    order: Order

    def turn(self, x: Tensor) -> Tensor:
        """Turn each pair of features of x (B, H, T, D) by its angle."""
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        if self.order == "halves":
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All angles are so many times smaller: places are squeezed into the range that the model was trained on."""

    kind: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """LLaMA 3.1: slow turns become `factor` times slower, quick ones stay, those between go over smoothly.

    A turn is slow that makes fewer than `low` rounds in `length` tokens, quick one that makes more than `high`.
    """

    kind: ClassVar[str] = "llama3"
    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    length: int = 8192  # that the model was first trained on

    def __post_init__(self) -> None:
        for name in ("factor", "low", "high"):
            check_positive(name, getattr(self, name))
        check_size("length", self.length)
        if self.high <= self.low:
            raise ValueError(f"`high` must be more than `low`={self.low:g}, but is {self.high:g}")


Scaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """`halves` pairs feature i with i + D/2 (LLaMA as published); `interleaved` pairs neighbours (RoFormer)."""

    kind: ClassVar[str] = "rotary"
    base: float = 10_000.0
    order: Order = "halves"
    scaling: Scaling | None = None  # for texts longer than the model was first trained on
    length: int | None = None  # tokens of the longest texts that it was trained on: longer ones are strange to it

    def __post_init__(self) -> None:
        check_positive("base", self.base)
        check_choice("order", self.order, Order)
        if self.length is not None:
            check_size("length", self.length)


class Rotary(Positions):
    """Rotary positions (Su et al. 2021): q.k then depends on the distance between the two tokens alone."""

    def __init__(self, config: RotaryConfig, head_width: int) -> None:
        super().__init__()
        check_even(head_width)
        self.base, self.order, self.head_width = config.base, config.order, head_width
        self.scaling = config.scaling

    def angles(self, at: Tensor) -> Angles:
        pair = torch.arange(0, self.head_width, 2, device=at.device, dtype=torch.float32)
        speed = 1.0 / self.base ** (pair / self.head_width)  # in this order published models were trained with it
        angle = at[..., None] * scaled(speed, self.scaling)  # (T, D / 2) or (B, T, D / 2)
        angle = angle.unsqueeze(-3)  # heads
        return Angles(angle.cos(), angle.sin(), self.order)


def scaled(speed: Tensor, scaling: Scaling | None) -> Tensor:
    """The angle of each pair of features from one place to the next, (D / 2,)."""
    match scaling:
        case None:
            return speed
        case LinearScaling():
            return speed / scaling.factor
        case Llama3Scaling():
            tokens = 2 * math.pi / speed  # of one round
            share = (scaling.length / tokens - scaling.low) / (scaling.high - scaling.low)
            between = (1 - share) * speed / scaling.factor + share * speed
            slow, quick = tokens > scaling.length / scaling.low, tokens < scaling.length / scaling.high
            return torch.where(slow, speed / scaling.factor, torch.where(quick, speed, between))


# --- added to the scores -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RelativeConfig:
    kind: ClassVar[str] = "relative"
    buckets: int = 32
    reach: int = 128  # distances from here on share the last bucket

    def __post_init__(self) -> None:
        check_size("buckets", self.buckets)
        check_size("reach", self.reach)
        if self.buckets % 4:
            raise ValueError(f"`buckets` must be a multiple of 4, but is {self.buckets}")
        if self.reach <= self.buckets:
            raise ValueError(f"`reach` must be more than `buckets`={self.buckets}, but is {self.reach}")


class Relative(Positions):
    """T5's relative bias (Raffel et al. 2020): one learned number per head and bucket of distances."""

    def __init__(self, config: RelativeConfig, heads: int, causal: bool) -> None:
        super().__init__()
        self.buckets, self.reach, self.causal = config.buckets, config.reach, causal
        self.weight = nn.Parameter(torch.empty(config.buckets, heads))
        normal(self.weight, std=0.02)

    def bias(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        distance = k_at[..., None, :] - q_at[..., :, None]  # (Tq, Tk) or (B, Tq, Tk)
        bucket = bucket_of(distance, self.buckets, self.reach, self.causal)
        return with_heads_first(self.weight[bucket])  # (..., Tq, Tk, H) -> (1 or B, H, Tq, Tk)


def bucket_of(distance: Tensor, buckets: int, reach: int, causal: bool) -> Tensor:
    """Near distances have a bucket each, far ones share buckets that widen; both directions, or the past alone."""
    if causal:
        later, away = torch.zeros_like(distance), (-distance).clamp(min=0)
    else:
        buckets //= 2
        later, away = (distance > 0).long() * buckets, distance.abs()
    near = buckets // 2
    growth = torch.log(away.clamp(min=1).float() / near) / math.log(reach / near)
    far = (near + (growth * (buckets - near)).long()).clamp(max=buckets - 1)
    return later + torch.where(away < near, away, far)


@dataclass(frozen=True, kw_only=True)
class AlibiConfig:
    kind: ClassVar[str] = "alibi"


class Alibi(Positions):
    """ALiBi (Press et al. 2022): a penalty that grows with distance, steeper for some heads than for others."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def bias(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        distance = (k_at[..., None, :] - q_at[..., :, None]).abs()  # (Tq, Tk) or (B, Tq, Tk)
        return with_heads_first(-distance[..., None] * alibi_slopes(self.heads, distance.device))


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """2^(-8/H), 2^(-16/H) ... for a power of two; other counts go on with slopes between those. (H,)"""
    power = 2 ** int(math.log2(heads))
    head = torch.arange(heads, device=device)
    exponent = torch.where(head < power, head + 1, head - power + 0.5)
    return 2.0 ** (-8 * exponent / power)


def with_heads_first(bias: Tensor) -> Tensor:
    """(Tq, Tk, H) or (B, Tq, Tk, H) -> (1 or B, H, Tq, Tk)"""
    bias = bias.movedim(-1, -3)
    return bias if bias.dim() == 4 else bias[None]


PositionsConfig = SinusoidalConfig | LearnedConfig | RotaryConfig | RelativeConfig | AlibiConfig


def build_positions(config: PositionsConfig, *, width: int, heads: int, head_width: int, causal: bool) -> Positions:
    match config:
        case SinusoidalConfig():
            return Sinusoidal(config)
        case LearnedConfig():
            return Learned(config, width)
        case RotaryConfig():
            return Rotary(config, head_width)
        case RelativeConfig():
            return Relative(config, heads, causal)
        case AlibiConfig():
            return Alibi(heads)
