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
from attent.nn.argument_checks import check_rate, check_size

LOGITS_PER_CHUNK = {"cpu": 2**21, "cuda": 2**27}  # logits at once: on CPU they stay in the cache, on a GPU they fill it
MEMORY_DIVISOR = 32  # of a GPU's memory that our kernel's logits may take, one in so many: mostly a whole batch
VOCAB_ALIGNMENT = 64  # of a GPU's matrix units: a vocabulary of 50,257 words takes three times as long as one of 50,304


def linear_cross_entropy(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_mask: Tensor | None,
    smoothing: float,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over the real tokens, in nats: the loss, and the plain cross-entropy (which has no gradient).

    states (N, E), weight (V, E), bias (V,), targets (N,); `real` (N,) is False at filler. The words' shares that are
    aimed at: 1 - smoothing for the right one, and smoothing / V more for every one, as in `F.cross_entropy`.
    """
    return _uncompiled_loss(states[None], weight, bias, targets, token_mask, (smoothing, 0.0), chunk_size)


def rdrop_loss(
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_mask: Tensor | None,
    smoothing: float,
    alpha: float,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """R-Drop (Liang et al. 2021) for two passes of the same tokens with different dropout, P and Q:

        1/2 (CE(P) + CE(Q)) + alpha / 2 * 1/2 (KL(P || Q) + KL(Q || P))

    That is half of the paper's loss: alpha means what it means there (5 for its translations), and a pass has the
    weight that it has without R-Drop. The plain cross-entropy is the mean of both.
    """
    return _uncompiled_loss(
        torch.stack([first, second]), weight, bias, targets, token_mask, (smoothing, alpha), chunk_size
    )


def _compute_loss(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_mask: Tensor | None,
    rates: tuple[float, float],
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """`states` is (P, N, E): one pass, or two of the same tokens."""
    _check_inputs(states, weight, targets, token_mask, rates, chunk_size)
    if token_mask is not None and _can_drop_padding(states):
        states, targets, token_mask = states[:, token_mask], targets[token_mask], None
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        dtype = torch.promote_types(states.dtype, weight.dtype)
    by_kernel = kernels.can_use_kernels(weight) and not rates[1] and dtype != torch.float64
    facts = _LossOptions(
        *rates, chunk_size or _choose_chunk_size(weight, states, by_kernel), dtype, torch.is_grad_enabled(), by_kernel
    )
    with torch.autocast(kind, enabled=False):
        apply: Callable[..., tuple[Tensor, Tensor]] = _LinearCrossEntropy.apply
        return apply(states, weight, bias, targets, token_mask, facts)


# A custom gradient and a loop over chunks are not for the compiler: it goes around them.
_uncompiled_loss: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(_compute_loss)


def _can_drop_padding(states: Tensor) -> bool:
    """May filler be left out? On a GPU the host would have to wait for the number of what is left."""
    return states.device.type == "cpu"


def _choose_chunk_size(weight: Tensor, states: Tensor, use_kernel: bool = False) -> int:
    """Tokens at once. Our kernel holds nothing beside the logits; softmax and R-Drop hold several times as much."""
    cells = LOGITS_PER_CHUNK.get(states.device.type, LOGITS_PER_CHUNK["cuda"])
    if use_kernel and states.device.type == "cuda":
        memory = torch.cuda.get_device_properties(states.device).total_memory
        cells = max(cells, memory // (MEMORY_DIVISOR * states.element_size()))
    return max(1, cells // max(1, weight.shape[0] * states.shape[0]))


class _LossOptions(NamedTuple):
    smoothing: float
    alpha: float
    chunk_size: int
    dtype: torch.dtype  # of the matrix products; the softmax is float32 at least
    needs_grad: bool
    use_kernel: bool

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    """(P, N, E) states -> the two sums. Gradients are made on the way forward, a chunk of tokens after another."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        token_mask: Tensor | None,
        options: _LossOptions,
    ) -> tuple[Tensor, Tensor]:
        inputs = (states, weight, bias)
        wanted = _NeededGradients(*(options.needs_grad and needed for needed in ctx.needs_input_grad[:3]))
        work = _compute_with_kernel if options.use_kernel else _compute_with_torch
        loss, plain, grads = work(states, weight, bias, targets, token_mask, options, wanted)
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


class _NeededGradients(NamedTuple):
    """Which gradients are asked for."""

    states: bool
    weight: bool
    bias: bool


class _Gradients(NamedTuple):
    """Sums so far; None where nobody asked."""

    states: Tensor | None  # (P, N, E)
    weight: Tensor | None  # (V, E)
    bias: Tensor | None  # (V,)


