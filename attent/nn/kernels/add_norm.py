"""Add & Norm (section 3.1) with dropout (section 5.4) in one pass: norm(x + dropout(y + b)), where y is a product that
still lacks its bias b.

All of it is reading and writing: the less often, the better. Forward reads x and y and writes the sum and its norm;
backward reads the gradient and the sum, and writes both gradients; what was dropped is drawn again from its seed, and
the gradients of the bias and of the norm's own weights are gathered on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attent.nn.kernels import use_device_of
from attent.nn.kernels.dropout_rng import draw_seeds, keep_mask
from attent.nn.kernels.row_reduce import count_programs, sum_rows

BLOCK_ELEMENTS = 1024  # numbers that a program takes at once, unless a row has more


def add_norm(
    x: Tensor,
    y: Tensor,
    y_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout: float,
    *,
    duplicate: bool = False,
) -> tuple[Tensor, Tensor]:
    """(..., E) -> (..., E), and the same again. `lacking` is added to y. With a bias it is LayerNorm, without RMSNorm.

    `twice` writes the numbers two times. Whoever uses them in two places so gets the gradients of both back here, where
    they are added in the pass that reads them: writing a copy is less work than another pass that adds them.
    """
    shape, width = x.shape, x.shape[-1]
    seed = draw_seeds(x.device) if dropout else None
    flat = x.reshape(-1, width), y.reshape(-1, width)
    out, twin, *_ = _add_norm(*flat, y_bias, weight, bias, eps, dropout, seed, duplicate)
    out = out.view(shape)
    return out, twin.view(shape) if duplicate else out


# --- for torch -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("attent::add_norm", mutates_args=())
def _add_norm(
    x: Tensor,
    y: Tensor,
    y_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout: float,
    seed: Tensor | None,
    duplicate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm (N, E), again or nothing, the sum (N, E), and of each row its mean and the inverse of its deviation
    (2, N)."""
    x, y = x.contiguous(), y.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    twin = torch.empty_like(x) if duplicate else x.new_empty(0)
    moments = x.new_empty(2, len(x), dtype=torch.float32)
    block, rows, warps = _choose_launch(x)
    with use_device_of(x):
        _forward_kernel[(triton.cdiv(len(x), rows),)](
            x, y, weight if y_bias is None else y_bias, weight, weight if bias is None else bias,
            x if seed is None else seed, out, twin, total, moments, len(x), x.shape[1], eps, dropout,
            LACKING=y_bias is not None, CENTRED=bias is not None, DROPS=dropout > 0, TWICE=duplicate,
            E=block, ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return out, twin, total, moments


@_add_norm.register_fake
def _(x, y, lacking, weight, bias, eps, dropout, seed, twice):
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    twin = torch.empty_like(like) if twice else x.new_empty(0)
    return like, twin, torch.empty_like(like), x.new_empty(2, len(x), dtype=torch.float32)


@torch.library.custom_op("attent::add_norm_backward", mutates_args=())
def _add_norm_backward(
    grad: Tensor,
    grad_copy: Tensor | None,
    total: Tensor,
    moments: Tensor,
    weight: Tensor,
    centered: bool,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of y (nothing, where they are the same), and of the weight, the bias and what was added to y
    (3, E). `other` is the gradient of the twin."""
    grad = grad.contiguous()
    grad_copy = grad if grad_copy is None else grad_copy.contiguous()
    twice = grad_copy is not grad
    of_x = torch.empty_like(total)
    of_y = torch.empty_like(total) if dropout else total.new_empty(0)
    block, rows, warps = _choose_launch(total)
    count = min(triton.cdiv(len(total), rows), count_programs(total))
    parts = total.new_empty(count, 3, total.shape[1], dtype=torch.float32)
    with use_device_of(grad):
        _backward_kernel[(count,)](
            grad, grad_copy, total, moments, weight, of_x if seed is None else seed, of_x, of_y, parts,
            len(total), total.shape[1], dropout,
            CENTRED=centered, DROPS=dropout > 0, TWICE=twice, E=block, ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return of_x, of_y, sum_rows(parts)


@_add_norm_backward.register_fake
def _(grad, other, total, moments, weight, centred, dropout, seed):
    of_y = torch.empty_like(total) if dropout else total.new_empty(0)
    return torch.empty_like(total), of_y, total.new_empty(3, total.shape[1], dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    _, _, lacking, weight, bias, _, dropout, seed, twice = inputs
    _, _, total, moments = output
    ctx.save_for_backward(total, moments, weight, seed)
    ctx.dtypes = None if lacking is None else lacking.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.dropout, ctx.twice = dropout, twice


def _backward(ctx, grad, other, *_):
    total, moments, weight, seed = ctx.saved_tensors
    of_lacking, of_weight, of_bias = ctx.dtypes
    of_x, of_y, sums = _add_norm_backward(
        grad, other if ctx.twice else None, total, moments, weight, of_bias is not None, ctx.dropout, seed
    )
    return (
        of_x,
        of_y if ctx.dropout else of_x,
        None if of_lacking is None else sums[2].to(of_lacking),
        sums[0].to(of_weight),
        None if of_bias is None else sums[1].to(of_bias),
        *[None] * 4,
    )


_add_norm.register_autograd(_backward, setup_context=_setup_context)


def _choose_launch(x: Tensor) -> tuple[int, int, int]:
    """The width, filled up to a power of 2; rows at once; warps. Measured on an H200."""
    block = triton.next_power_of_2(x.shape[1])
    rows = max(1, BLOCK_ELEMENTS // block)
    return block, rows, max(1, min(16, block * rows // 512))


# --- for the GPU ---------------------------------------------------------------------------------------------------


@triton.jit
def _forward_kernel(
    X, Y, Lacking, Weight, Bias, Seeds, Out, Twin, Total, Moments, N, width, eps, rate,
    LACKING: tl.constexpr, CENTRED: tl.constexpr, DROPS: tl.constexpr, TWICE: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, E)
    inside = (rows < N)[:, None] & (e < width)[None, :]
    place = rows.to(tl.int64)[:, None] * width + e[None, :]
    y = tl.load(Y + place, mask=inside, other=0.0).to(tl.float32)
    if LACKING:
        y += tl.load(Lacking + e, mask=e < width, other=0.0).to(tl.float32)[None, :]
    if DROPS:
        y = tl.where(keep_mask(Seeds, place, rate), y / (1 - rate), 0.0)
    total = tl.load(X + place, mask=inside, other=0.0).to(tl.float32) + y
    total = total.to(Total.dtype.element_ty)
    tl.store(Total + place, total, mask=inside)
    total = total.to(tl.float32)  # as backward will read it
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        mean = tl.sum(total, 1) / width
    centred = tl.where(inside, total - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    weight = tl.load(Weight + e, mask=e < width, other=0.0).to(tl.float32)
    out = centred * scale[:, None] * weight[None, :]
    if CENTRED:
        out += tl.load(Bias + e, mask=e < width, other=0.0).to(tl.float32)[None, :]
    tl.store(Out + place, out.to(Out.dtype.element_ty), mask=inside)
    if TWICE:
        tl.store(Twin + place, out.to(Out.dtype.element_ty), mask=inside)
    tl.store(Moments + rows, mean, mask=rows < N)
    tl.store(Moments + N + rows, scale, mask=rows < N)


@triton.jit
def _backward_kernel(
    Grad, Other, Total, Moments, Weight, Seeds, GradX, GradY, Parts, N, width, rate,
    CENTRED: tl.constexpr, DROPS: tl.constexpr, TWICE: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows after another, `programs` apart; what is summed over rows stays in registers until the end."""
    e = tl.arange(0, E)
    weight = tl.load(Weight + e, mask=e < width, other=0.0).to(tl.float32)
    of_weight = tl.zeros((ROWS, E), tl.float32)
    of_bias = tl.zeros((ROWS, E), tl.float32)
    of_lacking = tl.zeros((ROWS, E), tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < N)[:, None] & (e < width)[None, :]
        place = rows.to(tl.int64)[:, None] * width + e[None, :]
        grad = tl.load(Grad + place, mask=inside, other=0.0).to(tl.float32)
        if TWICE:
            grad += tl.load(Other + place, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(Total + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(Moments + rows, mask=rows < N, other=0.0)
        scale = tl.load(Moments + N + rows, mask=rows < N, other=0.0)
        normed = tl.where(inside, (total - mean[:, None]) * scale[:, None], 0.0)
        of_weight += grad * normed
        if CENTRED:
            of_bias += grad
        grad = grad * weight[None, :]
        along = tl.sum(grad * normed, 1) / width
        of_total = grad - normed * along[:, None]
        if CENTRED:
            of_total -= (tl.sum(grad, 1) / width)[:, None]
        of_total = of_total * scale[:, None]
        tl.store(GradX + place, of_total.to(GradX.dtype.element_ty), mask=inside)
        if DROPS:
            of_y = tl.where(keep_mask(Seeds, place, rate), of_total / (1 - rate), 0.0)
            tl.store(GradY + place, of_y.to(GradY.dtype.element_ty), mask=inside)
            of_lacking += of_y
        else:
            of_lacking += of_total
    parts = Parts + tl.program_id(0) * 3 * width + e
    tl.store(parts, tl.sum(of_weight, 0), mask=e < width)
    tl.store(parts + width, tl.sum(of_bias, 0), mask=e < width)
    tl.store(parts + 2 * width, tl.sum(of_lacking, 0), mask=e < width)
