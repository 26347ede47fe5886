"""Mistakes that a person can make, and the words that they will read: what it must be, what it is, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attent.nn import (
    Attention,
    FeedForward,
    LearnedConfig,
    Mask,
    Memory,
    Packing,
    RelativeConfig,
    Residual,
    RotaryConfig,
    SinusoidalConfig,
    Stack,
    StackConfig,
    attend,
    set_backend,
)

ENCODER = StackConfig(layers=1, width=8, heads=2, ffn_width=8, dropout=0.0)
DECODER = replace(ENCODER, causal=True)
CROSS = replace(DECODER, cross_attention=True)
LEARNED = replace(DECODER, positions=LearnedConfig(max_length=4))


def x(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def heads(heads: int = 2, B: int = 1, T: int = 3, D: int = 4) -> torch.Tensor:
    return torch.zeros(B, heads, T, D)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def packing(*rows: list[int], width: int | None = None) -> Packing:
    return Packing.from_lengths(rows, width)


def look(**changes: object) -> Callable[[], object]:
    """A good call of attention but for what changes."""
    return lambda: attend(**({"q": heads(), "k": heads(), "v": heads()} | changes))


def cached(config: StackConfig, *pieces: int, rows: int = 2, capacity: int = 4, beams: int = 1) -> None:
    stack = Stack(config)
    cache = stack.new_cache(capacity, rows=2, beams=beams)
    for piece in pieces:
        stack(x(rows, piece, 8), cache=cache)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    # --- configs
    "width that heads do not divide": (
        lambda: StackConfig(width=10, heads=4),
        "`width` must be a multiple of `heads`=4, but is 10; change one, or give `head_width`",
    ),
    "heads that key heads do not divide": (
        lambda: StackConfig(heads=8, kv_heads=3),
        "`heads` must be a multiple of `kv_heads`=3, but is 8",
    ),
    "heads without width": (
        lambda: StackConfig(head_width=0),
        "`head_width` must be a number from 1 to 16,777,216",
    ),
    "head width beyond all": (lambda: StackConfig(head_width=2**62), "`head_width` must be a number from 1"),
    "key heads in halves": (lambda: StackConfig(kv_heads=2.0), "`heads` must be a multiple of `kv_heads`=2.0"),
    "too deep": (lambda: StackConfig(layers=16_000_000), "`layers` must be a number from 1 to 1,000, but is 16000000"),
    "true layers": (lambda: StackConfig(layers=True), "`layers` must be a number from 1 to 1,000, but is True"),
    "dropout in words": (lambda: StackConfig(dropout="x"), "`dropout` must be at least 0 and less than 1, but is 'x'"),
    "no scale": (lambda: StackConfig(scale=float("nan")), "`scale` must be more than 0, but is nan"),
    "endless eps": (lambda: StackConfig(norm_eps=float("inf")), "`norm_eps` must be more than 0, but is inf"),
    "buckets beyond all": (lambda: RelativeConfig(buckets=2**62), "`buckets` must be a number from 1 to 16,777,216"),
    "no positions": (lambda: StackConfig(positions=None), "`positions` must be a config such as SinusoidalConfig()"),
    "no key heads": (lambda: StackConfig(kv_heads=0), "`kv_heads`=0"),
    "key heads that do not divide": (lambda: StackConfig(kv_heads=3), "`heads` must be a multiple of `kv_heads`=3"),
    "no layers": (lambda: StackConfig(layers=0), "`layers` must be a number from 1 to 1,000, but is 0"),
    "layers in words": (lambda: StackConfig(layers="6"), "`layers` must be a number from 1 to 1,000, but is '6'"),
    "half a layer": (lambda: StackConfig(layers=1.5), "`layers` must be a number from 1 to 1,000, but is 1.5"),
    "negative eps": (lambda: StackConfig(norm_eps=-1.0), "`norm_eps` must be more than 0, but is -1.0"),
    "additive rotary": (
        lambda: StackConfig(compatibility="additive", positions=RotaryConfig()),
        "`compatibility` must be dot with rotary positions, but is additive",
    ),
    "rotary base": (lambda: RotaryConfig(base=0.0), "`base` must be more than 0, but is 0.0"),
    "window in halves": (
        lambda: StackConfig(window=(1.5, None)),
        "`window` must be (before, after), a tuple of 0 or more",
    ),
    "rotary width in a config": (
        lambda: StackConfig(width=6, heads=2, positions=RotaryConfig()),
        "rotary positions rotate pairs of features: `head_width` must be even, but is 3",
    ),
    "dropout of one": (lambda: StackConfig(dropout=1.0), "`dropout` must be at least 0 and less than 1, but is 1.0"),
    "dropout below zero": (lambda: StackConfig(attention_dropout=-0.1), "`attention_dropout` must be at least 0"),
    "activation dropout": (lambda: StackConfig(activation_dropout=7), "`activation_dropout` must be at least 0"),
    "unknown activation": (
        lambda: StackConfig(activation="swish"),
        "`activation` must be one of relu, gelu, gelu_tanh, silu, but is 'swish'",
    ),
    "unknown norm": (lambda: Stack(replace(ENCODER, norm="batch")), "`norm` must be"),
    "unknown norm order": (lambda: Stack(replace(ENCODER, norm_order="before")), "`norm_order` must be"),
    "unknown order of sinusoids": (
        lambda: Stack(replace(ENCODER, positions=SinusoidalConfig(order="thirds"))),
        "`order` must be",
    ),
    "odd rotary width": (
        lambda: Stack(StackConfig(width=6, heads=2, positions=RotaryConfig())),
        "rotary positions rotate pairs of features: `head_width` must be even, but is 3",
    ),
    "buckets": (lambda: RelativeConfig(buckets=6), "`buckets` must be a multiple of 4, but is 6"),
    "reach": (lambda: RelativeConfig(max_distance=32), "`max_distance` must be more than `buckets`=32, but is 32"),
    "no learned positions": (
        lambda: LearnedConfig(max_length=0),
        "`max_length` must be a number from 1 to 16,777,216, but is 0",
    ),
    "negative window": (
        lambda: StackConfig(window=(-1, None)),
        "`window` must be (before, after), a tuple of 0 or more tokens each, but is (-1, None)",
    ),
    "window of one side": (lambda: StackConfig(window=(3,)), "`window` must be (before, after)"),
    "window of three sides": (lambda: StackConfig(window=(3, 0, 1)), "`window` must be (before, after)"),
    # --- tensors of one attention
    "three dimensions": (look(q=x(2, 3, 4)), "q, k, v must be (B, H, T, D), but have 3, 4, 4 dimensions"),
    "head width": (look(q=heads(D=6)), "q, k, v must agree in batch and head width"),
    "keys without values": (look(v=heads(T=4)), "but are (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4, 4)"),
    "head counts": (look(q=heads(3)), "query heads must be a multiple of key/value heads, but are 3 and 2"),
    "bias of another shape": (
        look(bias=x(1, 2, 3, 4)),
        "`bias` must be floating and broadcast to (1, 2, 3, 3), but is torch.float32 of (1, 2, 3, 4)",
    ),
    "bias without a batch": (
        look(bias=x(2, 3, 3)),
        "`bias` must be floating and broadcast to (1, 2, 3, 3), but is torch.float32 of (2, 3, 3)",
    ),
    "key lengths beyond the keys": (
        look(mask=Mask(key_lengths=lengths(4))),
        "`key_lengths` must be between 0 and 3, the length of the tensor, but ranges from 4 to 4; pad the tensor or",
    ),
    "key lengths of other rows": (
        look(mask=Mask(key_lengths=lengths(1, 2))),
        "`key_lengths` must be a tensor of 1 int64 or int32, one per row of the batch, but is torch.int64 of (2,)",
    ),
    "key lengths as a mask": (look(mask=Mask(key_lengths=torch.tensor([True]))), "but is torch.bool of (1,)"),
    "starts of other rows": (
        look(mask=Mask(q_start=lengths(1, 2))),
        "`q_start` must be a tensor of 1 int64 or int32, one per row of the batch, but is torch.int64 of (2,)",
    ),
    "packing of another width": (
        look(mask=Mask(packing=(packing([4]), packing([3])))),
        "`packing` must be of (1, 3) queries and (1, 3) keys, but is of ((1, 4), (1, 3))",
    ),
    "packing and lengths": (
        lambda: Mask(packing=(packing([4]), packing([4])), key_lengths=lengths(3)),
        "`key_lengths` must be None with `packing`, which marks the padding already",
    ),
    "packing in a cache": (
        lambda: Mask(packing=(packing([4]), packing([4])), q_start=1),
        "`q_start` must be 0 with `packing`: packed sentences cannot continue a cache",
    ),
    # --- backends
    "unknown backend": (
        look(backend="fusd"),
        "`backend` must be auto or one of fused, packed, tiles, flex, explicit, but is 'fusd'; did you mean `fused`?",
    ),
    "unknown backend of a model": (
        lambda: set_backend(Stack(ENCODER), "fusd"),
        "`backend` must be auto or one of fused, packed, tiles, flex, explicit, but is 'fusd'; did you mean `fused`?",
    ),
    "packed without packing": (
        look(backend="packed"),
        (
            "backend `packed` does not support these inputs: the batch is not packed (`mask.packing` is None); "
            "use fused, flex, explicit or auto"
        ),
    ),
    "packed on cpu": (
        look(backend="packed", mask=Mask(packing=(packing([3]), packing([3])))),
        (
            "backend `packed` does not support these inputs: its flash kernel runs on CUDA only, and the tensors are "
            "on cpu; use fused, flex, explicit or auto"
        ),
    ),
    "flex with dropout": (
        look(backend="flex", dropout=0.1),
        "backend `flex` does not support these inputs: FlexAttention has no dropout on the weights; use fused,",
    ),
    "flex backwards on cpu": (
        look(backend="flex", q=heads().requires_grad_()),
        "backend `flex` does not support these inputs: FlexAttention has no backward pass on CPU; use fused,",
    ),
    # --- packing
    "sentences wider than the row": (
        lambda: Packing.from_lengths([[2, 3]], 4),
        "a row must fit in `row_length`=4 tokens, but one has 5",
    ),
    "more sentences than places": (
        lambda: Packing.from_lengths([[1, 1, 1], [3]], max_sentences=2),
        "a row must hold at most `max_sentences`=2, but one row has 3",
    ),
    "negative sentence": (
        lambda: Packing.from_lengths([[1], [-1, 3]]),
        "sentence lengths must be integers of 0 or more, but row 1 has [-1, 3]",
    ),
    "half a token": (
        lambda: Packing.from_lengths([[2.5]]),
        "sentence lengths must be integers of 0 or more, but row 0 has [2.5]",
    ),
    "more sentences than there is room for": (
        lambda: Packing.from_lengths([[1, 1, 1]], max_sentences=2),
        "a row must hold at most `max_sentences`=2, but one row has 3",
    ),
    "half a start": (lambda: Mask(q_start=1.5), "`q_start` must be 0 or more, the number of keys before, but is 1.5"),
    "start before the keys of a row": (look(mask=Mask(q_start=lengths(-1))), "`q_start` must be between 0 and 3"),
    "a tensor for a mask": (
        look(mask=torch.ones(3, 3, dtype=torch.bool)),
        "`mask` must be a description such as Mask(causal=True), but is a Tensor",
    ),
    "two devices": (
        look(bias=torch.zeros(1, 2, 3, 3, device="meta")),
        "q, k, v and bias must be on one device, but are on cpu, meta; move them",
    ),
    "packing on another device": (
        look(mask=Mask(packing=(packing([3]).to("meta"), packing([3])))),
        "`packing` must be on cpu as the batch is, but is on",
    ),
    "flex with nothing": (
        look(backend="flex", k=heads(T=0), v=heads(T=0)),
        "backend `flex` does not support these inputs: FlexAttention takes no empty sequences",
    ),
    "cache of other heads": (
        lambda: Stack(DECODER)(x(1, 2, 8), cache=Stack(replace(DECODER, heads=4)).new_cache(4, rows=1)),
        "the cache must be made by this stack's `new_cache`, of (layers, heads, head width, memory) (1, 2, 4, False)",
    ),
    "rows in a list": (
        lambda: Stack(DECODER).new_cache(4, rows=2).reorder([0]),
        "`rows` must be a tensor of row indices, but is [0]",
    ),
    "start before the keys": (lambda: Mask(q_start=-1), "`q_start` must be 0 or more, the number of keys before, but"),
    "two precisions": (
        look(k=heads().double()),
        "q, k, v must be of one floating type, but are torch.float32, torch.f",
    ),
    "weights dropped twice": (look(dropout=2.0), "`dropout` must be at least 0 and less than 1, but is 2.0"),
    "lengths in a list": (
        lambda: Stack(ENCODER)(x(2, 3, 8), [3, 2]),
        "`lengths` must be a tensor of 2 int64 or int32, one per row of the batch, but is [3, 2]",
    ),
    "beams of rows that are not there": (
        lambda: Stack(DECODER).new_cache(4, rows=2).reorder(lengths(0, 2)),
        "`rows` must be rows of the cache, 0 to 1, but are [0, 2]",
    ),
    "memory lengths in a cache": (
        lambda: Stack(CROSS).new_cache(4, memory=Memory(x(1, 3, 8), lengths(4))),
        "`memory.lengths` must be between 0 and 3",
    ),
    # --- a stack
    "wrong width": (lambda: Stack(ENCODER)(x(2, 3, 6)), "`x` must be (B, T, E=8), but is (2, 3, 6)"),
    "alone, wrong width": (lambda: Attention(ENCODER)(x(2, 3, 6)), "`x` must be (B, T, E=8), but is (2, 3, 6)"),
    "alone, wrong memory": (
        lambda: Attention(width=8, heads=2)(x(2, 3, 8), x(2, 3, 6)),
        "`kv` must be (B, T, E=8), but is (2, 3, 6)",
    ),
    "wrong feed-forward width": (lambda: FeedForward(width=8)(x(2, 6)), "`x` must be (B, T, E=8), but is (2, 6)"),
    "a config and a size": (lambda: Residual(ENCODER, dropout=0.2), "give a `config` or `dropout`, but not both"),
    "ids in place of states": (lambda: Stack(ENCODER)(x(2, 3)), "`x` must be (B, T, E=8), but is (2, 3)"),
    "lengths beyond the tensor": (
        lambda: Stack(ENCODER)(x(2, 3, 8), lengths(3, 4)),
        (
            "`lengths` must be between 0 and 3, the length of the tensor, but ranges from 3 to 4; "
            "pad the tensor or shorten the lengths"
        ),
    ),
    "negative lengths": (lambda: Stack(DECODER)(x(2, 3, 8), lengths(3, -1)), "but ranges from -1 to 3"),
    "lengths as numbers with a point": (
        lambda: Stack(DECODER)(x(2, 3, 8), torch.tensor([1.0, 2.0])),
        "`lengths` must be a tensor of 2 int64 or int32, one per row of the batch, but is torch.float32 of (2,)",
    ),
    "lengths as a list": (lambda: Stack(ENCODER)(x(2, 3, 8), [3, 2]), "one per row of the batch, but is [3, 2]"),
    "lengths elsewhere": (
        lambda: Stack(ENCODER)(x(2, 3, 8), torch.tensor([3, 2], device="meta")),
        "`lengths` must be on cpu as the batch is, but is on meta; move it there",
    ),
    "lengths and packing": (
        lambda: Stack(ENCODER)(x(1, 3, 8), lengths(3), packing=packing([3])),
        "give `lengths` (padded rows) or `packing` (packed rows), but not both",
    ),
    "packing that does not fit": (
        lambda: Stack(ENCODER)(x(1, 3, 8), packing=packing([4])),
        "`packing` must be of (1, 3) tokens, but is of (1, 4)",
    ),
    "memory missing": (
        lambda: Stack(CROSS)(x(1, 3, 8)),
        "this stack attends to another's output: give `memory`, or a `cache` made with it",
    ),
    "memory without cross-attention": (
        lambda: Stack(DECODER)(x(1, 3, 8), memory=Memory(x(1, 3, 8))),
        "`memory` must be None",
    ),
    "memory of another width": (lambda: Stack(CROSS)(x(1, 3, 8), memory=Memory(x(1, 3, 6))), "`memory`"),
    "memory of other rows": (lambda: Stack(CROSS)(x(1, 3, 8), memory=Memory(x(2, 3, 8))), "`memory`"),
    "memory packed, text not": (
        lambda: Stack(CROSS)(x(1, 3, 8), memory=Memory(x(1, 3, 8), packing=packing([3]))),
        "the memory is packed, so the text must be too: pack both with the same sentences",
    ),
    "text packed, memory not": (
        lambda: Stack(CROSS)(x(1, 3, 8), packing=packing([2, 1]), memory=Memory(x(1, 3, 8))),
        "the text is packed, so the memory must be too: pack both with the same sentences",
    ),
    "memory of other sentences": (
        lambda: Stack(CROSS)(
            x(1, 3, 8), packing=packing([2, 1]), memory=Memory(x(1, 3, 8), packing=packing([1, 1, 1]))
        ),
        "sentences",
    ),
    "learned positions too few": (
        lambda: Stack(LEARNED)(x(1, 5, 8)),
        (
            "sequences must have at most `positions.max_length`=4 tokens, but one has 5; shorten it, or use positions "
            "without a limit (sinusoidal, rotary, relative, alibi)"
        ),
    ),
    "learned positions too few for a packed sentence": (
        lambda: Stack(LEARNED)(x(1, 7, 8), packing=packing([5, 2])),
        "at most `positions.max_length`=4 tokens, but one has 5",
    ),
    # --- a cache
    "cache past its capacity": (
        lambda: cached(DECODER, 3, 2),
        (
            "the cache must have room for 5 tokens, but its capacity is 4 (3 used, 2 to add); "
            "create it with `capacity=5` or more"
        ),
    ),
    "cache of beams past its capacity": (
        lambda: cached(DECODER, 3, 3, 3, capacity=2, beams=3),
        (
            "the cache must have room for 3 tokens, but its capacity is 2 (2 used, 1 to add); "
            "create it with `capacity=3` or more"
        ),
    ),
    "cache for nothing": (
        lambda: cached(DECODER, capacity=0),
        "`capacity` must be a number from 1 to 16,777,216, but is 0",
    ),
    "cache of other rows": (
        lambda: cached(DECODER, 1, rows=3),
        "the batch must have the cache's 2 rows, but has 3; `reorder` changes them",
    ),
    "cache beyond learned positions": (lambda: cached(LEARNED, capacity=5), "at most `positions.max_length`=4 tokens"),
    "cache of an encoder": (
        lambda: Stack(ENCODER).new_cache(4, rows=1),
        "a cache needs a causal stack: here every token attends to later ones, so no state can be reused",
    ),
    "cache in an encoder": (
        lambda: Stack(ENCODER)(x(1, 2, 8), cache=Stack(DECODER).new_cache(4, rows=1)),
        "a cache needs a causal stack",
    ),
    "cache without rows": (
        lambda: Stack(DECODER).new_cache(4),
        "give `rows`, the number of sequences to cache, for this stack's cache, and nothing else",
    ),
    "cache without memory": (lambda: Stack(CROSS).new_cache(4, rows=1), "give `memory` for this stack's cache"),
    "cache with memory without cross-attention": (
        lambda: Stack(DECODER).new_cache(4, memory=Memory(x(1, 3, 8))),
        "give `rows`, the number of sequences to cache, for this stack's cache, and nothing else",
    ),
    "cache of packed memory": (
        lambda: Stack(CROSS).new_cache(4, memory=Memory(x(1, 3, 8), packing=packing([3]))),
        "a cache continues one sequence per row: encode padded sentences, not packed ones",
    ),
    "cache and memory": (
        lambda: Stack(CROSS)(
            x(1, 2, 8), memory=Memory(x(1, 3, 8)), cache=Stack(CROSS).new_cache(4, memory=Memory(x(1, 3, 8)))
        ),
        "`memory` must be None with a cache: the cache holds the memory's keys and values already",
    ),
    "cache and packing": (
        lambda: Stack(DECODER)(x(1, 3, 8), packing=packing([3]), cache=Stack(DECODER).new_cache(4, rows=1)),
        "a cache continues one sequence per row, and a packed row holds several: give one of them",
    ),
    "cache of another stack": (
        lambda: Stack(CROSS)(x(1, 2, 8), cache=Stack(DECODER).new_cache(4, rows=1)),
        "cache",
    ),
    "cache of a stack with fewer blocks": (
        lambda: Stack(replace(DECODER, layers=2))(x(1, 2, 8), cache=Stack(DECODER).new_cache(4, rows=1)),
        "cache",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(mistake: str) -> None:
    call, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_good_calls_are_not_refused() -> None:
    """The good call that each mistake above departs from."""
    look()()
    cached(DECODER, 3, 1)
    cached(LEARNED, 1, 3)
    Stack(ENCODER)(x(2, 3, 8), lengths(0, 3))
    Stack(LEARNED)(x(1, 7, 8), packing=packing([4, 3]))
    Stack(CROSS)(x(1, 3, 8), packing=packing([2, 1]), memory=Memory(x(1, 4, 8), packing=packing([1, 3])))
