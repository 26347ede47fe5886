"""Equation 1, scaled dot-product attention (section 3.2.1), as written in the paper: the reference of every backend."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attent.nn.argument_checks import check_rate
from attent.nn.masks import Mask

MAX_HIDDEN_VALUES = 2**26  # of additive scores at a time: 256 MiB in float32


class AttentionInputs(NamedTuple):
    """The arguments of one attention call, in the order in which every backend takes them."""

    q: Tensor  # (B, H, Tq, D)
    k: Tensor  # (B, Hkv, Tk, D); query head h attends to key head h // (H / Hkv)
    v: Tensor  # (B, Hkv, Tk, D)
    mask: Mask
    bias: Tensor | None  # added to the scaled scores; broadcasts to (B, H, Tq, Tk)
    scale: float  # 1 / sqrt(D) in the paper
    dropout: float  # on the weights; the paper has none


def attend_explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    score_weight: Tensor | None = None,  # (H, D), of additive scores instead of dot products
) -> tuple[Tensor, Tensor]:
    """Equation 1: Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V. Also return the weights, before dropout."""
    mask = Mask() if mask is None else mask
    scale = q.shape[-1] ** -0.5 if scale is None else scale  # 1 / sqrt(d_k)
    k, v = repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1])
    visible = mask.to_dense(q.shape[0], q.shape[2], k.shape[2], q.device)

    # (B, H, Tq, D) @ (B, H, D, Tk) -> (B, H, Tq, Tk)
    scores = q @ k.transpose(-2, -1) if score_weight is None else compute_additive_scores(q, k, score_weight)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(~visible, 0)  # zeros where a query may attend to nothing
    return F.dropout(weights, dropout).to(v.dtype) @ v, weights


def compute_additive_scores(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """v^T tanh(q + k), the additive compatibility of Bahdanau et al. 2014, by head: (B, H, Tq, Tk). W^Q and W^K are
    applied already, and `weight` (H, D) is v.

    The hidden layer is (B, H, Tq, Tk, D). A large one is computed for some queries at a time, and again in the backward
    pass. A compiler fuses it into the sum.
    """

    def score(q: Tensor) -> Tensor:
        hidden = (q[:, :, :, None] + k[:, :, None]).tanh()  # (B, H, Tq, 1, D) + (B, H, 1, Tk, D)
        return (hidden * weight[:, None, None]).sum(-1)

    values_per_query = k.numel()
    if torch.compiler.is_compiling() or q.shape[2] * values_per_query <= MAX_HIDDEN_VALUES:
        return score(q)
    chunks = q.split(max(1, MAX_HIDDEN_VALUES // values_per_query), 2)
    return torch.cat([checkpoint(score, chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks], 2)


def repeat_kv_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hkv, T, D) -> (B, H, T, D): neighbouring query heads share one key/value head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def check_inputs(inputs: AttentionInputs) -> None:
    q, k, v, mask, bias, *_ = inputs
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(f"q, k, v must be (B, H, T, D), but have {q.dim()}, {k.dim()}, {v.dim()} dimensions")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ValueError(f"q, k, v must agree in batch and head width, and k, v in heads and length, but are {shapes}")
    if not isinstance(mask, Mask):
        raise ValueError(f"`mask` must be a description such as Mask(causal=True), but is a {type(mask).__name__}")
    if any(x is not None and x.device != q.device for x in (k, v, bias)):
        devices = sorted({str(x.device) for x in (q, k, v, bias) if x is not None})
        raise ValueError(f"q, k, v and bias must be on one device, but are on {', '.join(devices)}; move them")
    if not (q.dtype == k.dtype == v.dtype) or not q.is_floating_point():
        raise ValueError(f"q, k, v must be of one floating type, but are {q.dtype}, {k.dtype}, {v.dtype}")
    check_rate("dropout", inputs.dropout)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key/value heads, but are {q.shape[1]} and {k.shape[1]}")
    B, H, Tq, Tk = full = (*q.shape[:3], k.shape[2])
    if bias is not None:
        can_broadcast = bias.dim() == 4 and all(n in (1, m) for n, m in zip(bias.shape, full, strict=True))
        if not can_broadcast or not bias.is_floating_point():
            is_now = f"{bias.dtype} of {tuple(bias.shape)}"
            raise ValueError(f"`bias` must be floating and broadcast to {(B, H, Tq, Tk)}, but is {is_now}")
    mask.check(B, Tq, Tk, q.device)
