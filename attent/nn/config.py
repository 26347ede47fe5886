"""The configuration of a stack: every choice in which the members of the Transformer family differ."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from attent.nn.argument_checks import (
    MAX_LAYERS,
    check_choice,
    check_positive,
    check_rate,
    check_size,
    check_window,
    is_count,
)
from attent.nn.positions import PositionsConfig, RotaryConfig, SinusoidalConfig

Compatibility = Literal["dot", "additive"]
Norm = Literal["layer", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
NormOrder = Literal["post", "pre"]


@dataclass(frozen=True, kw_only=True, repr=False)
class StackConfig:
    """The defaults are the encoder of the paper's base model (table 3)."""

    kind: ClassVar[str] = "transformer"
    layers: int = 6  # N
    width: int = 512  # d_model
    heads: int = 8  # h
    kv_heads: int | None = None  # fewer than `heads`: grouped-query attention; None: as many
    head_width: int | None = None  # d_k = d_v; None: width / heads
    # After pruning: for each layer, for its self-attention and then its cross-attention, the original indices of the
    # heads that are left. None: all.
    remaining_heads: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    compatibility: Compatibility = "dot"  # of query and key; additive: v^T tanh(q + k), Bahdanau et al. 2014
    ffn_width: int = 2048  # d_ff
    activation: Activation = "relu"
    gated: bool = False  # a gated feed-forward layer (SwiGLU and similar)
    causal: bool = False  # tokens attend to no later token: a decoder
    cross_attention: bool = False  # blocks also attend to the output of another stack
    window: tuple[int | None, int | None] | None = None  # self-attention's reach in tokens (before, after); None: all
    positions: PositionsConfig = field(default_factory=SinusoidalConfig)
    norm: Norm = "layer"
    norm_order: NormOrder = "post"
    norm_eps: float = 1e-5
    bias: bool = True  # in the linear layers
    scale: float | None = None  # of the attention scores; None: 1 / sqrt(head_width), or 1 where they are additive
    scale_by_layer: bool = False  # also divide the scores of layer i by i + 1 (a variant of GPT-2)
    embedding_norm: bool = False  # a norm on embeddings + positions (BERT)
    dropout: float = 0.1  # P_drop: on each sub-layer's output, and on embeddings + positions
    embedding_dropout: float | None = None  # on embeddings + positions; None: as `dropout`
    output_dropout: float = 0.0  # on the output of the stack (T5)
    attention_dropout: float = 0.0  # on the attention weights
    activation_dropout: float = 0.0  # on the hidden units of the feed-forward layers

    def __post_init__(self) -> None:
        check_size("layers", self.layers, MAX_LAYERS)
        for name in ("width", "heads", "ffn_width"):
            check_size(name, getattr(self, name))
        for name in ("dropout", "attention_dropout", "activation_dropout", "output_dropout"):
            check_rate(name, getattr(self, name))
        if self.embedding_dropout is not None:
            check_rate("embedding_dropout", self.embedding_dropout)
        check_choice("compatibility", self.compatibility, Compatibility)
        for name, choices in (("activation", Activation), ("norm", Norm), ("norm_order", NormOrder)):
            check_choice(name, getattr(self, name), choices)
        check_positive("norm_eps", self.norm_eps)
        check_window(self.window)
        check_size("head_width", self.compute_head_width())
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        if not is_count(kv_heads) or kv_heads < 1 or self.heads % kv_heads:
            raise ValueError(f"`heads` must be a multiple of `kv_heads`={kv_heads}, but is {self.heads}")
        self.check_remaining_heads()
        if self.scale is not None:
            check_positive("scale", self.scale)
        if not isinstance(self.positions, PositionsConfig):
            raise ValueError(f"`positions` must be a config such as SinusoidalConfig(), but is {self.positions!r}")
        if isinstance(self.positions, RotaryConfig) and self.compute_head_width() % 2:
            width = self.compute_head_width()
            raise ValueError(f"rotary positions rotate pairs of features: `head_width` must be even, but is {width}")
        if isinstance(self.positions, RotaryConfig) and self.compatibility != "dot":
            raise ValueError("`compatibility` must be dot with rotary positions, but is additive; use other positions")

    def __repr__(self) -> str:
        return f"StackConfig({', '.join(find_changes(self, StackConfig()))})"

    def compute_head_width(self) -> int:
        if self.head_width is not None:
            return self.head_width
        if self.width % self.heads:
            raise ValueError(
                f"`width` must be a multiple of `heads`={self.heads}, but is {self.width}; change one, or give "
                f"`head_width`"
            )
        return self.width // self.heads

    @property
    def description(self) -> str:
        return "Transformer"

    @property
    def num_removed_heads(self) -> int:
        return sum(self.heads - len(heads) for layer in self.remaining_heads or () for heads in layer)

    def check_remaining_heads(self) -> None:
        if self.remaining_heads is None:
            return
        lists = 1 + self.cross_attention
        is_valid = [len(layer) for layer in self.remaining_heads] == [lists] * self.layers
        is_valid &= self.kv_heads in (None, self.heads)
        for heads in (heads for layer in self.remaining_heads for heads in layer):
            is_valid &= all(is_count(head) and head < self.heads for head in heads) and [*heads] == sorted(set(heads))
        if not is_valid:
            raise ValueError(
                f"`remaining_heads` must have {self.layers} layers of {lists} lists of distinct heads each, from 0 to "
                f"{self.heads - 1} in ascending order, and no grouped-query attention, but is {self.remaining_heads}"
            )


def find_changes(config: Any, base: Any, prefix: str = "") -> list[str]:
    """Return the fields that differ from those of another config of the same class, such as `encoder.dropout=0.2`."""
    changes = []
    for name in (prefix + each.name for each in fields(config)):
        value, other = (getattr(each, name.removeprefix(prefix)) for each in (config, base))
        if isinstance(value, StackConfig) and isinstance(other, StackConfig):
            changes += find_changes(value, other, f"{name}.")
        elif value != other:
            changes.append(f"{name}={value!r}")
    return changes


def choose_config(config: StackConfig | None, **sizes: float | None) -> StackConfig:
    """Return the config, or that of these sizes: a module takes one or the other."""
    changes = {name: size for name, size in sizes.items() if size is not None}
    if config is not None and changes:
        raise ValueError(f"give a `config` or `{next(iter(changes))}`, but not both")
    return StackConfig(**changes) if config is None else config  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class NonTransformerConfig:
    """The settings that LSTMs and convolutions share. The defaults are those of an encoder."""

    causal: ClassVar[bool] = False
    cross_attention: ClassVar[bool] = False
    layers: int = 4
    width: int = 512
    dropout: float = 0.1  # on the embeddings and in each layer

    def __post_init__(self) -> None:
        check_size("layers", self.layers, MAX_LAYERS)
        check_size("width", self.width)
        check_rate("dropout", self.dropout)
