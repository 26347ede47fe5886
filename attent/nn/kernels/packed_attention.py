"""Attention inside rows of packed sentences, many of which are shorter than the tiles that a GPU's matrix units like.

A tile is so many neighbouring tokens of a row, whatever sentences they are of. It meets the keys from the start of its
first sentence to the end of its last, and a comparison of sentence numbers hides what is of others: so a tile is as
full with sentences of 15 tokens as with those of 150. Flash kernels give each sentence tiles of its own, most of which
stay empty.

Queries, keys and values come as one product left them, (B, T, 3, H, D), or queries and memory apart; and so their
gradients go back, without a copy, and with them those of the biases of that product: sums over all tokens, of which
each tile has its share at hand. The rule is `Mask.allows` for a packing, with or without order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attent.nn.kernels import use_device_of
from attent.nn.kernels.dropout_rng import draw_seeds, keep_mask
from attent.nn.kernels.row_reduce import sum_rows
from attent.nn.masks import Mask

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)  # kernels work with powers of 2


def attend_packed(
    qkv: Tensor,
    kv: Tensor | None,
    qkv_bias: Tensor | None,
    kv_bias: Tensor | None,
    mask: Mask,
    scale: float,
    dropout: float,
) -> Tensor:
    """The first four are a `Joined`. -> (B, H, Tq, D)"""
    assert mask.packing is not None
    queries, keys = mask.packing
    seed = draw_seeds(qkv.device) if dropout else None
    places = [x.contiguous() for x in (queries.segments, queries.ends, keys.segments, keys.ends)]
    out, _ = _packed_attention(
        ensure_dense(qkv),
        None if kv is None else ensure_dense(kv),
        qkv_bias,
        kv_bias,
        *places,
        mask.causal,
        scale,
        dropout,
        seed,
    )
    return out.transpose(1, 2)


def ensure_dense(x: Tensor) -> Tensor:
    """A head's numbers lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


# --- for torch -----------------------------------------------------------------------------------------------------


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
    """The output (B, Tq, H, D), and of each query the logarithm of the softmax's denominator (B, H, Tq)."""
    q, k, v = _split_qkv(qkv, kv)
    B, Tq, H, D = q.shape
    out = qkv.new_empty(B, Tq, H, D)
    log_sums = qkv.new_empty(B, H, Tq, dtype=torch.float32)
    form = choose_tile_shape(qkv)
    grid = (H, triton.cdiv(Tq, form.queries), B)
    with use_device_of(qkv):
        _forward_kernel[grid](
            q, k, v, out, log_sums,
            segments_q, ends_q, segments_k, ends_k, segments_q if seed is None else seed,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            Tq, k.shape[1], ends_k.shape[1], H, scale * LOG2_E, dropout,
            CAUSAL=causal, DROPS=dropout > 0, D=D, M=form.queries, N=form.keys, EXACT=form.exact,
            num_warps=4, num_stages=1, maxnreg=form.max_registers,
        )  # fmt: skip
    return out, log_sums


