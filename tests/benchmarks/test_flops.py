"""FLOP counts of the training benchmark, compared with torch's counter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import attent
from attent.models.presets import make_seq2seq
from attent.nn import StackConfig, set_backend
from benchmarks.flops import count_min_bytes, count_model_flops

STACK = replace(StackConfig(), layers=2, width=16, heads=4, ffn_width=40, dropout=0.0)
STACKS = {"plain": STACK, "gated, shared keys, wide heads": replace(STACK, gated=True, kv_heads=2, head_width=8)}


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_flops_match_the_count_of_torch(stack: StackConfig) -> None:
    config, source, target = make_seq2seq(50, stack), 7, 5
    model = attent.build(config)
    set_backend(model, "explicit")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, source, dtype=torch.long), torch.ones(1, target, dtype=torch.long)).sum().backward()
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    expected = count_model_flops(config, np.array([source]), np.array([target]))
    assert counted.pop("aten.mm") + counted.pop("aten.addmm") == expected.matmuls
    unseen = target * (target - 1) // 2  # later tokens, which `explicit` computes and masks
    hidden = 12 * stack.layers * stack.heads * (stack.head_width or 4) * unseen
    assert counted.pop("aten.bmm") == expected.attention + hidden
    assert not counted


def test_base_model_takes_about_360_mflops_per_target_token() -> None:
    d, ff, layers, vocab, source, target = 512, 2048, 6, 32_768, 29, 30
    expected = count_model_flops(attent.presets.base(vocab), np.array([source]), np.array([target]))
    of_source, of_target = layers * (4 * d**2 + 2 * d * ff + 2 * d**2), layers * (6 * d**2 + 2 * d * ff) + d * vocab
    assert expected.matmuls == 6 * (source * of_source + target * of_target)
    assert 360e6 < expected.total / target < 370e6


def test_flops_of_a_batch_are_the_sum_over_sentences() -> None:
    config, source, target = attent.presets.tiny(100), np.array([3, 70_000], np.int32), np.array([9, 60_000], np.int32)
    parts = [count_model_flops(config, source[i : i + 1], target[i : i + 1]).total for i in range(2)]
    assert count_model_flops(config, source, target).total == sum(parts)


def test_min_bytes_grow_with_weights_and_tokens() -> None:
    config = attent.presets.base(32_768)
    assert count_min_bytes(config, 1000, 0, 0) == 32_000  # weight, gradient, two means: read and written
    encoder, decoder, memory = 6 * 512 + 2048, 9 * 512 + 2048, 2 * 512
    assert count_min_bytes(config, 0, 1, 0) == 4 * 6 * (encoder + memory)
    assert count_min_bytes(config, 0, 0, 1) == 4 * 6 * decoder
