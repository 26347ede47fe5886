"""The last linear layer and the label-smoothed cross-entropy (section 5.4) as one step: some tokens at a time, so that
the logits of a whole batch, far larger than all else in a small model, never lie in memory.

The gradients are worked out beside the loss, while a piece's probabilities are at hand; `backward` only scales them.
What goes in and which tokens are real is `objective`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from attent.nn import kernels
from attent.nn.checks import check_rate, check_size

CELLS = {"cpu": 2**21, "cuda": 2**27}  # logits at once: on CPU they stay in the cache, on a GPU they fill it
SHARE = 32  # of a GPU's memory that our kernel's logits may take, one in so many: mostly a whole batch
ALIGNED = 64  # of a GPU's matrix units: a vocabulary of 50,257 words takes three times as long as one of 50,304


def projected_loss(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    real: Tensor | None,
    smoothing: float,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over the real tokens, in nats: the loss, and the plain cross-entropy (which has no gradient).

    states (N, E), weight (V, E), bias (V,), targets (N,); `real` (N,) is False at filler. The words' shares that are
    aimed at: 1 - smoothing for the right one, and smoothing / V more for every one, as in `F.cross_entropy`.
    """
    return _uncompiled_loss(states[None], weight, bias, targets, real, (smoothing, 0.0), chunk)


