"""Multi-head attention (section 3.2.2): project, look with each head, join the heads, project back.

One class serves the paper's three uses (section 3.2.3); they differ only in whose keys and values they are given and
in the mask:

    encoder self-attention     attention(x, attention.remember(x), everything)
    decoder self-attention     attention(x, attention.remember(x), causal)
    encoder-decoder attention  attention(x, attention.remember(memory), everything real of memory)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attent.nn.attend import attend, check_name, explicit
from attent.nn.cache import KV
from attent.nn.checks import check_heads
from attent.nn.masks import Mask
from attent.nn.positions import Angles

COMPILED = "_orig_mod."  # what torch.compile puts into the names of a module's parts


@dataclass(frozen=True, eq=False)
class Look:
    """What a tap is shown of one call of one layer."""

    weights: Tensor  # (B, H, Tq, Tk) each row sums to one, or to zero where there was nothing to look at
    q: Tensor  # (B, H, Tq, D)
    k: Tensor  # (B, Hkv, Tk, D)
    v: Tensor  # (B, Hkv, Tk, D)
    mask: Mask


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
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.head_width = split_evenly(width, heads) if head_width is None else head_width
        check_heads(self.heads, self.kv_heads, self.head_width)
        self.scale = self.head_width**-0.5 if scale is None else scale
        self.dropout = dropout
        self.query = nn.Linear(width, heads * self.head_width, bias=bias)  # W^Q of all heads, side by side
        self.key = nn.Linear(width, self.kv_heads * self.head_width, bias=bias)  # W^K
        self.value = nn.Linear(width, self.kv_heads * self.head_width, bias=bias)  # W^V
        self.output = nn.Linear(heads * self.head_width, width, bias=bias)  # W^O
        self.backend = "auto"
        self.taps: list[Callable[[Look], None]] = []  # each is shown what this layer does (`attent.record`)

    def forward(
        self, x: Tensor, seen: KV, mask: Mask, angles: Angles | None = None, bias: Tensor | None = None
    ) -> Tensor:
        q = self.split(self.query(x))
        q = q if angles is None else angles.turn(q)
        dropout = self.dropout if self.training else 0.0
        seen = seen.to(q.dtype)
        heads = attend(q, seen.keys, seen.values, mask, bias, self.scale, dropout, self.backend)
        if self.taps:
            self.show(q, seen, mask, bias)
        return self.output(heads.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, H * D) -> (B, T, E)

    def remember(self, x: Tensor, angles: Angles | None = None) -> KV:
        """The keys and values by which x can be looked at, now or from a cache."""
        keys, values = self.split(self.key(x)), self.split(self.value(x))
        return KV(keys if angles is None else angles.turn(keys), values)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (B, T, H * D) -> (B, H, T, D)

    @torch.no_grad()
    def show(self, q: Tensor, seen: KV, mask: Mask, bias: Tensor | None) -> None:
        """The weights, which fast kernels never write down, computed beside them: a tap changes no output."""
        _, weights = explicit(q, seen.keys, seen.values, mask, bias, self.scale, dropout=0.0)
        for tap in self.taps:
            tap(Look(weights, q.detach(), seen.keys.detach(), seen.values.detach(), mask))


def split_evenly(width: int, heads: int) -> int:
    if heads < 1 or width % heads:
        raise ValueError(
            f"`width` must be a multiple of `heads`={heads}, but is {width}; change one, or give `head_width`"
        )
    return width // heads


def set_backend(model: nn.Module, name: str) -> None:
    """Let every attention of a model use the named backend ("auto" for the fastest that can)."""
    check_name(name)
    for layer in attention_layers(model).values():
        layer.backend = name


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """Every attention of a model by its path, such as `decoder.blocks.3.cross`, whether or not it is compiled."""
    return {path.replace(COMPILED, ""): m for path, m in model.named_modules() if isinstance(m, Attention)}


def init_attention(attention: Attention) -> None:
    """Xavier (Glorot) uniform; W^Q, W^K and W^V are drawn as the parts of one (E, 3 E) matrix, as fairseq does.

    Taken one by one they would start sqrt(2) larger, and the first scores twice as large.
    """
    for linear in (attention.query, attention.key, attention.value):
        nn.init.xavier_uniform_(linear.weight, gain=2**-0.5)
    nn.init.xavier_uniform_(attention.output.weight)
    for linear in (attention.query, attention.key, attention.value, attention.output):
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
