"""LSTM encoder and decoder with the interface of `Stack`: the recurrent translators that the paper compares with.

The encoder is bidirectional; the decoder attends to its output with `Attention`, additively (Bahdanau et al. 2015) or
by dot products (Luong et al. 2015), or not at all: then the initial state is all that it knows of the source (Sutskever
et al. 2014). As in GNMT (Wu et al. 2016), only the first decoder layer attends, so that all others run over whole
sequences, residual connections start at the second layer, and dropout follows each layer.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from attent.nn.argument_checks import check_choice
from attent.nn.attention import Attention
from attent.nn.block import Memory
from attent.nn.cache import KV, Cache, StateCache
from attent.nn.config import NonTransformerConfig, StackConfig
from attent.nn.dropout import Dropout
from attent.nn.masks import Mask
from attent.nn.positions import Positions
from attent.nn.stack import NonTransformerStack

RecurrentAttention = Literal["additive", "dot", "none"]


@dataclass(frozen=True, kw_only=True)
class LSTMEncoderConfig(NonTransformerConfig):
    """A bidirectional encoder: each direction has half of the width. Dropout is on the output of each layer."""

    kind: ClassVar[str] = "lstm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % 2:
            raise ValueError(f"`width` must be even, half for each direction, but is {self.width}")

    @property
    def description(self) -> str:
        return "bidirectional LSTM"


@dataclass(frozen=True, kw_only=True)
class LSTMDecoderConfig(LSTMEncoderConfig):
    """A decoder that starts from the first and the last state of an encoder."""

    causal: ClassVar[bool] = True
    cross_attention: ClassVar[bool] = True  # takes a memory
    attention: RecurrentAttention = "additive"
    input_feeding: bool = True  # the first layer also reads the context of the step before; slower

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("attention", self.attention, RecurrentAttention)
        if self.attention == "none" and self.input_feeding:
            raise ValueError("`input_feeding` must be false with `attention`=none: there is no context to feed")

    @property
    def description(self) -> str:
        attention = "no attention" if self.attention == "none" else f"{self.attention} attention"
        return f"LSTM, {attention}" + (", input feeding" if self.input_feeding else "")


class BidirectionalBlock(nn.Module):
    """One layer of the encoder: an LSTM in each direction."""

    def __init__(self, config: LSTMEncoderConfig, layer: int) -> None:
        super().__init__()
        self.is_residual = layer > 0
        self.norm = nn.LayerNorm(config.width) if self.is_residual else nn.Identity()
        self.forward_lstm = make_lstm(config.width, config.width // 2)
        self.backward_lstm = make_lstm(config.width, config.width // 2)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, reversal: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E); `reversal` (B, T, 1) are the positions of each row in reverse."""
        y = self.norm(x)
        forward = run_lstm(self.forward_lstm, y)
        backward = run_lstm(self.backward_lstm, y.gather(1, reversal.expand_as(y)))
        y = self.dropout(torch.cat([forward, backward.gather(1, reversal.expand_as(backward))], -1))
        return x + y if self.is_residual else y


