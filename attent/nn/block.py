"""One layer of figure 1: attention and feed-forward, each in a residual connection.

`self_attn` and `cross_attn` name the attention layers in module paths such as `decoder.blocks.3.cross_attn`. `stack`
puts N blocks together; `fused` computes the same with fewer kernels in training on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from attent.nn import kernels
from attent.nn.attention import Attention
from attent.nn.cache import KV, LayerCache
from attent.nn.config import StackConfig, choose_config
from attent.nn.dropout import Dropout
from attent.nn.feedforward import FeedForward
from attent.nn.masks import Mask, Packing
from attent.nn.positions import Angles


@dataclass(frozen=True, eq=False)
class Memory:
    """The output of one stack, (B, T, E), for the cross-attention of another; `lengths` or `packing` marks padding."""

    states: Tensor
    lengths: Tensor | None = None
    packing: Packing | None = None


@dataclass(frozen=True, eq=False)
class BlockContext:
    """The inputs that all blocks of a stack share in one forward pass."""

    self_mask: Mask = field(default_factory=Mask)
    angles: Angles | None = None
    position_bias: Tensor | None = None
    memory: Memory | None = None
    memory_mask: Mask = field(default_factory=Mask)
    cache_start: int | Tensor = 0  # first column that this pass writes
    cache_used: int = 0  # columns written by earlier passes


class Residual(nn.Module):
    """Add & Norm around a sub-layer (section 3.1) with its dropout (section 5.4), as pre-norm or post-norm.

    >>> attention, residual = attent.nn.Attention(width=64, heads=4), attent.nn.Residual(width=64, dropout=0.1)
    >>> residual(torch.randn(2, 7, 64), attention).shape
    torch.Size([2, 7, 64])
    """

    def __init__(
        self, config: StackConfig | None = None, *, width: int | None = None, dropout: float | None = None
    ) -> None:
        """Alone in another model, `width` (default 512) and `dropout` (default 0.1) replace the config: post-norm."""
        super().__init__()
        config = choose_config(config, width=width, dropout=dropout)
        self.norm = make_norm(config)
        self.dropout = Dropout(config.dropout)
        self.pre_norm = config.norm_order == "pre"

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))  # LayerNorm(x + Sublayer(x)): the paper


class Block(nn.Module):
    """One of the N layers of figure 1: self-attention, encoder-decoder attention (in decoders), feed-forward.

    >>> block = attent.nn.Block(attent.nn.StackConfig(width=64, heads=4, cross_attention=True))
    >>> context = attent.nn.BlockContext(
    ...     self_mask=attent.nn.Mask(causal=True), memory=attent.nn.Memory(torch.randn(2, 5, 64))
    ... )
    >>> block(torch.randn(2, 7, 64), context).shape
    torch.Size([2, 7, 64])
    """

    def __init__(
        self,
        config: StackConfig,
        layer: int = 0,
        remaining_heads: tuple[tuple[int, ...], ...] | None = None,
        feedforward: type[FeedForward] = FeedForward,
    ) -> None:
        super().__init__()
        self_heads, *cross_heads = (None, None) if remaining_heads is None else remaining_heads
        self.self_attn = Attention(config, layer, self_heads)
        self.self_attn_residual = Residual(config)
        self.cross_attn = Attention(config, layer, *cross_heads) if config.cross_attention else None
        self.cross_attn_residual = Residual(config) if config.cross_attention else None
        self.feedforward = feedforward(config)
        self.feedforward_residual = Residual(config)

    def forward(self, x: Tensor, context: BlockContext, cache: LayerCache | None = None) -> Tensor:
        x = self.self_attn_residual(x, lambda x: self.attend_self(x, context, cache))
        if self.cross_attn_residual is not None:
            x = self.cross_attn_residual(x, lambda x: self.attend_memory(x, context, cache))
        return self.feedforward_residual(x, self.feedforward)

    def attend_self(self, x: Tensor, context: BlockContext, cache: LayerCache | None) -> Tensor:
        kv = self.self_attn.project_keys_values(x, context.angles)
        if cache is not None:
            kv = cache.self_attn.append(kv, context.cache_start, context.cache_used)
        return self.self_attn(x, kv, context.self_mask, context.angles, context.position_bias)

    def attend_memory(self, x: Tensor, context: BlockContext, cache: LayerCache | None) -> Tensor:
        assert self.cross_attn is not None
        kv = None if cache is None else cache.cross_attn
        if kv is None:
            assert context.memory is not None
            kv = self.cross_attn.project_keys_values(context.memory.states)
        return self.cross_attn(x, kv, context.memory_mask)

    def new_cache(self, rows: int, max_columns: int, memory: Memory | None) -> LayerCache:
        attention, weight = self.self_attn, self.self_attn.key.weight
        shape = (2, rows, attention.kv_heads, max_columns, attention.head_width)
        buffer = weight.new_zeros(shape, dtype=kernels.get_compute_dtype(weight))
        cross, states = self.cross_attn, None if memory is None else memory.states
        cross_kv = None if cross is None or states is None else cross.project_keys_values(states)
        return LayerCache(KV(buffer[0], buffer[1]), cross_kv)


def make_norm(config: StackConfig) -> nn.Module:
    norm = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return norm(config.width, eps=config.norm_eps)
