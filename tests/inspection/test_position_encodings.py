"""Positional encodings of every scheme, one entry per stack."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from attent.inspection.attention_trace import unpack_array
from attent.inspection.inspectors.base import describe_positions
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import (
    AlibiConfig,
    LearnedConfig,
    RelativeConfig,
    RotaryConfig,
    SinusoidalConfig,
    Stack,
    StackConfig,
    make_sinusoids,
)
from attent.nn.positions import Positions, PositionsConfig

STACK = StackConfig(layers=1, width=16, heads=4, ffn_width=8)
SCHEMES = [SinusoidalConfig(), LearnedConfig(max_length=40), RotaryConfig(), RelativeConfig(), AlibiConfig()]
HALF = 2e-3  # float16 rounding


def stack(scheme: PositionsConfig, causal: bool = False) -> Stack:
    return Stack(replace(STACK, positions=scheme, causal=causal))


def entry(scheme: PositionsConfig, length: int = 12) -> dict[str, Any]:
    (info,) = describe_positions(stack(scheme), length)
    return info


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.kind)
def test_every_scheme_has_a_description_and_values(scheme: PositionsConfig) -> None:
    info = entry(scheme)
    assert info["scheme"] == scheme.kind
    assert info["stack"] == "encoder"
    assert info["formula"]
    assert info["note"].endswith(".")
    enters = {"sinusoidal": "embed", "learned": "embed", "rotary": "angles", "relative": "bias", "alibi": "bias"}
    assert info["applied_as"] == enters[scheme.kind]
    assert ("values" in info) == (info["applied_as"] != "bias")
    assert info["pairwise"]["shape"][-2:] == [12, 12]
    json.dumps(info, allow_nan=False)


@pytest.mark.parametrize("order", ["interleaved", "halves"])
def test_sinusoidal_values_are_those_added(order: Any) -> None:
    info = entry(SinusoidalConfig(order=order))
    expected = make_sinusoids(torch.arange(12), 16, order)
    torch.testing.assert_close(unpack_array(info["values"]), expected, atol=HALF, rtol=0)
    torch.testing.assert_close(unpack_array(info["pairwise"]), expected @ expected.T, atol=0.01, rtol=HALF)
    assert info["width"] == 16


def test_learned_values_are_the_table() -> None:
    made = stack(LearnedConfig(max_length=7))
    (info,) = describe_positions(made, 12)
    expected = made.positions.weight.detach()
    torch.testing.assert_close(unpack_array(info["values"]), expected, atol=HALF, rtol=0)
    torch.testing.assert_close(unpack_array(info["pairwise"]), expected @ expected.T, atol=HALF, rtol=HALF)


@pytest.mark.parametrize("order", ["interleaved", "halves"])
def test_rotary_similarity_is_that_of_rotated_ones(order: Any) -> None:
    made = stack(RotaryConfig(order=order, base=100.0))
    (info,) = describe_positions(made, 12)
    ones = made.positions.compute_angles(torch.arange(12)).rotate(torch.ones(1, 1, 12, 4))[0, 0]
    torch.testing.assert_close(unpack_array(info["pairwise"]), ones @ ones.T / 4, atol=HALF, rtol=0)
    values = unpack_array(info["values"])
    assert values.shape == (12, 4)
    assert info["width"] == 4
    assert values[0].tolist() == ([1, 0, 1, 0] if order == "interleaved" else [1, 1, 0, 0])


@pytest.mark.parametrize("scheme", [RelativeConfig(), AlibiConfig()], ids=lambda scheme: scheme.kind)
def test_biases_are_those_added(scheme: PositionsConfig) -> None:
    made = stack(scheme, causal=True)
    (info,) = describe_positions(made, 12)
    at = torch.arange(12)
    torch.testing.assert_close(
        unpack_array(info["pairwise"]), made.positions.compute_bias(at, at)[0].detach(), atol=HALF, rtol=HALF
    )
    assert info["pairwise"]["shape"] == [4, 12, 12]
    assert info["stack"] == "decoder"


def test_model_has_an_entry_for_each_stack() -> None:
    model = Seq2Seq(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)))
    assert [info["stack"] for info in describe_positions(model)] == ["encoder", "decoder"]
    assert describe_positions(model)[0]["pairwise"]["shape"] == [64, 64]
    assert [info["stack"] for info in describe_positions(nn.ModuleDict({"inner": model}))] == [
        "inner.encoder",
        "inner.decoder",
    ]


def test_model_without_positions_has_no_entry() -> None:
    made = stack(SinusoidalConfig())
    made.positions = Positions()
    assert describe_positions(made) == []
    assert describe_positions(nn.Linear(2, 2)) == []


def test_unknown_scheme_is_shown() -> None:
    class Ramp(Positions):
        def embed(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return x + at[:, None]

    made = stack(SinusoidalConfig())
    made.positions = Ramp()
    (info,) = describe_positions(made, 3)
    assert unpack_array(info["values"])[:, 0].tolist() == [0, 1, 2]


def test_half_precision() -> None:
    (info,) = describe_positions(stack(LearnedConfig()).bfloat16(), 5)
    assert info["pairwise"]["shape"] == [5, 5]
