"""Faster implementations of equation 1, in PyTorch and in Triton, and the inputs that each of them does not support.

All return the same values as `attend_explicit`, and zeros for a query that may attend to nothing.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attent.nn import kernels
from attent.nn.dot_product import AttentionInputs, repeat_kv_heads
from attent.nn.eval_mode import SharedContext
from attent.nn.masks import Mask, Packing, memoize

MAX_FEW_QUERIES = 16  # at most this many queries, as in a decoding step
TILE_HEAD_WIDTHS = (16, 32, 64, 128)
MAX_GRID_ROWS = 2**16 - 1  # CUDA's limit of a grid's third dimension, which counts rows


def avoid_cudnn(q: Tensor) -> AbstractContextManager[object]:
    """Disable cuDNN at inference: it takes 70 to 400 ms for each new shape in half precision (measured on an H200), and
    inference meets new shapes all the time. Training repeats its shapes, and cuDNN is fast then (but see
    `SpeechObjective`)."""
    if q.device.type != "cuda" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    return DISABLE_CUDNN


@contextmanager
def disable_cudnn() -> Iterator[None]:
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


DISABLE_CUDNN = SharedContext(disable_cudnn)  # the flag is global to the process: the last thread restores it


def attend_few_queries(q: Tensor, k: Tensor, v: Tensor, mask_or_bias: Tensor, scale: float) -> Tensor:
    """Attend with few queries to many keys by two matrix products, which read keys and values once. The tiles of a
    fused kernel would be nearly empty (measured on an H200: 1.3 to 2.8 times as slow).

    `mask_or_bias` is an additive bias, or a mask that is True where visible. Inference only; a query that may attend
    to nothing gives NaN.
    """
    if mask_or_bias.dtype == torch.bool:
        mask_or_bias = torch.zeros_like(mask_or_bias, dtype=torch.float32).masked_fill(~mask_or_bias, float("-inf"))
    if q.dtype == torch.float16:  # scale first: float16 overflows at 65,504
        q, scale = q * scale, 1.0
    scores = torch.add(mask_or_bias, q @ k.transpose(-2, -1), alpha=scale)
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype) @ v


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Equation 1 by the SDPA kernel that PyTorch selects."""
    (B, H, Tq, _), Tk = q.shape, k.shape[2]
    causal = bias is None and mask.is_plain_causal(Tq, Tk)
    visible = None if causal or mask.allows_all_keys(Tk) else mask.to_dense(B, Tq, Tk, q.device)
    attn_mask = visible if bias is None else mask_bias(bias.to(q.dtype), visible)
    if attn_mask is not None:  # SDPA kernels that take a mask do not support grouped heads
        k, v = repeat_kv_heads(k, H), repeat_kv_heads(v, H)
    inference = q.device.type == "cuda" and not dropout and not torch.is_grad_enabled()
    if inference and attn_mask is not None and Tq <= MAX_FEW_QUERIES:
        out = attend_few_queries(q, k, v, attn_mask, scale)
        return out.masked_fill(~mask.has_visible_keys(B, Tq, Tk, q.device), 0)
    with avoid_cudnn(q):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != H
        )
    if visible is None or q.device.type == "cpu":
        return out
    # cuDNN, which CUDA may select for half precision, returns the mean of all values for a fully masked query.
    return out.masked_fill(~mask.has_visible_keys(B, Tq, Tk, q.device), 0)


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Equation 1 compiled around `Mask.allows`."""
    from torch.nn.attention.flex_attention import flex_attention

    (B, H, Tq, _), Tk = q.shape, k.shape[2]
    block_mask = None if mask.allows_all_keys(Tk) else mask.to_block_mask(B, Tq, Tk, q.device)
    add_bias = None
    if bias is not None:
        full_bias = bias.expand(B, H, Tq, Tk)

        def add_bias(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            return score + full_bias[b, h, q_index, k_index]

    # Compiled here unless the caller compiles; on a CPU compiling would take a minute.
    use_compiled = q.device.type != "cpu" and not torch.compiler.is_compiling()
    run = compile_once(flex_attention) if use_compiled else cast(Callable[..., Tensor], flex_attention)
    return run(q, k, v, score_mod=add_bias, block_mask=block_mask, scale=scale, enable_gqa=k.shape[1] != H)


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Equation 1 for each packed sentence, in one flash attention call."""
    from torch.nn.attention.varlen import varlen_attn

    assert mask.packing is not None
    k, v = repeat_kv_heads(k, q.shape[1]), repeat_kv_heads(v, q.shape[1])
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B, H, T, D) -> (B * T, H, D)
    before, after = mask.window or (None, None)
    after = 0 if mask.causal else after
    # Padding is a sequence too, and may be as long as a row.
    max_q, max_k = (max(packing.shape[1], 1) for packing in mask.packing)
    window = (-1 if before is None else before, -1 if after is None else after)
    out = varlen_attn(flat_q, flat_k, flat_v, *compute_offsets(mask), max_q, max_k, scale=scale, window_size=window)
    assert isinstance(out, Tensor)
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)  # (B * T, H, D) -> (B, H, T, D)


