"""The summary of a model: every parameter once, equal layers on one line."""

from __future__ import annotations

import pytest

from attent.models import ModelConfig, build_empty, presets

MODELS = {
    "tiny": presets.tiny(100),
    "lstm": presets.lstm(100),
    "bert": presets.bert_base(),
    "llama": presets.llama_2_7b(),
    "vit": presets.vit_b_16(("cat", "dog")),
}


def read_count(line: str) -> int:
    """`4 x 16,512` -> 66048"""
    *columns, count = line.replace(",", "").split()
    times = int(columns[-2]) if columns[-1:] == ["x"] else 1
    return 0 if count == "shared" else times * int(count)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_counts_add_up(config: ModelConfig) -> None:
    """Of each module below its parent, apart from the parent's own parameters, such as a class token."""
    model = build_empty(config)
    first, *lines = model.summary().splitlines()
    assert read_count(first) == sum(parameter.numel() for parameter in model.parameters())
    own = sum(parameter.numel() for parameter in model.parameters(recurse=False))
    assert sum(read_count(line) for line in lines if line[2] != " ") + own == read_count(first)


def test_equal_layers_and_shared_weights_have_one_line() -> None:
    lines = build_empty(presets.tiny(100)).summary().splitlines()
    assert sum("blocks.0-3" in line for line in lines) == 2
    assert sum("query, key, value, output  4 x Linear" in line for line in lines) == 3
    assert lines[-1].split() == ["output", "OutputProjection", "100", "x", "128", "shared"]


def test_different_layers_have_their_own_lines() -> None:
    stack = presets.replace_stacks(presets.tiny(100), layers=2, remaining_heads=None).encoder
    config = presets.make_seq2seq(100, stack)
    pruned = presets.replace(config, encoder=presets.replace(stack, remaining_heads=(((0, 1),), ((0, 1, 2, 3),))))
    names = [line.split()[0] for line in build_empty(pruned).summary().splitlines()]
    assert [name for name in names if name.startswith("blocks")] == ["blocks.0", "blocks.1", "blocks.0-1"]
