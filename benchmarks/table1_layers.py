"""The layers that table 1 of the paper compares, alone and in a stack; `table1` measures them.

Each layer is (B, T, E) -> (B, T, E). "products" are the two matrix products of attention with the softmax between them:
the O(n^2 d) of table 1. A whole attention layer also has its four projections, which are O(n d^2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn import Attention, Mask, Packing, StackConfig, attend
from attent.nn.attention import concat_heads
from attent.nn.block import Residual
from attent.nn.recurrent import make_lstm

HEAD_WIDTH = 64  # of every attention, so that the number of heads grows with the width as in the paper
KERNEL, WINDOW = 3, 128  # defaults: k, and r = keys that a query may attend to (half of them before it)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One layer at one size."""

    layer: str
    length: int  # n
    width: int  # d
    batch: int
    kernel: int = KERNEL  # k of a convolution
    window: int = WINDOW  # r of windowed attention

    @property
    def key(self) -> str:
        sizes = f"n={self.length} d={self.width} B={self.batch}"
        own = f" k={self.kernel}" if self.layer == "convolution" else ""
        return f"{self.layer} {sizes}{own}" + (f" r={self.window}" if self.layer.startswith("windowed") else "")


class BuiltLayer(NamedTuple):
    """A forward pass, and the tensors whose gradients the backward pass computes."""

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    theory: str  # complexity in table 1
    build: Callable[[Point, torch.device, torch.dtype], BuiltLayer]
    count_flops: Callable[[Point], int]  # of the forward pass over one sequence


# --- attention -------------------------------------------------------------------------------------------------------


def build_attention(backend: str) -> Callable[[Point, torch.device, torch.dtype], BuiltLayer]:
    def build(point: Point, device: torch.device, dtype: torch.dtype) -> BuiltLayer:
        layer, mask = make_attention(point.width).to(device, dtype), Mask()
        layer.backend = backend
        x = make_input(point, device, dtype)
        return BuiltLayer(lambda: layer(x, layer.project_keys_values(x), mask), [x, *layer.parameters()])

    return build


def build_products(backend: str, windowed: bool = False) -> Callable[[Point, torch.device, torch.dtype], BuiltLayer]:
    def build(point: Point, device: torch.device, dtype: torch.dtype) -> BuiltLayer:
        half = point.window // 2
        mask, q, k, v = Mask(window=(half, half) if windowed else None), *make_heads(point, device, dtype)
        return BuiltLayer(lambda: attend(q, k, v, mask, backend=backend), [q, k, v])

    return build


def build_windowed(point: Point, device: torch.device, dtype: torch.dtype) -> BuiltLayer:
    layer, x = make_attention(point.width).to(device, dtype), make_input(point, device, dtype)
    mask = build_block_mask(point, device)

    def forward() -> Tensor:
        kv = layer.project_keys_values(x)
        out = attend_in_blocks(layer.project_queries(x), kv.keys, kv.values, mask, point.window)
        return layer.output(concat_heads(out))

    return BuiltLayer(forward, [x, *layer.parameters()])


def build_windowed_products(point: Point, device: torch.device, dtype: torch.dtype) -> BuiltLayer:
    q, k, v = make_heads(point, device, dtype)
    mask = build_block_mask(point, device)
    return BuiltLayer(lambda: attend_in_blocks(q, k, v, mask, point.window), [q, k, v])


