"""Positions as numbers to draw: of every scheme what it does, once for each stack."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from attent.inspection.json_arrays import unpack_array
from attent.inspection.position_encodings import describe_positions
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import (
    AlibiConfig,
    LearnedConfig,
    Positions,
    PositionsConfig,
    RelativeConfig,
    RotaryConfig,
    SinusoidalConfig,
    Stack,
    StackConfig,
    make_sinusoids,
)

STACK = StackConfig(layers=1, width=16, heads=4, ffn_width=8)
SCHEMES = [SinusoidalConfig(), LearnedConfig(max_length=40), RotaryConfig(), RelativeConfig(), AlibiConfig()]
HALF = 2e-3  # of what float16 holds


def stack(scheme: PositionsConfig, causal: bool = False) -> Stack:
    return Stack(replace(STACK, positions=scheme, causal=causal))


def entry(scheme: PositionsConfig, length: int = 12) -> dict[str, Any]:
    (found,) = describe_positions(stack(scheme), length)
    return found


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.kind)
def test_every_scheme_has_a_description_and_values(scheme: PositionsConfig) -> None:
    found = entry(scheme)
    assert found["scheme"] == scheme.kind
    assert found["stack"] == "encoder"
    assert found["formula"]
    assert found["note"].endswith(".")
    enters = {"sinusoidal": "embed", "learned": "embed", "rotary": "angles", "relative": "bias", "alibi": "bias"}
    assert found["applied_as"] == enters[scheme.kind]
    assert ("values" in found) == (found["applied_as"] != "bias")
    assert found["pairwise"]["shape"][-2:] == [12, 12]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("order", ["interleaved", "halves"])
def test_sinusoidal_values_are_those_added(order: Any) -> None:
    found = entry(SinusoidalConfig(order=order))
    wanted = make_sinusoids(torch.arange(12), 16, order)
    torch.testing.assert_close(unpack_array(found["values"]), wanted, atol=HALF, rtol=0)
    torch.testing.assert_close(unpack_array(found["pairwise"]), wanted @ wanted.T, atol=0.01, rtol=HALF)
    assert found["width"] == 16


def test_learned_values_are_the_table() -> None:
    made = stack(LearnedConfig(max_length=7))
    (found,) = describe_positions(made, 12)
    wanted = made.positions.weight.detach()
    torch.testing.assert_close(unpack_array(found["values"]), wanted, atol=HALF, rtol=0)
    torch.testing.assert_close(unpack_array(found["pairwise"]), wanted @ wanted.T, atol=HALF, rtol=HALF)


@pytest.mark.parametrize("order", ["interleaved", "halves"])
def test_rotary_similarity_is_that_of_rotated_ones(order: Any) -> None:
    made = stack(RotaryConfig(order=order, base=100.0))
    (found,) = describe_positions(made, 12)
    ones = made.positions.angles(torch.arange(12)).rotate(torch.ones(1, 1, 12, 4))[0, 0]
    torch.testing.assert_close(unpack_array(found["pairwise"]), ones @ ones.T / 4, atol=HALF, rtol=0)
    values = unpack_array(found["values"])
    assert values.shape == (12, 4)
    assert found["width"] == 4
    assert values[0].tolist() == ([1, 0, 1, 0] if order == "interleaved" else [1, 1, 0, 0])


@pytest.mark.parametrize("scheme", [RelativeConfig(), AlibiConfig()], ids=lambda scheme: scheme.kind)
def test_biases_are_those_added(scheme: PositionsConfig) -> None:
    made = stack(scheme, causal=True)
    (found,) = describe_positions(made, 12)
    at = torch.arange(12)
    torch.testing.assert_close(
        unpack_array(found["pairwise"]), made.positions.bias(at, at)[0].detach(), atol=HALF, rtol=HALF
    )
    assert found["pairwise"]["shape"] == [4, 12, 12]
    assert found["stack"] == "decoder"


def test_model_has_an_entry_for_each_stack() -> None:
    model = Seq2Seq(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)))
    assert [found["stack"] for found in describe_positions(model)] == ["encoder", "decoder"]
    assert describe_positions(model)[0]["pairwise"]["shape"] == [64, 64]
    assert [found["stack"] for found in describe_positions(nn.ModuleDict({"inner": model}))] == [
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
    (found,) = describe_positions(made, 3)
    assert unpack_array(found["values"])[:, 0].tolist() == [0, 1, 2]


def test_half_precision_and_invalid_length() -> None:
    (found,) = describe_positions(stack(LearnedConfig()).bfloat16(), 5)
    assert found["pairwise"]["shape"] == [5, 5]
    with pytest.raises(ValueError, match="`length` must be 1 or more positions, but is 0"):
        describe_positions(stack(SinusoidalConfig()), 0)