class LSTMEncoder(NonTransformerStack):
    def __init__(self, config: LSTMEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.positions = Positions()  # none: the recurrence knows the order
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(BidirectionalBlock(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def run_layers(self, x: Tensor, lengths: Tensor | None, memory: Memory | None, cache: Cache | None) -> Tensor:
        reversal = compute_reversal(x, lengths)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, reversal)
        return self.norm(x)


def compute_reversal(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return indices (B, T, 1) that reverse the tokens of each row and leave its padding in place."""
    # So an LSTM reads rows backward from their last token without packed sequences, which synchronize with the host.
    positions = torch.arange(x.shape[1], device=x.device)
    ends = positions.new_full((x.shape[0], 1), x.shape[1]) if lengths is None else lengths[:, None]
    return torch.where(positions < ends, ends - 1 - positions, positions)[..., None]


class LSTMBlock(nn.Module):
    """One layer of the decoder; the first one attends to the memory, unless attention is none."""

    def __init__(self, config: LSTMDecoderConfig, layer: int) -> None:
        super().__init__()
        self.is_residual = layer > 0
        self.norm = nn.LayerNorm(config.width) if self.is_residual else nn.Identity()
        self.has_input_feeding = config.input_feeding and layer == 0
        self.lstm = make_lstm(config.width * (1 + self.has_input_feeding), config.width)
        self.cross_attn = None
        if config.attention != "none" and layer == 0:
            self.cross_attn = Attention(StackConfig(width=config.width, heads=1, compatibility=config.attention))
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, state: "LSTMState", kv: KV | None, mask: Mask) -> Tensor:
        """Read whole sequences, one for each row: (B, T, E) -> (B, T, E)."""
        if not self.has_input_feeding:
            hidden = run_lstm(self.lstm, self.norm(x), (state.hidden[:, 0], state.cell[:, 0]))
            return self.add_context(x, hidden, self.attend(hidden, kv, mask))
        states = []
        for token in x.split(1, 1):  # each input has the context of the step before
            state = self.step(token, state, kv, mask, notify_observers=False)
            states.append(state)
        hidden, context = torch.cat([s.hidden for s in states], 1), torch.cat([s.context for s in states], 1)
        if self.cross_attn is not None and self.cross_attn.observers:  # once, with all queries
            self.attend(hidden, kv, mask)
        return self.add_context(x, hidden, context)

    def step(
        self, x: Tensor, state: "LSTMState", kv: KV | None, mask: Mask, *, notify_observers: bool = True
    ) -> "LSTMState":
        """Read one token of each of the K beams of a row, (B, K, E), and return their new state."""
        y = torch.cat([x, state.context.to(x.dtype)], -1) if self.has_input_feeding else self.norm(x)
        input_weight, hidden_weight, *biases = self.lstm.all_weights[0]
        y, *parts = (part.flatten(0, 1).to(input_weight.dtype) for part in (y, state.hidden, state.cell))
        with torch.autocast(x.device.type, enabled=False):
            new_parts = torch.lstm_cell(y, parts, input_weight, hidden_weight, *biases)
        hidden, cell = (part.view_as(state.hidden) for part in new_parts)
        return LSTMState(hidden, cell, self.attend(hidden, kv, mask, notify_observers))

    def attend(self, hidden: Tensor, kv: KV | None, mask: Mask, notify_observers: bool = True) -> Tensor:
        attention = self.cross_attn
        if attention is None or kv is None:
            return torch.zeros_like(hidden)
        heads = attention.attend(attention.project_queries(hidden), kv, mask, notify_observers=notify_observers)
        return attention.output(heads)

    def add_context(self, x: Tensor, hidden: Tensor, context: Tensor) -> Tensor:
        y = self.dropout(hidden)
        y = y if self.cross_attn is None else y + self.dropout(context)
        return x + y if self.is_residual else y


class LSTMState(NamedTuple):
    """The state of one layer for the K beams of each row, (B, K, E) each."""

    hidden: Tensor
    cell: Tensor
    context: Tensor


class LSTMDecoder(NonTransformerStack):
    """N layers and a norm; their initial state is computed from the memory."""

    def __init__(self, config: LSTMDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.positions = Positions()
        self.bridge = nn.Linear(2 * config.width, 2 * config.layers * config.width)
        self.dropout = Dropout(config.dropout)
        blocks = nn.ModuleList(LSTMBlock(config, layer) for layer in range(config.layers))
        self.blocks = cast("list[LSTMBlock]", blocks)
        self.norm = nn.LayerNorm(config.width)

    def run_layers(self, x: Tensor, lengths: Tensor | None, memory: Memory | None, cache: Cache | None) -> Tensor:
        if cache is not None:
            return self.read_cached(x, lengths, cache)
        assert memory is not None
        mask, kv = Mask(key_lengths=memory.lengths), self.project_memory(memory)
        states = split_layers(self.compute_initial_states(memory))
        x = self.dropout(x)
        for block, state in zip(self.blocks, states, strict=True):
            x = block(x, state, kv, mask)
        return self.norm(x)

    def read_cached(self, x: Tensor, lengths: Tensor | None, cache: Cache) -> Tensor:
        """Read tokens one by one: of each row, of which `lengths` are real, or one of each beam."""
        assert isinstance(cache, StateCache), "the cache must be made by `new_cache`"
        outputs = []
        for t, token in enumerate([x] if cache.beams > 1 else x.split(1, 1)):
            output, states = self.step(token, cache)
            is_real = None if lengths is None else (t < lengths)[:, None, None, None, None]
            cache.states = states if is_real is None else torch.where(is_real, states, cache.states)
            outputs.append(output)
        cache.advance(x.shape[1], lengths)
        return torch.cat(outputs, 1)

    def step(self, x: Tensor, cache: StateCache) -> tuple[Tensor, Tensor]:
        """Read one token of each beam, (B, K, E) -> (B, K, E); also return the new states."""
        mask, kv = Mask(key_lengths=cache.memory_lengths), cache.layers[0].cross_attn
        states = []
        for block, state in zip(self.blocks, split_layers(cache.states), strict=True):
            states.append(block.step(x, state, kv, mask))
            x = block.add_context(x, states[-1].hidden, states[-1].context)
        return self.norm(x), torch.stack([torch.stack(state, 2) for state in states], 2)

    def project_memory(self, memory: Memory) -> KV | None:
        attention = self.blocks[0].cross_attn
        return None if attention is None else attention.project_keys_values(memory.states)

    def compute_initial_states(self, memory: Memory) -> Tensor:
        """Return (B, 1, N, 3, E) from the memory's first and last states: an encoder's last in both directions."""
        states, lengths = memory.states, memory.lengths
        ends = torch.stack([states[:, 0], states[:, -1]], 1)
        if lengths is not None:
            last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[2])
            ends = torch.cat([states[:, :1], states.gather(1, last)], 1).masked_fill((lengths == 0)[:, None, None], 0)
        hidden_and_cell = self.bridge(ends.flatten(1)).tanh().view(len(states), 1, self.config.layers, 2, -1)
        return torch.cat([hidden_and_cell, torch.zeros_like(hidden_and_cell[..., :1, :])], 3)

    def init_states(self, memory: Memory) -> tuple[Tensor, list[KV | None]]:
        return self.compute_initial_states(memory), [self.project_memory(memory)]


def split_layers(states: Tensor) -> list[LSTMState]:
    """(B, K, N, 3, E) -> the state of each layer"""
    return [LSTMState(*layer.unbind(2)) for layer in states.unbind(2)]


def make_lstm(inputs: int, width: int) -> nn.LSTM:
    """Build one layer; the forget gates start open (Jozefowicz et al. 2015)."""
    lstm = nn.LSTM(inputs, width, batch_first=True)
    _, _, input_bias, hidden_bias = lstm.all_weights[0]
    if not input_bias.is_meta:
        with torch.no_grad():
            input_bias[width : 2 * width] = 1  # gates are in the order input, forget, cell, output
            hidden_bias.zero_()
    return lstm


def run_lstm(lstm: nn.LSTM, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Read whole sequences: (B, T, E) -> (B, T, width)"""
    # The dtype of the weights: under autocast, cuDNN's LSTM computes in float16, which is not what was requested.
    dtype = lstm.all_weights[0][0].dtype
    needs_native = torch.is_grad_enabled() and not lstm.training  # cuDNN has no backward pass in eval mode
    native = torch.backends.cudnn.flags(enabled=False) if needs_native else nullcontext()
    with torch.autocast(x.device.type, enabled=False), native:
        hidden_and_cell = None if state is None else tuple(part[None].to(dtype).contiguous() for part in state)
        return cast(Tensor, lstm(x.to(dtype), hidden_and_cell)[0])
