"""Attention inside rows of packed sentences, many of which are shorter than the tiles of a GPU's matrix units.

A tile is a run of neighbouring tokens of a row, whichever sentences they belong to. It iterates over the keys from the
start of its first sentence to the end of its last, and compares segment indices to mask other sentences: a tile is as
full with sentences of 15 tokens as with sentences of 150. Flash attention gives each sentence its own tiles, most of
which stay nearly empty.

Queries, keys and values are read as one product writes them, (B, T, 3, H, D), or queries and memory separately, and
gradients are written in the same layout, without a copy. The gradients of that product's biases are sums over all
tokens, to which each tile adds its part. The rule is `Mask.allows` for a packing, causal or not.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attent.nn.kernels import use_device_of
from attent.nn.kernels.row_reduce import draw_seeds, keep_mask, sum_rows
from attent.nn.masks import Mask

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)  # kernels compute powers of 2


def attend_packed_qkv(
    qkv: Tensor,
    kv: Tensor | None,
    qkv_bias: Tensor | None,
    kv_bias: Tensor | None,
    mask: Mask,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend inside packed sentences: (B, H, Tq, D). The first four arguments are a `fused.FusedQKV`."""
    assert mask.packing is not None
    queries, keys = mask.packing
    seed = draw_seeds(qkv.device) if dropout else None
    layout = [x.contiguous() for x in (queries.segments, queries.ends, keys.segments, keys.ends)]
    out, _ = _packed_attention(
        ensure_dense(qkv),
        None if kv is None else ensure_dense(kv),
        qkv_bias,
        kv_bias,
        *layout,
        mask.causal,
        scale,
        dropout,
        seed,
    )
    return out.transpose(1, 2)


def ensure_dense(x: Tensor) -> Tensor:
    """Make the features of a head contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


# --- custom operators ----------------------------------------------------------------------------------------------


@torch.library.custom_op("attent::packed_attention", mutates_args=())
def _packed_attention(
    qkv: Tensor,
    kv: Tensor | None,
    qkv_bias: Tensor | None,
    kv_bias: Tensor | None,
    segments_q: Tensor,
    ends_q: Tensor,
    segments_k: Tensor,
    ends_k: Tensor,
    causal: bool,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output (B, Tq, H, D), and the logarithm of each query's softmax denominator (B, H, Tq)."""
    q, k, v = _split_qkv(qkv, kv)
    B, Tq, H, D = q.shape
    out = qkv.new_empty(B, Tq, H, D)
    log_sums = qkv.new_empty(B, H, Tq, dtype=torch.float32)
    tile = choose_tile_shape(qkv)
    grid = (H, triton.cdiv(Tq, tile.own_tokens), B)
    with use_device_of(qkv):
        _forward_kernel[grid](
            q, k, v, out, log_sums,
            segments_q, ends_q, segments_k, ends_k, segments_q if seed is None else seed,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            Tq, k.shape[1], ends_k.shape[1], H, scale * LOG2_E, dropout,
            CAUSAL=causal, HAS_DROPOUT=dropout > 0,
            D=D, M=tile.own_tokens, N=tile.other_tokens, IEEE_FP32=tile.ieee_fp32,
            num_warps=4, num_stages=1, maxnreg=tile.max_registers,
        )  # fmt: skip
    return out, log_sums


@_packed_attention.register_fake
def _(qkv, *_):
    B, Tq, _, H, D = qkv.shape
    return qkv.new_empty(B, Tq, H, D), qkv.new_empty(B, H, Tq, dtype=torch.float32)