@memoize
def compute_offsets(mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the packings of queries and keys as cu_seqlens, the sentence offsets in the concatenation of all rows:
    (S * B + 2 * B + 1,) each.

    Each row ends with two more sequences, the padding of the queries and that of the keys. Each is empty on the other
    side, so padding queries meet no key and padding keys meet no query.
    """
    assert mask.packing is not None
    queries, keys = mask.packing
    text_ends = (keys.segments >= 0).sum(1, keepdim=True)
    row_ends = [torch.full_like(side.positions[:, :1], side.shape[1]) for side in (queries, keys)]
    return concat_offsets(queries, row_ends[0], row_ends[0]), concat_offsets(keys, text_ends, row_ends[1])


def concat_offsets(packing: Packing, first_padding: Tensor, second_padding: Tensor) -> Tensor:
    rows, row_length = packing.shape
    ends = torch.cat([packing.ends, first_padding, second_padding], 1)  # (B, S + 2)
    ends = ends + row_length * torch.arange(rows, device=ends.device)[:, None]
    return F.pad(ends.flatten(), (1, 0)).to(torch.int32)


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Equation 1 for packed sentences, several in one tile."""
    from attent.nn.kernels import packed_attention

    q, k, v = (repeat_kv_heads(x, q.shape[1]).transpose(1, 2) for x in (q, k, v))
    return packed_attention.attend_packed_qkv(q[:, :, None], torch.stack([k, v], 2), None, None, mask, scale, dropout)


def mask_bias(bias: Tensor, visible: Tensor | None) -> Tensor:
    return bias if visible is None else bias.masked_fill(~visible, float("-inf"))


@functools.cache
def compile_once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


# --- limitations ---------------------------------------------------------------------------------------------------


def find_flex_limitation(inputs: AttentionInputs) -> str | None:
    q, k, v, *_ = inputs
    if inputs.dropout > 0:
        return "FlexAttention has no dropout on the weights"
    if q.shape[2] == 0 or k.shape[2] == 0:
        return "FlexAttention takes no empty sequences"
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "FlexAttention has no backward pass on CPU"
    if q.device.type == "cuda" and q.shape[-1] < 16:
        return f"FlexAttention needs a head width of at least 16 on CUDA, and it is {q.shape[-1]}"
    if q.device.type == "cuda" and q.dtype == torch.float64:
        return "FlexAttention has no float64 on CUDA"
    return None


def find_packed_limitation(inputs: AttentionInputs) -> str | None:
    q, mask = inputs.q, inputs.mask
    if mask.packing is None:
        return "the batch is not packed (`mask.packing` is None)"
    if q.device.type != "cuda":
        return f"its flash kernel runs on CUDA only, and the tensors are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its flash kernel takes bfloat16 and float16, not {q.dtype}"
    if inputs.bias is not None:
        return "its flash kernel takes no bias"
    if inputs.dropout > 0:
        return "its flash kernel has no dropout on the weights"
    if (mask.causal or mask.window) and mask.packing[0] is not mask.packing[1]:
        return "its flash kernel aligns causal masks and windows of two different packings at the end, not at the start"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"its flash kernel takes head widths that are multiples of 8 up to 256, and this is {q.shape[-1]}"
    return None


def find_tiles_limitation(inputs: AttentionInputs) -> str | None:
    q, k, mask = inputs.q, inputs.k, inputs.mask
    if mask.packing is None:
        return "the batch is not packed (`mask.packing` is None)"
    if not kernels.can_use_kernels(q):
        if q.device.type == "cuda":
            return "its kernel needs Triton, a C compiler and an NVIDIA GPU with bfloat16, and one of these is missing"
        return f"its kernel runs on CUDA only, and the tensors are on {q.device.type}"
    if inputs.bias is not None:
        return "its kernel takes no bias"
    if mask.window is not None:
        return "its kernel takes no window"
    if mask.causal and mask.packing[0] is not mask.packing[1]:
        return "its kernel has no causal mask between two different packings"
    if q.dtype not in kernels.SUPPORTED_DTYPES:
        return f"its kernel takes bfloat16, float16 and float32, not {q.dtype}"
    if q.shape[-1] not in TILE_HEAD_WIDTHS:
        return f"its kernel takes head widths of {', '.join(map(str, TILE_HEAD_WIDTHS))}, and this is {q.shape[-1]}"
    if not (q.shape[2] and k.shape[2] and mask.packing[0].ends.shape[1]):
        return "its kernel takes no empty rows"
    if q.shape[0] > MAX_GRID_ROWS or 3 * max(q.shape[2], k.shape[2]) * q.shape[1] * q.shape[3] >= 2**31:
        size = f"{q.shape[0]:,} rows of {k.shape[2]:,} tokens"
        return f"its kernel takes at most {MAX_GRID_ROWS:,} rows of 2**31 elements, and the batch has {size}"
    return None
