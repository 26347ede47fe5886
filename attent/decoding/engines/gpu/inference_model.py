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

from attent.decoding.engines.gpu import kernels
from attent.models import Seq2Seq
from attent.models.output import OutputProjection
from attent.nn import Attention, Stack
from attent.nn.block import Block, Residual
from attent.nn.dropout import Dropout
from attent.nn.feedforward import ACTIVATIONS, FeedForward
from attent.nn.frontends import TokenEmbedding
from attent.nn.fused import FusedBlock, FusedFeedForward
from attent.nn.positions import LearnedPositions, Positions, SinusoidalPositions

SUPPORTED_MODULES = (
    Attention,
    Block,
    Dropout,
    FeedForward,
    FusedBlock,
    FusedFeedForward,
    OutputProjection,
    Residual,
    Stack,
    TokenEmbedding,
    LearnedPositions,
    Positions,
    SinusoidalPositions,
)
TORCH_MODULES = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.ModuleList)
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_WIDTHS = (16, 32, 64, 128)  # widths
MIN_POSITIONS = 256  # that there are positions for
LOGITS_ALIGNMENT = 8  # words: rows of logits that begin anywhere would be read one by one


def find_unsupported_reason(model: object) -> str | None:
    """Why a model cannot be run so, as the end of a sentence; None: it can."""
    if type(model) is not Seq2Seq:
        return f"it is a {type(model).__name__}"
    parts = list(model.modules())[1:]
    if model.training or any(part.training for part in parts):
        return "it, or a part of it, is being trained"
    if {"begin", "step"} & vars(model).keys() or any(is_customized(part) for part in parts) or has_forward_hooks(parts):
        return "a part of it was replaced, or is hooked"
    weights, first = list(model.parameters()), model.output.weight
    if first.dtype not in SUPPORTED_DTYPES or any(
        one.dtype != first.dtype or one.device != first.device for one in weights
    ):
        return "its numbers are not all of one format and on one device"
    if any(type(one) is not nn.Parameter for one in weights):
        return "its weights are no plain ones"
    stacks = (model.encoder, model.decoder)
    if not all(
        isinstance(stack.positions, LearnedPositions | SinusoidalPositions) and stack.config.window is None
        for stack in stacks
    ):
        return "it has relative positions, or a window"
    if not all(is_standard_block(block) for stack in stacks for block in stack.blocks):
        return "a part of it is of another kind"
    attentions = [part for part in parts if isinstance(part, Attention)]
    if any(one.taps or not one.heads or one.head_width not in HEAD_WIDTHS for one in attentions):
        return f"its heads are tapped, gone, or of a width other than {HEAD_WIDTHS}"
    return None


def is_customized(module: nn.Module) -> bool:
    """Is it of a class of its own, or was it given a `forward` of its own?"""
    return type(module) not in (*SUPPORTED_MODULES, *TORCH_MODULES) or "forward" in vars(module)


def has_forward_hooks(modules: Sequence[nn.Module]) -> bool:
    """Does somebody wait for a part to be called, or for anything?"""
    if hooked._global_forward_hooks or hooked._global_forward_pre_hooks:
        return True
    return any(part._forward_hooks or part._forward_pre_hooks for part in modules)


def is_standard_block(block: Block) -> bool:
    """Are sub-layers what they are called, and do layers that will lie side by side have biases together?"""
    attentions = [one for one in (block.self_attn, block.cross_attn) if one is not None]
    if type(block.feedforward) not in (FeedForward, FusedFeedForward) or any(
        type(one) is not Attention for one in attentions
    ):
        return False
    return all((one.query.bias is None) == (one.key.bias is None) == (one.value.bias is None) for one in attentions)


