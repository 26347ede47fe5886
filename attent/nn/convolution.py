"""Convolutional encoder and decoder (Gehring et al. 2017) with the interface of `Stack`, to compare with.

A layer is a convolution over k positions with gated linear units, in a residual connection scaled by sqrt(0.5). Order
comes from learned positions, and every decoder layer attends to the encoder. As a decoder layer reads the last k
positions only, a step of decoding needs its last k - 1 inputs. In place of weight normalization there is a norm at the
end of each stack.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.argument_checks import check_size
from attent.nn.attention import Attention
from attent.nn.block import Memory
from attent.nn.cache import KV, Cache, StateCache
from attent.nn.config import NonTransformerConfig, StackConfig
from attent.nn.dropout import Dropout
from attent.nn.masks import Mask
from attent.nn.positions import LearnedConfig, LearnedPositions
from attent.nn.stack import NonTransformerStack, compute_positions, init_weights

RESIDUAL_SCALE = 0.5**0.5  # keeps the variance of a sum of two


@dataclass(frozen=True, kw_only=True)
class ConvEncoderConfig(NonTransformerConfig):
    """An encoder whose layers read (k - 1) / 2 positions on each side. Dropout is on the input of each convolution."""

    kind: ClassVar[str] = "conv"
    layers: int = 6
    kernel: int = 3  # k
    max_length: int = 512  # of the learned positions

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("kernel", self.kernel)
        check_size("max_length", self.max_length)
        if not self.causal and self.kernel % 2 == 0:
            raise ValueError(f"`kernel` must be odd, to have a middle, but is {self.kernel}")

    @property
    def description(self) -> str:
        return f"convolutions of {self.kernel} positions"


@dataclass(frozen=True, kw_only=True)
class ConvDecoderConfig(ConvEncoderConfig):
    """A decoder whose layers read k - 1 positions before each, and attend to the encoder."""

    causal: ClassVar[bool] = True
    cross_attention: ClassVar[bool] = True

    @property
    def description(self) -> str:
        return f"{super().description}, attention in every layer"


class ConvBlock(nn.Module):
    def __init__(self, config: ConvEncoderConfig) -> None:
        super().__init__()
        E, self.kernel = config.width, config.kernel
        self.convolution = nn.Linear(self.kernel * E, 2 * E)  # of the concatenated inputs of k positions
        self.cross_attn = Attention(StackConfig(width=E, heads=1)) if config.cross_attention else None
        self.dropout = Dropout(config.dropout)
        std = (4 * (1 - config.dropout) / (self.kernel * E)) ** 0.5  # their initialization for gated units
        nn.init.normal_(self.convolution.weight, std=std)
        nn.init.zeros_(self.convolution.bias)

    def forward(self, x: Tensor, inputs: Tensor, embedded: Tensor, kv: KV | None, mask: Mask) -> Tensor:
        """(B, T, E) -> (B, T, E). `inputs` (B, T + k - 1, E) are x and the positions around it."""
        windows = inputs.unfold(1, self.kernel, 1).flatten(2)  # (B, T, E * k)
        y = F.glu(self.convolution(windows), -1).view_as(x)
        if self.cross_attn is not None and kv is not None:
            y = (y + self.cross_attn(y + embedded, kv, mask)) * RESIDUAL_SCALE
        return (x + y) * RESIDUAL_SCALE


class ConvStack(NonTransformerStack):
    config: ConvEncoderConfig

    def __init__(self, config: ConvEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.positions = LearnedPositions(LearnedConfig(max_length=config.max_length), config.width)
        self.dropout = Dropout(config.dropout)
        self.blocks = cast("list[ConvBlock]", nn.ModuleList(ConvBlock(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.apply(init_weights)

    def run_layers(self, x: Tensor, lengths: Tensor | None, memory: Memory | None, cache: Cache | None) -> Tensor:
        x = self.dropout(self.positions.embed(x, compute_positions(x, None, cache)))
        if self.config.causal:
            return self.norm(self.decode(x, lengths, memory, cache))
        return self.norm((x + self.encode(x, lengths)) * RESIDUAL_SCALE)  # the embeddings are part of the values

    def encode(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Run the layers of an encoder, for which padding is zeros, as is everything outside of a sequence."""
        padding, embedded, is_padding = self.config.kernel // 2, x, None
        if lengths is not None:
            is_padding = (torch.arange(x.shape[1], device=x.device) >= lengths[:, None])[..., None]
        for block in self.blocks:
            inputs = block.dropout(x)
            if is_padding is not None:
                inputs = inputs.masked_fill(is_padding, 0)
            x = block(x, F.pad(inputs, (0, 0, padding, padding)), embedded, None, Mask())
        return x

    def decode(self, x: Tensor, lengths: Tensor | None, memory: Memory | None, cache: Cache | None) -> Tensor:
        """Run the layers of a decoder: each reads the k - 1 inputs before x, which are zeros or in the cache."""
        state = self.new_cache(max(1, x.shape[1]), memory=memory) if cache is None else cache
        assert isinstance(state, StateCache), "the cache must be made by `new_cache`"
        embedded, mask, layers = x, Mask(key_lengths=state.memory_lengths), []
        for i, (block, layer) in enumerate(zip(self.blocks, state.layers, strict=True)):
            history = state.states[:, :, i].flatten(0, 1)  # (B * K, k - 1, E) of the K beams of each row
            inputs = block.dropout(x).reshape(len(history), x.shape[1] // state.beams, -1)  # T, or one of each beam
            layers.append(torch.cat([history, inputs], 1))
            x = block(x, layers[-1], embedded, layer.cross_attn, mask)
        if cache is not None:
            last = select_last(torch.stack(layers, 1), lengths, self.config.kernel - 1)
            state.states = last.view_as(state.states)
            state.advance(x.shape[1], lengths)
        return x

    def init_states(self, memory: Memory) -> tuple[Tensor, list[KV | None]]:
        states, (N, k) = memory.states, (self.config.layers, self.config.kernel)
        initial = states.new_zeros(len(states), 1, N, k - 1, states.shape[2])  # the inputs before the first position
        return initial, [cast("Attention", block.cross_attn).project_keys_values(states) for block in self.blocks]


def select_last(inputs: Tensor, lengths: Tensor | None, count: int) -> Tensor:
    """Return the last `count` inputs of each row, (R, N, count + T, E) -> (R, N, count, E); `lengths` of T are real."""
    if lengths is None:
        return inputs.narrow(2, inputs.shape[2] - count, count)
    columns = lengths[:, None] + torch.arange(count, device=lengths.device)  # (R, count)
    return inputs.gather(2, columns[:, None, :, None].expand(-1, inputs.shape[1], -1, inputs.shape[3]))
