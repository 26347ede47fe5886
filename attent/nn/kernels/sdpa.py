"""Two workarounds for scaled_dot_product_attention at inference on CUDA, in plain PyTorch (no Triton needed)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from attent.nn.eval_mode import SharedContext

MAX_FEW_QUERIES = 16  # at most this many queries, as in a decoding step


def avoid_cudnn(q: Tensor) -> AbstractContextManager[object]:
    """Disable cuDNN at inference: it takes 70 to 400 ms for each new shape in half precision (measured on an H200), and
    inference meets new shapes all the time. Training repeats its shapes, and cuDNN is fast then."""
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
