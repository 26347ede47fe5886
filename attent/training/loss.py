"""The output layer and the label-smoothed cross-entropy (section 5.4) in one function, computed in chunks of tokens.

The logits of a whole batch, larger than everything else in a small model, are never in memory at once. Gradients are
computed in the forward pass, while a chunk's probabilities are available; `backward` only scales them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from attent.nn import kernels

LOGITS_PER_CHUNK = {"cpu": 2**21, "cuda": 2**27}  # fits the CPU's cache; fills a GPU
MEMORY_DIVISOR = 32  # our kernel's logits may take 1/32 of a GPU's memory, mostly a whole batch
VOCAB_ALIGNMENT = 64  # for tensor cores: a vocabulary of 50,257 takes three times as long as one of 50,304


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
    """Return sums over the tokens, in nats: the loss, and the plain cross-entropy, without a gradient.

    states (N, E), weight (V, E), bias (V,), targets (N,); token_mask (N,) is False at padding. Label smoothing is that
    of `F.cross_entropy`: 1 - smoothing for the target, plus smoothing / V for every token of the vocabulary.
    """
    inputs = _LossInputs(states[None], weight, bias, targets, token_mask)
    return _uncompiled_loss(inputs, smoothing, 0.0, chunk_size)


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

    This is half of the paper's loss, so that a pass has the same weight as without R-Drop; alpha is that of the paper
    (5 for translation). The plain cross-entropy is the mean of both passes.
    """
    inputs = _LossInputs(torch.stack([first, second]), weight, bias, targets, token_mask)
    return _uncompiled_loss(inputs, smoothing, alpha, chunk_size)


class _LossInputs(NamedTuple):
    states: Tensor  # (P, N, E) with one or two passes P over the same tokens
    weight: Tensor  # (V, E)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,)
    token_mask: Tensor | None  # (N,) False at padding


def _compute_loss(inputs: _LossInputs, smoothing: float, alpha: float, chunk_size: int | None) -> tuple[Tensor, Tensor]:
    states, weight, bias, targets, token_mask = inputs
    if token_mask is not None and _can_drop_padding(states):
        states, targets, token_mask = states[:, token_mask], targets[token_mask], None
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        dtype = torch.promote_types(states.dtype, weight.dtype)
    by_kernel = kernels.can_use_kernels(weight) and dtype != torch.float64
    chunk_size = chunk_size or _choose_chunk_size(weight, states, by_kernel)
    options = _LossOptions(smoothing, alpha, chunk_size, dtype, torch.is_grad_enabled(), by_kernel)
    with torch.autocast(kind, enabled=False):
        apply: Callable[..., tuple[Tensor, Tensor]] = _LinearCrossEntropy.apply
        return apply(states, weight, bias, targets, token_mask, options)


# torch.compile cannot trace the custom gradient and the loop over chunks. `torch.compiler.disable` would import the
# compiler now, which takes seconds, and not at the first call.
_uncompiled_loss: Callable[..., tuple[Tensor, Tensor]] = _disable_dynamo(_compute_loss)


def _can_drop_padding(states: Tensor) -> bool:
    """True on a CPU; on a GPU, selecting tokens would synchronize."""
    return states.device.type == "cpu"


