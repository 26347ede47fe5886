"""What the laws share: toy models that cover the family, random weights and text, and what counts as equal.

Whole models are compared in float64 where the device has it quickly (CPU): rounding is then 1e-16, so that a fault
that changes the sixth digit is still seen, and no tolerance needs to be argued about.
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

# Allowed difference, relative and absolute: some hundred roundings of the format (sums of about a hundred terms of
# about 1, in another order). A token wrongly seen or hidden changes toy outputs by 1e-2 and more.
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


def covering(*factors: Iterable[str]) -> list[tuple[str, ...]]:
    """Few combinations in which every choice of one factor meets every choice of every other."""

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
    """Toy stacks by name, over positions, norms, shared heads and windows; feed-forwards and biases vary along."""
    found = {}
    chosen = covering(POSITIONS, NORM_ORDERS, NORMS, KV_HEADS, windows)
    for i, (positions, norm_order, norm, kv_heads, window) in enumerate(chosen):
        found[f"{positions}-{norm_order}-{norm}{kv_heads}{window}"] = replace(
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
    return found


ENCODERS = {f"encoder-{name}": config for name, config in toys(LOOKING_BOTH_WAYS).items()}
DECODERS = {f"decoder-{name}": config for name, config in toys(LOOKING_BACK, causal=True).items()}
CROSS_DECODERS = {f"cross-{name}": replace(config, cross_attention=True) for name, config in DECODERS.items()}


def every(argument: str, cases: dict[str, object], quick: Sequence[str] | None = None) -> pytest.MarkDecorator:
    """Where some are named as `quick`, the others are slow."""
    marks = {name: () if quick is None or name in quick else pytest.mark.slow for name in cases}
    params = [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]
    return pytest.mark.parametrize(argument, params)


def in_turn(arguments: str, cases: dict[str, object], others: dict[str, object]) -> pytest.MarkDecorator:
    """Every case with every other; the quick tests take each case with one of the others, in turn; the rest is slow."""
    pairs = [
        pytest.param(case, other, id=f"{name}-{other_name}", marks=() if j == i % len(others) else pytest.mark.slow)
        for i, (name, case) in enumerate(cases.items())
        for j, (other_name, other) in enumerate(others.items())
    ]
    return pytest.mark.parametrize(arguments, pairs)


every_encoder = every("config", ENCODERS)
every_decoder = every("config", DECODERS | CROSS_DECODERS)
every_cross_decoder = every("config", CROSS_DECODERS)
every_stack = every("config", ENCODERS | DECODERS | CROSS_DECODERS)


def precise(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def shake(model: nn.Module) -> nn.Module:
    """Random biases, norms and all: a parameter that starts at zero or one could otherwise be left out unseen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape).to(parameter)
    return model.eval()


def make(config: StackConfig, device: torch.device) -> Stack:
    return shake(Stack(config).to(device, precise(device)))


def states(*shape: int, device: torch.device) -> Tensor:
    """Random states (B, T, E), the same on every device."""
    return torch.randn(*shape, WIDTH, dtype=torch.float64).to(device, precise(device))


def numbers(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def memory_for(config: StackConfig, rows: int, device: torch.device, T: int = 6) -> Memory | None:
    """Random output of an encoder with ragged rows for a stack that looks at one."""
    if not config.cross_attention:
        return None
    lengths = numbers(*(T - 2 * (row % 3) for row in range(rows)), device=device)
    return Memory(states(rows, T, device=device), lengths)


def take(memory: Memory | None, rows: Tensor | slice) -> Memory | None:
    """The memory of some rows."""
    return memory and Memory(memory.states[rows], None if memory.lengths is None else memory.lengths[rows])


def new_cache(stack: Stack, capacity: int, rows: int, memory: Memory | None) -> object:
    return stack.new_cache(capacity, rows=None if memory else rows, memory=memory)


def padded(sequences: Sequence[Tensor], extra: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one tensor, with noise behind each; and the lengths."""
    T = max(len(x) for x in sequences) + extra
    rows = [torch.cat([x, noise_like(x, T - len(x))]) for x in sequences]
    return torch.stack(rows), torch.tensor([len(x) for x in sequences], device=sequences[0].device)


def noise_like(x: Tensor, count: int) -> Tensor:
    """States or token ids that mean nothing."""
    shape = (count, *x.shape[1:])
    return torch.randn(shape).to(x) if x.is_floating_point() else torch.randint(0, 17, shape).to(x)


def real(x: Tensor, lengths: Tensor) -> Tensor:
    """Only the tokens that are not padding, one behind the other."""
    return torch.cat([row[:length] for row, length in zip(x, lengths.tolist(), strict=True)])


def close(actual: Tensor, expected: Tensor, *, times: float = 1.0) -> None:
    """Equal but for rounding; `times` more where a sum runs over many tokens (gradients of parameters)."""
    tolerance = TOLERANCE[actual.dtype] * times
    torch.testing.assert_close(actual, expected.to(actual), rtol=tolerance, atol=tolerance)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        close(actual[name], gradient, times=100)
