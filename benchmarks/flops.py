"""FLOPs of a training step of a Transformer, and the fewest bytes that it must move.

Both are computed from the model's shape and the lengths of the sentences. Padding, recomputation and everything but
matrix products do not count, so that two programs that train the same model have the same reference. `train_gpu`
measures the machine's rates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attent.data.arrays import Array
from attent.models import Seq2SeqConfig
from attent.nn import StackConfig

FORWARD_BACKWARD = 3  # the backward pass takes twice the forward pass
OPTIMIZER_BYTES = (
    4 * 8
)  # bytes of a weight: itself, its gradient and Adam's two means, float32, each read and written once
ACTIVATION_BYTES = (
    2 * 2
)  # bytes of an activation in bfloat16: written once on the way forward, read once on the way back


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """FLOPs of the forward and backward passes over a batch."""

    matmuls: int  # products with weights
    attention: int  # products of queries with keys, and of weights with values

    @property
    def total(self) -> int:
        return self.matmuls + self.attention


def count_model_flops(config: Seq2SeqConfig, source: Array, target: Array) -> FlopCount:
    """Count the FLOPs of a training step on sentence pairs with these lengths.

    Products: 6 for each weight and each token that meets it. With S source and T target tokens, L layers of width d and
    inner width ff, and V words that is

        6 (S L (4d^2 + 2 d ff + 2d^2) + T (L (6d^2 + 2 d ff) + d V))

    where the second 2d^2 are the decoder's keys and values of the source. Attention: 4d on the way forward for each
    query and each key that it may look at, in each layer, and three times that with the way back. A sentence of n
    tokens has n^2 such pairs where all is seen, n (n + 1) / 2 where nothing later is.
    """
    source, target = source.astype(np.int64), target.astype(np.int64)
    encoder, decoder = config.encoder, config.decoder
    ends, memory = (
        _query_output_weights(decoder),
        _key_value_weights(decoder),
    )  # of one attention: queries and output; keys and values
    of_source = (
        encoder.layers * (_query_output_weights(encoder) + _key_value_weights(encoder) + _ffn_weights(encoder))
        + decoder.layers * memory
    )
    of_target = decoder.layers * (2 * ends + memory + _ffn_weights(decoder)) + decoder.width * config.output_vocab
    weights = int(source.sum()) * of_source + int(target.sum()) * of_target
    own, causal, cross = (source * source).sum(), (target * (target + 1)).sum() // 2, (source * target).sum()
    looks = encoder.layers * _query_width(encoder) * int(own) + decoder.layers * _query_width(decoder) * int(
        causal + cross
    )
    return FlopCount(matmuls=2 * FORWARD_BACKWARD * weights, attention=4 * FORWARD_BACKWARD * looks)


def count_min_bytes(config: Seq2SeqConfig, parameters: int, source_tokens: int, target_tokens: int) -> int:
    """Count the bytes that a step must move if nothing is moved twice and all kernels are fused.

    The optimizer reads and writes weights, gradients and both of Adam's means (float32). Of the activations only those
    count that the backward pass cannot do without: what enters each product, and queries, keys and values; they are
    written once and read once in bfloat16. Logits, masks and norms are not counted. No program reaches this bound.
    """
    encoder, decoder = config.encoder, config.decoder
    width, cross = (
        encoder.width,
        encoder.width + 2 * _query_width(decoder),
    )  # input, queries, output
    of_source = encoder.layers * (
        _self_attn_activations(encoder) + width + encoder.ffn_width
    ) + decoder.layers * 2 * _key_width(decoder)
    of_target = decoder.layers * (_self_attn_activations(decoder) + cross + width + decoder.ffn_width)
    return OPTIMIZER_BYTES * parameters + ACTIVATION_BYTES * (source_tokens * of_source + target_tokens * of_target)


def _self_attn_activations(stack: StackConfig) -> int:
    """Return the stored values per token of self-attention: input, queries, keys, values and output."""
    return stack.width + 2 * _query_width(stack) + 2 * _key_width(stack)


def _query_width(stack: StackConfig) -> int:
    """Return the total width of a token's queries."""
    return stack.heads * (stack.head_width or stack.width // stack.heads)


def _key_width(stack: StackConfig) -> int:
    """Return the total width of a token's keys, which query heads may share; values have the same."""
    return _query_width(stack) // stack.heads * (stack.kv_heads or stack.heads)


def _query_output_weights(stack: StackConfig) -> int:
    return 2 * stack.width * _query_width(stack)


def _key_value_weights(stack: StackConfig) -> int:
    return 2 * stack.width * _key_width(stack)


def _ffn_weights(stack: StackConfig) -> int:
    return (3 if stack.gated else 2) * stack.width * stack.ffn_width
