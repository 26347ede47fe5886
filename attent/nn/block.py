"""Figure 1: a block is attention and feed-forward, each inside a residual; a stack is N blocks. The encoder and the
decoder are two configurations of the same stack, and so are BERT, GPT, LLaMA and T5.

Short names, as in the path `decoder.blocks.3.cross_attn`: `own` is self-attention (a text looks at itself), `cross` is
encoder-decoder attention. Token embeddings and the output layer are `attent.models`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn import kernels
from attent.nn.argument_checks import (
    MAX_LAYERS,
    check_choice,
    check_even_head_width,
    check_forward_args,
    check_heads,
    check_new_cache,
    check_positive,
    check_rate,
    check_size,
    check_window,
    is_count,
)
from attent.nn.attention import Attention, compute_head_width, init_attention
from attent.nn.cache import KV, Cache, KVCache, LayerCache
from attent.nn.dropout import Dropout
from attent.nn.feedforward import Activation, FeedForward
from attent.nn.masks import Mask, Packing
from attent.nn.positions import Angles, PositionsConfig, RotaryConfig, SinusoidalConfig, build_positions

Norm = Literal["layer", "rms"]
NormOrder = Literal["post", "pre"]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """One stack. The defaults are the paper's encoder, base model (table 3)."""

    layers: int = 6  # N
    width: int = 512  # d_model
    heads: int = 8  # h
    kv_heads: int | None = None  # fewer than `heads`: several query heads share keys and values; None: as many
    head_width: int | None = None  # d_k = d_v; None: width / heads
    # Where heads were removed: for each layer, for its self-attention and then its cross-attention, the numbers (of 0
    # to `heads` - 1) of those that are left. None: all are there.
    remaining_heads: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    ffn_width: int = 2048  # d_ff
    activation: Activation = "relu"
    gated: bool = False
    causal: bool = False  # tokens see no later token: a decoder
    cross_attention: bool = False  # blocks also look at the output of another stack
    window: tuple[int | None, int | None] | None = None  # self-attention reaches (before, after) tokens; None: all
    positions: PositionsConfig = field(default_factory=SinusoidalConfig)
    norm: Norm = "layer"
    norm_order: NormOrder = "post"
    norm_eps: float = 1e-5
    bias: bool = True  # in the linear layers
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_width)
    scale_by_layer: bool = False  # scores of layer i are divided by i + 1 as well (a variant of GPT-2)
    embedding_norm: bool = False  # embeddings + positions are normed before the first block (BERT)
    dropout: float = 0.1  # P_drop: on each sub-layer's output, and on embeddings + positions
    embedding_dropout: float | None = None  # on embeddings + positions; None: as `dropout`
    output_dropout: float = 0.0  # on what the stack gives (T5)
    attention_dropout: float = 0.0  # on attention weights
    activation_dropout: float = 0.0  # inside the feed-forward

    def __post_init__(self) -> None:
        check_size("layers", self.layers, MAX_LAYERS)
        for name in ("width", "heads", "ffn_width"):
            check_size(name, getattr(self, name))
        for name in ("dropout", "attention_dropout", "activation_dropout", "output_dropout"):
            check_rate(name, getattr(self, name))
        if self.embedding_dropout is not None:
            check_rate("embedding_dropout", self.embedding_dropout)
        for name, choices in (("activation", Activation), ("norm", Norm), ("norm_order", NormOrder)):
            check_choice(name, getattr(self, name), choices)
        check_positive("norm_eps", self.norm_eps)
        check_window(self.window)
        head_width = compute_head_width(self.width, self.heads) if self.head_width is None else self.head_width
        check_heads(self.heads, self.heads if self.kv_heads is None else self.kv_heads, head_width)
        check_remaining_heads(self)
        if self.scale is not None:
            check_positive("scale", self.scale)
        if not isinstance(self.positions, PositionsConfig):
            raise ValueError(f"`positions` must be a config such as SinusoidalConfig(), but is {self.positions!r}")
        if isinstance(self.positions, RotaryConfig):
            check_even_head_width(head_width)

    @property
    def num_removed_heads(self) -> int:
        """How many heads are gone, of all layers together."""
        return sum(self.heads - len(heads) for layer in self.remaining_heads or () for heads in layer)


