"""Multi-head attention (section 3.2.2): project, look with each head, join the heads, project back.

One class serves the paper's three uses (section 3.2.3); they differ only in whose keys and values they are given and
in the mask:

    encoder self-attention     attention(x, attention.remember(x), everything)
    decoder self-attention     attention(x, attention.remember(x), causal)
    encoder-decoder attention  attention(x, attention.remember(memory), everything real of memory)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.argument_checks import check_heads
from attent.nn.backends import FusedQKV, attend, attend_explicit, attend_fused_qkv, check_backend_name
from attent.nn.cache import KV
from attent.nn.masks import Mask
from attent.nn.positions import Angles

if TYPE_CHECKING:
    from attent.nn.block import BlockContext

COMPILED_PREFIX = "_orig_mod."  # what torch.compile puts into the names of a module's parts


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """What a tap is shown of one call of one layer."""

    q: Tensor  # (B, H, Tq, D), turned by its positions where these are angles
    k: Tensor  # (B, Hkv, Tk, D)
    v: Tensor  # (B, Hkv, Tk, D)
    mask: Mask
    bias: Tensor | None  # added to the scaled scores
    scale: float

    @cached_property
    def weights(self) -> Tensor:
        """(B, H, Tq, Tk) each row sums to one, or to zero where there was nothing to look at."""
        return self.compute_weights(range(self.q.shape[1]))

    @torch.no_grad()
    def compute_weights(self, heads: Sequence[int]) -> Tensor:
        """Of some heads alone: fast kernels never write weights down, so each is computed only when it is asked for."""
        shared = self.q.shape[1] // max(1, self.k.shape[1])
        keys = [head // shared for head in heads]
        bias = None if self.bias is None else self.bias.expand(-1, self.q.shape[1], -1, -1)[:, list(heads)]
        q, k, v = self.q[:, list(heads)], self.k[:, keys], self.v[:, keys]
        return attend_explicit(q, k, v, self.mask, bias, self.scale)[1]


class Attention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1 ... head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        bias: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
        remaining_heads: tuple[int, ...] | None = None,
    ) -> None:
        """`remaining_heads` are the numbers of the heads that are left where some were removed, also none at all; None: all."""
        super().__init__()
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.head_width = compute_head_width(width, heads) if head_width is None else head_width
        check_heads(self.heads, self.kv_heads, self.head_width)
        self.remaining_heads = remaining_heads
        if remaining_heads is not None:
            self.heads = self.kv_heads = len(remaining_heads)
        self.scale = self.head_width**-0.5 if scale is None else scale
        self.dropout = dropout
        self.query = make_linear(width, self.heads * self.head_width, bias)  # W^Q of all heads, side by side
        self.key = make_linear(width, self.kv_heads * self.head_width, bias)  # W^K
        self.value = make_linear(width, self.kv_heads * self.head_width, bias)  # W^V
        self.output = make_linear(self.heads * self.head_width, width, bias)  # W^O
        self.backend = "auto"
        self.taps: list[Callable[[AttentionRecord], None]] = []  # each is shown what this layer does (`attent.record`)

    def forward(
        self, x: Tensor, kv: KV, mask: Mask, angles: Angles | None = None, bias: Tensor | None = None
    ) -> Tensor:
        return self.output(self.attend(self.project_queries(x, angles), kv, mask, bias))  # (B, T, H * D) -> (B, T, E)

    def project_queries(self, x: Tensor, angles: Angles | None = None) -> Tensor:
        """The queries of x."""
        q = self.split_heads(self.query(x))
        return q if angles is None else angles.rotate(q)

    def attend(self, q: Tensor, kv: KV, mask: Mask, bias: Tensor | None = None) -> Tensor:
        """Concat(head_1 ... head_h), of which W^O makes the output: (B, T, H * D)."""
        kv, bias = kv.to(q.dtype), self.select_bias(bias)
        if self.heads:
            heads = attend(q, kv.keys, kv.values, mask, bias, self.scale, self.dropout_rate, self.backend)
        else:  # all were removed: (B, 0, T, D), of which W^O makes its bias; no kernel takes that
            heads, _ = attend_explicit(q, kv.keys, kv.values, mask, bias, self.scale)
        if self.taps:
            bias = None if bias is None else bias.detach()
            look = AttentionRecord(q.detach(), kv.keys.detach(), kv.values.detach(), mask, bias, self.scale)
            for tap in self.taps:  # beside the fast kernel, so that a tap changes no output
                tap(look)
        return concat_heads(heads)

    def attend_fused(self, x: Tensor, memory: Tensor | None, context: BlockContext) -> Tensor:
        """`look` where queries, keys and values are all new: those of one input come from one product, and go to the
        kernel as they lie there. `memory` None: x looks at itself."""
        own = memory is None
        mask, angles, bias = (
            (context.self_mask, context.angles, context.bias) if own else (context.memory_mask, None, None)
        )
        if self.heads != self.kv_heads or not self.heads or self.taps or angles is not None or bias is not None:
            return self.attend(
                self.project_queries(x, angles),
                self.project_keys_values(x if memory is None else memory, angles),
                mask,
                bias,
            )
        if memory is None:
            asked, of_asked = self.project_fused(x, self.query, self.key, self.value)
            joined = FusedQKV(asked, None, of_asked)
        else:
            asked, of_asked = self.project_fused(x, self.query)
            told, of_told = self.project_fused(memory, self.key, self.value)
            joined = FusedQKV(asked, told, of_asked, of_told)
        return concat_heads(attend_fused_qkv(joined, mask, self.scale, self.dropout_rate, self.backend))

    def project_fused(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """(B, T, E) -> (B, T, n, H, D), and the biases, (n, H, D), which get their gradient from the kernel."""
        shape = len(layers), self.heads, self.head_width
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        found = F.linear(x, torch.cat([layer.weight for layer in layers]), None if bias is None else bias.detach())
        return found.unflatten(-1, shape), None if bias is None else bias.view(shape)

    @property
    def dropout_rate(self) -> float:
        return self.dropout if self.training else 0.0

    def project_keys_values(self, x: Tensor, angles: Angles | None = None) -> KV:
        """The keys and values by which x can be looked at, now or from a cache."""
        keys, values = self.split_heads(self.key(x)), self.split_heads(self.value(x))
        return KV(keys if angles is None else angles.rotate(keys), values)

    def split_heads(self, x: Tensor) -> Tensor:
        heads = x.shape[-1] // self.head_width
        return x.unflatten(-1, (heads, self.head_width)).transpose(1, 2)  # (B, T, H * D) -> (B, H, T, D)

    def select_bias(self, bias: Tensor | None) -> Tensor | None:
        """Of a bias for all heads that there were, that of those that are left."""
        if bias is None or self.remaining_heads is None:
            return bias
        if not self.remaining_heads:
            return bias[:, :0]
        # Slice by slice: a list of numbers would have to be brought to the device in every step.
        return torch.stack([bias[:, head] for head in self.remaining_heads], 1)


def concat_heads(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H * D)


def make_linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """Without torch's warning that a matrix of no rows or columns has nothing to initialise."""
    if inputs and outputs:
        return nn.Linear(inputs, outputs, bias=bias)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")
        return nn.Linear(inputs, outputs, bias=bias)


