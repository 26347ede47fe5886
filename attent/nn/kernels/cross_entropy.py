"""Softmax, label-smoothed cross-entropy and its gradient, in place, for one pass or for R-Drop's two. The logits are by
far the largest tensor of a training step, so they are read from memory once and overwritten once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attent.nn.kernels import use_device_of

CHUNK = 4096  # logits per iteration
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def cross_entropy_inplace(
    logits: Tensor, targets: Tensor, token_mask: Tensor | None, vocab: int, smoothing: float
) -> Tensor:
    """Overwrite logits (N, V) with the gradients of the summed loss. Return the loss and the cross-entropy without
    smoothing of each token (2, N). Columns from `vocab` on are alignment; padding has no loss and no gradient."""
    return _launch(_cross_entropy_kernel, logits, targets, token_mask, vocab, smoothing)


def rdrop_inplace(
    logits: Tensor, targets: Tensor, token_mask: Tensor | None, vocab: int, smoothing: float, alpha: float
) -> Tensor:
    """`cross_entropy_inplace` for R-Drop's two passes (2, N, V): see `attent.training.loss.rdrop_loss`."""
    return _launch(_rdrop_kernel, logits, targets, token_mask, vocab, smoothing, alpha)


def _launch(
    kernel: Any, logits: Tensor, targets: Tensor, token_mask: Tensor | None, vocab: int, *rates: float
) -> Tensor:
    N, V = logits.shape[-2:]
    losses = logits.new_empty(2, N, dtype=torch.float32)
    targets = targets.contiguous()
    flags = targets if token_mask is None else token_mask.contiguous().view(torch.uint8)
    chunk = min(CHUNK, triton.next_power_of_2(V))
    with use_device_of(logits):
        kernel[(N,)](
            logits, targets, flags, losses, N, V, vocab, *rates,
            ALL_REAL=token_mask is None, ALIGNED=vocab == V and V % chunk == 0, CHUNK=chunk, num_warps=16,
        )  # fmt: skip
    return losses


@triton.jit
def _load_logits(Logits, columns, vocab, ALIGNED: tl.constexpr):
    """Load part of a row, times log2(e), since all exponentials are powers of 2; -inf beyond the vocabulary."""
    x = tl.load(Logits + columns) if ALIGNED else tl.load(Logits + columns, mask=columns < vocab, other=float("-inf"))
    return x.to(tl.float32) * LOG2_E


@triton.jit
def _compute_log_total(Logits, vocab, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the logarithm of the softmax's denominator, to base 2, and the mean of the logits times log2(e)."""
    offsets = tl.arange(0, CHUNK)
    maxima = tl.full((CHUNK,), float("-inf"), tl.float32)
    logit_sums = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, vocab, CHUNK):
        x = _load_logits(Logits, start + offsets, vocab, ALIGNED)
        maxima = tl.maximum(maxima, x)
        logit_sums += x if ALIGNED else tl.where(start + offsets < vocab, x, 0.0)
    maximum = tl.max(maxima, 0)
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, vocab, CHUNK):
        total += tl.exp2(_load_logits(Logits, start + offsets, vocab, ALIGNED) - maximum)
    return maximum + tl.log2(tl.sum(total, 0)), tl.sum(logit_sums, 0) / vocab