def check_remaining_heads(config: StackConfig) -> None:
    """The heads that are left, where some were removed."""
    if config.remaining_heads is None:
        return
    if config.kv_heads not in (None, config.heads):
        raise ValueError(
            f"`remaining_heads` must be None where query heads share keys and values (`kv_heads`={config.kv_heads}): one of them "
            f"cannot be removed alone; leave it out"
        )
    shape = [len(layer) for layer in config.remaining_heads]
    if shape != [1 + config.cross_attention] * config.layers:
        raise ValueError(
            f"`remaining_heads` must have {config.layers} layers of {1 + config.cross_attention} lists of heads each, but has {shape}"
        )
    for heads in (heads for layer in config.remaining_heads for heads in layer):
        if not all(is_count(head) and head < config.heads for head in heads) or list(heads) != sorted(set(heads)):
            raise ValueError(
                f"`remaining_heads` must hold numbers of heads from 0 to {config.heads - 1}, each once and in their order, "
                f"but holds {list(heads)}"
            )


@dataclass(frozen=True, eq=False)
class Memory:
    """What one stack leaves for another to look at: states (B, T, E), and which of them are real."""

    states: Tensor
    lengths: Tensor | None = None
    packing: Packing | None = None


@dataclass(frozen=True, eq=False)
class BlockContext:
    """What every block of a stack is given alike in one pass."""

    self_mask: Mask
    angles: Angles | None
    bias: Tensor | None
    memory: Memory | None
    memory_mask: Mask
    cache_start: int | Tensor  # where this pass begins among the keys (0 without a cache)
    cache_used: int  # columns of the cache written before it