def compute_head_width(width: int, heads: int) -> int:
    if heads < 1 or width % heads:
        raise ValueError(
            f"`width` must be a multiple of `heads`={heads}, but is {width}; change one, or give `head_width`"
        )
    return width // heads


def set_backend(model: nn.Module, name: str) -> None:
    """Let every attention of a model use the named backend ("auto" for the fastest that can)."""
    check_backend_name(name)
    for layer in attention_layers(model).values():
        layer.backend = name


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """Every attention of a model by its path, such as `decoder.blocks.3.cross_attn`, whether or not it is compiled."""
    return {path.replace(COMPILED_PREFIX, ""): m for path, m in model.named_modules() if isinstance(m, Attention)}


def init_attention(attention: Attention) -> None:
    """Xavier (Glorot) uniform; W^Q, W^K and W^V are drawn as the parts of one (E, 3 E) matrix, as fairseq does.

    Taken one by one they would start sqrt(2) larger, and the first scores twice as large. Where scores are scaled down
    less than the paper does, as T5 does not at all, W^Q starts smaller: else the first softmax picks single tokens.
    """
    smaller = min(1.0, attention.head_width**-0.5 / attention.scale)
    for linear, gain in ((attention.query, smaller), (attention.key, 1.0), (attention.value, 1.0)):
        nn.init.xavier_uniform_(linear.weight, gain=gain * 2**-0.5)
    nn.init.xavier_uniform_(attention.output.weight)
    for linear in (attention.query, attention.key, attention.value, attention.output):
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