@dataclass(frozen=True, eq=False)
class FusedLinear:
    """One or several linear layers side by side: of one, its own weights."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def from_layers(cls, *layers: nn.Linear) -> FusedLinear:
        if len(layers) == 1:
            return cls(layers[0].weight.detach(), None if layers[0].bias is None else layers[0].bias.detach())
        bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        return cls(torch.cat([layer.weight.detach() for layer in layers]), bias)

    def refresh(self, *layers: nn.Linear) -> None:
        """The layers may have been changed, also by those whom nothing counts: through `data`, or by a CUDA graph."""
        if len(layers) > 1:
            torch.cat([layer.weight.detach() for layer in layers], out=self.weight)
            if self.bias is not None:
                torch.cat([layer.bias.detach() for layer in layers], out=self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def forward_into(self, x: Tensor, out: Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def forward_relu(self, x: Tensor) -> Tensor:
        """max(0, x W + b), at the end of the product itself."""
        if self.bias is None:
            return self(x).relu_()
        return torch._addmm_activation(self.bias, x, self.weight.t())


@dataclass(frozen=True, eq=False)
class NormWeights:
    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def from_module(cls, norm: nn.Module) -> NormWeights:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        bias = norm.bias.detach() if isinstance(norm, nn.LayerNorm) else None
        assert norm.eps is not None
        return cls(norm.weight.detach(), bias, norm.eps)


@dataclass(frozen=True)
class HeadShape:
    """What one attention is, besides its matrices."""

    heads: int
    kv_heads: int  # those of keys and values
    head_width: int
    scale: float

    @classmethod
    def from_attention(cls, attention: Attention) -> HeadShape:
        return cls(attention.heads, attention.kv_heads, attention.head_width, attention.scale)


@dataclass(frozen=True, eq=False)
class InferenceFeedForward:
    """A feed-forward network."""

    expand: FusedLinear
    gate: FusedLinear | None
    contract: FusedLinear
    activation: str

    @classmethod
    def from_module(cls, feedforward: FeedForward) -> InferenceFeedForward:
        gate = None if feedforward.gate is None else FusedLinear.from_layers(feedforward.gate)
        return cls(
            FusedLinear.from_layers(feedforward.expand),
            gate,
            FusedLinear.from_layers(feedforward.contract),
            feedforward.activation,
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self.activation == "relu" and self.gate is None:
            return self.contract(self.expand.forward_relu(x))
        inner = ACTIVATIONS[self.activation](self.expand(x))
        return self.contract(inner if self.gate is None else inner * self.gate(x))


@dataclass(frozen=True, eq=False)
class InferenceBlock:
    """A block of an encoder."""

    qkv: FusedLinear
    self_attn_shape: HeadShape
    self_attn_output: FusedLinear
    feedforward: InferenceFeedForward

    @classmethod
    def from_block(cls, block: Block) -> InferenceBlock:
        own = block.self_attn
        return cls(
            FusedLinear.from_layers(own.query, own.key, own.value),
            HeadShape.from_attention(own),
            FusedLinear.from_layers(own.output),
            InferenceFeedForward.from_module(block.feedforward),
        )

    def refresh(self, block: Block) -> None:
        self.qkv.refresh(block.self_attn.query, block.self_attn.key, block.self_attn.value)


@dataclass(frozen=True, eq=False)
class InferenceCrossAttention:
    """What a block of a decoder has besides."""

    query: FusedLinear
    shape: HeadShape
    output: FusedLinear
    key_value: FusedLinear  # keys and values of the source

    @classmethod
    def from_attention(cls, cross_attn: Attention | None) -> InferenceCrossAttention:
        assert cross_attn is not None
        remember = FusedLinear.from_layers(cross_attn.key, cross_attn.value)
        return cls(
            FusedLinear.from_layers(cross_attn.query),
            HeadShape.from_attention(cross_attn),
            FusedLinear.from_layers(cross_attn.output),
            remember,
        )

    def refresh(self, cross_attn: Attention | None) -> None:
        assert cross_attn is not None
        self.key_value.refresh(cross_attn.key, cross_attn.value)


@dataclass(frozen=True, eq=False)
class GpuLayerCache:
    """What one layer keeps of the targets (Hkv, columns, D) and of the sources (tokens, 2, Hkv, D)."""

    keys: Tensor
    values: Tensor
    memory: Tensor


class InferenceStack:
    """An embedding and a stack: what encoder and decoder have in common."""

    def __init__(self, embedding: TokenEmbedding, stack: Stack) -> None:
        self.embedding_weight, self.scale = embedding.weight.detach(), embedding.scale
        self.layers = [InferenceBlock.from_block(block) for block in stack.blocks]
        self.pre_norm = stack.config.norm_order == "pre"
        norms = [NormWeights.from_module(residual.norm) for block in stack.blocks for residual in iter_residuals(block)]
        self.first_norm = norms.pop(0) if self.pre_norm else None
        self.norms = [*norms, NormWeights.from_module(stack.norm)] if self.pre_norm else norms  # behind each sub-layer
        self.embedding_norm = NormWeights.from_module(stack.embedding_norm) if stack.config.embedding_norm else None
        self.position_embeddings = self.embedding_weight.new_zeros(0, self.embedding_weight.shape[1])

    def refresh(self, stack: Stack) -> None:
        """Copies of weights are made anew, where they are."""
        for layer, block in zip(self.layers, stack.blocks, strict=True):
            layer.refresh(block)
        if isinstance(stack.positions, LearnedPositions):
            self.position_embeddings.copy_(stack.positions.weight[: len(self.position_embeddings)])

    def ensure_positions(self, stack: Stack, max_length: int) -> bool:
        """Are there positions for so many tokens? If not, there are now, elsewhere."""
        if max_length <= len(self.position_embeddings):
            return True
        self.position_embeddings = self._embed_positions(
            stack.positions, max(max_length, 2 * len(self.position_embeddings), MIN_POSITIONS)
        )
        return False

    def _embed_positions(self, positions: Positions, max_length: int) -> Tensor:
        max_length = min(max_length, positions.max_length or max_length)
        at = torch.arange(max_length, device=self.embedding_weight.device)
        return (
            positions.embed(self.embedding_weight.new_zeros(max_length, self.embedding_weight.shape[1]), at)
            .detach()
            .contiguous()
        )

    def start_residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, and what the first sub-layer reads of it."""
        if self.embedding_norm is not None:
            x, _ = self.add_and_norm(x, None, self.embedding_norm, keep_sum=False)
        return x, x if self.first_norm is None else self.add_and_norm(x, None, self.first_norm, keep_sum=True)[1]

    def add_and_norm(
        self, x: Tensor, y: Tensor | None, norm: NormWeights, *, keep_sum: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """The stream with what a sub-layer adds, and what the next one reads of it."""
        return kernels.add_norm(x, y, norm.weight, norm.bias, norm.eps, self.pre_norm if keep_sum is None else keep_sum)


class InferenceEncoder(InferenceStack):
    """Of sources that lie end to end."""

    def encode(self, token_ids: Tensor, positions: Tensor, offsets: Tensor, lengths: Tensor, max_length: int) -> Tensor:
        """Tokens (N,) at their places (N,) in S sources, which begin at `begins` (S,): (N, E)."""
        norms = iter(self.norms)
        x, h = self.start_residual(
            F.embedding(token_ids, self.embedding_weight) * self.scale + self.position_embeddings[positions]
        )
        for layer in self.layers:
            own = layer.self_attn_shape
            heads = (own.heads, own.kv_heads, own.head_width)
            y = kernels.attend_packed(layer.qkv(h), offsets, lengths, max_length, heads, own.scale)
            x, h = self.add_and_norm(x, layer.self_attn_output(y), next(norms))
            x, h = self.add_and_norm(x, layer.feedforward(h), next(norms))
        return h


class InferenceDecoder(InferenceStack):
    """Of beams side by side; `never` are words that it does not write."""

    def __init__(self, model: Seq2Seq, suppressed_tokens: Tensor) -> None:
        super().__init__(model.target_embedding, model.decoder)
        self.cross_attns = [InferenceCrossAttention.from_attention(block.cross_attn) for block in model.decoder.blocks]
        self.suppressed_tokens = suppressed_tokens.clone()
        self.output_scale = model.output.scale
        weight = model.output.weight.detach()
        V, missing = len(weight), -len(weight) % LOGITS_ALIGNMENT
        weight = weight.new_zeros(V + missing, weight.shape[1]) if missing else weight
        self.output = FusedLinear(weight, weight.new_full((V + missing,), float("-inf")))
        self._refresh_output(model.output)

    def refresh_model(self, model: Seq2Seq) -> None:
        self.refresh(model.decoder)
        for across, block in zip(self.cross_attns, model.decoder.blocks, strict=True):
            across.refresh(block.cross_attn)
        self._refresh_output(model.output)

    def _refresh_output(self, output: OutputProjection) -> None:
        """The words that are never written have a bias of -inf, and so have those that fill up the last row."""
        V, weight, bias = len(output.weight), self.output.weight, self.output.bias
        assert bias is not None
        if len(weight) > V:
            weight[:V].copy_(output.weight)
        if output.bias is None:
            bias[:V].zero_()
        else:
            bias[:V].copy_(output.bias)
        bias.index_fill_(0, self.suppressed_tokens, float("-inf"))

    def cache_memory(self, states: Tensor, caches: Sequence[GpuLayerCache], offset: int) -> None:
        """The keys and values of some sources' states (N, E), behind those of so many tokens."""
        for across, held in zip(self.cross_attns, caches, strict=True):
            across.key_value.forward_into(states, held.memory[offset : offset + len(states)].flatten(1))

    def compute_logits(
        self, rows: Tensor, input_tokens: Tensor, ancestors: Tensor, caches: Sequence[GpuLayerCache]
    ) -> Tensor:
        """What may come behind the tokens read (R, K): (R * K, V)."""
        K, norms = input_tokens.shape[1], iter(self.norms)
        x, h = self.start_residual(
            kernels.embed_tokens(input_tokens, rows, self.embedding_weight, self.position_embeddings, self.scale)
        )
        for layer, across, held in zip(self.layers, self.cross_attns, caches, strict=True):
            own = layer.self_attn_shape
            y = kernels.attend_past(layer.qkv(h), held.keys, held.values, ancestors, rows, K, own.heads, own.scale)
            x, h = self.add_and_norm(x, layer.self_attn_output(y), next(norms))
            y = kernels.attend_memory(across.query(h), held.memory, rows, K, across.shape.scale)
            x, h = self.add_and_norm(x, across.output(y), next(norms))
            x, h = self.add_and_norm(x, layer.feedforward(h), next(norms))
        return self.output(h if self.output_scale is None else h * self.output_scale)


class InferenceModel:
    """Both sides of a model."""

    def __init__(self, model: Seq2Seq, suppressed_tokens: Tensor) -> None:
        assert isinstance(model.source_embedding, TokenEmbedding)
        self.encoder = InferenceEncoder(model.source_embedding, model.encoder)
        self.decoder = InferenceDecoder(model, suppressed_tokens)
        self.fingerprint = compute_fingerprint(model)

    def matches_model(self, model: Seq2Seq) -> bool:
        """Are the weights still at their places? What is recorded reads them there."""
        return self.fingerprint == compute_fingerprint(model)

    def refresh(self, model: Seq2Seq) -> None:
        """The weights as they are now."""
        self.encoder.refresh(model.encoder)
        self.decoder.refresh_model(model)


def iter_residuals(block: Block) -> Iterator[Residual]:
    yield block.self_attn_residual
    if block.cross_attn_residual is not None:
        yield block.cross_attn_residual
    yield block.feedforward_residual


def compute_fingerprint(model: Seq2Seq) -> list[object]:
    """Where each weight lies, and the numbers besides that become part of a recording."""
    parts = list(model.modules())
    return [
        *(one.data_ptr() for one in model.parameters()),
        *(HeadShape.from_attention(part) for part in parts if isinstance(part, Attention)),
        *(part.eps for part in parts if isinstance(part, nn.LayerNorm | nn.RMSNorm)),
        *(part.scale for part in (model.source_embedding, model.target_embedding, model.output)),
    ]
