"""Helpers of the parity tests: float64 computation in `transformers`, gradients, and comparisons.

Under `exact`, a `transformers` model in float64 computes in float64: some of its norms and softmaxes cast to float32,
which would limit the comparison to about 7 digits. Rotary tables stay in float32, as in attent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROTARY = ("inv_freq", "original_inv_freq")


class NoRoundDown(TorchFunctionMode):
    """Ignore casts from float64 to float32; integers are still cast to float32."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            args = tuple(keep_float64(value) for value in args)
            kwargs = {name: keep_float64(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def keep_float64(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """Run a `transformers` model in float64 throughout, with eager attention and SDPA alike.

    GPT-2's `reorder_and_upcast_attn` always computes in float32: compare it in float32.
    """
    for module in model.modules():
        for name in ROTARY:
            table = getattr(module, name, None)
            if isinstance(table, Tensor):
                setattr(module, name, table.float())  # undo `model.double()`, which is lossless here
    with NoRoundDown():
        yield


# Random weights, and gradients under attent's names.


def randomise(model: nn.Module, seed: int) -> None:
    """Set every weight to random values, so that no zero bias or unit norm hides an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.3
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * spread
            weight.copy_(noise + ("norm" in name.lower() and name.endswith("weight")))


def save_gradients(model: Any, folder: Path) -> None:
    """Save the gradients as the weights of a model folder, so that `load` maps them to attent's names."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    model.save_pretrained(folder)


def gradient_errors(ours: nn.Module, gradients: nn.Module) -> dict[str, float]:
    """Return the maximum error of each gradient that differs by 1e-9 or more."""
    expected = dict(gradients.named_parameters())
    got = {name: weight.grad for name, weight in ours.named_parameters()}
    assert got.keys() == expected.keys()
    assert any(gradient is not None and bool(gradient.abs().max() > 1e-3) for gradient in got.values())
    errors = {
        name: float((expected[name] if gradient is None else gradient - expected[name]).detach().abs().max())
        for name, gradient in got.items()
    }
    return {name: error for name, error in errors.items() if not error < 1e-9}


def projection(*outputs: Tensor) -> Tensor:
    """Return the sum of all outputs, weighted by fixed random numbers."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    return torch.stack([(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]).sum()


def same_bits(first: nn.Module, second: nn.Module) -> bool:
    first_state, second_state = first.state_dict(), second.state_dict()
    return (
        first.config == second.config
        and list(first_state) == list(second_state)
        and all(
            first_state[name].dtype == second_state[name].dtype and torch.equal(first_state[name], second_state[name])
            for name in second_state
        )
    )


def worst(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


def max_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return max(worst(ours[name], theirs[name]) for name in theirs)


def until(row: list[int], end: int) -> list[int]:
    """Return a row up to its end token."""
    return row[: row.index(end) + 1] if end in row else row
