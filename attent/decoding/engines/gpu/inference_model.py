"""A model as the GPU engine runs it: a few large matrix products, and the kernels of `kernels` between them. The
encoder reads concatenated sources, the decoder steps many beams at once.

The numbers are those of `attent.nn.Stack`. Matrices with the same input are concatenated, in memory that stays in place
and is refreshed for each search; all others are the model's own. `find_unsupported_reason` says which models qualify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from attent.decoding.engines.gpu import kernels
from attent.models import Seq2Seq
from attent.models.output import OutputProjection
from attent.nn import Attention, Stack
from attent.nn.block import Block, Residual
from attent.nn.dropout import Dropout
from attent.nn.feedforward import FeedForward
from attent.nn.frontends import TokenEmbedding
from attent.nn.fused import FusedBlock, FusedFeedForward
from attent.nn.kernels.add_norm import add_norm
from attent.nn.kernels.packed_attention import attend_packed_qkv
from attent.nn.masks import Mask, Packing
from attent.nn.positions import LearnedPositions, Positions, SinusoidalPositions

SUPPORTED_MODULES = (
    Attention, Block, FusedBlock, Dropout, FeedForward, FusedFeedForward, OutputProjection, Residual, Stack,
    TokenEmbedding, LearnedPositions, Positions, SinusoidalPositions,
    nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.ModuleList,
)  # fmt: skip
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_WIDTHS = (16, 32, 64, 128)
MIN_POSITIONS = 256
LOGITS_ALIGNMENT = 8  # columns: unaligned rows of logits would be loaded element by element


def find_unsupported_reason(model: object) -> str | None:
    """Return why a model is not supported, as the end of a sentence; None if it is."""
    if type(model) is not Seq2Seq:
        return f"it is a {type(model).__name__}"
    modules = list(model.modules())[1:]
    if model.training or any(module.training for module in modules):
        return "it, or a part of it, is in training mode"
    is_customized = any(type(module) not in SUPPORTED_MODULES or "forward" in vars(module) for module in modules)
    has_global_hooks = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    has_hooks = has_global_hooks or any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    if {"init_decoder_state", "step"} & vars(model).keys() or is_customized or has_hooks:
        return "a part of it was replaced, or has a hook"
    weights, dtype, device = list(model.parameters()), model.output.weight.dtype, model.output.weight.device
    if dtype not in SUPPORTED_DTYPES or any((weight.dtype, weight.device) != (dtype, device) for weight in weights):
        return "its weights do not all have one supported dtype and one device"
    if any(type(weight) is not nn.Parameter for weight in weights):
        return "its weights are of a subclass of nn.Parameter"
    stacks = model.stacks
    absolute = LearnedPositions | SinusoidalPositions
    if not all(isinstance(stack.positions, absolute) and stack.config.window is None for stack in stacks):
        return "it has relative positions, or a window"
    if not all(is_standard_block(block) for stack in stacks for block in stack.blocks):
        return "a sub-layer is of another kind"
    attentions = [module for module in modules if isinstance(module, Attention)]
    if any(each.observers or not each.heads or each.head_width not in HEAD_WIDTHS for each in attentions):
        return f"its heads are observed, pruned, or of a width other than {HEAD_WIDTHS}"
    return None


def is_standard_block(block: Block) -> bool:
    """True if the sub-layers have the expected classes, and matrices to concatenate have biases together."""
    attentions = [each for each in (block.self_attn, block.cross_attn) if each is not None]
    standard = type(block.feedforward) in (FeedForward, FusedFeedForward)
    if not standard or any(type(each) is not Attention or each.score_weight is not None for each in attentions):
        return False
    return all((each.query.bias is None) == (each.key.bias is None) == (each.value.bias is None) for each in attentions)


# --- layers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FusedLinear:
    """Linear layers with the same input as one product, by concatenated copies of their weights."""

    layers: tuple[nn.Linear, ...]
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def from_layers(cls, *layers: nn.Linear) -> FusedLinear:
        bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        return cls(layers, torch.cat([layer.weight.detach() for layer in layers]), bias)

    def refresh(self) -> None:
        """Copy the weights again. No version counter would tell: `data` or a CUDA graph may have changed them."""
        torch.cat([layer.weight.detach() for layer in self.layers], out=self.weight)
        if self.bias is not None:
            torch.cat([layer.bias.detach() for layer in self.layers], out=self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def run_feedforward(feedforward: FeedForward, x: Tensor) -> Tensor:
    """(N, E) -> (N, E), with max(0, x W + b) in the epilogue of the product."""
    expand = feedforward.expand
    if feedforward.activation != "relu" or feedforward.gate is not None or expand.bias is None:
        return feedforward.contract(feedforward.compute_hidden(x))
    return feedforward.contract(torch._addmm_activation(expand.bias, x, expand.weight.t()))


def attend_within_sources(qkv: Tensor, mask: Mask, attention: Attention) -> Tensor:
    """(N, (H + 2 Hkv) * D) -> (N, H * D); `mask` packs the sources in one row."""
    heads, kv_heads = attention.heads, attention.kv_heads
    q, kv = qkv.unflatten(-1, (-1, attention.head_width))[None].split([heads, 2 * kv_heads], 2)
    kv = kv.unflatten(2, (2, kv_heads))  # (1, N, 2, Hkv, D)
    kv = kv if kv_heads == heads else kv.repeat_interleave(heads // kv_heads, 3)
    out = attend_packed_qkv(q[:, :, None], kv, None, None, mask, attention.scale, dropout=0.0)
    return out[0].transpose(0, 1).flatten(1)  # (1, H, N, D) -> (N, H * D)


@dataclass(frozen=True, eq=False)
class GpuLayerCache:
    """The KV cache of one layer: of targets (Hkv, columns, D), and of sources (tokens, 2, Hkv, D)."""

    keys: Tensor
    values: Tensor
    memory: Tensor

    @classmethod
    def allocate(cls, decoder: InferenceDecoder, layer: int, columns: int, source_tokens: int) -> GpuLayerCache:
        own, cross = decoder.blocks[layer].self_attn, decoder.cross_attns[layer]
        keys, values = (decoder.embedding_weight.new_zeros(own.kv_heads, columns, own.head_width) for _ in range(2))
        memory = decoder.embedding_weight.new_zeros(source_tokens, 2, cross.kv_heads, cross.head_width)
        return cls(keys, values, memory)


# --- stacks --------------------------------------------------------------------------------------------------------


class InferenceStack:
    def __init__(self, embedding: TokenEmbedding, stack: Stack) -> None:
        self.embedding_weight, self.scale = embedding.weight.detach(), embedding.scale
        self.blocks, self.positions = list(stack.blocks), stack.positions
        attentions = [block.self_attn for block in stack.blocks]
        self.qkv = [FusedLinear.from_layers(each.query, each.key, each.value) for each in attentions]
        self.pre_norm = stack.config.norm_order == "pre"
        residuals = [
            residual
            for block in stack.blocks
            for residual in (block.self_attn_residual, block.cross_attn_residual, block.feedforward_residual)
        ]
        norms = [residual.norm for residual in residuals if residual is not None]
        self.first_norm = norms.pop(0) if self.pre_norm else None
        self.norms = [*norms, stack.norm] if self.pre_norm else norms  # after each sub-layer
        self.embedding_norm = stack.embedding_norm if stack.config.embedding_norm else None
        self.position_embeddings = self.embedding_weight.new_zeros(0, self.embedding_weight.shape[1])

    def refresh(self) -> None:
        for linear in self.qkv:
            linear.refresh()
        if isinstance(self.positions, LearnedPositions):
            self.position_embeddings.copy_(self.positions.weight[: len(self.position_embeddings)])

    def grow_position_table(self, max_length: int) -> bool:
        """Compute position embeddings up to this length; True if they had to move in memory."""
        if max_length <= len(self.position_embeddings):
            return False
        count = max(max_length, 2 * len(self.position_embeddings), MIN_POSITIONS)
        count = min(count, self.positions.max_length or count)
        zeros = self.embedding_weight.new_zeros(count, self.embedding_weight.shape[1])
        positions = torch.arange(count, device=zeros.device)
        self.position_embeddings = self.positions.embed(zeros, positions).detach().contiguous()
        return True

    def start_residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the input of the first sub-layer."""
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return x, x if self.first_norm is None else self.first_norm(x)

    def add_and_norm(self, x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Add a sub-layer's output to the residual stream; return the stream and the input of the next sub-layer."""
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        assert norm.eps is not None
        bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        h, _, total, _ = add_norm(x, y, None, norm.weight, bias, norm.eps, dropout=0.0, seed=None, duplicate=False)
        return total if self.pre_norm else h, h


class InferenceEncoder(InferenceStack):
    def encode(self, token_ids: Tensor, packing: Packing) -> Tensor:
        """Tokens (N,) of sources that are packed in one row -> (N, E)."""
        norms, mask = iter(self.norms), Mask(packing=(packing, packing))
        positions = self.position_embeddings[packing.positions[0]]
        embedded = F.embedding(token_ids, self.embedding_weight) * self.scale + positions
        x, h = self.start_residual(embedded)
        for block, qkv in zip(self.blocks, self.qkv, strict=True):
            y = attend_within_sources(qkv(h), mask, block.self_attn)
            x, h = self.add_and_norm(x, block.self_attn.output(y), next(norms))
            x, h = self.add_and_norm(x, run_feedforward(block.feedforward, h), next(norms))
        return h


class InferenceDecoder(InferenceStack):
    """Steps the beams of many rows; never generates `suppressed_tokens`."""

    def __init__(self, model: Seq2Seq, suppressed_tokens: Tensor) -> None:
        super().__init__(model.target_embedding, model.stacks[1])
        self.cross_attns = [block.cross_attn for block in self.blocks if block.cross_attn is not None]
        self.key_values = [FusedLinear.from_layers(each.key, each.value) for each in self.cross_attns]
        self.suppressed_tokens = suppressed_tokens.clone()
        self.output, weight = model.output, model.output.weight.detach()
        V, missing = len(weight), -len(weight) % LOGITS_ALIGNMENT
        self.output_weight = weight.new_zeros(V + missing, weight.shape[1]) if missing else weight
        self.output_bias = weight.new_full((V + missing,), float("-inf"))

    def refresh(self) -> None:
        """Suppressed tokens and alignment columns have a bias of -inf."""
        super().refresh()
        for linear in self.key_values:
            linear.refresh()
        V = len(self.output.weight)
        if len(self.output_weight) > V:
            self.output_weight[:V].copy_(self.output.weight)
        if self.output.bias is None:
            self.output_bias[:V].zero_()
        else:
            self.output_bias[:V].copy_(self.output.bias)
        self.output_bias.index_fill_(0, self.suppressed_tokens, float("-inf"))

    def cache_memory(self, states: Tensor, caches: Sequence[GpuLayerCache], offset: int) -> None:
        """Project encoder states (N, E) to keys and values, stored from token `offset` on."""
        for linear, cache in zip(self.key_values, caches, strict=True):
            out = cache.memory[offset : offset + len(states)].flatten(1)
            if linear.bias is None:
                torch.mm(states, linear.weight.t(), out=out)
            else:
                torch.addmm(linear.bias, states, linear.weight.t(), out=out)

    def compute_logits(
        self, rows: Tensor, input_tokens: Tensor, ancestors: Tensor, caches: Sequence[GpuLayerCache]
    ) -> Tensor:
        """Step by the input tokens (R, K): logits (R * K, V)."""
        K, norms = input_tokens.shape[1], iter(self.norms)
        embedded = kernels.embed_tokens(input_tokens, rows, self.embedding_weight, self.position_embeddings, self.scale)
        x, h = self.start_residual(embedded)
        for block, qkv, cross_attn, cache in zip(self.blocks, self.qkv, self.cross_attns, caches, strict=True):
            own = block.self_attn
            y = kernels.attend_past(qkv(h), cache.keys, cache.values, ancestors, rows, K, own.heads, own.scale)
            x, h = self.add_and_norm(x, own.output(y), next(norms))
            y = kernels.attend_memory(cross_attn.query(h), cache.memory, rows, K, cross_attn.scale)
            x, h = self.add_and_norm(x, cross_attn.output(y), next(norms))
            x, h = self.add_and_norm(x, run_feedforward(block.feedforward, h), next(norms))
        h = h if self.output.scale is None else h * self.output.scale
        return F.linear(h, self.output_weight, self.output_bias)


class InferenceModel:
    def __init__(self, model: Seq2Seq, suppressed_tokens: Tensor) -> None:
        assert isinstance(model.source_embedding, TokenEmbedding)
        self.encoder = InferenceEncoder(model.source_embedding, model.stacks[0])
        self.decoder = InferenceDecoder(model, suppressed_tokens)
        self.graph_constants = collect_graph_constants(model)

    def matches_model(self, model: Seq2Seq) -> bool:
        """True if the weights are still where the CUDA graphs read them."""
        return self.graph_constants == collect_graph_constants(model)

    def refresh(self) -> None:
        self.encoder.refresh()
        self.decoder.refresh()


def collect_graph_constants(model: Seq2Seq) -> list[object]:
    """Return the address of each weight and the constants that become part of a CUDA graph."""
    modules = list(model.modules())
    return [
        *(weight.data_ptr() for weight in model.parameters()),
        *((m.heads, m.kv_heads, m.head_width, m.scale) for m in modules if isinstance(m, Attention)),
        *(module.eps for module in modules if isinstance(module, nn.LayerNorm | nn.RMSNorm)),
        *(module.scale for module in modules if isinstance(module, TokenEmbedding | OutputProjection)),
    ]
