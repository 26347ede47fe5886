"""The softmax, the label-smoothed cross-entropy and its gradient, over the logits themselves: these are the largest
numbers of a step by far, so they are read from memory once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attent.nn.kernels import use_device_of

CHUNK = 4096  # words at once
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def cross_entropy_inplace(
    logits: Tensor, targets: Tensor, real_mask: Tensor | None, vocab: int, smoothing: float
) -> Tensor:
    """Logits (N, V) become the gradients of the sum of the losses; of each token its loss and plain cross-entropy
    (2, N). Columns from `words` on are no words; filler has neither loss nor gradient."""
    N, V = logits.shape
    found = logits.new_empty(2, N, dtype=torch.float32)
    targets = targets.contiguous()
    flags = targets if real_mask is None else real_mask.contiguous().view(torch.uint8)
    chunk = min(CHUNK, triton.next_power_of_2(V))
    with use_device_of(logits):
        _cross_entropy_kernel[(N,)](
            logits, targets, flags, found, N, V, vocab, smoothing,
            ALL_REAL=real_mask is None, EVEN=vocab == V and V % chunk == 0, CHUNK=chunk, num_warps=16,
        )  # fmt: skip
    return found


@triton.jit
def _load_logits(Logits, at, words, EVEN: tl.constexpr):
    """Some of a row, times log2(e): all exponentials are powers of 2. What is no word is -inf."""
    x = tl.load(Logits + at) if EVEN else tl.load(Logits + at, mask=at < words, other=float("-inf"))
    return x.to(tl.float32) * LOG2_E


@triton.jit
def _cross_entropy_kernel(
    Logits, Targets, Real, Found, N, V, words, smoothing,
    ALL_REAL: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One token. It is read three times, but only once from afar. Operations are few, for there are millions of them:
    nothing is compared in the loops that need not be."""
    n = tl.program_id(0)
    Logits += n.to(tl.int64) * V
    near = tl.arange(0, CHUNK)
    right = tl.load(Targets + n).to(tl.int32)
    at_right = tl.load(Logits + right).to(tl.float32)
    real = n >= 0
    if not ALL_REAL:
        real = tl.load(Real + n) != 0
    top = tl.full((CHUNK,), float("-inf"), tl.float32)
    plain = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, words, CHUNK):
        x = _load_logits(Logits, start + near, words, EVEN)
        top = tl.maximum(top, x)
        plain += x if EVEN else tl.where(start + near < words, x, 0.0)
    highest = tl.max(top, 0)
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, words, CHUNK):
        total += tl.exp2(_load_logits(Logits, start + near, words, EVEN) - highest)
    log_total = highest + tl.log2(tl.sum(total, 0))
    # Whatever stands in filler, be it NaN, must not reach the sums.
    entropy = tl.where(real, log_total * LN_2 - at_right, 0.0)
    even = tl.where(real, (log_total - tl.sum(plain, 0) / words) * LN_2, 0.0)
    tl.store(Found + n, (1 - smoothing) * entropy + smoothing * even)
    tl.store(Found + N + n, entropy)
    share = smoothing / words
    for start in range(0, V, CHUNK):
        at = start + near
        p = tl.exp2(_load_logits(Logits, at, words, EVEN) - log_total) - share
        if EVEN:
            tl.store(Logits + at, tl.where(real, p, 0.0).to(Logits.dtype.element_ty))
        else:
            p = tl.where((at < words) & real, p, 0.0)
            tl.store(Logits + at, p.to(Logits.dtype.element_ty), mask=at < V)
    tl.debug_barrier()  # what the loop wrote for the right word is written over
    p = tl.exp2(at_right * LOG2_E - log_total) - share - (1 - smoothing)
    tl.store(Logits + right, tl.where(real, p, 0.0).to(Logits.dtype.element_ty))