def _choose_chunk_size(weight: Tensor, states: Tensor, use_kernel: bool = False) -> int:
    """Return the tokens per chunk. Our kernel needs memory for the logits only, softmax several times as much."""
    cells = LOGITS_PER_CHUNK.get(states.device.type, LOGITS_PER_CHUNK["cuda"])
    if use_kernel and states.device.type == "cuda":
        memory = torch.cuda.get_device_properties(states.device).total_memory
        cells = max(cells, memory // (MEMORY_DIVISOR * states.element_size()))
    return max(1, cells // max(1, weight.shape[0] * states.shape[0]))


class _LossOptions(NamedTuple):
    smoothing: float
    alpha: float
    chunk_size: int
    dtype: torch.dtype  # of the matrix products; the softmax is at least float32
    needs_grad: bool
    use_kernel: bool

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    """(P, N, E) states -> the two sums; computes the gradients in the forward pass."""

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
        dtypes = (options.dtype, options.accumulate_dtype, options.accumulate_dtype)
        inputs = (states, weight, bias)
        grads = _Gradients(
            *(
                torch.zeros_like(like, dtype=dtype) if like is not None and options.needs_grad and needed else None
                for like, dtype, needed in zip(inputs, dtypes, ctx.needs_input_grad[:3], strict=True)
            )
        )
        loss, plain = _compute_sums(_LossInputs(states, weight, bias, targets, token_mask), options, grads).unbind()
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


class _Gradients(NamedTuple):
    states: Tensor | None  # (P, N, E)
    weight: Tensor | None  # (V, E)
    bias: Tensor | None  # (V,)


def _compute_sums(inputs: _LossInputs, options: _LossOptions, grads: _Gradients) -> Tensor:
    """Return the loss and the plain cross-entropy (2,), and add to the gradients, chunk by chunk."""
    states, weight, bias, targets, token_mask = inputs
    vocab, dtype = len(weight), options.dtype
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    if options.use_kernel:
        weight, bias = pad_vocab_rows(weight), None if bias is None else pad_vocab_rows(bias)
    compute_gradients = _compute_with_kernel if options.use_kernel else _compute_with_torch
    sums = torch.zeros(2, dtype=options.accumulate_dtype, device=states.device)
    for start in range(0, len(targets), options.chunk_size):
        part = slice(start, start + options.chunk_size)
        chunk, mask = states[:, part].to(dtype), None if token_mask is None else token_mask[part]
        if mask is not None:  # NaN in padding must not reach the weight's gradient
            chunk = chunk.masked_fill(~mask[:, None], 0)
        losses, logits_grad = compute_gradients(F.linear(chunk, weight, bias), targets[part], mask, vocab, options)
        sums += losses.sum(1)
        if grads.states is not None:
            for pass_grad, states_grad in zip(logits_grad, grads.states, strict=True):
                torch.mm(pass_grad, weight, out=states_grad[part])
        logits_grad = logits_grad.flatten(0, 1)
        if grads.weight is not None:
            _add_matmul(grads.weight, logits_grad.T[:vocab], chunk.flatten(0, 1))
        if grads.bias is not None:
            grads.bias.add_(logits_grad[:, :vocab].sum(0, dtype=options.accumulate_dtype))
    return sums


def _compute_with_kernel(
    logits: Tensor, targets: Tensor, mask: Tensor | None, vocab: int, options: _LossOptions
) -> tuple[Tensor, Tensor]:
    from attent.nn.kernels.cross_entropy import cross_entropy_inplace, rdrop_inplace

    if len(logits) == 2:
        return rdrop_inplace(logits, targets, mask, vocab, options.smoothing, options.alpha), logits
    return cross_entropy_inplace(logits[0], targets, mask, vocab, options.smoothing), logits


def _compute_with_torch(
    logits: Tensor, targets: Tensor, mask: Tensor | None, vocab: int, options: _LossOptions
) -> tuple[Tensor, Tensor]:
    """(P, n, V) logits, which are overwritten -> the loss and plain cross-entropy of each token (2, n), and the
    gradient of the loss with respect to the logits (P, n, V), unless none is needed."""
    smoothing, dtype, kl = options.smoothing, options.accumulate_dtype, None
    columns = targets.expand(len(logits), -1)[..., None]
    mean_logits = logits.mean(-1, dtype=dtype) if smoothing else 0.0
    log_ratio = logits[0].to(dtype) - logits[1] if options.alpha else None  # log p - log q
    probs, target_logits, log_total = softmax_inplace(logits, columns, dtype)
    plain = log_total - target_logits
    loss = ((1 - smoothing) * plain + smoothing * (log_total - mean_logits)).mean(0)
    if log_ratio is not None:
        log_ratio.sub_((log_total[0] - log_total[1])[:, None])
        kl = torch.stack([(probs[0] * log_ratio).sum(-1), -(probs[1] * log_ratio).sum(-1)])
        loss = loss + options.alpha / 4 * kl.sum(0)
    losses = torch.stack([loss, plain.mean(0)])
    if mask is not None:
        losses = losses.masked_fill(~mask, 0)
    if not options.needs_grad:
        return losses, probs
    grad = _compute_logit_gradients(probs, columns, log_ratio, kl, options)
    return losses, (grad if mask is None else grad.masked_fill_(~mask[:, None], 0)).to(options.dtype)


def _compute_logit_gradients(
    probs: Tensor, columns: Tensor, log_ratio: Tensor | None, kl: Tensor | None, options: _LossOptions
) -> Tensor:
    """Overwrite the probabilities (P, n, V) with the gradient of the loss with respect to the logits.

    Cross-entropy: p, minus 1 - smoothing at the target and smoothing / V everywhere. With respect to P's logits,
    KL(P || Q) has the gradient p (log p - log q - KL(P || Q)), and KL(Q || P) has p - q.
    """
    grad, passes, divergence = probs, len(probs), None
    if log_ratio is not None and kl is not None:
        signed = torch.stack([log_ratio, -log_ratio]).sub_(kl[..., None])
        divergence = signed.mul_(probs).add_(probs).sub_(probs.flip(0))
    if options.smoothing:
        grad.sub_(options.smoothing / probs.shape[-1])
    if passes > 1:
        grad.div_(passes)
    if divergence is not None:
        grad.add_(divergence, alpha=options.alpha / 4)
    return grad.scatter_add_(-1, columns, grad.new_full((), (options.smoothing - 1) / passes).expand(columns.shape))


def softmax_inplace(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(P, n, V) logits -> probabilities, the target's logit (P, n), the log of the softmax's denominator (P, n).

    On a CPU it overwrites the logits, which halves the memory traffic: 1.4 ns per number instead of 2. A GPU is
    fastest with torch's fused kernel, which leaves them.
    """
    target_logits = logits.gather(-1, targets)[..., 0].to(dtype)
    if logits.device.type == "cpu" and logits.dtype == dtype:
        top = logits.amax(-1, keepdim=True)
        exps = logits.sub_(top).exp_()
        total = exps.sum(-1, keepdim=True)
        return exps.div_(total), target_logits, (top + total.log())[..., 0]
    log_p = F.log_softmax(logits, -1, dtype=dtype)
    log_total = target_logits - log_p.gather(-1, targets)[..., 0]
    return log_p.exp_(), target_logits, log_total


def pad_vocab_rows(rows: Tensor) -> Tensor:
    missing = -len(rows) % VOCAB_ALIGNMENT
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in at least float32 where the device can."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right, out_dtype=total.dtype) if left.is_cuda else left @ right)
