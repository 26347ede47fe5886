"""Softmax, label-smoothed cross-entropy and its gradient, in place. The logits are by far the largest tensor of a
training step, so they are read from memory once and overwritten once."""

from __future__ import annotations

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
    N, V = logits.shape
    losses = logits.new_empty(2, N, dtype=torch.float32)
    targets = targets.contiguous()
    flags = targets if token_mask is None else token_mask.contiguous().view(torch.uint8)
    chunk = min(CHUNK, triton.next_power_of_2(V))
    with use_device_of(logits):
        _cross_entropy_kernel[(N,)](
            logits, targets, flags, losses, N, V, vocab, smoothing,
            ALL_REAL=token_mask is None, ALIGNED=vocab == V and V % chunk == 0, CHUNK=chunk, num_warps=16,
        )  # fmt: skip
    return losses


@triton.jit
def _load_logits(Logits, columns, vocab, ALIGNED: tl.constexpr):
    """Load part of a row, times log2(e), since all exponentials are powers of 2; -inf beyond the vocabulary."""
    x = tl.load(Logits + columns) if ALIGNED else tl.load(Logits + columns, mask=columns < vocab, other=float("-inf"))
    return x.to(tl.float32) * LOG2_E


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
    log_total = maximum + tl.log2(tl.sum(total, 0))
    # Padding may hold NaN, which must not reach the sums.
    cross_entropy = tl.where(real, log_total * LN_2 - target_logit, 0.0)
    uniform = tl.where(real, (log_total - tl.sum(logit_sums, 0) / vocab) * LN_2, 0.0)
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
