"""Refusals: what cannot be, or does not fit together, told before anything is computed, in sentences that say what it
must be and what it is.

Numbers inside tensors are looked at on CPU only, where that costs nothing; on an accelerator the host would wait.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attent.nn.block import Memory, Stack
    from attent.nn.cache import Cache
    from attent.nn.masks import Packing

MAX_SIZE = 2**24  # of any size of a model: beyond it torch could not even count the bytes of a matrix
MAX_LAYERS = 1000  # layers: a folder that asks for more would keep us busy for minutes before its tensors are missed
CACHE_NEEDS_CAUSAL = "a cache needs a causal stack: here every token looks at later ones, so none can be kept"


def can_read_values(tensor: Tensor) -> bool:
    """May we look at the numbers? On an accelerator that would make the host wait; while compiling it is impossible."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


# --- settings ------------------------------------------------------------------------------------------------------


def check_choice(name: str, value: str, choices: Any) -> None:
    """One of the words of a Literal."""
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


def check_heads(heads: int, kv_heads: int, head_width: int) -> None:
    check_size("head_width", head_width)
    if not is_count(kv_heads) or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"`heads` must be a multiple of `kv_heads`={kv_heads}, but is {heads}")


def check_even_head_width(head_width: int) -> None:
    if head_width % 2:
        raise ValueError(f"rotary positions turn pairs of features: `head_width` must be even, but is {head_width}")


def check_window(window: Any) -> None:
    """(before, after): on each side a number of tokens, or None for no limit; or None in all."""
    sides = (None, None) if window is None else window
    if not isinstance(sides, tuple) or len(sides) != 2 or not all(s is None or is_count(s) for s in sides):
        raise ValueError(f"`window` must be (before, after), a tuple of 0 or more tokens each, but is {window}")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# --- tensors -------------------------------------------------------------------------------------------------------


def check_lengths(lengths: Tensor, B: int, T: int, device: torch.device, name: str) -> None:
    """Lengths of the rows of a (B, T) batch."""
    if not isinstance(lengths, Tensor) or lengths.shape != (B,) or lengths.dtype not in (torch.int64, torch.int32):
        is_now = f"{lengths.dtype} of {tuple(lengths.shape)}" if isinstance(lengths, Tensor) else repr(lengths)
        raise ValueError(f"`{name}` must be a tensor of {B} int64 or int32, one per row of the batch, but is {is_now}")
    if lengths.device != device:
        raise ValueError(f"`{name}` must be on {device} as the batch is, but is on {lengths.device}; move it there")
    if B and can_read_values(lengths) and not bool(((lengths >= 0) & (lengths <= T)).all()):
        raise ValueError(
            f"`{name}` must be between 0 and {T}, the length of the tensor, "
            f"but reaches from {int(lengths.min())} to {int(lengths.max())}; pad the tensor or shorten the lengths"
        )


# --- a pass through a stack ----------------------------------------------------------------------------------------


def check_forward_args(
    stack: Stack,
    x: Tensor,
    lengths: Tensor | None,
    packing: Packing | None,
    memory: Memory | None,
    cache: Cache | None,
) -> None:
    """All that `Stack.forward` is given."""
    if x.dim() != 3 or x.shape[2] != stack.config.width:
        raise ValueError(f"x must be (B, T, {stack.config.width}), but is {tuple(x.shape)}")
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
    elif not torch.compiler.is_compiling():  # a number that differs with every batch would be a graph for each
        check_positions(stack, packing.max_length)


def check_cache(stack: Stack, x: Tensor, packing: Packing | None, memory: Memory | None, cache: Cache) -> None:
    """A cache that x continues."""
    if not stack.config.causal:
        raise ValueError(CACHE_NEEDS_CAUSAL)
    if packing is not None:
        raise ValueError("a cache continues one sequence per row, and a packed row holds several: give one of them")
    if memory is not None:
        raise ValueError("`memory` must be None with a cache: the cache holds the memory's keys and values already")
    first, own = cache.layers[0], stack.blocks[0].self_attn
    theirs = (len(cache.layers), *first.self_attn.buffer.keys.shape[1::2], first.cross_attn is not None)
    ours = (stack.config.layers, own.kv_heads, own.head_width, stack.config.cross_attention)
    if theirs != ours:
        raise ValueError(
            f"the cache must be made by this stack's `new_cache`, of (layers, heads, head width, memory) {ours}, "
            f"but is of {theirs}"
        )
    cache.check_capacity(x.shape[0], x.shape[1])


def check_memory(stack: Stack, x: Tensor, packing: Packing | None, memory: Memory | None) -> None:
    """The other stack's output that x looks at."""
    if memory is None:
        if stack.config.cross_attention:
            raise ValueError("this stack looks at another's output: give `memory`, or a `cache` made with it")
        return
    if not stack.config.cross_attention:
        raise ValueError(
            "`memory` must be None for a stack with `cross_attention`=false: no block of it would look there"
        )
    wanted, shape = (x.shape[0], stack.config.width), tuple(memory.states.shape)
    if len(shape) != 3 or (shape[0], shape[2]) != wanted:
        raise ValueError(f"`memory` must be of ({wanted[0]}, T, {wanted[1]}) states, but is of {shape}")
    if (memory.packing is None) != (packing is None):
        packed, other = ("text", "memory") if memory.packing is None else ("memory", "text")
        raise ValueError(f"the {packed} is packed, so the {other} must be too: pack both with the same sentences")


def check_positions(stack: Stack, count: int) -> None:
    limit = stack.positions.max_length
    if limit is not None and count > limit:
        raise ValueError(
            f"sequences must have at most `positions.max_length`={limit} tokens, but one has {count}; "
            f"shorten it, or use positions without a limit (sinusoidal, rotary, relative, alibi)"
        )


def check_new_cache(stack: Stack, capacity: int, rows: int | None, memory: Memory | None, beams: int) -> None:
    """All that `Stack.new_cache` is given."""
    check_size("capacity", capacity)
    check_size("beams", beams)
    if not stack.config.causal:
        raise ValueError(CACHE_NEEDS_CAUSAL)
    if (memory is not None) != stack.config.cross_attention:
        raise ValueError(
            f"`memory` must be {'given' if stack.config.cross_attention else 'None'} for this stack's cache"
        )
    if (rows is None) == (memory is None):
        raise ValueError("give `memory`, or for a stack without it `rows`: how many sequences will be cached?")
    if memory is not None and memory.packing is not None:
        raise ValueError("a cache continues one sequence per row: encode padded sentences, not packed ones")
    if memory is not None and memory.lengths is not None:
        B, T = memory.states.shape[:2]
        check_lengths(memory.lengths, B, T, memory.states.device, "memory.lengths")
    check_positions(stack, capacity)