@torch.library.custom_op("attent::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad: Tensor,
    out: Tensor,
    log_sums: Tensor,
    qkv: Tensor,
    kv: Tensor | None,
    qkv_bias: Tensor | None,
    kv_bias: Tensor | None,
    segments_q: Tensor,
    ends_q: Tensor,
    segments_k: Tensor,
    ends_k: Tensor,
    causal: bool,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `qkv`, of `kv` (empty, where it is None) and of the biases (3, H, D)."""
    grad_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    grad_kv = qkv.new_empty(0) if kv is None else torch.empty_like(kv, memory_format=torch.contiguous_format)
    q, k, v = _split_qkv(qkv, kv)
    dq, dk, dv = _split_qkv(grad_qkv, None if kv is None else grad_kv)
    grad = grad if grad.stride()[1:] == out.stride()[1:] else grad.contiguous()
    B, Tq, H, D = q.shape
    tile = choose_tile_shape(qkv)
    blocks = max(triton.cdiv(Tq, tile.own_tokens), triton.cdiv(k.shape[1], tile.own_tokens))
    has_bias = qkv_bias is not None
    sums = qkv.new_empty(B * blocks if has_bias else 0, 3, H, D, dtype=torch.float32)
    with use_device_of(qkv):
        _backward_kernel[(2 * H, blocks, B)](
            q, k, v, out, grad, log_sums, dq, dk, dv, sums,
            segments_q, ends_q, segments_k, ends_k, segments_q if seed is None else seed,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            dq.stride(0), dq.stride(1), dq.stride(2), dk.stride(0), dk.stride(1), dk.stride(2), grad.stride(0),
            Tq, k.shape[1], ends_k.shape[1], H, scale * LOG2_E, dropout,
            CAUSAL=causal, HAS_DROPOUT=dropout > 0, HAS_BIAS=has_bias,
            D=D, M=tile.own_tokens, N=tile.other_tokens, IEEE_FP32=tile.ieee_fp32,
            num_warps=4, num_stages=1, maxnreg=tile.max_registers,
        )  # fmt: skip
    return grad_qkv, grad_kv, sum_rows(sums) if has_bias else sums


@_packed_attention_backward.register_fake
def _(grad, out, log_sums, qkv, kv, qkv_bias, *_):
    grad_kv = qkv.new_empty(0) if kv is None else torch.empty_like(kv, memory_format=torch.contiguous_format)
    H, D = qkv.shape[-2:]
    grad_biases = qkv.new_empty(*((0, 3, H, D) if qkv_bias is None else (3, H, D)), dtype=torch.float32)
    return torch.empty_like(qkv, memory_format=torch.contiguous_format), grad_kv, grad_biases


def _setup_context(ctx, inputs, output):
    *tensors, causal, scale, dropout, seed = inputs
    ctx.save_for_backward(*tensors, seed, *output)
    ctx.options = causal, scale, dropout


def _backward(ctx, grad, _):
    *tensors, seed, out, log_sums = ctx.saved_tensors
    _, kv, qkv_bias, kv_bias, *_ = tensors
    grad_qkv, grad_kv, grad_biases = _packed_attention_backward(grad, out, log_sums, *tensors, *ctx.options, seed)
    return (
        grad_qkv,
        None if kv is None else grad_kv,
        None if qkv_bias is None else (grad_biases if kv is None else grad_biases[:1]).to(qkv_bias.dtype),
        None if kv_bias is None else grad_biases[1:].to(kv_bias.dtype),
        *[None] * 8,
    )


_packed_attention.register_autograd(_backward, setup_context=_setup_context)


def _split_qkv(qkv: Tensor, kv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as views, (B, T, H, D) each."""
    if kv is None:
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    return qkv[:, :, 0], kv[:, :, 0], kv[:, :, 1]


class TileShape(NamedTuple):
    """Tile sizes of a launch."""

    own_tokens: int  # of the side that a program owns: queries, or keys in the backward pass of keys
    other_tokens: int  # of the other side, per iteration
    ieee_fp32: bool = False  # products in full float32 instead of TF32
    max_registers: int | None = None  # per thread: with more, occupancy is too low


def choose_tile_shape(x: Tensor) -> TileShape:
    """Tuned on an H200."""
    if x.dtype == torch.float32:
        return TileShape(32, 32, ieee_fp32=True)
    return TileShape(64, 32, max_registers=128 if x.shape[-1] <= 64 else None)


# --- Triton kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _load_span(segments, ends, S):
    """Return the range in which the other side holds the sentences of a tile; (0, 0) for padding only."""
    last = tl.max(segments, 0)
    first = tl.min(tl.where(segments >= 0, segments, S), 0)
    low = tl.load(ends + first - 1, mask=(first > 0) & (last >= 0), other=0)
    high = tl.load(ends + last, mask=last >= 0, other=0)
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def _forward_kernel(
    Q, K, V, Out, LogSums, SegmentsQ, EndsQ, SegmentsK, EndsK, Seeds,
    q_row, q_token, q_head, k_row, k_token, k_head,
    Tq, Tk, S, H, scale, rate,
    CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, IEEE_FP32: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head."""
    precision: tl.constexpr = "ieee" if IEEE_FP32 else "tf32"
    h, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, D)
    rows = block * M + tl.arange(0, M)
    inside = rows < Tq
    own_segments = tl.load(SegmentsQ + b * Tq + rows, mask=inside, other=-1).to(tl.int32)
    low, high = _load_span(own_segments, EndsK + b * S, S)
    if CAUSAL:
        high = tl.minimum(high, block * M + M)
    Q += b * q_row + h * q_head
    K += b * k_row + h * k_head
    V += b * k_row + h * k_head
    q = tl.load(Q + rows[:, None] * q_token + d[None, :], mask=inside[:, None], other=0.0)
    max_score = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    for start in range(low, high, N):
        columns = start + tl.arange(0, N)
        valid = columns < high
        other_segments = tl.load(SegmentsK + b * Tk + columns, mask=valid, other=-2).to(tl.int32)
        k = tl.load(K + columns[:, None] * k_token + d[None, :], mask=valid[:, None], other=0.0)
        v = tl.load(V + columns[:, None] * k_token + d[None, :], mask=valid[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        visible = own_segments[:, None] == other_segments[None, :]
        if CAUSAL:
            visible = visible & (rows[:, None] >= columns[None, :])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(max_score - base)
        total = total * rescale + tl.sum(probs, 1)
        if HAS_DROPOUT:
            index = ((b * H + h) * Tq + rows[:, None]) * Tk + columns[None, :]
            probs = tl.where(keep_mask(Seeds, index, rate), probs / (1 - rate), 0.0)
        out = out * rescale[:, None] + tl.dot(probs.to(v.dtype), v, input_precision=precision)
        max_score = new_max
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    log_sum = tl.where(total == 0, 0.0, max_score + tl.log2(tl.where(total == 0, 1.0, total)))
    tl.store(LogSums + (b * H + h) * Tq + rows, log_sum, mask=inside)
    offsets = ((b * Tq + rows[:, None]) * H + h) * D + d[None, :]
    tl.store(Out + offsets, out.to(Out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _backward_kernel(
    Q, K, V, Out, Grad, LogSums, GradQ, GradK, GradV, Sums,
    SegmentsQ, EndsQ, SegmentsK, EndsK, Seeds,
    q_row, q_token, q_head, k_row, k_token, k_head,
    gq_row, gq_token, gq_head, gk_row, gk_token, gk_head, grad_row,
    Tq, Tk, S, H, scale, rate,
    CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, IEEE_FP32: tl.constexpr,
):  # fmt: skip
    """One tile of keys, or one of queries, of one head."""
    h, block, b = tl.program_id(0) % H, tl.program_id(1), tl.program_id(2).to(tl.int64)
    Q += b * q_row + h * q_head
    K += b * k_row + h * k_head
    V += b * k_row + h * k_head
    Out += (b * Tq * H + h) * D
    Grad += b * grad_row + h * D
    LogSums += (b * H + h) * Tq
    SegmentsQ += b * Tq
    SegmentsK += b * Tk
    Sums += ((b * tl.num_programs(1) + block) * 3 * H + h) * D
    if tl.program_id(0) < H:
        _backward_keys(
            Q, K, V, Out, Grad, LogSums,
            GradK + b * gk_row + h * gk_head, GradV + b * gk_row + h * gk_head, Sums,
            SegmentsQ, EndsQ + b * S, SegmentsK, Seeds, q_token, k_token, gk_token,
            block, (b * H + h) * Tq, Tq, Tk, S, H, scale, rate, CAUSAL, HAS_DROPOUT, HAS_BIAS, D, M, N, IEEE_FP32,
        )  # fmt: skip
    else:
        _backward_queries(
            Q, K, V, Out, Grad, LogSums, GradQ + b * gq_row + h * gq_head, Sums,
            SegmentsQ, SegmentsK, EndsK + b * S, Seeds, q_token, k_token, gq_token,
            block, (b * H + h) * Tq, Tq, Tk, S, H, scale, rate, CAUSAL, HAS_DROPOUT, HAS_BIAS, D, M, N, IEEE_FP32,
        )  # fmt: skip


@triton.jit
def _backward_keys(
    Q, K, V, Out, Grad, LogSums, GradK, GradV, Sums,
    SegmentsQ, EndsQ, SegmentsK, Seeds, q_token, k_token, gk_token,
    block, index, Tq, Tk, S, H, scale, rate,
    CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, IEEE_FP32: tl.constexpr,
):  # fmt: skip
    precision: tl.constexpr = "ieee" if IEEE_FP32 else "tf32"
    d = tl.arange(0, D)
    columns = block * M + tl.arange(0, M)
    inside = columns < Tk
    own_segments = tl.load(SegmentsK + columns, mask=inside, other=-2).to(tl.int32)
    low, high = _load_span(own_segments, EndsQ, S)
    if CAUSAL:
        low = tl.maximum(low, block * M)
    k = tl.load(K + columns[:, None] * k_token + d[None, :], mask=inside[:, None], other=0.0)
    v = tl.load(V + columns[:, None] * k_token + d[None, :], mask=inside[:, None], other=0.0)
    grad_k = tl.zeros((M, D), tl.float32)
    grad_v = tl.zeros((M, D), tl.float32)
    for start in range(low, high, N):
        rows = start + tl.arange(0, N)
        valid = rows < high
        other_segments = tl.load(SegmentsQ + rows, mask=valid, other=-3).to(tl.int32)
        q = tl.load(Q + rows[:, None] * q_token + d[None, :], mask=valid[:, None], other=0.0)
        offsets = rows[:, None] * (H * D) + d[None, :]
        grad = tl.load(Grad + offsets, mask=valid[:, None], other=0.0)
        out = tl.load(Out + offsets, mask=valid[:, None], other=0.0)
        log_sums = tl.load(LogSums + rows, mask=valid, other=0.0)
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        visible = own_segments[:, None] == other_segments[None, :]
        if CAUSAL:
            visible = visible & (rows[None, :] >= columns[:, None])
        scores = tl.dot(k, tl.trans(q), input_precision=precision) * scale
        probs = tl.where(visible, tl.exp2(scores - log_sums[None, :]), 0.0)
        grad_probs = tl.dot(v, tl.trans(grad), input_precision=precision)
        if HAS_DROPOUT:
            keep = keep_mask(Seeds, (index + rows[None, :]) * Tk + columns[:, None], rate)
            grad_probs = tl.where(keep, grad_probs / (1 - rate), 0.0)
            dropped_probs = tl.where(keep, probs / (1 - rate), 0.0)
            grad_v += tl.dot(dropped_probs.to(grad.dtype), grad, input_precision=precision)
        else:
            grad_v += tl.dot(probs.to(grad.dtype), grad, input_precision=precision)
        grad_scores = probs * (grad_probs - delta[None, :])
        grad_k += tl.dot(grad_scores.to(q.dtype), q, input_precision=precision)
    offsets = columns[:, None] * gk_token + d[None, :]
    grad_k = grad_k * (scale * LN_2)
    tl.store(GradK + offsets, grad_k.to(GradK.dtype.element_ty), mask=inside[:, None])
    tl.store(GradV + offsets, grad_v.to(GradV.dtype.element_ty), mask=inside[:, None])
    if HAS_BIAS:
        tl.store(Sums + H * D + d, tl.sum(grad_k, 0))
        tl.store(Sums + 2 * H * D + d, tl.sum(grad_v, 0))


@triton.jit
def _backward_queries(
    Q, K, V, Out, Grad, LogSums, GradQ, Sums,
    SegmentsQ, SegmentsK, EndsK, Seeds, q_token, k_token, gq_token,
    block, index, Tq, Tk, S, H, scale, rate,
    CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, IEEE_FP32: tl.constexpr,
):  # fmt: skip
    precision: tl.constexpr = "ieee" if IEEE_FP32 else "tf32"
    d = tl.arange(0, D)
    rows = block * M + tl.arange(0, M)
    inside = rows < Tq
    own_segments = tl.load(SegmentsQ + rows, mask=inside, other=-1).to(tl.int32)
    low, high = _load_span(own_segments, EndsK, S)
    if CAUSAL:
        high = tl.minimum(high, block * M + M)
    q = tl.load(Q + rows[:, None] * q_token + d[None, :], mask=inside[:, None], other=0.0)
    offsets = rows[:, None] * (H * D) + d[None, :]
    grad = tl.load(Grad + offsets, mask=inside[:, None], other=0.0)
    out = tl.load(Out + offsets, mask=inside[:, None], other=0.0)
    log_sums = tl.load(LogSums + rows, mask=inside, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    grad_q = tl.zeros((M, D), tl.float32)
    for start in range(low, high, N):
        columns = start + tl.arange(0, N)
        valid = columns < high
        other_segments = tl.load(SegmentsK + columns, mask=valid, other=-2).to(tl.int32)
        k = tl.load(K + columns[:, None] * k_token + d[None, :], mask=valid[:, None], other=0.0)
        v = tl.load(V + columns[:, None] * k_token + d[None, :], mask=valid[:, None], other=0.0)
        visible = own_segments[:, None] == other_segments[None, :]
        if CAUSAL:
            visible = visible & (rows[:, None] >= columns[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        probs = tl.where(visible, tl.exp2(scores - log_sums[:, None]), 0.0)
        grad_probs = tl.dot(grad, tl.trans(v), input_precision=precision)
        if HAS_DROPOUT:
            keep = keep_mask(Seeds, (index + rows[:, None]) * Tk + columns[None, :], rate)
            grad_probs = tl.where(keep, grad_probs / (1 - rate), 0.0)
        grad_scores = probs * (grad_probs - delta[:, None])
        grad_q += tl.dot(grad_scores.to(k.dtype), k, input_precision=precision)
    offsets = rows[:, None] * gq_token + d[None, :]
    grad_q = grad_q * (scale * LN_2)
    tl.store(GradQ + offsets, grad_q.to(GradQ.dtype.element_ty), mask=inside[:, None])
    if HAS_BIAS:
        tl.store(Sums + d, tl.sum(grad_q, 0))
