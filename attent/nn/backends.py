"""Scaled dot-product attention (section 3.2.1): equation 1 as written, and four faster ways to the same numbers.

    explicit  equation 1, step by step; gives the weights too. Every other way is checked against it.
    fused     PyTorch's scaled_dot_product_attention: memory grows with length, not with its square (windows, packing
              and biases still need a mask tensor of that square)
    flex      FlexAttention: compiled from `Mask.allows` itself; skips blocks that nobody may look at
    packed    flash attention over sentences of different lengths laid end to end, without padding (CUDA)
    tiles     our own kernel for rows of many short sentences, each tile of which holds several (CUDA)

All take the same arguments and treat a query that may look at nothing the same way: its output is zeros. `attend`
picks one through `choose`. Projections and heads are `attention`'s business; who may look at whom is `masks`'.
"""

from __future__ import annotations

import difflib
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attent.nn import kernels
from attent.nn.argument_checks import check_rate
from attent.nn.masks import Mask

MAX_FEW_QUERIES = 16  # queries at once, as in a step of decoding
LONG_ROW_TOKENS = (
    2048  # packed rows up to here are faster in tiles of many sentences than in flash's, which have one each
)
TILE_HEAD_WIDTHS = (16, 32, 64, 128)  # of heads
MAX_GRID_ROWS = 2**16 - 1  # of a batch: a GPU counts programs so far in that direction


class AttentionInputs(NamedTuple):
    """One call of attention, as every backend takes it."""

    q: Tensor  # (B, H, Tq, D)
    k: Tensor  # (B, Hkv, Tk, D); query head h looks at key head h // (H / Hkv)
    v: Tensor  # (B, Hkv, Tk, D)
    mask: Mask
    bias: Tensor | None  # added to the scaled scores; broadcasts to (B, H, Tq, Tk)
    scale: float  # 1 / sqrt(D) in the paper
    dropout: float  # on the weights; the paper has none


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention by the named backend, or by the best that can do it: (B, H, Tq, D)."""
    mask = Mask() if mask is None else mask
    request = AttentionInputs(q, k, v, mask, bias, q.shape[-1] ** -0.5 if scale is None else scale, dropout)
    check_inputs(request)
    return choose_backend(backend, request).run(*request)


class FusedQKV(NamedTuple):
    """Queries, keys and values side by side in memory, as one product leaves them. If that has added biases which it
    knows as mere numbers (detached), they stand here to be given their gradient."""

    qkv: Tensor  # (B, T, 3, H, D); or queries alone (B, Tq, 1, H, D)
    kv: Tensor | None  # keys and values (B, Tk, 2, H, D), where these are not of the same tokens
    qkv_bias: Tensor | None = None  # (3, H, D) or (1, H, D)
    kv_bias: Tensor | None = None  # (2, H, D)

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as they lie there."""
        both = self.qkv.unbind(2) if self.kv is None else (*self.qkv.unbind(2), *self.kv.unbind(2))
        q, k, v = (x.transpose(1, 2) for x in both)
        return q, k, v

    def with_bias_gradients(self) -> FusedQKV:
        """The same numbers, which now know where their biases come from."""
        asked = self.qkv if self.qkv_bias is None else self.qkv + zeros_with_gradient(self.qkv_bias, self.qkv)
        if self.kv is None or self.kv_bias is None:
            return FusedQKV(asked, self.kv)
        return FusedQKV(asked, self.kv + zeros_with_gradient(self.kv_bias, self.kv))


def zeros_with_gradient(bias: Tensor, like: Tensor) -> Tensor:
    """Zeros, through which a gradient reaches the bias."""
    return (bias - bias.detach()).to(like.dtype)


def attend_fused_qkv(
    fused_qkv: FusedQKV, mask: Mask, scale: float, dropout: float = 0.0, backend: str = "auto"
) -> Tensor:
    """`attend` without taking apart what lies together, where a backend can."""
    request = AttentionInputs(*fused_qkv.unpack(), mask, None, scale, dropout)
    check_inputs(request)
    chosen = choose_backend(backend, request)
    if chosen.run_fused_qkv is not None:
        return chosen.run_fused_qkv(fused_qkv, mask, scale, dropout)
    return chosen.run(*fused_qkv.with_bias_gradients().unpack(), mask, None, scale, dropout)


