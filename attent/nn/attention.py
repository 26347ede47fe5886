"""Multi-head attention (section 3.2.2): project, attend with each head, concatenate the heads, project back.

One class serves the paper's three uses (section 3.2.3), which differ in the source of the keys and values and in the
mask:

    encoder self-attention     attention(x)
    decoder self-attention     attention(x, mask=Mask(causal=True))
    encoder-decoder attention  attention(x, memory, Mask(key_lengths=...))
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from attent.nn.argument_checks import check_states
from attent.nn.backends import attend, check_backend_name
from attent.nn.cache import KV
from attent.nn.config import StackConfig, choose_config
from attent.nn.dot_product import attend_explicit
from attent.nn.masks import Mask
from attent.nn.positions import Angles

COMPILED_PREFIX = "_orig_mod."  # inserted by torch.compile into module paths


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """The inputs of one attention call, as passed to the layer's observers."""

    q: Tensor  # (B, H, Tq, D), rotated where positions are rotary
    k: Tensor  # (B, Hkv, Tk, D)
    v: Tensor  # (B, Hkv, Tk, D)
    mask: Mask
    bias: Tensor | None  # added to the scaled scores
    scale: float
    score_weight: Tensor | None = None  # (H, D) of additive scores

    @cached_property
    @torch.no_grad()
    def weights(self) -> Tensor:
        """(B, H, Tq, Tk), computed on demand; a row sums to one, or to zero where the query may attend to nothing."""
        inputs = (self.q, self.k, self.v, self.mask, self.bias, self.scale)
        return attend_explicit(*inputs, score_weight=self.score_weight)[1]