def _compute_with_kernel(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_mask: Tensor | None,
    options: _LossOptions,
    needed: _NeededGradients,
) -> tuple[Tensor, Tensor, _Gradients]:
    """On a GPU: products by its library, and all between them by our kernel."""
    from attent.nn.kernels.cross_entropy import cross_entropy_inplace

    words, dtype = len(weight), options.dtype
    weight = pad_rows(weight.to(dtype))
    bias = None if bias is None else pad_rows(bias.to(dtype))
    sums = torch.zeros(2, dtype=torch.float32, device=states.device)
    of_states = torch.empty_like(states, dtype=dtype) if needed.states else None
    of_weight = of_bias = None
    for start in range(0, len(targets), options.chunk_size):
        part = slice(start, start + options.chunk_size)
        chunk, some = states[0, part].to(dtype), None if token_mask is None else token_mask[part]
        if some is not None:  # whatever stands in filler, be it NaN, adds nothing to the weight's gradient
            chunk = chunk.masked_fill(~some[:, None], 0)
        logits = F.linear(chunk, weight, bias)
        sums += cross_entropy_inplace(logits, targets[part], some, words, options.smoothing).sum(1)
        if of_states is not None:
            torch.mm(logits, weight, out=of_states[0, part])
        if needed.weight:
            of_weight = _accumulate_matmul(of_weight, logits.T[:words], chunk)
        if needed.bias:
            here = logits[:, :words].sum(0, dtype=torch.float32)
            of_bias = here if of_bias is None else of_bias + here
    if needed.weight and of_weight is None:  # there is no token
        of_weight = torch.zeros_like(weight[:words], dtype=torch.float32)
    if needed.bias and of_bias is None:
        of_bias = torch.zeros(words, device=weight.device)
    return sums[0], sums[1], _Gradients(of_states, of_weight, of_bias)


def _accumulate_matmul(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right in float32, in which the product is worked out anyway."""
    found = torch.mm(left, right, out_dtype=torch.float32) if left.dtype != torch.float32 else left @ right
    return found if total is None else total.add_(found)


def _compute_with_torch(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_mask: Tensor | None,
    options: _LossOptions,
    needed: _NeededGradients,
) -> tuple[Tensor, Tensor, _Gradients]:
    """Wherever torch runs."""
    grads = _Gradients(
        *(
            torch.zeros_like(like, dtype=options.accumulate_dtype) if like is not None and asked else None
            for like, asked in zip((states, weight, bias), needed, strict=True)
        )
    )
    layer = _OutputLayer(weight.to(options.dtype), None if bias is None else bias.to(options.dtype), options)
    loss, plain = (torch.zeros((), dtype=options.accumulate_dtype, device=states.device) for _ in range(2))
    for start in range(0, len(targets), options.chunk_size):
        part = slice(start, start + options.chunk_size)
        chunk = _Chunk.from_tokens(
            states[:, part].to(options.dtype), targets[part], None if token_mask is None else token_mask[part]
        )
        more, nats, seen = layer.compute_sums(chunk)
        loss += more
        plain += nats
        if any(grad is not None for grad in grads):
            layer.add_gradients(grads, part, chunk, seen)
    if grads.weight is not None:
        grads.weight.add_(layer.uniform_row_grad)
    return loss, plain, grads


class _Chunk(NamedTuple):
    """Some tokens of each pass."""

    states: Tensor  # (P, n, E)
    targets: Tensor  # (P, n, 1) the target words
    weights: Tensor  # (n,) 1, or 0 for filler
    padding: Tensor | None  # (n, 1)

    @classmethod
    def from_tokens(cls, states: Tensor, targets: Tensor, token_mask: Tensor | None) -> _Chunk:
        right = targets.expand(len(states), -1)[..., None]
        exact = torch.promote_types(states.dtype, torch.float32)
        if token_mask is None:
            return cls(states, right, torch.ones(len(targets), dtype=exact, device=states.device), None)
        filler = ~token_mask[:, None]
        # Whatever stands in filler, be it NaN, must not reach the sums; zeros add nothing to the weight's gradient.
        return cls(states.masked_fill(filler, 0), right, token_mask.to(exact), filler)


class _SoftmaxStats(NamedTuple):
    """What the gradients need of a chunk."""

    probs: Tensor  # (P, n, V) probabilities
    log_ratio: Tensor | None  # (n, V) with two passes: log p - log q
    kl: Tensor | None  # (2, n) KL(P || Q), KL(Q || P)


class _OutputLayer:
    """The linear layer, the softmax and the loss on a chunk.

    The smoothing's share of every word, smoothing / V, is left to algebra: it needs the mean of the logits only, and
    that is the states times the mean row of the weight. So no pass over (n, V) is made for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, options: _LossOptions) -> None:
        self.weight, self.bias, self.options = weight, bias, options
        self.mean_row = weight.mean(0, dtype=options.accumulate_dtype)  # (E,)
        self.mean_bias = 0.0 if bias is None else bias.mean(dtype=options.accumulate_dtype)
        self.uniform_row_grad = torch.zeros_like(
            self.mean_row
        )  # what the even share adds to each row of the weight's gradient

    def compute_sums(self, chunk: _Chunk) -> tuple[Tensor, Tensor, _SoftmaxStats]:
        """The loss, the plain cross-entropy, and what the gradients need."""
        facts = self.options
        logits = F.linear(chunk.states, self.weight, self.bias)
        apart = logits[0].to(facts.accumulate_dtype) - logits[1] if facts.alpha else None
        p, right, log_total = softmax(logits, chunk.targets, facts.accumulate_dtype)
        plain = log_total - right  # (P, n)
        uniform = log_total - (
            chunk.states.to(facts.accumulate_dtype) @ self.mean_row + self.mean_bias
        )  # if all words were right
        loss = ((1 - facts.smoothing) * plain + facts.smoothing * uniform).mean(0)
        divergences = None
        if apart is not None:
            apart.sub_((log_total[0] - log_total[1])[:, None])
            divergences = torch.stack([(p[0] * apart).sum(-1), -(p[1] * apart).sum(-1)])
            loss = loss + facts.alpha / 4 * divergences.sum(0)
        return loss @ chunk.weights, plain.mean(0) @ chunk.weights, _SoftmaxStats(p, apart, divergences)

    def add_gradients(self, grads: _Gradients, part: slice, chunk: _Chunk, stats: _SoftmaxStats) -> None:
        facts, passes = self.options, len(stats.probs)
        even = facts.smoothing / passes
        of_logits = _compute_logit_gradients(stats, chunk.targets, facts)
        if grads.bias is not None:
            of_bias = (chunk.weights @ of_logits).sum(0)
            grads.bias.add_(of_bias - facts.smoothing / len(grads.bias) * chunk.weights.sum())
        of_logits = of_logits.to(facts.dtype)
        if grads.states is not None:
            of_states = (of_logits @ self.weight).to(facts.accumulate_dtype).sub_(even * self.mean_row)
            grads.states[:, part] = of_states if chunk.padding is None else of_states.masked_fill_(chunk.padding, 0)
        if grads.weight is not None:
            states = chunk.states.flatten(0, 1)
            _add_matmul(grads.weight, of_logits.flatten(0, 1).T, states)
            self.uniform_row_grad.sub_(even / len(grads.weight) * states.sum(0, dtype=facts.accumulate_dtype))