@_packed_attention.register_fake
def _(asked, *_):
    B, Tq, _, H, D = asked.shape
    return asked.new_empty(B, Tq, H, D), asked.new_empty(B, H, Tq, dtype=torch.float32)


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
    """The gradients of `asked`, of `told` (of nothing, where that was None), and of all biases (3, H, D)."""
    for_asked = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    for_told = qkv.new_empty(0) if kv is None else torch.empty_like(kv, memory_format=torch.contiguous_format)
    q, k, v = _split_qkv(qkv, kv)
    dq, dk, dv = _split_qkv(for_asked, None if kv is None else for_told)
    grad = grad if grad.stride()[1:] == out.stride()[1:] else grad.contiguous()
    B, Tq, H, D = q.shape
    form = choose_tile_shape(qkv)
    blocks = max(triton.cdiv(Tq, form.queries), triton.cdiv(k.shape[1], form.queries))
    adds_up = qkv_bias is not None
    sums = qkv.new_empty(B * blocks if adds_up else 0, 3, H, D, dtype=torch.float32)
    with use_device_of(qkv):
        _backward_kernel[(2 * H, blocks, B)](
            q, k, v, out, grad, log_sums, dq, dk, dv, sums,
            segments_q, ends_q, segments_k, ends_k, segments_q if seed is None else seed,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            dq.stride(0), dq.stride(1), dq.stride(2), dk.stride(0), dk.stride(1), dk.stride(2), grad.stride(0),
            Tq, k.shape[1], ends_k.shape[1], H, scale * LOG2_E, dropout,
            CAUSAL=causal, DROPS=dropout > 0, SUMS=adds_up, D=D, M=form.queries, N=form.keys, EXACT=form.exact,
            num_warps=4, num_stages=1, maxnreg=form.max_registers,
        )  # fmt: skip
    return for_asked, for_told, sum_rows(sums) if adds_up else sums


@_packed_attention_backward.register_fake
def _(grad, out, log_sums, asked, told, of_asked, *_):
    for_told = asked.new_empty(0) if told is None else torch.empty_like(told, memory_format=torch.contiguous_format)
    H, D = asked.shape[-2:]
    of_biases = asked.new_empty(*((0, 3, H, D) if of_asked is None else (3, H, D)), dtype=torch.float32)
    return torch.empty_like(asked, memory_format=torch.contiguous_format), for_told, of_biases


def _setup_context(ctx, inputs, output):
    *tensors, causal, scale, dropout, seed = inputs
    ctx.save_for_backward(*tensors, seed, *output)
    ctx.facts = causal, scale, dropout


def _backward(ctx, grad, _):
    *tensors, seed, out, log_sums = ctx.saved_tensors
    _, told, of_asked, of_told, *_ = tensors
    for_asked, for_told, of_biases = _packed_attention_backward(grad, out, log_sums, *tensors, *ctx.facts, seed)
    return (
        for_asked,
        None if told is None else for_told,
        None if of_asked is None else (of_biases if told is None else of_biases[:1]).to(of_asked.dtype),
        None if of_told is None else of_biases[1:].to(of_told.dtype),
        *[None] * 8,
    )


_packed_attention.register_autograd(_backward, setup_context=_setup_context)


