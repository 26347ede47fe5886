"""The block of figure 1 by fused kernels, for training on a GPU: the same results in fewer passes over memory.

`Stack` builds a `FusedBlock` for each layer. Where the kernels do not apply (pre-norm, inference, another device, a
layer that was replaced or has a hook), it runs `Block.forward`, the reference.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn import kernels
from attent.nn.attention import Attention, concat_heads
from attent.nn.backends import choose_backend
from attent.nn.block import Block, BlockContext, Residual
from attent.nn.cache import LayerCache
from attent.nn.config import StackConfig
from attent.nn.dot_product import AttentionInputs, check_inputs
from attent.nn.dropout import Dropout
from attent.nn.feedforward import FeedForward
from attent.nn.masks import Mask


class FusedBlock(Block):
    """A block of sub-layers up to their last matrix product; bias, dropout, residual and norm run in one kernel."""

    def __init__(
        self, config: StackConfig, layer: int = 0, remaining_heads: tuple[tuple[int, ...], ...] | None = None
    ) -> None:
        super().__init__(config, layer, remaining_heads, FusedFeedForward)

    def forward(self, x: Tensor, context: BlockContext, cache: LayerCache | None = None) -> Tensor:
        if cache is not None or not can_fuse(self, x):
            return super().forward(x, context, cache)
        attended = attend_fused_projections(self.self_attn, x, None, context)
        x, residual = apply_add_norm(self.self_attn_residual, x, attended, self.self_attn.output)
        if self.cross_attn is not None and self.cross_attn_residual is not None:
            assert context.memory is not None
            attended = attend_fused_projections(self.cross_attn, x, context.memory.states, context)
            x, residual = apply_add_norm(self.cross_attn_residual, residual, attended, self.cross_attn.output)
        hidden, output_layer = self.feedforward.compute_hidden(x), self.feedforward.contract
        x, _ = apply_add_norm(self.feedforward_residual, residual, hidden, output_layer, duplicate=False)
        return x


class FusedFeedForward(FeedForward):
    """A feed-forward layer with max(0, x W1 + b1) in one kernel, where nothing else is done to its hidden units."""

    def compute_hidden(self, x: Tensor) -> Tensor:
        if not (self.is_plain_relu and torch.is_grad_enabled() and self.supports_kernel(x)):
            return super().compute_hidden(x)
        from attent.nn.kernels.linear_relu import linear_relu

        return linear_relu(x, self.expand.weight, self.expand.bias)

    @property
    def is_plain_relu(self) -> bool:
        plain = self.activation == "relu" and self.gate is None and self.expand.bias is not None
        unmodified = kernels.is_unmodified(self.dropout, Dropout)
        return plain and unmodified and not (self.dropout.training and self.dropout.p)

    def supports_kernel(self, x: Tensor) -> bool:
        supported = kernels.can_use_kernels(x) and kernels.get_compute_dtype(x) in kernels.SUPPORTED_DTYPES
        return supported and kernels.is_unmodified(self.expand, nn.Linear)


def can_fuse(block: Block, x: Tensor) -> bool:
    """True in training on a GPU with post-norm, if no part of the block was replaced or has hooks."""
    if block.self_attn_residual.pre_norm or not torch.is_grad_enabled() or not kernels.can_use_kernels(x):
        return False
    supported = x.dtype == kernels.get_compute_dtype(x) in kernels.SUPPORTED_DTYPES
    return supported and 0 < x.shape[-1] <= kernels.MAX_NORM_WIDTH and x.numel() > 0 and is_unmodified_block(block)


def is_unmodified_block(block: Block) -> bool:
    attentions = [block.self_attn] if block.cross_attn is None else [block.self_attn, block.cross_attn]
    residuals = [block.self_attn_residual, block.cross_attn_residual, block.feedforward_residual]
    linears = [linear for each in attentions for linear in (each.query, each.key, each.value, each.output)]
    linears += [block.feedforward.expand, block.feedforward.contract]
    return (
        all(kernels.is_unmodified(attention, Attention) for attention in attentions)
        and kernels.is_unmodified(block.feedforward, FeedForward)
        and all(kernels.is_unmodified(linear, nn.Linear) for linear in linears)
        and all(is_unmodified_residual(residual) for residual in residuals if residual is not None)
    )


def is_unmodified_residual(residual: Residual) -> bool:
    """True with a LayerNorm with weight and bias or an RMSNorm with a weight, as `make_norm` builds them."""
    norm = residual.norm
    if not kernels.is_unmodified(norm, nn.LayerNorm, nn.RMSNorm) or norm.eps is None or norm.weight is None:
        return False
    has_bias = getattr(norm, "bias", norm.weight) is not None
    return has_bias and kernels.is_unmodified(residual, Residual) and kernels.is_unmodified(residual.dropout, Dropout)


def apply_add_norm(
    residual: Residual, x: Tensor, y: Tensor, output_layer: nn.Linear, *, duplicate: bool = True
) -> tuple[Tensor, Tensor]:
    """LayerNorm(x + Dropout(output_layer(y))): a product, then one kernel, which writes twice if `duplicate`."""
    from attent.nn.kernels.add_norm import fused_add_norm

    norm, rate = residual.norm, residual.dropout.p if residual.dropout.training else 0.0
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    assert norm.eps is not None
    product = F.linear(y, output_layer.weight)  # its bias is added by the kernel
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    return fused_add_norm(x, product, output_layer.bias, norm.weight, bias, norm.eps, rate, duplicate=duplicate)


def cast_residual_stream(x: Tensor, *, pre_norm: bool) -> Tensor:
    """Cast to the dtype of the matrix products in post-norm stacks: half the bytes between sub-layers, while the kernel
    adds and norms in float32. Pre-norm stacks keep the full precision: there small updates would be rounded away."""
    cast = not pre_norm and kernels.can_use_kernels(x)
    return x.to(kernels.get_compute_dtype(x)) if cast else x


class FusedQKV(NamedTuple):
    """Queries, keys and values as one product writes them, side by side in memory. Where the product has added biases
    as constants (detached), they are here for the kernel to compute their gradients."""

    qkv: Tensor  # (B, T, 3, H, D); or queries alone (B, Tq, 1, H, D)
    kv: Tensor | None  # (B, Tk, 2, H, D), where keys and values come from other tokens
    qkv_bias: Tensor | None = None  # (3, H, D) or (1, H, D)
    kv_bias: Tensor | None = None  # (2, H, D)

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.qkv.unbind(2) if self.kv is None else (*self.qkv.unbind(2), *self.kv.unbind(2))
        q, k, v = (x.transpose(1, 2) for x in parts)
        return q, k, v

    def with_bias_gradients(self) -> "FusedQKV":
        """Return the same values, attached to the biases for autograd."""
        qkv = self.qkv if self.qkv_bias is None else self.qkv + zeros_with_gradient(self.qkv_bias, self.qkv)
        if self.kv is None or self.kv_bias is None:
            return FusedQKV(qkv, self.kv)
        return FusedQKV(qkv, self.kv + zeros_with_gradient(self.kv_bias, self.kv))


def zeros_with_gradient(bias: Tensor, like: Tensor) -> Tensor:
    return (bias - bias.detach()).to(like.dtype)


def attend_fused_projections(attention: Attention, x: Tensor, memory: Tensor | None, context: BlockContext) -> Tensor:
    """`Attention.attend` without a cache, with one product for all projections of an input. Without `memory`, x attends
    to itself."""
    is_self = memory is None
    mask = context.self_mask if is_self else context.memory_mask
    angles, position_bias = (context.angles, context.position_bias) if is_self else (None, None)
    unsupported = attention.heads != attention.kv_heads or attention.score_weight is not None
    if unsupported or not attention.heads or attention.observers or angles is not None or position_bias is not None:
        kv = attention.project_keys_values(x if memory is None else memory, angles)
        return attention.attend(attention.project_queries(x, angles), kv, mask, position_bias)
    if memory is None:
        qkv, qkv_bias = project_with_detached_bias(attention, x, attention.query, attention.key, attention.value)
        fused_qkv = FusedQKV(qkv, None, qkv_bias)
    else:
        q, q_bias = project_with_detached_bias(attention, x, attention.query)
        memory_kv, kv_bias = project_with_detached_bias(attention, memory, attention.key, attention.value)
        fused_qkv = FusedQKV(q, memory_kv, q_bias, kv_bias)
    return concat_heads(attend_qkv(fused_qkv, mask, attention.scale, attention.dropout_rate, attention.backend))


def project_with_detached_bias(attention: Attention, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """(B, T, E) -> (B, T, n, H, D), and the biases (n, H, D), whose gradients the attention kernel computes."""
    shape = len(layers), attention.heads, attention.head_width
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    out = F.linear(x, torch.cat([layer.weight for layer in layers]), None if bias is None else bias.detach())
    return out.unflatten(-1, shape), None if bias is None else bias.view(shape)


def attend_qkv(fused_qkv: FusedQKV, mask: Mask, scale: float, dropout: float = 0.0, backend: str = "auto") -> Tensor:
    """`attend`, without unpacking where the backend is our own kernel: (B, H, Tq, D)."""
    inputs = AttentionInputs(*fused_qkv.unpack(), mask, None, scale, dropout)
    check_inputs(inputs)
    chosen = choose_backend(backend, inputs)
    if chosen.name == "tiles":
        from attent.nn.kernels.packed_attention import attend_packed_qkv

        return attend_packed_qkv(*fused_qkv, mask, scale, dropout)
    return chosen.run(*fused_qkv.with_bias_gradients().unpack(), mask, None, scale, dropout)
