"""Helpers of the invariant tests: toy models that cover the family, random weights and text, and tolerances.

Models are compared in float64 where it is fast (CPU): rounding is then 1e-16, so that a fault that changes the sixth
digit is still detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor, nn

from attent.nn import (
    AlibiConfig,
    LearnedConfig,
    Memory,
    RelativeConfig,
    RotaryConfig,
    SinusoidalConfig,
    Stack,
    StackConfig,
)

# Tolerance, relative and absolute: about a hundred roundings of the dtype (sums of about a hundred terms of
# about 1, in another order). A token wrongly visible or masked changes toy outputs by 1e-2 and more.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 3e-2}

WIDTH = 32
TOY = StackConfig(layers=2, width=WIDTH, heads=4, head_width=16, ffn_width=40, dropout=0.0)

POSITIONS = {
    "interleaved": SinusoidalConfig(order="interleaved"),
    "halves": SinusoidalConfig(order="halves"),
    "learned": LearnedConfig(max_length=40),
    "rotary": RotaryConfig(),
    "rotary-neighbours": RotaryConfig(order="interleaved"),
    "relative": RelativeConfig(buckets=8, max_distance=12),
    "alibi": AlibiConfig(),
}
NORM_ORDERS = ("pre", "post")
NORMS = ("layer", "rms")
KV_HEADS = {"": None, "-grouped": 2, "-onekey": 1}
LOOKING_BOTH_WAYS = {"": None, "-window2,1": (2, 1), "-window-,1": (None, 1)}
LOOKING_BACK = {"": None, "-window2,-": (2, None), "-window3,0": (3, 0)}


def pairwise_combinations(*factors: Iterable[str]) -> list[tuple[str, ...]]:
    """A small set of combinations that contains every pair of choices of two factors."""

    def pairs(combination: tuple[str, ...]) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(combination), 2))

    every = list(product(*factors))
    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        chosen.append(max(every, key=lambda combination: len(pairs(combination) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def toys(windows: dict[str, tuple[int | None, int | None] | None], **changes: bool) -> dict[str, StackConfig]:
    """Toy stack configs by name, over positions, norms, key/value heads and windows; other options vary too."""
    configs = {}
    chosen = pairwise_combinations(POSITIONS, NORM_ORDERS, NORMS, KV_HEADS, windows)
    for i, (positions, norm_order, norm, kv_heads, window) in enumerate(chosen):
        configs[f"{positions}-{norm_order}-{norm}{kv_heads}{window}"] = replace(
            TOY,
            positions=POSITIONS[positions],
            norm_order=norm_order,
            norm=norm,
            kv_heads=KV_HEADS[kv_heads],
            window=windows[window],
            gated=i % 3 == 0,
            activation=("relu", "silu", "gelu", "gelu_tanh")[i % 4],
            bias=i % 4 != 3,
            **changes,
        )
    additive = replace(TOY, compatibility="additive", positions=POSITIONS["relative"], kv_heads=2, **changes)
    return configs | {"additive-grouped": additive}


ENCODERS = {f"encoder-{name}": config for name, config in toys(LOOKING_BOTH_WAYS).items()}
DECODERS = {f"decoder-{name}": config for name, config in toys(LOOKING_BACK, causal=True).items()}
CROSS_DECODERS = {f"cross-{name}": replace(config, cross_attention=True) for name, config in DECODERS.items()}


def parametrize_all(
    argument: str, cases: dict[str, object], quick: Sequence[str] | None = None
) -> pytest.MarkDecorator:
    """Parametrize over named cases; if `quick` is given, the others are marked slow."""
    marks = {name: () if quick is None or name in quick else pytest.mark.slow for name in cases}
    params = [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]
    return pytest.mark.parametrize(argument, params)


def parametrize_in_turn(arguments: str, cases: dict[str, object], others: dict[str, object]) -> pytest.MarkDecorator:
    """Parametrize over all pairs of cases; one pair per case is fast, in turn, the others are marked slow."""
    pairs = [
        pytest.param(case, other, id=f"{name}-{other_name}", marks=() if j == i % len(others) else pytest.mark.slow)
        for i, (name, case) in enumerate(cases.items())
        for j, (other_name, other) in enumerate(others.items())
    ]
    return pytest.mark.parametrize(arguments, pairs)


every_encoder = parametrize_all("config", ENCODERS)
every_decoder = parametrize_all("config", DECODERS | CROSS_DECODERS)
every_cross_decoder = parametrize_all("config", CROSS_DECODERS)
every_stack = parametrize_all("config", ENCODERS | DECODERS | CROSS_DECODERS)


def precise(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def randomize(model: nn.Module) -> nn.Module:
    """Add noise to all parameters, so that one that starts at zero or one cannot be omitted unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape).to(parameter)
    return model.eval()


def make_stack(config: StackConfig, device: torch.device) -> Stack:
    return randomize(Stack(config).to(device, precise(device)))


def random_states(*shape: int, device: torch.device) -> Tensor:
    """Random states (B, T, E), the same on every device."""
    return torch.randn(*shape, WIDTH, dtype=torch.float64).to(device, precise(device))


def make_tensor(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def make_memory(config: StackConfig, rows: int, device: torch.device, T: int = 6) -> Memory | None:
    """Random encoder output with ragged rows if the stack has cross-attention, else None."""
    if not config.cross_attention:
        return None
    lengths = make_tensor(*(T - 2 * (row % 3) for row in range(rows)), device=device)
    return Memory(random_states(rows, T, device=device), lengths)


def select_memory(memory: Memory | None, rows: Tensor | slice) -> Memory | None:
    """The memory of some rows."""
    return memory and Memory(memory.states[rows], None if memory.lengths is None else memory.lengths[rows])


def new_cache(stack: Stack, capacity: int, rows: int, memory: Memory | None) -> object:
    return stack.new_cache(capacity, rows=None if memory else rows, memory=memory)


def pad_with_noise(sequences: Sequence[Tensor], extra: int = 0) -> tuple[Tensor, Tensor]:
    """Pad rows to one tensor with noise; return it and the lengths."""
    T = max(len(x) for x in sequences) + extra
    rows = [torch.cat([x, noise_like(x, T - len(x))]) for x in sequences]
    return torch.stack(rows), torch.tensor([len(x) for x in sequences], device=sequences[0].device)


def noise_like(x: Tensor, count: int) -> Tensor:
    """Random states or token ids."""
    shape = (count, *x.shape[1:])
    return torch.randn(shape).to(x) if x.is_floating_point() else torch.randint(0, 17, shape).to(x)


def unpad(x: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the tokens that are not padding."""
    return torch.cat([row[:length] for row, length in zip(x, lengths.tolist(), strict=True)])


def assert_close(actual: Tensor, expected: Tensor, *, times: float = 1.0) -> None:
    """Assert equality up to rounding; `times` the tolerance for sums over many tokens (gradients of parameters)."""
    tolerance = TOLERANCE[actual.dtype] * times
    torch.testing.assert_close(actual, expected.to(actual), rtol=tolerance, atol=tolerance)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, values, strict=True) if gradient is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, times=100)