def _split_qkv(qkv: Tensor, kv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, H, D) each; the last dimension is dense."""
    if kv is None:
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    return qkv[:, :, 0], kv[:, :, 0], kv[:, :, 1]


class TileShape(NamedTuple):
    """How a kernel is cut up."""

    queries: int  # of a tile, or keys, where a tile is of keys
    keys: int  # at once, or queries
    exact: bool = False
    max_registers: int | None = None  # of a thread, at most: with more, too few tiles are at work at once


def choose_tile_shape(x: Tensor) -> TileShape:
    """Measured on an H200."""
    if x.dtype == torch.float32:
        return TileShape(32, 32, exact=True)
    return TileShape(64, 32, max_registers=128 if x.shape[-1] <= 64 else None)


# --- for the GPU ---------------------------------------------------------------------------------------------------


@triton.jit
def _load_span(segments, ends, S):
    """From where to where the other side holds the sentences of a tile; (0, 0): of none."""
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
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    h, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, D)
    rows = block * M + tl.arange(0, M)
    inside = rows < Tq
    mine = tl.load(SegmentsQ + b * Tq + rows, mask=inside, other=-1).to(tl.int32)
    low, high = _load_span(mine, EndsK + b * S, S)
    if CAUSAL:
        high = tl.minimum(high, block * M + M)
    Q += b * q_row + h * q_head
    K += b * k_row + h * k_head
    V += b * k_row + h * k_head
    q = tl.load(Q + rows[:, None] * q_token + d[None, :], mask=inside[:, None], other=0.0)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    for start in range(low, high, N):
        columns = start + tl.arange(0, N)
        there = columns < high
        theirs = tl.load(SegmentsK + b * Tk + columns, mask=there, other=-2).to(tl.int32)
        k = tl.load(K + columns[:, None] * k_token + d[None, :], mask=there[:, None], other=0.0)
        v = tl.load(V + columns[:, None] * k_token + d[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        seen = mine[:, None] == theirs[None, :]
        if CAUSAL:
            seen = seen & (rows[:, None] >= columns[None, :])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(top - base)
        total = total * shrunk + tl.sum(shares, 1)
        if DROPS:
            index = ((b * H + h) * Tq + rows[:, None]) * Tk + columns[None, :]
            shares = tl.where(keep_mask(Seeds, index, rate), shares / (1 - rate), 0.0)
        out = out * shrunk[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=precision)
        top = higher
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    log_sum = tl.where(total == 0, 0.0, top + tl.log2(tl.where(total == 0, 1.0, total)))
    tl.store(LogSums + (b * H + h) * Tq + rows, log_sum, mask=inside)
    place = ((b * Tq + rows[:, None]) * H + h) * D + d[None, :]
    tl.store(Out + place, out.to(Out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _backward_kernel(
    Q, K, V, Out, Grad, LogSums, GradQ, GradK, GradV, Sums,
    SegmentsQ, EndsQ, SegmentsK, EndsK, Seeds,
    q_row, q_token, q_head, k_row, k_token, k_head,
    gq_row, gq_token, gq_head, gk_row, gk_token, gk_head, grad_row,
    Tq, Tk, S, H, scale, rate,
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, SUMS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
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
            block, (b * H + h) * Tq, Tq, Tk, S, H, scale, rate, CAUSAL, DROPS, SUMS, D, M, N, EXACT,
        )  # fmt: skip
    else:
        _backward_queries(
            Q, K, V, Out, Grad, LogSums, GradQ + b * gq_row + h * gq_head, Sums,
            SegmentsQ, SegmentsK, EndsK + b * S, Seeds, q_token, k_token, gq_token,
            block, (b * H + h) * Tq, Tq, Tk, S, H, scale, rate, CAUSAL, DROPS, SUMS, D, M, N, EXACT,
        )  # fmt: skip


@triton.jit
def _backward_keys(
    Q, K, V, Out, Grad, LogSums, GradK, GradV, Sums,
    SegmentsQ, EndsQ, SegmentsK, Seeds, q_token, k_token, gk_token,
    block, index, Tq, Tk, S, H, scale, rate,
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, SUMS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    d = tl.arange(0, D)
    columns = block * M + tl.arange(0, M)
    inside = columns < Tk
    mine = tl.load(SegmentsK + columns, mask=inside, other=-2).to(tl.int32)
    low, high = _load_span(mine, EndsQ, S)
    if CAUSAL:
        low = tl.maximum(low, block * M)
    k = tl.load(K + columns[:, None] * k_token + d[None, :], mask=inside[:, None], other=0.0)
    v = tl.load(V + columns[:, None] * k_token + d[None, :], mask=inside[:, None], other=0.0)
    of_k = tl.zeros((M, D), tl.float32)
    of_v = tl.zeros((M, D), tl.float32)
    for start in range(low, high, N):
        rows = start + tl.arange(0, N)
        there = rows < high
        theirs = tl.load(SegmentsQ + rows, mask=there, other=-3).to(tl.int32)
        q = tl.load(Q + rows[:, None] * q_token + d[None, :], mask=there[:, None], other=0.0)
        place = rows[:, None] * (H * D) + d[None, :]
        grad = tl.load(Grad + place, mask=there[:, None], other=0.0)
        out = tl.load(Out + place, mask=there[:, None], other=0.0)
        log_sums = tl.load(LogSums + rows, mask=there, other=0.0)
        centre = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        seen = mine[:, None] == theirs[None, :]
        if CAUSAL:
            seen = seen & (rows[None, :] >= columns[:, None])
        scores = tl.dot(k, tl.trans(q), input_precision=precision) * scale
        shares = tl.where(seen, tl.exp2(scores - log_sums[None, :]), 0.0)
        of_shares = tl.dot(v, tl.trans(grad), input_precision=precision)
        if DROPS:
            keeps = keep_mask(Seeds, (index + rows[None, :]) * Tk + columns[:, None], rate)
            of_shares = tl.where(keeps, of_shares / (1 - rate), 0.0)
            dropped = tl.where(keeps, shares / (1 - rate), 0.0)
            of_v += tl.dot(dropped.to(grad.dtype), grad, input_precision=precision)
        else:
            of_v += tl.dot(shares.to(grad.dtype), grad, input_precision=precision)
        of_scores = shares * (of_shares - centre[None, :])
        of_k += tl.dot(of_scores.to(q.dtype), q, input_precision=precision)
    place = columns[:, None] * gk_token + d[None, :]
    of_k = of_k * (scale * LN_2)
    tl.store(GradK + place, of_k.to(GradK.dtype.element_ty), mask=inside[:, None])
    tl.store(GradV + place, of_v.to(GradV.dtype.element_ty), mask=inside[:, None])
    if SUMS:
        tl.store(Sums + H * D + d, tl.sum(of_k, 0))
        tl.store(Sums + 2 * H * D + d, tl.sum(of_v, 0))


@triton.jit
def _backward_queries(
    Q, K, V, Out, Grad, LogSums, GradQ, Sums,
    SegmentsQ, SegmentsK, EndsK, Seeds, q_token, k_token, gq_token,
    block, index, Tq, Tk, S, H, scale, rate,
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, SUMS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    d = tl.arange(0, D)
    rows = block * M + tl.arange(0, M)
    inside = rows < Tq
    mine = tl.load(SegmentsQ + rows, mask=inside, other=-1).to(tl.int32)
    low, high = _load_span(mine, EndsK, S)
    if CAUSAL:
        high = tl.minimum(high, block * M + M)
    q = tl.load(Q + rows[:, None] * q_token + d[None, :], mask=inside[:, None], other=0.0)
    place = rows[:, None] * (H * D) + d[None, :]
    grad = tl.load(Grad + place, mask=inside[:, None], other=0.0)
    out = tl.load(Out + place, mask=inside[:, None], other=0.0)
    log_sums = tl.load(LogSums + rows, mask=inside, other=0.0)
    centre = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    of_q = tl.zeros((M, D), tl.float32)
    for start in range(low, high, N):
        columns = start + tl.arange(0, N)
        there = columns < high
        theirs = tl.load(SegmentsK + columns, mask=there, other=-2).to(tl.int32)
        k = tl.load(K + columns[:, None] * k_token + d[None, :], mask=there[:, None], other=0.0)
        v = tl.load(V + columns[:, None] * k_token + d[None, :], mask=there[:, None], other=0.0)
        seen = mine[:, None] == theirs[None, :]
        if CAUSAL:
            seen = seen & (rows[:, None] >= columns[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        shares = tl.where(seen, tl.exp2(scores - log_sums[:, None]), 0.0)
        of_shares = tl.dot(grad, tl.trans(v), input_precision=precision)
        if DROPS:
            keeps = keep_mask(Seeds, (index + rows[:, None]) * Tk + columns[None, :], rate)
            of_shares = tl.where(keeps, of_shares / (1 - rate), 0.0)
        of_scores = shares * (of_shares - centre[:, None])
        of_q += tl.dot(of_scores.to(k.dtype), k, input_precision=precision)
    place = rows[:, None] * gq_token + d[None, :]
    of_q = of_q * (scale * LN_2)
    tl.store(GradQ + place, of_q.to(GradQ.dtype.element_ty), mask=inside[:, None])
    if SUMS:
        tl.store(Sums + d, tl.sum(of_q, 0))
