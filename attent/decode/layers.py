"""A model as the fast lane runs it: a few large products, and the kernels of `steps` between them. The encoder reads
sources that lie end to end, the decoder takes a step of many beams.

The numbers are those of `attent.nn.Stack`. Matrices that read the same input lie side by side, in memory that stays and
is written anew for each search; all others are the model's own. Which models can be run so, `refuses` tells; the search
itself is `lane`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooked

from attent.models import Seq2Seq
from attent.models.embedding import Embedding, Output
from attent.nn import Attention, Stack
from attent.nn.block import Block, Residual
from attent.nn.dropout import Dropout
from attent.nn.feedforward import ACTIVATIONS, FeedForward
from attent.nn.kernels import steps
from attent.nn.positions import Learned, Positions, Sinusoidal

KNOWN = (Attention, Block, Dropout, Embedding, FeedForward, Output, Residual, Stack, Learned, Positions, Sinusoidal)
TORCH = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.ModuleList)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = (16, 32, 64, 128)  # widths
FEWEST_PLACES = 256  # that there are positions for
ALIGNED = 8  # words: rows of logits that begin anywhere would be read one by one


def refuses(model: object) -> str | None:
    """Why a model cannot be run so, as the end of a sentence; None: it can."""
    if type(model) is not Seq2Seq:
        return f"it is a {type(model).__name__}"
    parts = list(model.modules())[1:]
    if model.training or any(part.training for part in parts):
        return "it, or a part of it, is being trained"
    if {"begin", "step"} & vars(model).keys() or any(is_changed(part) for part in parts) or is_watched(parts):
        return "a part of it was replaced, or is hooked"
    weights, first = list(model.parameters()), model.output.weight
    if first.dtype not in DTYPES or any(one.dtype != first.dtype or one.device != first.device for one in weights):
        return "its numbers are not all of one format and on one device"
    if any(type(one) is not nn.Parameter for one in weights):
        return "its weights are no plain ones"
    stacks = (model.encoder, model.decoder)
    if not all(isinstance(stack.positions, Learned | Sinusoidal) and stack.config.window is None for stack in stacks):
        return "it has relative positions, or a window"
    if not all(is_plain(block) for stack in stacks for block in stack.blocks):
        return "a part of it is of another kind"
    attentions = [part for part in parts if isinstance(part, Attention)]
    if any(one.taps or not one.heads or one.head_width not in HEADS for one in attentions):
        return f"its heads are tapped, gone, or of a width other than {HEADS}"
    return None


def is_changed(part: nn.Module) -> bool:
    """Is it of a class of its own, or was it given a `forward` of its own?"""
    return type(part) not in (*KNOWN, *TORCH) or "forward" in vars(part)


def is_watched(parts: Sequence[nn.Module]) -> bool:
    """Does somebody wait for a part to be called, or for anything?"""
    if hooked._global_forward_hooks or hooked._global_forward_pre_hooks:
        return True
    return any(part._forward_hooks or part._forward_pre_hooks for part in parts)


def is_plain(block: Block) -> bool:
    """Are sub-layers what they are called, and do layers that will lie side by side have biases together?"""
    attentions = [one for one in (block.own, block.cross) if one is not None]
    if type(block.feedforward) is not FeedForward or any(type(one) is not Attention for one in attentions):
        return False
    return all((one.query.bias is None) == (one.key.bias is None) == (one.value.bias is None) for one in attentions)


@dataclass(frozen=True, eq=False)
class Linear:
    """One or several linear layers side by side: of one, its own weights."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *layers: nn.Linear) -> Linear:
        if len(layers) == 1:
            return cls(layers[0].weight.detach(), None if layers[0].bias is None else layers[0].bias.detach())
        bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        return cls(torch.cat([layer.weight.detach() for layer in layers]), bias)

    def take(self, *layers: nn.Linear) -> None:
        """The layers may have been changed, also by those whom nothing counts: through `data`, or by a CUDA graph."""
        if len(layers) > 1:
            torch.cat([layer.weight.detach() for layer in layers], out=self.weight)
            if self.bias is not None:
                torch.cat([layer.bias.detach() for layer in layers], out=self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def into(self, x: Tensor, out: Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def rectified(self, x: Tensor) -> Tensor:
        """max(0, x W + b), at the end of the product itself."""
        if self.bias is None:
            return self(x).relu_()
        return torch._addmm_activation(self.bias, x, self.weight.t())


@dataclass(frozen=True, eq=False)
class Norm:
    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, norm: nn.Module) -> Norm:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        bias = norm.bias.detach() if isinstance(norm, nn.LayerNorm) else None
        assert norm.eps is not None
        return cls(norm.weight.detach(), bias, norm.eps)


@dataclass(frozen=True)
class Heads:
    """What one attention is, besides its matrices."""

    count: int
    shared: int  # those of keys and values
    width: int
    scale: float

    @classmethod
    def of(cls, attention: Attention) -> Heads:
        return cls(attention.heads, attention.kv_heads, attention.head_width, attention.scale)


@dataclass(frozen=True, eq=False)
class Inner:
    """A feed-forward network."""

    expand: Linear
    gate: Linear | None
    contract: Linear
    activation: str

    @classmethod
    def of(cls, part: FeedForward) -> Inner:
        gate = None if part.gate is None else Linear.of(part.gate)
        return cls(Linear.of(part.expand), gate, Linear.of(part.contract), part.activation)

    def __call__(self, x: Tensor) -> Tensor:
        if self.activation == "relu" and self.gate is None:
            return self.contract(self.expand.rectified(x))
        inner = ACTIVATIONS[self.activation](self.expand(x))
        return self.contract(inner if self.gate is None else inner * self.gate(x))


@dataclass(frozen=True, eq=False)
class Layer:
    """A block of an encoder."""

    qkv: Linear
    own: Heads
    own_output: Linear
    inner: Inner

    @classmethod
    def of(cls, block: Block) -> Layer:
        own = block.own
        return cls(
            Linear.of(own.query, own.key, own.value), Heads.of(own), Linear.of(own.output), Inner.of(block.feedforward)
        )

    def take(self, block: Block) -> None:
        self.qkv.take(block.own.query, block.own.key, block.own.value)


@dataclass(frozen=True, eq=False)
class Across:
    """What a block of a decoder has besides."""

    query: Linear
    heads: Heads
    output: Linear
    remember: Linear  # keys and values of the source

    @classmethod
    def of(cls, cross: Attention | None) -> Across:
        assert cross is not None
        remember = Linear.of(cross.key, cross.value)
        return cls(Linear.of(cross.query), Heads.of(cross), Linear.of(cross.output), remember)

    def take(self, cross: Attention | None) -> None:
        assert cross is not None
        self.remember.take(cross.key, cross.value)


@dataclass(frozen=True, eq=False)
class Kept:
    """What one layer keeps of the targets (Hkv, columns, D) and of the sources (tokens, 2, Hkv, D)."""

    keys: Tensor
    values: Tensor
    memory: Tensor


class Side:
    """An embedding and a stack: what encoder and decoder have in common."""

    def __init__(self, embedding: Embedding, stack: Stack) -> None:
        self.table, self.scale = embedding.weight.detach(), embedding.scale
        self.layers = [Layer.of(block) for block in stack.blocks]
        self.pre = stack.config.norm_order == "pre"
        norms = [Norm.of(residual.norm) for block in stack.blocks for residual in residuals(block)]
        self.first = norms.pop(0) if self.pre else None
        self.norms = [*norms, Norm.of(stack.norm)] if self.pre else norms  # behind each sub-layer
        self.embedding_norm = Norm.of(stack.embedding_norm) if stack.config.embedding_norm else None
        self.places = self.table.new_zeros(0, self.table.shape[1])

    def take(self, stack: Stack) -> None:
        """Copies of weights are made anew, where they are."""
        for layer, block in zip(self.layers, stack.blocks, strict=True):
            layer.take(block)
        if isinstance(stack.positions, Learned):
            self.places.copy_(stack.positions.weight[: len(self.places)])

    def reach(self, stack: Stack, longest: int) -> bool:
        """Are there positions for so many tokens? If not, there are now, elsewhere."""
        if longest <= len(self.places):
            return True
        self.places = self._places(stack.positions, max(longest, 2 * len(self.places), FEWEST_PLACES))
        return False

    def _places(self, positions: Positions, longest: int) -> Tensor:
        longest = min(longest, positions.max_length or longest)
        at = torch.arange(longest, device=self.table.device)
        return positions.embed(self.table.new_zeros(longest, self.table.shape[1]), at).detach().contiguous()

    def begun(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, and what the first sub-layer reads of it."""
        if self.embedding_norm is not None:
            x, _ = self.added(x, None, self.embedding_norm, keep=False)
        return x, x if self.first is None else self.added(x, None, self.first, keep=True)[1]

    def added(self, x: Tensor, y: Tensor | None, norm: Norm, *, keep: bool | None = None) -> tuple[Tensor, Tensor]:
        """The stream with what a sub-layer adds, and what the next one reads of it."""
        return steps.added(x, y, norm.weight, norm.bias, norm.eps, self.pre if keep is None else keep)


class Encoder(Side):
    """Of sources that lie end to end."""

    def states(self, ids: Tensor, at: Tensor, begins: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Tokens (N,) at their places (N,) in S sources, which begin at `begins` (S,): (N, E)."""
        norms = iter(self.norms)
        x, h = self.begun(F.embedding(ids, self.table) * self.scale + self.places[at])
        for layer in self.layers:
            own = layer.own
            heads = (own.count, own.shared, own.width)
            y = steps.look_around(layer.qkv(h), begins, lengths, longest, heads, own.scale)
            x, h = self.added(x, layer.own_output(y), next(norms))
            x, h = self.added(x, layer.inner(h), next(norms))
        return h


class Decoder(Side):
    """Of beams side by side; `never` are words that it does not write."""

    def __init__(self, model: Seq2Seq, never: Tensor) -> None:
        super().__init__(model.target_embedding, model.decoder)
        self.across = [Across.of(block.cross) for block in model.decoder.blocks]
        self.never = never.clone()
        self.output_scale = model.output.scale
        weight = model.output.weight.detach()
        V, missing = len(weight), -len(weight) % ALIGNED
        weight = weight.new_zeros(V + missing, weight.shape[1]) if missing else weight
        self.output = Linear(weight, weight.new_full((V + missing,), float("-inf")))
        self._take_output(model.output)

    def take_all(self, model: Seq2Seq) -> None:
        self.take(model.decoder)
        for across, block in zip(self.across, model.decoder.blocks, strict=True):
            across.take(block.cross)
        self._take_output(model.output)

    def _take_output(self, output: Output) -> None:
        """The words that are never written have a bias of -inf, and so have those that fill up the last row."""
        V, weight, bias = len(output.weight), self.output.weight, self.output.bias
        assert bias is not None
        if len(weight) > V:
            weight[:V].copy_(output.weight)
        if output.bias is None:
            bias[:V].zero_()
        else:
            bias[:V].copy_(output.bias)
        bias.index_fill_(0, self.never, float("-inf"))

    def remember(self, states: Tensor, kept: Sequence[Kept], at: int) -> None:
        """The keys and values of some sources' states (N, E), behind those of so many tokens."""
        for across, held in zip(self.across, kept, strict=True):
            across.remember.into(states, held.memory[at : at + len(states)].flatten(1))

    def logits(self, rows: Tensor, read: Tensor, ancestors: Tensor, kept: Sequence[Kept]) -> Tensor:
        """What may come behind the tokens read (R, K): (R * K, V)."""
        K, norms = read.shape[1], iter(self.norms)
        x, h = self.begun(steps.embedded(read, rows, self.table, self.places, self.scale))
        for layer, across, held in zip(self.layers, self.across, kept, strict=True):
            own = layer.own
            y = steps.look_back(layer.qkv(h), held.keys, held.values, ancestors, rows, K, own.count, own.scale)
            x, h = self.added(x, layer.own_output(y), next(norms))
            y = steps.look_across(across.query(h), held.memory, rows, K, across.heads.scale)
            x, h = self.added(x, across.output(y), next(norms))
            x, h = self.added(x, layer.inner(h), next(norms))
        return self.output(h if self.output_scale is None else h * self.output_scale)


class Twin:
    """Both sides of a model."""

    def __init__(self, model: Seq2Seq, never: Tensor) -> None:
        self.encoder = Encoder(model.source_embedding, model.encoder)
        self.decoder = Decoder(model, never)
        self.facts = facts(model)

    def fits(self, model: Seq2Seq) -> bool:
        """Are the weights still at their places? What is recorded reads them there."""
        return self.facts == facts(model)

    def take(self, model: Seq2Seq) -> None:
        """The weights as they are now."""
        self.encoder.take(model.encoder)
        self.decoder.take_all(model)


def residuals(block: Block) -> Iterator[Residual]:
    yield block.own_residual
    if block.cross_residual is not None:
        yield block.cross_residual
    yield block.feedforward_residual


def facts(model: Seq2Seq) -> list[object]:
    """Where each weight lies, and the numbers besides that become part of a recording."""
    parts = list(model.modules())
    return [
        *(one.data_ptr() for one in model.parameters()),
        *(Heads.of(part) for part in parts if isinstance(part, Attention)),
        *(part.eps for part in parts if isinstance(part, nn.LayerNorm | nn.RMSNorm)),
        *(part.scale for part in (model.source_embedding, model.target_embedding, model.output)),
    ]