def build_block_mask(point: Point, device: torch.device) -> Mask:
    """The window as the mask of `attend_in_blocks`, whose rows are blocks: the positions are those in the sequence, and
    keys before its beginning or after its end are padding."""
    half, (B, T) = point.window // 2, (point.batch, point.length)
    blocks = T // half
    queries = torch.arange(T, device=device).view(blocks, half).repeat(B, 1)
    keys = torch.arange(-half, T + half, device=device).unfold(0, 3 * half, half).repeat(B, 1)
    ends = torch.zeros(B * blocks, 1, dtype=torch.int64, device=device)
    padding = (keys < 0) | (keys >= T)
    packing = (
        Packing(torch.zeros_like(queries), queries, ends + half, half),
        Packing(-padding.long(), keys, ends + 3 * half, 3 * half),
    )
    return Mask(window=(half, half), packing=packing)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: int) -> Tensor:
    """Attend to `window` / 2 keys on each side of a query and to its own, in O(r n d): SDPA has a mask for windows, but
    computes all n^2 scores, so each block of queries is given the keys of three blocks only."""
    half, (B, _, T, _) = window // 2, q.shape
    q = q.unflatten(2, (T // half, half)).transpose(1, 2).flatten(0, 1)  # (B, H, T, D) -> (B * blocks, H, half, D)
    k, v = (
        F.pad(x, (0, 0, half, half)).unfold(2, 3 * half, half).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v)
    )  # (B, H, T, D) -> (B * blocks, H, 3 * half, D)
    out = attend(q, k, v, mask, backend="fused")
    return out.unflatten(0, (B, T // half)).transpose(1, 2).flatten(2, 3)


def make_attention(width: int, head_width: int = HEAD_WIDTH) -> Attention:
    return Attention(StackConfig(width=width, heads=width // head_width))


def make_input(point: Point, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(point.batch, point.length, point.width, device=device, dtype=dtype, requires_grad=True)


def make_heads(point: Point, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v as projections return them: (B, T, H, D) in memory."""
    shape = point.batch, point.length, point.width // HEAD_WIDTH, HEAD_WIDTH
    return [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


# --- recurrence and convolution --------------------------------------------------------------------------------------


def make_rnn(inputs: int, width: int) -> nn.RNN:
    """A recurrent layer in its smallest form: h = tanh(W x + U h)."""
    return nn.RNN(inputs, width, batch_first=True)


def build_recurrent(make_layer: Callable[[int, int], nn.RNNBase]) -> Callable[..., BuiltLayer]:
    def build(point: Point, device: torch.device, dtype: torch.dtype) -> BuiltLayer:
        layer = make_layer(point.width, point.width).to(device, dtype)
        x = make_input(point, device, dtype)
        return BuiltLayer(lambda: layer(x)[0], [x, *layer.parameters()])

    return build


def build_convolution(point: Point, device: torch.device, dtype: torch.dtype) -> BuiltLayer:
    """A convolution over positions from E features to E, as k matrix products (fairseq's ConvTBC): input (T, B, E)."""
    T, B, E = point.length, point.batch, point.width
    x = torch.randn(T, B, E, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(point.kernel, E, E, device=device, dtype=dtype, requires_grad=True)
    bias = torch.zeros(E, device=device, dtype=dtype, requires_grad=True)
    return BuiltLayer(lambda: torch.conv_tbc(x, weight, bias, point.kernel // 2), [x, weight, bias])


# --- FLOPs -----------------------------------------------------------------------------------------------------------


def count_projection_flops(point: Point) -> int:
    return 8 * point.length * point.width**2  # W^Q, W^K, W^V, W^O


def count_product_flops(point: Point) -> int:
    return 4 * point.length**2 * point.width  # scores, and the weighted sum of values


def count_windowed_flops(point: Point) -> int:
    return 4 * point.length * point.window * point.width


LAYERS = {
    "attention explicit": LayerKind(
        theory="n² d + n d²",
        build=build_attention("explicit"),
        count_flops=lambda p: count_projection_flops(p) + count_product_flops(p),
    ),
    "attention fused": LayerKind(
        theory="n² d + n d²",
        build=build_attention("fused"),
        count_flops=lambda p: count_projection_flops(p) + count_product_flops(p),
    ),
    "products explicit": LayerKind(theory="n² d", build=build_products("explicit"), count_flops=count_product_flops),
    "products fused": LayerKind(theory="n² d", build=build_products("fused"), count_flops=count_product_flops),
    "windowed attention": LayerKind(
        theory="r n d + n d²",
        build=build_windowed,
        count_flops=lambda p: count_projection_flops(p) + count_windowed_flops(p),
    ),
    "windowed products": LayerKind(theory="r n d", build=build_windowed_products, count_flops=count_windowed_flops),
    "windowed products flex": LayerKind(
        theory="r n d", build=build_products("flex", windowed=True), count_flops=count_windowed_flops
    ),
    "recurrent": LayerKind(
        theory="n d²", build=build_recurrent(make_rnn), count_flops=lambda p: 4 * p.length * p.width**2
    ),
    "LSTM": LayerKind(
        theory="n d²", build=build_recurrent(make_lstm), count_flops=lambda p: 16 * p.length * p.width**2
    ),
    "convolution": LayerKind(
        theory="k n d²", build=build_convolution, count_flops=lambda p: 2 * p.kernel * p.length * p.width**2
    ),
}


def find_flop_crossover(attention: str, other: str, width: int) -> float:
    """Return the length above which attention takes more FLOPs; 0 if it does at every length.

    Per token both are linear in the length, and only the products of attention grow with it.
    """
    first, second = (Point(layer=attention, length=n, width=width, batch=1) for n in (1, 2))
    per_token = [LAYERS[attention].count_flops(point) / point.length for point in (first, second)]
    growth = per_token[1] - per_token[0]
    missing = LAYERS[other].count_flops(Point(layer=other, length=1, width=width, batch=1)) - (per_token[0] - growth)
    return max(0.0, missing / growth)


# --- path length -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PathSizes:
    layers: int = 6
    width: int = 64
    kernel: int = KERNEL
    window: int = 16
    rows: int = 8  # random inputs, of which the root mean square is taken


def measure_gradient_path(layer: str, length: int, sizes: PathSizes) -> float:
    """Return the norm of the gradient that reaches the first input from the last output, through a stack of layers at
    initialization, each with the residual connection and the norm of figure 1.

    In float64: through an LSTM it falls below the smallest float32.
    """
    torch.manual_seed(length)
    config = StackConfig(width=sizes.width, heads=4, dropout=0.0)
    modules = [PATH_LAYERS[layer](sizes).double() for _ in range(sizes.layers)]
    residuals = [Residual(config).double() for _ in range(sizes.layers)]
    x = torch.randn(sizes.rows, length, sizes.width, dtype=torch.float64, requires_grad=True)
    direction = F.normalize(torch.randn(sizes.rows, sizes.width, dtype=torch.float64), dim=-1)
    y = x
    for residual, module in zip(residuals, modules, strict=True):
        y = residual(y, module)
    (gradient,) = torch.autograd.grad((y[:, -1] * direction).sum(), x)
    return float(gradient[:, 0].square().sum(-1).mean().sqrt())


class PathAttention(nn.Module):
    def __init__(self, sizes: PathSizes, window: int | None) -> None:
        super().__init__()
        self.attention = make_attention(sizes.width, sizes.width // 4)
        self.window = None if window is None else (window // 2, window // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.attention.project_keys_values(x), Mask(window=self.window))


class PathRecurrence(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


class PathConvolution(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.layer = nn.Conv1d(width, width, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return out


PATH_LAYERS: dict[str, Callable[[PathSizes], nn.Module]] = {
    "self-attention": lambda sizes: PathAttention(sizes, None),
    "windowed attention": lambda sizes: PathAttention(sizes, sizes.window),
    "recurrent": lambda sizes: PathRecurrence(make_rnn(sizes.width, sizes.width)),
    "LSTM": lambda sizes: PathRecurrence(make_lstm(sizes.width, sizes.width)),
    "convolution": lambda sizes: PathConvolution(sizes.width, sizes.kernel),
}


def compute_reach(layer: str, sizes: PathSizes) -> int | None:
    """Return the largest distance between positions that a stack connects; None: unlimited."""
    sides = {"windowed attention": sizes.window // 2, "convolution": sizes.kernel // 2}
    return sizes.layers * sides[layer] if layer in sides else None