def rdrop_loss(
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    real: Tensor | None,
    smoothing: float,
    alpha: float,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """R-Drop (Liang et al. 2021) for two passes of the same tokens with different dropout, P and Q:

        1/2 (CE(P) + CE(Q)) + alpha / 2 * 1/2 (KL(P || Q) + KL(Q || P))

    That is half of the paper's loss: alpha means what it means there (5 for its translations), and a pass has the
    weight that it has without R-Drop. The plain cross-entropy is the mean of both.
    """
    return _uncompiled_loss(torch.stack([first, second]), weight, bias, targets, real, (smoothing, alpha), chunk)


def _loss(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    real: Tensor | None,
    rates: tuple[float, float],
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """`states` is (P, N, E): one pass, or two of the same tokens."""
    _check(states, weight, targets, real, rates, chunk)
    if real is not None and _may_count(states):
        states, targets, real = states[:, real], targets[real], None
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        dtype = torch.promote_types(states.dtype, weight.dtype)
    by_kernel = kernels.usable(weight) and not rates[1] and dtype != torch.float64
    facts = _Facts(*rates, chunk or _chunk(weight, states, by_kernel), dtype, torch.is_grad_enabled(), by_kernel)
    with torch.autocast(kind, enabled=False):
        apply: Callable[..., tuple[Tensor, Tensor]] = _ProjectedLoss.apply
        return apply(states, weight, bias, targets, real, facts)


# A custom gradient and a loop over chunks are not for the compiler: it goes around them.
_uncompiled_loss: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(_loss)


def _may_count(states: Tensor) -> bool:
    """May filler be left out? On a GPU the host would have to wait for the number of what is left."""
    return states.device.type == "cpu"


def _chunk(weight: Tensor, states: Tensor, by_kernel: bool = False) -> int:
    """Tokens at once. Our kernel holds nothing beside the logits; softmax and R-Drop hold several times as much."""
    cells = CELLS.get(states.device.type, CELLS["cuda"])
    if by_kernel and states.device.type == "cuda":
        memory = torch.cuda.get_device_properties(states.device).total_memory
        cells = max(cells, memory // (SHARE * states.element_size()))
    return max(1, cells // max(1, weight.shape[0] * states.shape[0]))


class _Facts(NamedTuple):
    smoothing: float
    alpha: float
    chunk: int
    dtype: torch.dtype  # of the matrix products; the softmax is float32 at least
    learns: bool
    by_kernel: bool

    @property
    def exact(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class _ProjectedLoss(torch.autograd.Function):
    """(P, N, E) states -> the two sums. Gradients are made on the way forward, a chunk of tokens after another."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        real: Tensor | None,
        facts: _Facts,
    ) -> tuple[Tensor, Tensor]:
        inputs = (states, weight, bias)
        wanted = _Wanted(*(facts.learns and needed for needed in ctx.needs_input_grad[:3]))
        work = _kernel_sums if facts.by_kernel else _plain_sums
        loss, plain, grads = work(states, weight, bias, targets, real, facts, wanted)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if like is None else like.dtype for like in inputs]
        ctx.mark_non_differentiable(plain)
        return loss, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if grad is None else (grad * scale).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None)


class _Wanted(NamedTuple):
    """Which gradients are asked for."""

    states: bool
    weight: bool
    bias: bool


class _Gradients(NamedTuple):
    """Sums so far; None where nobody asked."""

    states: Tensor | None  # (P, N, E)
    weight: Tensor | None  # (V, E)
    bias: Tensor | None  # (V,)


def _kernel_sums(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    real: Tensor | None,
    facts: _Facts,
    wanted: _Wanted,
) -> tuple[Tensor, Tensor, _Gradients]:
    """On a GPU: products by its library, and all between them by our kernel."""
    from attent.nn.kernels.loss import to_gradients

    words, dtype = len(weight), facts.dtype
    weight = aligned(weight.to(dtype))
    bias = None if bias is None else aligned(bias.to(dtype))
    sums = torch.zeros(2, dtype=torch.float32, device=states.device)
    of_states = torch.empty_like(states, dtype=dtype) if wanted.states else None
    of_weight = of_bias = None
    for start in range(0, len(targets), facts.chunk):
        part = slice(start, start + facts.chunk)
        chunk, some = states[0, part].to(dtype), None if real is None else real[part]
        if some is not None:  # whatever stands in filler, be it NaN, adds nothing to the weight's gradient
            chunk = chunk.masked_fill(~some[:, None], 0)
        logits = F.linear(chunk, weight, bias)
        sums += to_gradients(logits, targets[part], some, words, facts.smoothing).sum(1)
        if of_states is not None:
            torch.mm(logits, weight, out=of_states[0, part])
        if wanted.weight:
            of_weight = _added(of_weight, logits.T[:words], chunk)
        if wanted.bias:
            here = logits[:, :words].sum(0, dtype=torch.float32)
            of_bias = here if of_bias is None else of_bias + here
    if wanted.weight and of_weight is None:  # there is no token
        of_weight = torch.zeros_like(weight[:words], dtype=torch.float32)
    if wanted.bias and of_bias is None:
        of_bias = torch.zeros(words, device=weight.device)
    return sums[0], sums[1], _Gradients(of_states, of_weight, of_bias)


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right in float32, in which the product is worked out anyway."""
    found = torch.mm(left, right, out_dtype=torch.float32) if left.dtype != torch.float32 else left @ right
    return found if total is None else total.add_(found)


def _plain_sums(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    real: Tensor | None,
    facts: _Facts,
    wanted: _Wanted,
) -> tuple[Tensor, Tensor, _Gradients]:
    """Wherever torch runs."""
    grads = _Gradients(
        *(
            torch.zeros_like(like, dtype=facts.exact) if like is not None and asked else None
            for like, asked in zip((states, weight, bias), wanted, strict=True)
        )
    )
    layer = _Layer(weight.to(facts.dtype), None if bias is None else bias.to(facts.dtype), facts)
    loss, plain = (torch.zeros((), dtype=facts.exact, device=states.device) for _ in range(2))
    for start in range(0, len(targets), facts.chunk):
        part = slice(start, start + facts.chunk)
        chunk = _Chunk.of(states[:, part].to(facts.dtype), targets[part], None if real is None else real[part])
        more, nats, seen = layer.sums(chunk)
        loss += more
        plain += nats
        if any(grad is not None for grad in grads):
            layer.add_gradients(grads, part, chunk, seen)
    if grads.weight is not None:
        grads.weight.add_(layer.even_row)
    return loss, plain, grads


class _Chunk(NamedTuple):
    """Some tokens of each pass."""

    states: Tensor  # (P, n, E)
    right: Tensor  # (P, n, 1) the target words
    counts: Tensor  # (n,) 1, or 0 for filler
    filler: Tensor | None  # (n, 1)

    @classmethod
    def of(cls, states: Tensor, targets: Tensor, real: Tensor | None) -> _Chunk:
        right = targets.expand(len(states), -1)[..., None]
        exact = torch.promote_types(states.dtype, torch.float32)
        if real is None:
            return cls(states, right, torch.ones(len(targets), dtype=exact, device=states.device), None)
        filler = ~real[:, None]
        # Whatever stands in filler, be it NaN, must not reach the sums; zeros add nothing to the weight's gradient.
        return cls(states.masked_fill(filler, 0), right, real.to(exact), filler)


class _Softmax(NamedTuple):
    """What the gradients need of a chunk."""

    p: Tensor  # (P, n, V) probabilities
    apart: Tensor | None  # (n, V) with two passes: log p - log q
    divergences: Tensor | None  # (2, n) KL(P || Q), KL(Q || P)


class _Layer:
    """The linear layer, the softmax and the loss on a chunk.

    The smoothing's share of every word, smoothing / V, is left to algebra: it needs the mean of the logits only, and
    that is the states times the mean row of the weight. So no pass over (n, V) is made for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, facts: _Facts) -> None:
        self.weight, self.bias, self.facts = weight, bias, facts
        self.mean_row = weight.mean(0, dtype=facts.exact)  # (E,)
        self.mean_bias = 0.0 if bias is None else bias.mean(dtype=facts.exact)
        self.even_row = torch.zeros_like(self.mean_row)  # what the even share adds to each row of the weight's gradient

    def sums(self, chunk: _Chunk) -> tuple[Tensor, Tensor, _Softmax]:
        """The loss, the plain cross-entropy, and what the gradients need."""
        facts = self.facts
        logits = F.linear(chunk.states, self.weight, self.bias)
        apart = logits[0].to(facts.exact) - logits[1] if facts.alpha else None
        p, right, log_total = softmax(logits, chunk.right, facts.exact)
        plain = log_total - right  # (P, n)
        uniform = log_total - (chunk.states.to(facts.exact) @ self.mean_row + self.mean_bias)  # if all words were right
        loss = ((1 - facts.smoothing) * plain + facts.smoothing * uniform).mean(0)
        divergences = None
        if apart is not None:
            apart.sub_((log_total[0] - log_total[1])[:, None])
            divergences = torch.stack([(p[0] * apart).sum(-1), -(p[1] * apart).sum(-1)])
            loss = loss + facts.alpha / 4 * divergences.sum(0)
        return loss @ chunk.counts, plain.mean(0) @ chunk.counts, _Softmax(p, apart, divergences)

    def add_gradients(self, grads: _Gradients, part: slice, chunk: _Chunk, seen: _Softmax) -> None:
        facts, passes = self.facts, len(seen.p)
        even = facts.smoothing / passes
        of_logits = _logit_gradients(seen, chunk.right, facts)
        if grads.bias is not None:
            of_bias = (chunk.counts @ of_logits).sum(0)
            grads.bias.add_(of_bias - facts.smoothing / len(grads.bias) * chunk.counts.sum())
        of_logits = of_logits.to(facts.dtype)
        if grads.states is not None:
            of_states = (of_logits @ self.weight).to(facts.exact).sub_(even * self.mean_row)
            grads.states[:, part] = of_states if chunk.filler is None else of_states.masked_fill_(chunk.filler, 0)
        if grads.weight is not None:
            states = chunk.states.flatten(0, 1)
            _add_product(grads.weight, of_logits.flatten(0, 1).T, states)
            self.even_row.sub_(even / len(grads.weight) * states.sum(0, dtype=facts.exact))


def softmax(logits: Tensor, right: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(P, n, V) logits -> probabilities, the logit of the right word (P, n), the log of the softmax's denominator.

    On CPU it is written over the logits, so that half as much stands in the cache: 1.4 ns a number instead of 2. A GPU
    does best with torch's one kernel.
    """
    at_right = logits.gather(-1, right)[..., 0].to(exact)
    if logits.device.type == "cpu" and logits.dtype == exact:
        top = logits.amax(-1, keepdim=True)
        shares = logits.sub_(top).exp_()
        total = shares.sum(-1, keepdim=True)
        return shares.div_(total), at_right, (top + total.log())[..., 0]
    log_p = F.log_softmax(logits, -1, dtype=exact)
    log_total = at_right - log_p.gather(-1, right)[..., 0]
    return log_p.exp_(), at_right, log_total


def aligned(rows: Tensor) -> Tensor:
    """Zeros behind, so that their number suits a GPU."""
    missing = -len(rows) % ALIGNED
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def _logit_gradients(seen: _Softmax, right: Tensor, facts: _Facts) -> Tensor:
    """Of the loss, less the smoothing's even share, with respect to the logits; written over p (P, n, V).

    Cross-entropy: p, less 1 - smoothing at the right word. With respect to P's logits, KL(P || Q) has
    p (log p - log q - KL(P || Q)), and KL(Q || P) has p - q.
    """
    grad, passes, divergence = seen.p, len(seen.p), None
    if seen.apart is not None and seen.divergences is not None:
        signed = torch.stack([seen.apart, -seen.apart]).sub_(seen.divergences[..., None])
        divergence = signed.mul_(grad).add_(grad).sub_(grad.flip(0))
    if passes > 1:
        grad.div_(passes)
    if divergence is not None:
        grad.add_(divergence, alpha=facts.alpha / 4)
    return grad.scatter_add_(-1, right, grad.new_full((), (facts.smoothing - 1) / passes).expand(right.shape))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; the sum of many chunks is of float32 at least."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _check(
    states: Tensor, weight: Tensor, targets: Tensor, real: Tensor | None, rates: tuple[float, float], chunk: int | None
) -> None:
    check_rate("smoothing", rates[0])
    if not 0 <= rates[1] < float("inf"):
        raise ValueError(f"`alpha` must be 0 or more, but is {rates[1]}")
    if chunk is not None:
        check_size("chunk", chunk)
    tokens = states.shape[1:2]
    if states.dim() != 3 or weight.dim() != 2 or states.shape[2] != weight.shape[1]:
        shapes = f"{tuple(states.shape[1:])} and {tuple(weight.shape)}"
        raise ValueError(f"states must be (N, E) and weight (V, E), one E, but are {shapes}; flatten rows first")
    if targets.shape != tokens or (real is not None and (real.shape != tokens or real.dtype != torch.bool)):
        given = f"{tuple(targets.shape)}" + ("" if real is None else f" and {real.dtype} of {tuple(real.shape)}")
        raise ValueError(f"targets and (bool) real must be of {tuple(tokens)}, one a token, but are {given}")