class Attention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1 ... head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    >>> attention = attent.nn.Attention(width=64, heads=4)
    >>> x, memory = torch.randn(2, 7, 64), torch.randn(2, 5, 64)
    >>> attention(x, mask=attent.nn.Mask(causal=True)).shape  # self-attention
    torch.Size([2, 7, 64])
    >>> attention(x, memory).shape  # the keys and values are computed from the memory
    torch.Size([2, 7, 64])
    """

    def __init__(
        self,
        config: StackConfig | None = None,
        layer: int = 0,
        remaining_heads: tuple[int, ...] | None = None,
        *,
        width: int | None = None,
        heads: int | None = None,
    ) -> None:
        """
        config           all choices; alone in another model, `width` (default 512) and `heads` (default 8) are enough
        layer            number of the layer, for `scale_by_layer`
        remaining_heads  original indices of the heads left after pruning, possibly none; None: all
        """
        super().__init__()
        config = choose_config(config, width=width, heads=heads)
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.remaining_heads = remaining_heads
        if remaining_heads is not None:
            self.heads = self.kv_heads = len(remaining_heads)
        self.head_width = config.compute_head_width()
        self.default_scale = self.head_width**-0.5 if config.compatibility == "dot" else 1.0
        scale = self.default_scale if config.scale is None else config.scale
        self.scale = scale / (layer + 1) if config.scale_by_layer else scale
        self.dropout = config.attention_dropout
        self.width, bias = config.width, config.bias
        self.query = make_linear(self.width, self.heads * self.head_width, bias)  # W^Q of all heads
        self.key = make_linear(self.width, self.kv_heads * self.head_width, bias)  # W^K
        self.value = make_linear(self.width, self.kv_heads * self.head_width, bias)  # W^V
        self.output = make_linear(self.heads * self.head_width, self.width, bias)  # W^O
        self.score_weight = None  # v of additive scores, for all heads
        if config.compatibility == "additive":
            limit = (6 / (self.head_width + 1)) ** 0.5  # Xavier uniform, of a layer with one output
            self.score_weight = nn.Parameter(torch.empty(self.heads * self.head_width).uniform_(-limit, limit))
        self.backend = "auto"
        self.observers: list[Callable[[AttentionRecord], None]] = []  # called with each call's inputs (`attent.record`)

    def forward(
        self,
        x: Tensor,
        kv: KV | Tensor | None = None,
        mask: Mask | None = None,
        angles: Angles | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """(B, T, E) -> (B, T, E). Attend to `kv`: projected keys and values, or states (B, Tk, E); None: to x."""
        q = self.project_queries(x, angles)
        if not isinstance(kv, KV):
            if kv is not None and len(kv) != len(x):
                raise ValueError(f"`kv` must have the batch size of `x`, {len(x)}, but has {len(kv)}")
            kv = self.project_keys_values(x, angles) if kv is None else self.project_keys_values(kv)
        heads = self.attend(q, kv, Mask() if mask is None else mask, bias)
        return self.output(heads)  # (B, T, H * D) -> (B, T, E)

    def project_queries(self, x: Tensor, angles: Angles | None = None) -> Tensor:
        check_states("x", x, self.width)
        q = self.split_heads(self.query(x))
        return q if angles is None else angles.rotate(q)

    def project_keys_values(self, x: Tensor, angles: Angles | None = None) -> KV:
        check_states("kv", x, self.width)
        keys, values = self.split_heads(self.key(x)), self.split_heads(self.value(x))
        return KV(keys if angles is None else angles.rotate(keys), values)

    def attend(
        self, q: Tensor, kv: KV, mask: Mask, bias: Tensor | None = None, *, notify_observers: bool = True
    ) -> Tensor:
        """Concat(head_1 ... head_h), the input of W^O: (B, T, H * D)."""
        kv, bias = kv.to(q.dtype), self.select_bias(bias)
        v = None if self.score_weight is None else self.score_weight.view(-1, self.head_width).to(q.dtype)
        if self.heads:
            out = attend(q, kv.keys, kv.values, mask, bias, self.scale, self.dropout_rate, self.backend, v)
        else:  # all heads were pruned: (B, 0, T, D), for which W^O returns its bias; no kernel takes that
            out, _ = attend_explicit(q, kv.keys, kv.values, mask, bias, self.scale)
        if self.observers and notify_observers:
            bias, v = (None if x is None else x.detach() for x in (bias, v))
            record = AttentionRecord(q.detach(), kv.keys.detach(), kv.values.detach(), mask, bias, self.scale, v)
            for observer in self.observers:  # in addition to the fast kernel, so that an observer changes no output
                observer(record)
        return concat_heads(out)

    @property
    def dropout_rate(self) -> float:
        return self.dropout if self.training else 0.0

    def split_heads(self, x: Tensor) -> Tensor:
        heads = x.shape[-1] // self.head_width
        return x.unflatten(-1, (heads, self.head_width)).transpose(1, 2)  # (B, T, H * D) -> (B, H, T, D)

    def select_bias(self, bias: Tensor | None) -> Tensor | None:
        """Select the remaining heads' part of a bias that covers all original heads."""
        if bias is None or self.remaining_heads is None:
            return bias
        if not self.remaining_heads:
            return bias[:, :0]
        # Slice by slice: an index list would be copied to the device in every step.
        return torch.stack([bias[:, head] for head in self.remaining_heads], 1)


def concat_heads(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H * D)


def make_linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """Build a linear layer without torch's warning about matrices without elements."""
    if inputs and outputs:
        return nn.Linear(inputs, outputs, bias=bias)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")
        return nn.Linear(inputs, outputs, bias=bias)


def set_backend(model: nn.Module, name: str) -> None:
    """Use the named backend in every attention layer of a model ("auto": the fastest that supports the inputs)."""
    check_backend_name(name)
    for layer in get_attention_layers(model).values():
        layer.backend = name


def get_attention_layers(model: nn.Module) -> dict[str, Attention]:
    """Attention layers by module path, such as `decoder.blocks.3.cross_attn`, also in a compiled model."""
    return {path.replace(COMPILED_PREFIX, ""): m for path, m in model.named_modules() if isinstance(m, Attention)}