@triton.jit
def _cross_entropy_kernel(
    Logits, Targets, Real, Losses, N, V, vocab, smoothing,
    ALL_REAL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One token. Its row is read three times, but only once from global memory; later reads hit the cache. The loops
    avoid comparisons where the vocabulary is aligned (ALIGNED)."""
    n = tl.program_id(0)
    Logits += n.to(tl.int64) * V
    offsets = tl.arange(0, CHUNK)
    target = tl.load(Targets + n).to(tl.int32)
    target_logit = tl.load(Logits + target).to(tl.float32)
    real = n >= 0
    if not ALL_REAL:
        real = tl.load(Real + n) != 0
    log_total, mean = _compute_log_total(Logits, vocab, ALIGNED, CHUNK)
    # Padding may hold NaN, which must not reach the sums.
    cross_entropy = tl.where(real, log_total * LN_2 - target_logit, 0.0)
    uniform = tl.where(real, (log_total - mean) * LN_2, 0.0)
    tl.store(Losses + n, (1 - smoothing) * cross_entropy + smoothing * uniform)
    tl.store(Losses + N + n, cross_entropy)
    share = smoothing / vocab
    for start in range(0, V, CHUNK):
        columns = start + offsets
        p = tl.exp2(_load_logits(Logits, columns, vocab, ALIGNED) - log_total) - share
        if ALIGNED:
            tl.store(Logits + columns, tl.where(real, p, 0.0).to(Logits.dtype.element_ty))
        else:
            p = tl.where((columns < vocab) & real, p, 0.0)
            tl.store(Logits + columns, p.to(Logits.dtype.element_ty), mask=columns < V)
    tl.debug_barrier()  # the target was written by the loop, and is overwritten
    p = tl.exp2(target_logit * LOG2_E - log_total) - share - (1 - smoothing)
    tl.store(Logits + target, tl.where(real, p, 0.0).to(Logits.dtype.element_ty))


@triton.jit
def _rdrop_kernel(
    Logits, Targets, Real, Losses, N, V, vocab, smoothing, alpha,
    ALL_REAL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One token, in two passes p and q."""
    n = tl.program_id(0)
    P = Logits + n.to(tl.int64) * V
    Q = Logits + (n.to(tl.int64) + N) * V
    offsets = tl.arange(0, CHUNK)
    target = tl.load(Targets + n).to(tl.int32)
    target_p, target_q = tl.load(P + target).to(tl.float32) * LOG2_E, tl.load(Q + target).to(tl.float32) * LOG2_E
    real = n >= 0
    if not ALL_REAL:
        real = tl.load(Real + n) != 0
    log_total_p, mean_p = _compute_log_total(P, vocab, ALIGNED, CHUNK)
    log_total_q, mean_q = _compute_log_total(Q, vocab, ALIGNED, CHUNK)
    kl_p, kl_q = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for start in range(0, vocab, CHUNK):
        log_p = _load_logits(P, start + offsets, vocab, ALIGNED) - log_total_p
        log_q = _load_logits(Q, start + offsets, vocab, ALIGNED) - log_total_q
        ratio = log_p - log_q if ALIGNED else tl.where(start + offsets < vocab, log_p - log_q, 0.0)
        kl_p += tl.exp2(log_p) * ratio
        kl_q -= tl.exp2(log_q) * ratio
    # From here on in nats. Padding may hold NaN, which must not reach the sums.
    divergence_p, divergence_q = tl.sum(kl_p, 0) * LN_2, tl.sum(kl_q, 0) * LN_2
    cross_entropy = (log_total_p - target_p + log_total_q - target_q) * (LN_2 / 2)
    uniform = (log_total_p - mean_p + log_total_q - mean_q) * (LN_2 / 2)
    loss = (1 - smoothing) * cross_entropy + smoothing * uniform + alpha / 4 * (divergence_p + divergence_q)
    tl.store(Losses + n, tl.where(real, loss, 0.0))
    tl.store(Losses + N + n, tl.where(real, cross_entropy, 0.0))
    for start in range(0, V, CHUNK):
        columns = start + offsets
        log_p = _load_logits(P, columns, vocab, ALIGNED) - log_total_p
        log_q = _load_logits(Q, columns, vocab, ALIGNED) - log_total_q
        p, q, ratio = tl.exp2(log_p), tl.exp2(log_q), (log_p - log_q) * LN_2
        constant = smoothing / (2 * vocab) + tl.where(columns == target, (1 - smoothing) / 2, 0.0)
        grad_p = p / 2 - constant + alpha / 4 * (p * (ratio - divergence_p) + p - q)
        grad_q = q / 2 - constant + alpha / 4 * (q * (-ratio - divergence_q) + q - p)
        used = real if ALIGNED else (columns < vocab) & real
        in_row = columns < V
        tl.store(P + columns, tl.where(used, grad_p, 0.0).to(Logits.dtype.element_ty), mask=in_row)
        tl.store(Q + columns, tl.where(used, grad_q, 0.0).to(Logits.dtype.element_ty), mask=in_row)
