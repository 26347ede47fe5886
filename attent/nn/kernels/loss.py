"""The softmax, the label-smoothed cross-entropy and its gradient, over the logits themselves: these are the largest
numbers of a step by far, so they are read from memory once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # words at once


def to_gradients(logits: Tensor, targets: Tensor, real: Tensor | None, words: int, smoothing: float) -> Tensor:
    """Logits (N, V) become the gradients of the sum of the losses; of each token its loss and plain cross-entropy
    (2, N). Columns from `words` on are no words; filler has neither loss nor gradient."""
    N, V = logits.shape
    found = logits.new_empty(2, N, dtype=torch.float32)
    flags = targets if real is None else real.view(torch.uint8)
    _to_gradients[(N,)](
        logits, targets, flags, found, N, V, words, smoothing,
        ALL_REAL=real is None, CHUNK=min(CHUNK, triton.next_power_of_2(V)), num_warps=16,
    )  # fmt: skip
    return found


@triton.jit
def _to_gradients(Logits, Targets, Real, Found, N, V, words, smoothing, ALL_REAL: tl.constexpr, CHUNK: tl.constexpr):
    """One token. It is read three times, but only once from afar; more would be asked of the unit that makes
    exponentials if the highest were looked for on the way."""
    n = tl.program_id(0)
    Logits += n.to(tl.int64) * V
    near = tl.arange(0, CHUNK)
    real = n >= 0
    if not ALL_REAL:
        real = tl.load(Real + n) != 0
    top = tl.full((CHUNK,), float("-inf"), tl.float32)
    plain = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, words, CHUNK):
        at = start + near
        x = tl.load(Logits + at, mask=at < words, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, x)
        plain += tl.where(at < words, x, 0.0)
    highest = tl.max(top, 0)
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, words, CHUNK):
        at = start + near
        total += tl.exp(tl.load(Logits + at, mask=at < words, other=float("-inf")).to(tl.float32) - highest)
    log_total = highest + tl.log(tl.sum(total, 0))
    right = tl.load(Targets + n).to(tl.int32)
    # Whatever stands in filler, be it NaN, must not reach the sums.
    entropy = tl.where(real, log_total - tl.load(Logits + right).to(tl.float32), 0.0)
    even = tl.where(real, log_total - tl.sum(plain, 0) / words, 0.0)
    tl.store(Found + n, (1 - smoothing) * entropy + smoothing * even)
    tl.store(Found + N + n, entropy)
    tl.debug_barrier()  # the right word's logit is read before anybody writes over it
    for start in range(0, V, CHUNK):
        at = start + near
        x = tl.load(Logits + at, mask=at < words, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - log_total) - smoothing / words - tl.where(at == right, 1 - smoothing, 0.0)
        p = tl.where((at < words) & real, p, 0.0)
        tl.store(Logits + at, p.to(Logits.dtype.element_ty), mask=at < V)