class Residual(nn.Module):
    """Add & Norm around a sub-layer (section 3.1), with section 5.4's dropout. It alone knows pre- from post-norm."""

    def __init__(self, norm: nn.Module, dropout: float, order: NormOrder) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.pre_norm = order == "pre"

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))  # LayerNorm(x + Sublayer(x)): the paper

    def add_norm_fused(
        self, x: Tensor, y: Tensor, output_layer: nn.Linear, duplicate: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The paper's, where last(y) is Sublayer(x): after the product one kernel does all of it. Given twice: for the
        next sub-layer, and to be added to what that makes of it."""
        from attent.nn.kernels.add_norm import add_norm

        norm, rate = self.norm, self.dropout.p if self.training else 0.0
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        assert norm.eps is not None
        product = F.linear(y, output_layer.weight)  # the bias is added where all else is
        bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        return add_norm(x, product, output_layer.bias, norm.weight, bias, norm.eps, rate, duplicate=duplicate)


class Block(nn.Module):
    """One of the N layers of figure 1: self-attention, encoder-decoder attention (decoders), feed-forward."""

    def __init__(
        self, config: StackConfig, layer: int = 0, remaining_heads: tuple[tuple[int, ...], ...] | None = None
    ) -> None:
        super().__init__()
        own, *cross = (None, None) if remaining_heads is None else remaining_heads
        self.self_attn = make_attention(config, layer, own)
        self.self_attn_residual = make_residual(config)
        self.cross_attn = make_attention(config, layer, *cross) if config.cross_attention else None
        self.cross_attn_residual = make_residual(config) if config.cross_attention else None
        self.feedforward = FeedForward(
            config.width,
            config.ffn_width,
            activation=config.activation,
            gated=config.gated,
            bias=config.bias,
            dropout=config.activation_dropout,
        )
        self.feedforward_residual = make_residual(config)

    def forward(self, x: Tensor, context: BlockContext, cache: LayerCache | None = None) -> Tensor:
        if cache is None and self.can_fuse(x):
            return self.forward_fused(x, context)
        x = self.self_attn_residual(x, lambda x: self.attend_self(x, context, cache))
        if self.cross_attn_residual is not None:
            x = self.cross_attn_residual(x, lambda x: self.attend_memory(x, context, cache))
        return self.feedforward_residual(x, self.feedforward)

    def attend_self(self, x: Tensor, context: BlockContext, cache: LayerCache | None) -> Tensor:
        """Keys and values are of x itself, and of what the cache holds before it."""
        seen = self.self_attn.project_keys_values(x, context.angles)
        if cache is not None:
            seen = cache.self_attn.append(seen, context.cache_start, context.cache_used)
        return self.self_attn(x, seen, context.self_mask, context.angles, context.bias)

    def attend_memory(self, x: Tensor, context: BlockContext, cache: LayerCache | None) -> Tensor:
        """Keys and values are of the other stack's output."""
        assert self.cross_attn is not None
        if cache is None:
            assert context.memory is not None
            seen = self.cross_attn.project_keys_values(context.memory.states)
        else:
            assert cache.cross_attn is not None
            seen = cache.cross_attn
        return self.cross_attn(x, seen, context.memory_mask)

    def forward_fused(self, x: Tensor, context: BlockContext) -> Tensor:
        """The same by our kernels, to which a sub-layer is one thing up to its last product, and with it another."""
        x, beside = self.self_attn_residual.add_norm_fused(
            x, self.self_attn.attend_fused(x, None, context), self.self_attn.output
        )
        if self.cross_attn is not None and self.cross_attn_residual is not None:
            assert context.memory is not None
            heads = self.cross_attn.attend_fused(x, context.memory.states, context)
            x, beside = self.cross_attn_residual.add_norm_fused(beside, heads, self.cross_attn.output)
        inner, last = self.feedforward.compute_hidden(x), self.feedforward.contract
        x, _ = self.feedforward_residual.add_norm_fused(beside, inner, last, duplicate=False)
        return x

    def can_fuse(self, x: Tensor) -> bool:
        """In training on a GPU, with a norm behind each sub-layer, if no part was replaced by another kind."""
        if self.self_attn_residual.pre_norm or not torch.is_grad_enabled() or not kernels.can_use_kernels(x):
            return False
        fits = (
            x.dtype == kernels.get_compute_dtype(x) in kernels.SUPPORTED_DTYPES
            and 0 < x.shape[-1] <= kernels.MAX_NORM_WIDTH
        )
        return fits and x.numel() > 0 and self.is_unmodified()

    def is_unmodified(self) -> bool:
        attentions = [self.self_attn] if self.cross_attn is None else [self.self_attn, self.cross_attn]
        residuals = [self.self_attn_residual, self.cross_attn_residual, self.feedforward_residual]
        linear = [layer for each in attentions for layer in (each.query, each.key, each.value, each.output)]
        linear += [self.feedforward.expand, self.feedforward.contract]
        norms = [residual.norm for residual in residuals if residual is not None]
        return (
            all(kernels.is_unmodified(each, Attention) for each in attentions)
            and kernels.is_unmodified(self.feedforward, FeedForward)
            and all(kernels.is_unmodified(layer, nn.Linear) for layer in linear)
            and all(has_standard_weights(norm) for norm in norms)
        )

    def new_cache(self, rows: int, capacity: int, memory: Memory | None) -> LayerCache:
        weight = self.self_attn.key.weight
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        room = weight.new_zeros(2, rows, self.self_attn.kv_heads, capacity, self.self_attn.head_width, dtype=dtype)
        cross = (
            None if self.cross_attn is None or memory is None else self.cross_attn.project_keys_values(memory.states)
        )
        return LayerCache(KVCache(KV(room[0], room[1])), cross)


class Stack(nn.Module):
    """N blocks, with positions before and, where the norm comes first in each block, a last norm behind."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        self.positions = build_positions(
            config.positions,
            width=config.width,
            heads=config.heads,
            head_width=config.head_width or compute_head_width(config.width, config.heads),
            causal=config.causal,
        )
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout if config.embedding_dropout is None else config.embedding_dropout)
        self.blocks = cast(
            "list[Block]", nn.ModuleList(Block(config, i, kept) for i, kept in enumerate(split_remaining_heads(config)))
        )
        self.norm = make_norm(config) if config.norm_order == "pre" else nn.Identity()
        self.output_dropout = Dropout(config.output_dropout)
        self.apply(init_weights)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        *,
        packing: Packing | None = None,
        memory: Memory | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """(B, T, E) -> (B, T, E). Rows are padded on the right, told by `lengths`, or packed, told by `packing`.

        With a cache, x continues what the cache holds, and the memory is the one that the cache was made with.
        """
        check_forward_args(self, x, lengths, packing, memory, cache)
        if cache is not None:
            cache.mark_new_columns()
        at = compute_positions(x, packing, cache)
        view = self.build_context(x, at, lengths, packing, memory, cache)
        below = None if packing is None else x.shape[1]
        x = self.cast_residual_stream(self.dropout(self.embedding_norm(self.positions.embed(x, at, below))))
        for i, block in enumerate(self.blocks):
            x = block(x, view, None if cache is None else cache.layers[i])
        if cache is not None:
            cache.advance(x.shape[1], lengths)
        return self.output_dropout(self.norm(x))

    def cast_residual_stream(self, x: Tensor) -> Tensor:
        """In the format of the products, where a norm follows each sum and our kernels work it out in float32: half as
        many bytes go from one sub-layer to the next. Without a norm behind each, small parts would get lost."""
        after_each = self.config.norm_order == "post" and kernels.can_use_kernels(x)
        return x.to(kernels.get_compute_dtype(x)) if after_each else x

    def build_context(
        self,
        x: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        packing: Packing | None,
        memory: Memory | None,
        cache: Cache | None,
    ) -> BlockContext:
        """Masks, angles and biases of one pass: worked out once, used by every block."""
        start, used = (0, 0) if cache is None else (cache.next_column, cache.used_columns)
        keys_at = positions if cache is None else torch.arange(used + x.shape[1], device=x.device) // cache.beams
        return BlockContext(
            self_mask=self.build_self_mask(lengths, packing, cache),
            angles=self.positions.angles(positions),
            bias=self.positions.bias(positions, keys_at),
            memory=memory,
            memory_mask=build_memory_mask(packing, memory, cache),
            cache_start=start,
            cache_used=used,
        )

    def build_self_mask(self, lengths: Tensor | None, packing: Packing | None, cache: Cache | None) -> Mask:
        # Padding is on the right: a causal stack hides it from every real token already, and without key lengths
        # fast kernels need no mask tensor.
        return Mask(
            causal=self.config.causal,
            window=self.config.window,
            q_start=0 if cache is None else cache.next_position,
            ancestors=None if cache is None else cache.ancestors,
            key_lengths=None if self.config.causal else lengths,
            packing=None if packing is None else (packing, packing),
        )

    def new_cache(
        self, capacity: int, *, rows: int | None = None, memory: Memory | None = None, beams: int = 1
    ) -> Cache:
        """An empty cache for `capacity` tokens of each beam of a row; the memory's keys and values are projected now,
        once."""
        check_new_cache(self, capacity, rows, memory, beams)
        rows = rows if memory is None else memory.states.shape[0]
        assert rows is not None
        layers = [block.new_cache(rows, capacity * beams, memory) for block in self.blocks]
        device = layers[0].self_attn.buffer.keys.device
        ancestors = None if beams == 1 else torch.full((rows, beams, capacity), -1, device=device)
        lengths = None if memory is None else memory.lengths
        return Cache(layers, memory_lengths=lengths, beams=beams, ancestors=ancestors)


def has_standard_weights(norm: nn.Module) -> bool:
    """LayerNorm with weight and bias, or RMSNorm with a weight, as `make_norm` makes them."""
    if not kernels.is_unmodified(norm, nn.LayerNorm, nn.RMSNorm) or norm.eps is None:
        return False
    return norm.weight is not None and getattr(norm, "bias", norm.weight) is not None


def compute_positions(x: Tensor, packing: Packing | None, cache: Cache | None) -> Tensor:
    """The position of each token in its own sequence: (T,), or (B, T) where rows differ."""
    if packing is not None:
        return packing.positions
    at = torch.arange(x.shape[1], device=x.device)
    if cache is None:
        return at
    at = at if cache.beams == 1 else torch.zeros_like(at)  # beams are side by side, all at one place
    return at + (cache.next_position[:, None] if isinstance(cache.next_position, Tensor) else cache.next_position)


def build_memory_mask(packing: Packing | None, memory: Memory | None, cache: Cache | None) -> Mask:
    """What of the other stack's output may be looked at: all that is real, of one's own sentence."""
    if cache is not None:
        return Mask(key_lengths=cache.memory_lengths)
    if memory is None:
        return Mask()
    packings = None if packing is None or memory.packing is None else (packing, memory.packing)
    return Mask(key_lengths=memory.lengths, packing=packings)


def split_remaining_heads(config: StackConfig) -> Sequence[tuple[tuple[int, ...], ...] | None]:
    return [None] * config.layers if config.remaining_heads is None else config.remaining_heads


def make_attention(config: StackConfig, layer: int, remaining_heads: tuple[int, ...] | None) -> Attention:
    scale = config.scale
    if config.scale_by_layer:
        head_width = config.head_width or compute_head_width(config.width, config.heads)
        scale = (head_width**-0.5 if scale is None else scale) / (layer + 1)
    return Attention(
        config.width,
        config.heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        bias=config.bias,
        scale=scale,
        dropout=config.attention_dropout,
        remaining_heads=remaining_heads,
    )


def make_residual(config: StackConfig) -> Residual:
    return Residual(make_norm(config), config.dropout, config.norm_order)


def make_norm(config: StackConfig) -> nn.Module:
    norm = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return norm(config.width, eps=config.norm_eps)


def init_weights(module: nn.Module) -> None:
    """Xavier (Glorot) uniform, biases zero: keeps the variance of activations through a layer of either direction."""
    if isinstance(module, Attention):
        init_attention(module)
    elif isinstance(module, FeedForward):
        for linear in module.children():
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
