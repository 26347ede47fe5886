"""The same numbers: what the parity tests of every family need.

Under `exact`, a `transformers` model in float64 stays in float64: some of its norms and softmaxes compute in float32
whatever they are given, which would hide the tenth digit. Rotary tables stay in float32, as they are in ours.
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
    """Whatever would turn float64 into float32 leaves it as it is; integers become float32 as they always do."""

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
    """What this model of `transformers` computes in here, it computes in float64 (in eager attention and SDPA alike).

    GPT-2's `reorder_and_upcast_attn` insists on float32 by an error: compare it in float32.
    """
    for module in model.modules():
        for name in ROTARY:
            table = getattr(module, name, None)
            if isinstance(table, Tensor):
                setattr(module, name, table.float())  # `model.double()` has changed it, and no digit is lost
    with NoRoundDown():
        yield


# Their models at toy size, and their gradients under our names.


def randomise(model: nn.Module, seed: int) -> None:
    """Every number random: no zero bias or unit norm hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.3
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * spread
            weight.copy_(noise + ("norm" in name.lower() and name.endswith("weight")))


def save_gradients(model: Any, folder: Path) -> None:
    """The folder of a model whose weights are the gradients of this one, so that our `load` gives them our names."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    model.save_pretrained(folder)


def gradient_errors(ours: nn.Module, gradients: nn.Module) -> dict[str, float]:
    """How far each gradient of our model is from theirs, where that is too far."""
    wanted = dict(gradients.named_parameters())
    got = {name: weight.grad for name, weight in ours.named_parameters()}
    assert got.keys() == wanted.keys()
    assert any(gradient is not None and bool(gradient.abs().max() > 1e-3) for gradient in got.values())
    errors = {
        name: float((wanted[name] if gradient is None else gradient - wanted[name]).detach().abs().max())
        for name, gradient in got.items()
    }
    return {name: error for name, error in errors.items() if not error < 1e-9}


def projection(*outputs: Tensor) -> Tensor:
    """A number that hangs on every entry of each output, by fixed random weights."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    return torch.stack([(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]).sum()


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return (
        one.config == other.config
        and list(mine) == list(theirs)
        and all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in theirs)
    )


def worst(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


def max_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return max(worst(ours[name], theirs[name]) for name in theirs)


def until(row: list[int], end: int) -> list[int]:
    """Return a row up to its end token."""
    return row[: row.index(end) + 1] if end in row else row
