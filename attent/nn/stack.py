"""Figure 1: a stack of N blocks. The encoder and the decoder of the paper are two configurations of it, and so are
BERT, GPT, LLaMA, T5 and ViT. Embeddings and output layers are in `attent.models`.
"""

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from attent.nn.argument_checks import check_forward_args, check_new_cache
from attent.nn.attention import Attention
from attent.nn.block import Block, BlockContext, Memory, make_norm
from attent.nn.cache import KV, Cache, StateCache
from attent.nn.config import NonTransformerConfig, StackConfig
from attent.nn.dropout import Dropout
from attent.nn.feedforward import FeedForward
from attent.nn.fused import FusedBlock, cast_residual_stream
from attent.nn.masks import Mask, Packing
from attent.nn.positions import Positions, build_positions


class Stack(nn.Module):
    """Positions, N blocks and, in a pre-norm stack, a final norm.

    >>> encoder = attent.nn.Stack(attent.nn.StackConfig(layers=2, width=64, heads=4, ffn_width=256))
    >>> encoder(torch.randn(2, 7, 64), lengths=torch.tensor([7, 4])).shape
    torch.Size([2, 7, 64])
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.width, config.heads, config.compute_head_width()
        self.positions = build_positions(config.positions, *sizes, config.causal)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout if config.embedding_dropout is None else config.embedding_dropout)
        remaining_heads = config.remaining_heads or [None] * config.layers
        blocks = (FusedBlock(config, layer, heads) for layer, heads in enumerate(remaining_heads))
        self.blocks = cast("list[Block]", nn.ModuleList(blocks))
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
        """(B, T, E) -> (B, T, E). Rows are padded on the right (`lengths`) or packed (`packing`).

        With a cache, x continues the tokens in it, and the memory is the one that the cache was created with.
        """
        check_forward_args(self, x, lengths, packing, memory, cache)
        if cache is not None:
            cache.mark_new_columns()
        positions = compute_positions(x, packing, cache)
        self_mask = self.build_self_mask(lengths, packing, cache)
        context = self.build_context(positions, self_mask, packing, memory, cache)
        x = self.positions.embed(x, positions, None if packing is None else x.shape[1])
        x = self.dropout(self.embedding_norm(x))
        x = cast_residual_stream(x, pre_norm=self.config.norm_order == "pre")
        for i, block in enumerate(self.blocks):
            x = block(x, context, None if cache is None else cache.layers[i])
        if cache is not None:
            cache.advance(x.shape[1], lengths)
        return self.output_dropout(self.norm(x))

    def build_context(
        self, positions: Tensor, self_mask: Mask, packing: Packing | None, memory: Memory | None, cache: Cache | None
    ) -> BlockContext:
        angles, memory_mask = self.positions.compute_angles(positions), build_memory_mask(packing, memory, cache)
        if cache is None:
            return BlockContext(
                self_mask, angles, self.positions.compute_bias(positions, positions), memory, memory_mask
            )
        end = cache.used_columns + positions.shape[-1]
        key_positions = torch.arange(end, device=positions.device) // cache.beams
        position_bias = self.positions.compute_bias(positions, key_positions)
        return BlockContext(self_mask, angles, position_bias, None, memory_mask, cache.next_column, cache.used_columns)

    def build_self_mask(self, lengths: Tensor | None, packing: Packing | None, cache: Cache | None) -> Mask:
        # Padding is on the right, so a causal mask hides it from every real token, and fast kernels need no mask
        # tensor without key lengths.
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
        check_new_cache(self, capacity, rows, memory, beams)
        rows, lengths = (rows, None) if memory is None else (memory.states.shape[0], memory.lengths)
        assert rows is not None
        layers = [block.new_cache(rows, capacity * beams, memory) for block in self.blocks]
        device = layers[0].self_attn.keys.device
        ancestors = None if beams == 1 else torch.full((rows, beams, capacity), -1, device=device)
        return Cache(layers, memory_lengths=lengths, beams=beams, ancestors=ancestors)


class NonTransformerStack(nn.Module):
    """The interface of `Stack` for LSTMs and convolutions: subclasses define `run_layers`; decoders, `init_states`."""

    config: NonTransformerConfig
    positions: Positions

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        *,
        packing: Packing | None = None,
        memory: Memory | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """(B, T, E) -> (B, T, E). Rows are padded on the right. With a cache, x continues the tokens in it."""
        if packing is not None:
            raise ValueError(
                "`packing` must be None for LSTMs and convolutions, which would cross sentences: pad rows (`lengths`)"
            )
        if cache is None or not self.config.causal:
            check_forward_args(self, x, lengths, packing, memory, cache)
        else:
            cache.check_step(x.shape[0], x.shape[1])
        return self.run_layers(x, lengths, memory, cache)

    @abstractmethod
    def run_layers(self, x: Tensor, lengths: Tensor | None, memory: Memory | None, cache: Cache | None) -> Tensor: ...

    def init_states(self, memory: Memory) -> tuple[Tensor, list[KV | None]]:
        """Return the states before the first token, (B, 1, N, S, E), and the projected memory of layers that attend."""
        raise NotImplementedError

    def new_cache(
        self, capacity: int, *, rows: int | None = None, memory: Memory | None = None, beams: int = 1
    ) -> StateCache:
        check_new_cache(self, capacity, rows, memory, beams)
        assert memory is not None
        return StateCache.create(*self.init_states(memory), memory.lengths, capacity, beams)


def compute_positions(x: Tensor, packing: Packing | None, cache: Cache | None) -> Tensor:
    """Return the position of each token in its own sequence: (T,), or (B, T) where rows differ."""
    if packing is not None:
        return packing.positions
    positions = torch.arange(x.shape[1], device=x.device)
    if cache is None:
        return positions
    positions = positions if cache.beams == 1 else torch.zeros_like(positions)  # beams share one position
    start = cache.next_position
    return positions + (start[:, None] if isinstance(start, Tensor) else start)


def build_memory_mask(packing: Packing | None, memory: Memory | None, cache: Cache | None) -> Mask:
    """Mask the padding of the memory and, in packed rows, other sentences."""
    if cache is not None:
        return Mask(key_lengths=cache.memory_lengths)
    if memory is None:
        return Mask()
    packings = None if packing is None or memory.packing is None else (packing, memory.packing)
    return Mask(key_lengths=memory.lengths, packing=packings)


def init_weights(module: nn.Module) -> None:
    """Xavier (Glorot) uniform, biases zero: keeps the variance of activations and of gradients through a layer.

    W^Q, W^K and W^V are the parts of one (E, 3 E) matrix, as in fairseq: one by one they would be sqrt(2) larger, and
    the first scores twice as large. Where scores are scaled down less than in the paper (T5 does not scale at all), W^Q
    starts smaller; otherwise the first softmax would be nearly one-hot.
    """
    if not isinstance(module, Attention | FeedForward):
        return
    gains = {}
    if isinstance(module, Attention):
        query_gain = min(1.0, module.default_scale / module.scale)
        gains = {"query": query_gain * 2**-0.5, "key": 2**-0.5, "value": 2**-0.5}
    for name, linear in module.named_children():
        if isinstance(linear, nn.Linear):
            nn.init.xavier_uniform_(linear.weight, gain=gains.get(name, 1.0))
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
