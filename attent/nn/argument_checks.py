"""Checks of arguments, before anything is computed: each error says what a value must be and what it is.

Values inside tensors are checked on the CPU only; on an accelerator that would synchronize with the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, cast, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attent.nn.block import Memory
    from attent.nn.cache import Cache
    from attent.nn.masks import Packing
    from attent.nn.stack import NonTransformerStack, Stack

    Layers: TypeAlias = Stack | NonTransformerStack

MAX_SIZE = 2**24  # of any dimension of a model: with larger ones torch overflows when it counts a matrix's bytes
MAX_LAYERS = 1000  # building more takes minutes, before a damaged folder is found to lack their tensors
CACHE_NEEDS_CAUSAL = "a cache needs a causal stack: here every token attends to later ones, so no state can be reused"


def can_read_values(tensor: Tensor) -> bool:
    """True where values can be read without synchronizing; never while compiling."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_choice(name: str, value: str, choices: Any) -> None:
    """`choices` is a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"`{name}` must be one of {', '.join(get_args(choices))}, but is {value!r}")


def check_size(name: str, value: int, maximum: int = MAX_SIZE) -> None:
    if not is_count(value) or not 1 <= value <= maximum:
        raise ValueError(f"`{name}` must be a number from 1 to {maximum:,}, but is {value!r}")


def check_rate(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"`{name}` must be at least 0 and less than 1, but is {value!r}")


def check_positive(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be more than 0, but is {value!r}")


def check_window(window: Any) -> None:
    """(before, after): a number of tokens on each side, or None for no limit; or None for no window."""
    sides = (None, None) if window is None else window
    if not isinstance(sides, tuple) or len(sides) != 2 or not all(s is None or is_count(s) for s in sides):
        raise ValueError(f"`window` must be (before, after), a tuple of 0 or more tokens each, but is {window}")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_states(name: str, states: Tensor, width: int) -> None:
    if states.dim() != 3 or states.shape[2] != width:
        raise ValueError(f"`{name}` must be (B, T, E={width}), but is {tuple(states.shape)}")


def check_lengths(lengths: Tensor, B: int, T: int, device: torch.device, name: str) -> None:
    if not isinstance(lengths, Tensor) or lengths.shape != (B,) or lengths.dtype not in (torch.int64, torch.int32):
        is_now = f"{lengths.dtype} of {tuple(lengths.shape)}" if isinstance(lengths, Tensor) else repr(lengths)
        raise ValueError(f"`{name}` must be a tensor of {B} int64 or int32, one per row of the batch, but is {is_now}")
    if lengths.device != device:
        raise ValueError(f"`{name}` must be on {device} as the batch is, but is on {lengths.device}; move it there")
    if B and can_read_values(lengths) and not bool(((lengths >= 0) & (lengths <= T)).all()):
        raise ValueError(
            f"`{name}` must be between 0 and {T}, the length of the tensor, "
            f"but ranges from {int(lengths.min())} to {int(lengths.max())}; pad the tensor or shorten the lengths"
        )


def check_forward_args(
    stack: Layers,
    x: Tensor,
    lengths: Tensor | None,
    packing: Packing | None,
    memory: Memory | None,
    cache: Cache | None,
) -> None:
    check_states("x", x, stack.config.width)
    if lengths is not None and packing is not None:
        raise ValueError("give `lengths` (padded rows) or `packing` (packed rows), but not both")
    if lengths is not None:
        check_lengths(lengths, x.shape[0], x.shape[1], x.device, "lengths")
    if packing is not None and packing.shape != x.shape[:2]:
        raise ValueError(f"`packing` must be of {tuple(x.shape[:2])} tokens, but is of {packing.shape}")
    if cache is not None:
        check_cache(stack, x, packing, memory, cache)
    else:
        check_memory(stack, x, packing, memory)
    if packing is None:
        check_positions(stack, x.shape[1] if cache is None else (x.shape[1] + cache.used_columns) // cache.beams)
    elif not torch.compiler.is_compiling():  # the number differs with every batch: each would compile a new graph
        check_positions(stack, packing.max_length)


def check_cache(stack: Layers, x: Tensor, packing: Packing | None, memory: Memory | None, cache: Cache) -> None:
    if not stack.config.causal:
        raise ValueError(CACHE_NEEDS_CAUSAL)
    if packing is not None:
        raise ValueError("a cache continues one sequence per row, and a packed row holds several: give one of them")
    if memory is not None:
        raise ValueError("`memory` must be None with a cache: the cache holds the memory's keys and values already")
    first, attention = cache.layers[0], cast("Stack", stack).blocks[0].self_attn
    actual = (len(cache.layers), *first.self_attn.keys.shape[1::2], first.cross_attn is not None)
    expected = (stack.config.layers, attention.kv_heads, attention.head_width, stack.config.cross_attention)
    if actual != expected:
        raise ValueError(
            f"the cache must be made by this stack's `new_cache`, of (layers, heads, head width, memory) {expected}, "
            f"but is of {actual}"
        )
    cache.check_step(x.shape[0], x.shape[1])


def check_memory(stack: Layers, x: Tensor, packing: Packing | None, memory: Memory | None) -> None:
    if memory is None:
        if stack.config.cross_attention:
            raise ValueError("this stack attends to another's output: give `memory`, or a `cache` made with it")
        return
    if not stack.config.cross_attention:
        raise ValueError("`memory` must be None for a stack with `cross_attention`=false: no block would attend to it")
    rows, width, shape = x.shape[0], stack.config.width, tuple(memory.states.shape)
    if len(shape) != 3 or (shape[0], shape[2]) != (rows, width):
        raise ValueError(f"`memory` must be of ({rows}, T, {width}) states, but is of {shape}")
    if (memory.packing is None) != (packing is None):
        packed, other = ("text", "memory") if memory.packing is None else ("memory", "text")
        raise ValueError(f"the {packed} is packed, so the {other} must be too: pack both with the same sentences")


def check_positions(stack: Layers, count: int) -> None:
    limit = stack.positions.max_length
    if limit is not None and count > limit:
        raise ValueError(
            f"sequences must have at most `positions.max_length`={limit} tokens, but one has {count}; "
            f"shorten it, or use positions without a limit (sinusoidal, rotary, relative, alibi)"
        )


def check_new_cache(stack: Layers, capacity: int, rows: int | None, memory: Memory | None, beams: int) -> None:
    check_size("capacity", capacity)
    check_size("beams", beams)
    if not stack.config.causal:
        raise ValueError(CACHE_NEEDS_CAUSAL)
    if (memory is not None) != stack.config.cross_attention or (rows is None) == (memory is None):
        needed = "`memory`" if stack.config.cross_attention else "`rows`, the number of sequences to cache,"
        raise ValueError(f"give {needed} for this stack's cache, and nothing else")
    if memory is not None and memory.packing is not None:
        raise ValueError("a cache continues one sequence per row: encode padded sentences, not packed ones")
    if memory is not None and memory.lengths is not None:
        B, T = memory.states.shape[:2]
        check_lengths(memory.lengths, B, T, memory.states.device, "memory.lengths")
    check_positions(stack, capacity)
