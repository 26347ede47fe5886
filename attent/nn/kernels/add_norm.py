"""Add & Norm (section 3.1) with dropout (section 5.4) in one pass: norm(x + dropout(y + b)), where y is a product
without its bias b.

The operation is bound by memory bandwidth. Forward reads x and y and writes the sum and its norm; backward reads the
gradient and the sum and writes both gradients. It draws the dropout mask again from its seeds, and accumulates the
gradients of the bias and of the norm's weights in the same pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attent.nn.kernels import use_device_of
from attent.nn.kernels.row_reduce import choose_num_programs, draw_seeds, keep_mask, sum_rows

BLOCK_ELEMENTS = 1024  # elements per program and iteration, unless a row has more


def fused_add_norm(
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
    """(..., E) -> (..., E), and a copy or the same tensor. `y_bias` is added to y. LayerNorm with `bias`, else RMSNorm.

    With `duplicate` the result is written twice. Its two users then return two gradients, which the backward kernel
    adds while it reads them: that is cheaper than another pass that adds them.
    """
    shape, width = x.shape, x.shape[-1]
    seed = draw_seeds(x.device) if dropout else None
    flat = x.reshape(-1, width), y.reshape(-1, width)
    out, copy, *_ = add_norm(*flat, y_bias, weight, bias, eps, dropout, seed, duplicate)
    out = out.view(shape)
    return out, copy.view(shape) if duplicate else out


# --- custom operators ----------------------------------------------------------------------------------------------


@torch.library.custom_op("attent::add_norm", mutates_args=())
def add_norm(
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
    """Return the norm (N, E), its copy or an empty tensor, the sum (N, E), and the mean and inverse standard deviation
    of each row (2, N)."""
    x, y = x.contiguous(), y.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    copy = torch.empty_like(x) if duplicate else x.new_empty(0)
    moments = x.new_empty(2, len(x), dtype=torch.float32)
    block, rows, warps = _choose_launch(x)
    with use_device_of(x):
        _forward_kernel[(triton.cdiv(len(x), rows),)](
            x, y, weight if y_bias is None else y_bias, weight, weight if bias is None else bias,
            x if seed is None else seed, out, copy, total, moments, len(x), x.shape[1], eps, dropout,
            HAS_Y_BIAS=y_bias is not None, LAYER_NORM=bias is not None, HAS_DROPOUT=dropout > 0, DUPLICATE=duplicate,
            E=block, ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return out, copy, total, moments


@add_norm.register_fake
def _(x, y, y_bias, weight, bias, eps, dropout, seed, duplicate):
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    copy = torch.empty_like(like) if duplicate else x.new_empty(0)
    return like, copy, torch.empty_like(like), x.new_empty(2, len(x), dtype=torch.float32)


@torch.library.custom_op("attent::add_norm_backward", mutates_args=())
def _add_norm_backward(
    grad: Tensor,
    grad_copy: Tensor | None,
    total: Tensor,
    moments: Tensor,
    weight: Tensor,
    layer_norm: bool,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of y (empty, where it is the same), and of weight, bias and y_bias (3, E)."""
    grad = grad.contiguous()
    grad_copy = grad if grad_copy is None else grad_copy.contiguous()
    duplicate = grad_copy is not grad
    grad_x = torch.empty_like(total)
    grad_y = torch.empty_like(total) if dropout else total.new_empty(0)
    block, rows, warps = _choose_launch(total)
    count = min(triton.cdiv(len(total), rows), choose_num_programs(total))
    parts = total.new_empty(count, 3, total.shape[1], dtype=torch.float32)
    with use_device_of(grad):
        _backward_kernel[(count,)](
            grad, grad_copy, total, moments, weight, grad_x if seed is None else seed, grad_x, grad_y, parts,
            len(total), total.shape[1], dropout,
            LAYER_NORM=layer_norm, HAS_DROPOUT=dropout > 0, DUPLICATE=duplicate, E=block, ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return grad_x, grad_y, sum_rows(parts)


@_add_norm_backward.register_fake
def _(grad, grad_copy, total, moments, weight, layer_norm, dropout, seed):
    grad_y = torch.empty_like(total) if dropout else total.new_empty(0)
    return torch.empty_like(total), grad_y, total.new_empty(3, total.shape[1], dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    _, _, y_bias, weight, bias, _, dropout, seed, duplicate = inputs
    _, _, total, moments = output
    ctx.save_for_backward(total, moments, weight, seed)
    ctx.dtypes = None if y_bias is None else y_bias.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.dropout, ctx.duplicate = dropout, duplicate


def _backward(ctx, grad, grad_copy, *_):
    total, moments, weight, seed = ctx.saved_tensors
    y_bias_dtype, weight_dtype, bias_dtype = ctx.dtypes
    grad_x, grad_y, sums = _add_norm_backward(
        grad, grad_copy if ctx.duplicate else None, total, moments, weight, bias_dtype is not None, ctx.dropout, seed
    )
    return (
        grad_x,
        grad_y if ctx.dropout else grad_x,
        None if y_bias_dtype is None else sums[2].to(y_bias_dtype),
        sums[0].to(weight_dtype),
        None if bias_dtype is None else sums[1].to(bias_dtype),
        *[None] * 4,
    )


add_norm.register_autograd(_backward, setup_context=_setup_context)


def _choose_launch(x: Tensor) -> tuple[int, int, int]:
    """Return the width rounded up to a power of 2, rows per iteration, and warps. Tuned on an H200."""
    block = triton.next_power_of_2(x.shape[1])
    rows = max(1, BLOCK_ELEMENTS // block)
    return block, rows, max(1, min(16, block * rows // 512))


# --- Triton kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _forward_kernel(
    X, Y, YBias, Weight, Bias, Seeds, Out, Copy, Total, Moments, N, width, eps, rate,
    HAS_Y_BIAS: tl.constexpr, LAYER_NORM: tl.constexpr, HAS_DROPOUT: tl.constexpr, DUPLICATE: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, E)
    inside = (rows < N)[:, None] & (e < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * width + e[None, :]
    y = tl.load(Y + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y_BIAS:
        y += tl.load(YBias + e, mask=e < width, other=0.0).to(tl.float32)[None, :]
    if HAS_DROPOUT:
        y = tl.where(keep_mask(Seeds, offsets, rate), y / (1 - rate), 0.0)
    total = tl.load(X + offsets, mask=inside, other=0.0).to(tl.float32) + y
    total = total.to(Total.dtype.element_ty)
    tl.store(Total + offsets, total, mask=inside)
    total = total.to(tl.float32)  # rounded, as backward reads it
    mean = tl.zeros((ROWS,), tl.float32)
    if LAYER_NORM:
        mean = tl.sum(total, 1) / width
    centered = tl.where(inside, total - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 1) / width + eps)
    weight = tl.load(Weight + e, mask=e < width, other=0.0).to(tl.float32)
    out = centered * scale[:, None] * weight[None, :]
    if LAYER_NORM:
        out += tl.load(Bias + e, mask=e < width, other=0.0).to(tl.float32)[None, :]
    tl.store(Out + offsets, out.to(Out.dtype.element_ty), mask=inside)
    if DUPLICATE:
        tl.store(Copy + offsets, out.to(Out.dtype.element_ty), mask=inside)
    tl.store(Moments + rows, mean, mask=rows < N)
    tl.store(Moments + N + rows, scale, mask=rows < N)


@triton.jit
def _backward_kernel(
    Grad, GradCopy, Total, Moments, Weight, Seeds, GradX, GradY, Parts, N, width, rate,
    LAYER_NORM: tl.constexpr, HAS_DROPOUT: tl.constexpr, DUPLICATE: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Iterate over rows with a stride of the number of programs; sums over rows stay in registers."""
    e = tl.arange(0, E)
    weight = tl.load(Weight + e, mask=e < width, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((ROWS, E), tl.float32)
    grad_bias = tl.zeros((ROWS, E), tl.float32)
    grad_y_bias = tl.zeros((ROWS, E), tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < N)[:, None] & (e < width)[None, :]
        offsets = rows.to(tl.int64)[:, None] * width + e[None, :]
        grad = tl.load(Grad + offsets, mask=inside, other=0.0).to(tl.float32)
        if DUPLICATE:
            grad += tl.load(GradCopy + offsets, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(Total + offsets, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(Moments + rows, mask=rows < N, other=0.0)
        scale = tl.load(Moments + N + rows, mask=rows < N, other=0.0)
        normed = tl.where(inside, (total - mean[:, None]) * scale[:, None], 0.0)
        grad_weight += grad * normed
        if LAYER_NORM:
            grad_bias += grad
        grad = grad * weight[None, :]
        projection = tl.sum(grad * normed, 1) / width
        grad_total = grad - normed * projection[:, None]
        if LAYER_NORM:
            grad_total -= (tl.sum(grad, 1) / width)[:, None]
        grad_total = grad_total * scale[:, None]
        tl.store(GradX + offsets, grad_total.to(GradX.dtype.element_ty), mask=inside)
        if HAS_DROPOUT:
            grad_y = tl.where(keep_mask(Seeds, offsets, rate), grad_total / (1 - rate), 0.0)
            tl.store(GradY + offsets, grad_y.to(GradY.dtype.element_ty), mask=inside)
            grad_y_bias += grad_y
        else:
            grad_y_bias += grad_total
    parts = Parts + tl.program_id(0) * 3 * width + e
    tl.store(parts, tl.sum(grad_weight, 0), mask=e < width)
    tl.store(parts + width, tl.sum(grad_bias, 0), mask=e < width)
    tl.store(parts + 2 * width, tl.sum(grad_y_bias, 0), mask=e < width)