def softmax(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(P, n, V) logits -> probabilities, the logit of the right word (P, n), the log of the softmax's denominator.

    On CPU it is written over the logits, so that half as much stands in the cache: 1.4 ns a number instead of 2. A GPU
    does best with torch's one kernel.
    """
    at_right = logits.gather(-1, targets)[..., 0].to(dtype)
    if logits.device.type == "cpu" and logits.dtype == dtype:
        top = logits.amax(-1, keepdim=True)
        shares = logits.sub_(top).exp_()
        total = shares.sum(-1, keepdim=True)
        return shares.div_(total), at_right, (top + total.log())[..., 0]
    log_p = F.log_softmax(logits, -1, dtype=dtype)
    log_total = at_right - log_p.gather(-1, targets)[..., 0]
    return log_p.exp_(), at_right, log_total


def pad_rows(rows: Tensor) -> Tensor:
    """Zeros behind, so that their number suits a GPU."""
    missing = -len(rows) % VOCAB_ALIGNMENT
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def _compute_logit_gradients(stats: _SoftmaxStats, targets: Tensor, options: _LossOptions) -> Tensor:
    """Of the loss, less the smoothing's even share, with respect to the logits; written over p (P, n, V).

    Cross-entropy: p, less 1 - smoothing at the right word. With respect to P's logits, KL(P || Q) has
    p (log p - log q - KL(P || Q)), and KL(Q || P) has p - q.
    """
    grad, passes, divergence = stats.probs, len(stats.probs), None
    if stats.log_ratio is not None and stats.kl is not None:
        signed = torch.stack([stats.log_ratio, -stats.log_ratio]).sub_(stats.kl[..., None])
        divergence = signed.mul_(grad).add_(grad).sub_(grad.flip(0))
    if passes > 1:
        grad.div_(passes)
    if divergence is not None:
        grad.add_(divergence, alpha=options.alpha / 4)
    return grad.scatter_add_(-1, targets, grad.new_full((), (options.smoothing - 1) / passes).expand(targets.shape))


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; the sum of many chunks is of float32 at least."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _check_inputs(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_mask: Tensor | None,
    rates: tuple[float, float],
    chunk_size: int | None,
) -> None:
    check_rate("smoothing", rates[0])
    if not 0 <= rates[1] < float("inf"):
        raise ValueError(f"`alpha` must be 0 or more, but is {rates[1]}")
    if chunk_size is not None:
        check_size("chunk", chunk_size)
    tokens = states.shape[1:2]
    if states.dim() != 3 or weight.dim() != 2 or states.shape[2] != weight.shape[1]:
        shapes = f"{tuple(states.shape[1:])} and {tuple(weight.shape)}"
        raise ValueError(f"states must be (N, E) and weight (V, E), one E, but are {shapes}; flatten rows first")
    if targets.shape != tokens or (
        token_mask is not None and (token_mask.shape != tokens or token_mask.dtype != torch.bool)
    ):
        given = f"{tuple(targets.shape)}" + (
            "" if token_mask is None else f" and {token_mask.dtype} of {tuple(token_mask.shape)}"
        )
        raise ValueError(f"targets and (bool) real must be of {tuple(tokens)}, one a token, but are {given}")
