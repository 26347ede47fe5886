"""max(0, x W + b), the first half of equation 2: bias and ReLU in the epilogue of the product. Backward masks the
gradient and sums it into the bias's gradient in one pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attent.nn.kernels import get_compute_dtype, use_device_of
from attent.nn.kernels.row_reduce import choose_num_programs, sum_rows

ROWS, COLUMNS = 16, 256  # of a tile


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(..., E) times (ffn_width, E) -> (..., ffn_width)"""
    dtype = get_compute_dtype(x)
    flat = x.reshape(-1, x.shape[-1]).to(dtype)
    return _linear_relu(flat, weight.to(dtype), bias.to(dtype)).view(*x.shape[:-1], len(weight))


# --- custom operators ----------------------------------------------------------------------------------------------


@torch.library.custom_op("attent::linear_relu", mutates_args=())
def _linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, x, weight.t())


@_linear_relu.register_fake
def _(x, weight, bias):
    return x.new_empty(len(x), len(weight))


@torch.library.custom_op("attent::relu_backward", mutates_args=())
def _relu_backward(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient where the output is positive, and its sum over all rows."""
    grad = grad.contiguous()
    grad_hidden = torch.empty_like(grad)
    N, width = grad.shape
    num_columns = triton.cdiv(width, COLUMNS)
    num_rows = max(1, min(triton.cdiv(N, ROWS), choose_num_programs(grad) // num_columns))
    parts = grad.new_empty(num_rows, width, dtype=torch.float32)
    with use_device_of(grad):
        _relu_backward_kernel[(num_columns, num_rows)](
            grad, out, grad_hidden, parts, N, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )
    return grad_hidden, sum_rows(parts)


@_relu_backward.register_fake
def _(grad, out):
    like = torch.empty_like(grad, memory_format=torch.contiguous_format)
    return like, grad.new_empty(grad.shape[1], dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output)


def _backward(ctx, grad):
    x, weight, out = ctx.saved_tensors
    grad, grad_bias = _relu_backward(grad, out)
    return grad @ weight, grad.t() @ x, grad_bias.to(x.dtype)


_linear_relu.register_autograd(_backward, setup_context=_setup_context)


# --- Triton kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _relu_backward_kernel(Grad, Out, GradHidden, Parts, N, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(tl.program_id(1) * ROWS, N, tl.num_programs(1) * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < N)[:, None] & (columns < width)[None, :]
        offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
        grad = tl.load(Grad + offsets, mask=inside, other=0.0)
        out = tl.load(Out + offsets, mask=inside, other=0.0)
        grad = tl.where(out > 0, grad, 0.0).to(GradHidden.dtype.element_ty)
        tl.store(GradHidden + offsets, grad, mask=inside)
        total += grad.to(tl.float32)
    tl.store(Parts + tl.program_id(1) * width + columns, tl.sum(total, 0), mask=columns < width)