def attend_explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Equation 1: Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V. Also gives the softmax, before dropout."""
    mask = Mask() if mask is None else mask
    scale = q.shape[-1] ** -0.5 if scale is None else scale  # 1 / sqrt(d_k)
    k, v = repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1])
    visible = mask.to_dense(q.shape[0], q.shape[2], k.shape[2], q.device)

    scores = q @ k.transpose(-2, -1)  # (B, H, Tq, D) @ (B, H, D, Tk) -> (B, H, Tq, Tk)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(~visible, 0)  # zeros too where a query may look at nothing
    return F.dropout(weights, dropout).to(v.dtype) @ v, weights


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Equation 1 in one kernel of PyTorch's choosing."""
    (B, H, Tq, _), Tk = q.shape, k.shape[2]
    causal = bias is None and mask.is_plain_causal(Tq, Tk)
    visible = None if causal or mask.allows_all_keys(Tk) else mask.to_dense(B, Tq, Tk, q.device)
    additive = visible if bias is None else mask_bias(bias.to(q.dtype), visible)
    if additive is not None:  # kernels that take a mask do not share heads by themselves
        k, v = repeat_kv_heads(k, H), repeat_kv_heads(v, H)
    if (
        additive is not None
        and q.device.type == "cuda"
        and Tq <= MAX_FEW_QUERIES
        and not dropout
        and not torch.is_grad_enabled()
    ):
        out = attend_few_queries(q, k, v, additive, scale)
        return out.masked_fill(~mask.has_visible_keys(B, Tq, Tk, q.device), 0)
    with avoid_cudnn(q):
        out = F.scaled_dot_product_attention(
            q, k, v, additive, dropout, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != H
        )
    if visible is None or q.device.type == "cpu":
        return out
    # cuDNN, which CUDA may pick for half precision, gives the mean of all values to a query that sees nothing.
    return out.masked_fill(~mask.has_visible_keys(B, Tq, Tk, q.device), 0)


def avoid_cudnn(q: Tensor) -> AbstractContextManager[object]:
    """Without cuDNN, which takes 70 to 400 ms for each new shape of half precision (measured on an H200): whoever does
    not train has new ones all the time. Who trains has the same again and again, and cuDNN is quick then."""
    if q.device.type != "cuda" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    return DISABLE_CUDNN


class DisableCudnn:
    """The switch is the whole process's: the last one out sets it back to what it was."""

    def __init__(self) -> None:
        self.lock, self.depth, self.was_enabled = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self.lock:
            if not self.depth:
                self.was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self.depth += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.depth -= 1
            if not self.depth:
                torch.backends.cuda.enable_cudnn_sdp(self.was_enabled)


DISABLE_CUDNN = DisableCudnn()


