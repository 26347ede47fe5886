"""The implementations of scaled dot-product attention (section 3.2.1), and the choice between them.

    explicit  equation 1, step by step; also returns the weights. The reference that the others are tested against.
    fused     PyTorch's scaled_dot_product_attention (SDPA); linear memory, except for windows, packing and biases,
              which need a mask tensor of Tq x Tk. Not to be confused with `nn.fused`, the fused training block.
    flex      FlexAttention, compiled from `Mask.allows`; skips blocks that are masked entirely
    packed    FlashAttention's varlen kernel over packed sentences: each sentence has tiles of its own (CUDA)
    tiles     our Triton kernel, `kernels.packed_attention`, for rows of many short packed sentences, several of which
              share a tile (CUDA)

All share one signature, and give zeros for a query that may attend to nothing. `attend` selects one by
`choose_backend`. Projections and heads are in `attention`, visibility is in `masks`.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from attent.nn.dot_product import AttentionInputs, attend_explicit, check_inputs
from attent.nn.kernels import attention as fast
from attent.nn.masks import Mask

LONG_ROW_TOKENS = 2048  # packed rows up to here are faster in our tiles than in flash attention's, one sentence each


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    score_weight: Tensor | None = None,
) -> Tensor:
    """Attend with the named or the fastest backend: (B, H, Tq, D).

    Only `explicit` computes additive scores: `score_weight`, (H, D).
    """
    mask = Mask() if mask is None else mask
    inputs = AttentionInputs(q, k, v, mask, bias, q.shape[-1] ** -0.5 if scale is None else scale, dropout)
    check_inputs(inputs)
    if score_weight is None:
        return choose_backend(backend, inputs).run(*inputs)
    if backend not in ("auto", "explicit"):
        check_backend_name(backend)
        reason = "it computes dot products only, and `compatibility` is additive"
        raise ValueError(f"backend `{backend}` does not support these inputs: {reason}; use explicit or auto")
    return attend_explicit(*inputs, score_weight)[0]


@dataclass(frozen=True)
class Backend:
    """An implementation of equation 1. `find_limitation` returns why it does not support some inputs, or None."""

    name: str
    run: Callable[..., Tensor]
    find_limitation: Callable[[AttentionInputs], str | None]


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("fused", fast.attend_fused, lambda inputs: None),
        Backend("packed", fast.attend_varlen, fast.find_packed_limitation),
        Backend("tiles", fast.attend_tiles, fast.find_tiles_limitation),
        Backend("flex", fast.attend_flex, fast.find_flex_limitation),
        Backend("explicit", lambda *inputs: attend_explicit(*inputs)[0], lambda inputs: None),
    )
}


def choose_backend(name: str, inputs: AttentionInputs) -> Backend:
    """Return the named backend if it supports the inputs; for "auto" the fastest that does."""
    if name == "auto":
        candidates = (BACKENDS[candidate] for candidate in rank_backends(inputs))
        return next(backend for backend in candidates if backend.find_limitation(inputs) is None)
    check_backend_name(name)
    limitation = BACKENDS[name].find_limitation(inputs)
    if limitation is not None:
        able = [other for other, backend in BACKENDS.items() if backend.find_limitation(inputs) is None]
        raise ValueError(f"backend `{name}` does not support these inputs: {limitation}; use {', '.join(able)} or auto")
    return BACKENDS[name]


def check_backend_name(name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        near = difflib.get_close_matches(name, [*BACKENDS, "auto"], 1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ValueError(f"`backend` must be auto or one of {', '.join(BACKENDS)}, but is {name!r}{hint}")


def rank_backends(inputs: AttentionInputs) -> tuple[str, ...]:
    """Return the candidates for "auto", fastest first: flash attention's tiles suit long packed rows only."""
    if inputs.mask.packing is None:
        return ("fused",)
    return ("packed", "tiles", "fused") if inputs.k.shape[2] > LONG_ROW_TOKENS else ("tiles", "fused")