def attend_few_queries(q: Tensor, k: Tensor, v: Tensor, mask_or_bias: Tensor, scale: float) -> Tensor:
    """Few queries at many keys: two plain products, which read keys and values once. The tiles of a fused kernel would
    be nearly empty (measured on an H200: 1.3 to 2.8 times as slow), and cuDNN takes up to seconds for each new shape.

    `additive` is a bias, or a mask of what is visible. No gradient; a query that sees nothing gives NaN.
    """
    if mask_or_bias.dtype == torch.bool:
        mask_or_bias = torch.zeros_like(mask_or_bias, dtype=torch.float32).masked_fill(~mask_or_bias, float("-inf"))
    if q.dtype == torch.float16:  # it ends at 65,504
        q, scale = q * scale, 1.0
    scores = torch.add(mask_or_bias, q @ k.transpose(-2, -1), alpha=scale)
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype) @ v


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Equation 1 compiled around `Mask.allows`."""
    (B, H, Tq, _), Tk = q.shape, k.shape[2]
    blocks = None if mask.allows_all_keys(Tk) else mask.to_block_mask(B, Tq, Tk, q.device)
    add_bias = None
    if bias is not None:
        table = bias.expand(B, H, Tq, Tk)

        def add_bias(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            return score + table[b, h, q_index, k_index]

    # Compiled here unless somebody compiles around us; on CPU that would take a minute.
    run = get_flex_kernel(use_compiled=q.device.type != "cpu" and not torch.compiler.is_compiling())
    return run(q, k, v, score_mod=add_bias, block_mask=blocks, scale=scale, enable_gqa=k.shape[1] != H)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Equation 1 for each packed sentence by itself, all in one flash kernel."""
    from torch.nn.attention.varlen import varlen_attn

    assert mask.packing is not None
    k, v = repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1])
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B, H, T, D) -> (B * T, H, D)
    offsets_q, offsets_k = mask.offsets()
    before, after = mask.window or (None, None)
    after = 0 if mask.causal else after
    out = varlen_attn(
        flat_q,
        flat_k,
        flat_v,
        offsets_q,
        offsets_k,
        max(mask.packing[0].shape[1], 1),  # filler is a stretch too, and may be as long as a row
        max(mask.packing[1].shape[1], 1),
        scale=scale,
        window_size=(-1 if before is None else before, -1 if after is None else after),
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)  # (B * T, H, D) -> (B, H, T, D)


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Equation 1 for packed sentences, several in a tile."""
    k, v = repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1])
    asked, *told = (x.transpose(1, 2) for x in (q, k, v))
    return attend_tiles_fused_qkv(FusedQKV(asked[:, :, None], torch.stack(told, 2)), mask, scale, dropout)


def attend_tiles_fused_qkv(fused_qkv: FusedQKV, mask: Mask, scale: float, dropout: float) -> Tensor:
    from attent.nn.kernels import packed_attention as kernel

    return kernel.attend_packed(*fused_qkv, mask, scale, dropout)


def repeat_kv_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hkv, T, D) -> (B, H, T, D): neighbouring query heads share one key/value head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def mask_bias(bias: Tensor, visible: Tensor | None) -> Tensor:
    return bias if visible is None else bias.masked_fill(~visible, float("-inf"))


def get_flex_kernel(use_compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return compile_once(flex_attention) if use_compiled else flex_attention


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


# --- which backend -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """A way to compute attention, and the reasons why it cannot do a request (None: it can)."""

    name: str
    run: Callable[..., Tensor]
    find_limitation: Callable[[AttentionInputs], str | None]
    run_fused_qkv: Callable[..., Tensor] | None = None  # the same for `attend_joined`, without taking it apart


def find_no_limitation(inputs: AttentionInputs) -> str | None:
    return None


def attend_explicit_output(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    return attend_explicit(q, k, v, mask, bias, scale, dropout)[0]


def find_flex_limitation(inputs: AttentionInputs) -> str | None:
    q, k, v, *_ = inputs
    if inputs.dropout > 0:
        return "FlexAttention has no dropout on the weights"
    if q.shape[2] == 0 or k.shape[2] == 0:
        return "FlexAttention takes no empty sequences"
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "FlexAttention has no backward pass on CPU"
    if q.device.type == "cuda" and q.shape[-1] < 16:
        return f"FlexAttention needs heads of at least 16 on CUDA, and these are {q.shape[-1]} wide"
    if q.device.type == "cuda" and q.dtype == torch.float64:
        return "FlexAttention has no float64 on CUDA"
    return None


def find_packed_limitation(inputs: AttentionInputs) -> str | None:
    q, mask = inputs.q, inputs.mask
    if mask.packing is None:
        return "the batch is not packed (`mask.packing` is None)"
    if q.device.type != "cuda":
        return f"its flash kernel runs on CUDA only, and these tensors are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its flash kernel takes bfloat16 and float16, not {q.dtype}"
    if inputs.bias is not None:
        return "its flash kernel takes no bias"
    if inputs.dropout > 0:
        return "its flash kernel has no dropout on the weights"
    if (mask.causal or mask.window) and mask.packing[0] is not mask.packing[1]:
        return "order and windows between two different packings are not what its flash kernel means by them"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"its flash kernel takes heads of a multiple of 8 up to 256 wide, and these are {q.shape[-1]}"
    return None


def find_tiles_limitation(inputs: AttentionInputs) -> str | None:
    q, k, mask = inputs.q, inputs.k, inputs.mask
    if mask.packing is None:
        return "the batch is not packed (`mask.packing` is None)"
    if not kernels.can_use_kernels(q):
        if q.device.type == "cuda":
            return "its kernel needs Triton, a C compiler and an NVIDIA GPU with bfloat16, and one of these is missing"
        return f"its kernel runs on CUDA only, and these tensors are on {q.device.type}"
    if inputs.bias is not None:
        return "its kernel takes no bias"
    if mask.window is not None:
        return "its kernel takes no window"
    if mask.causal and mask.packing[0] is not mask.packing[1]:
        return "order between two different packings is not what its kernel means by it"
    if q.dtype not in kernels.SUPPORTED_DTYPES:
        return f"its kernel takes bfloat16, float16 and float32, not {q.dtype}"
    if q.shape[-1] not in TILE_HEAD_WIDTHS:
        return f"its kernel takes heads {', '.join(map(str, TILE_HEAD_WIDTHS))} wide, and these are {q.shape[-1]}"
    if not (q.shape[2] and k.shape[2] and mask.packing[0].ends.shape[1]):
        return "its kernel takes no empty rows"
    if q.shape[0] > MAX_GRID_ROWS or 3 * max(q.shape[2], k.shape[2]) * q.shape[1] * q.shape[3] >= 2**31:
        sizes = f"{q.shape[0]:,} of {k.shape[2]:,} tokens"
        return f"its kernel takes at most {MAX_GRID_ROWS:,} rows of 2**31 numbers, and these are {sizes}"
    return None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("fused", attend_fused, find_no_limitation),
        Backend("packed", attend_packed, find_packed_limitation),
        Backend("tiles", attend_tiles, find_tiles_limitation, attend_tiles_fused_qkv),
        Backend("flex", attend_flex, find_flex_limitation),
        Backend("explicit", attend_explicit_output, find_no_limitation),
    )
}


def choose_backend(name: str, inputs: AttentionInputs) -> Backend:
    """The backend of that name if it can do the request; for "auto" the first that can, in order of speed."""
    if name == "auto":
        return next(
            BACKENDS[other] for other in rank_backends(inputs) if BACKENDS[other].find_limitation(inputs) is None
        )
    check_backend_name(name)
    reason = BACKENDS[name].find_limitation(inputs)
    if reason is not None:
        able = [other for other, backend in BACKENDS.items() if backend.find_limitation(inputs) is None]
        raise ValueError(f"backend `{name}` cannot do this: {reason}. Can do it: {', '.join(able)} (or `auto`)")
    return BACKENDS[name]


def check_backend_name(name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        near = difflib.get_close_matches(name, [*BACKENDS, "auto"], 1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ValueError(f"`backend` must be auto or one of {', '.join(BACKENDS)}, but is {name!r}{hint}")


def rank_backends(inputs: AttentionInputs) -> tuple[str, ...]:
    """Sentences that are long fill flash's own tiles; short ones share ours. What is not packed is dense."""
    if inputs.mask.packing is None:
        return ("fused",)
    return ("packed", "tiles", "fused") if inputs.k.shape[2] > LONG_ROW_TOKENS else ("tiles", "fused")


def check_inputs(inputs: AttentionInputs) -> None:
    """Refuse tensors that do not belong together."""
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
    B, H, Tq, Tk = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    if bias is not None and not (can_broadcast(bias.shape, (B, H, Tq, Tk)) and bias.is_floating_point()):
        is_now = f"{bias.dtype} of {tuple(bias.shape)}"
        raise ValueError(f"`bias` must be floating and broadcast to {(B, H, Tq, Tk)}, but is {is_now}")
    mask.check(B, Tq, Tk, q.device)


def can_broadcast(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return len(shape) == len(full) and all(n in (1, m) for n, m in zip(shape, full, strict=True))
