"""Visibility of keys to queries. `Mask.allows` is the one rule; every backend's form of a mask derives from it.

A mask is a description, not a tensor. A backend asks for the form that it needs, and each form is computed once,
however many layers share the mask. Biases (T5, ALiBi) are added to the scores and mask nothing; see `positions`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from attent.nn.argument_checks import check_lengths, check_window, is_count

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Packing:
    """The layout of packed rows, which hold several whole sentences without padding between them.

    Source and target are packed with the same sentences in the same order: sentence s of row b on one side belongs to
    sentence s of row b on the other.
    """

    segments: Tensor  # (B, T) index of each token's sentence in its row; -1 for the padding at the end
    positions: Tensor  # (B, T) position of each token in its sentence, from 0
    ends: Tensor  # (B, S) end of each sentence; a row with fewer sentences repeats its last end
    max_length: int  # tokens of the longest sentence, known without a device synchronization

    @classmethod
    def from_lengths(
        cls,
        sentence_lengths: Sequence[Sequence[int]],
        row_length: int | None = None,
        max_sentences: int | None = None,
        device: torch.device | str | None = None,
    ) -> "Packing":
        """Build the packing of rows with sentences of these lengths, padded to `row_length` (None: the fullest row).

        Fixing `row_length` and `max_sentences` (S) gives every batch the same shapes, and so one compiled graph.
        """
        for b, row in enumerate(sentence_lengths):
            if not all(map(is_count, row)):
                raise ValueError(f"sentence lengths must be integers of 0 or more, but row {b} has {list(row)}")
        fullest = max((sum(row) for row in sentence_lengths), default=0)
        row_length = fullest if row_length is None else row_length
        if fullest > row_length:
            raise ValueError(f"a row must fit in `row_length`={row_length} tokens, but one has {fullest}")
        most = max((len(row) for row in sentence_lengths), default=0)
        if max_sentences is not None and most > max_sentences:
            raise ValueError(f"a row must hold at most `max_sentences`={max_sentences}, but one row has {most}")
        S = most if max_sentences is None else max_sentences
        lengths = torch.tensor([[*row, *[0] * (S - len(row))] for row in sentence_lengths], dtype=torch.long)
        ends = lengths.view(len(sentence_lengths), S).cumsum(1)
        columns = torch.arange(row_length).expand(len(sentence_lengths), row_length).contiguous()
        sentence = torch.searchsorted(ends, columns, right=True)  # the number of sentences that end before here
        is_padding = sentence == S
        positions = (columns - pad(ends, (1, 0)).gather(1, sentence)).masked_fill(is_padding, 0)
        max_length = max((length for row in sentence_lengths for length in row), default=0)
        packing = cls(sentence.masked_fill(is_padding, -1), positions, ends, max_length)
        return packing if device is None else packing.to(device)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Packing":
        tensors = (self.segments, self.positions, self.ends)
        segments, positions, ends = (tensor.to(device, non_blocking=non_blocking) for tensor in tensors)
        return Packing(segments, positions, ends, self.max_length)

    @property
    def shape(self) -> tuple[int, int]:
        return self.segments.shape[0], self.segments.shape[1]


def memoize(form: F) -> F:
    """Compute a form of a mask once for the same arguments."""

    @functools.wraps(form)
    def get(mask: "Mask", *args: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler removes common work itself; a key would fix every size
            return form(mask, *args)
        key = form, *args
        if key not in mask._memo:
            mask._memo[key] = form(mask, *args)
        return mask._memo[key]

    return cast(F, get)


@dataclass(frozen=True, eq=False)
class Mask:
    """A description of the keys that each query may attend to; True in any form of it means visible.

    causal       a query attends to no later token
    window       (before, after): how many tokens it may attend to on each side, inclusive; None: no limit
    q_start      index of the first query among the keys, as many as the cache held before; (B,) if rows differ
    key_lengths  (B,) real keys of each row; the rest is padding
    ancestors    (B, K, positions) for K beams, all at position `q_start`: key i belongs to beam i % K at position
                 i // K, and beam k attends, at each position, to the key of its ancestor; -1: none
    packing      (of the queries, of the keys): tokens attend to their own sentence, positions count inside it

    Forms are cached: do not change the tensors in place afterwards.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    q_start: int | Tensor = 0
    key_lengths: Tensor | None = None
    ancestors: Tensor | None = None
    packing: tuple[Packing, Packing] | None = None
    _memo: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_window(self.window)
        if not isinstance(self.q_start, Tensor | torch.SymInt) and not is_count(self.q_start):
            raise ValueError(f"`q_start` must be 0 or more, the number of keys before, but is {self.q_start}")
        if self.packing is not None and self.key_lengths is not None:
            raise ValueError("`key_lengths` must be None with `packing`, which marks the padding already")
        if self.packing is not None and (isinstance(self.q_start, Tensor) or self.q_start != 0):
            raise ValueError("`q_start` must be 0 with `packing`: packed sentences cannot continue a cache")

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """THE rule: may query `q` of row `b` attend to key `k`? Index arithmetic only, so any backend can trace it."""
        if self.packing is None:
            start = self.q_start[b] if isinstance(self.q_start, Tensor) else self.q_start
            allowed, q_position, k_position = k >= 0, q + start, k
            if self.ancestors is not None:
                K = self.ancestors.shape[1]
                q_position, k_position = q * 0 + start, k // K
                allowed = self.ancestors[b, q, k_position] == k % K
        else:
            queries, keys = self.packing
            segment, q_position, k_position = queries.segments[b, q], queries.positions[b, q], keys.positions[b, k]
            allowed = (segment == keys.segments[b, k]) & (segment >= 0)
        if self.causal:
            allowed = allowed & (k_position <= q_position)
        if self.window is not None:
            before, after = self.window
            allowed = allowed if before is None else allowed & (k_position >= q_position - before)
            allowed = allowed if after is None else allowed & (k_position <= q_position + after)
        if self.key_lengths is not None:
            allowed = allowed & (k < self.key_lengths[b])
        return allowed

    @memoize
    def to_dense(self, B: int, Tq: int, Tk: int, device: torch.device) -> Tensor:
        """Evaluate the rule into the smallest tensor that broadcasts to (B, 1, Tq, Tk).

        Padding alone is (B, 1, 1, Tk): memory grows with the length, not with its square.
        """
        b, q, k = (torch.arange(n, device=device) for n in (B if self.is_per_row else 1, Tq, Tk))
        allowed = self.allows(b[:, None, None, None], b.new_zeros(()), q[:, None], k)
        return allowed[(None,) * (4 - allowed.dim())]

    @memoize
    def to_block_mask(self, B: int, Tq: int, Tk: int, device: torch.device) -> Any:
        """Evaluate the rule into FlexAttention's BlockMask."""
        from torch.nn.attention.flex_attention import create_block_mask

        def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # a bound method is refused
            return self.allows(b, h, q, k)

        return create_block_mask(rule, B if self.is_per_row else None, None, Tq, Tk, device=device)

    @memoize
    def has_visible_keys(self, B: int, Tq: int, Tk: int, device: torch.device) -> Tensor:
        """True for queries that may attend to any key; broadcasts to (B, 1, Tq, 1)."""
        return self.to_dense(B, Tq, Tk, device).any(-1, keepdim=True)

    @property
    def is_per_row(self) -> bool:
        """True if the rule differs between the rows of a batch."""
        parts = (self.key_lengths, self.ancestors, self.packing)
        return isinstance(self.q_start, Tensor) or any(part is not None for part in parts)

    @property
    def is_causal_or_full(self) -> bool:
        """True if neither padding, packing, beams nor a window restricts the keys."""
        return not self.is_per_row and self.window is None

    def allows_all_keys(self, Tk: int) -> bool:
        """True if every query attends to all Tk keys, as far as the host knows."""
        reaches_end = not self.causal or (isinstance(self.q_start, int) and self.q_start >= Tk - 1)
        return self.is_causal_or_full and reaches_end

    def is_plain_causal(self, Tq: int, Tk: int) -> bool:
        """True in the one case where SDPA's `is_causal` is our rule: a square that starts at the first key."""
        at_first = isinstance(self.q_start, int) and self.q_start == 0
        # Sizes may be symbols while compiling, and SDPA takes a plain bool.
        return True if self.is_causal_or_full and self.causal and at_first and Tq == Tk else False  # noqa: SIM210

    @memoize
    def check(self, B: int, Tq: int, Tk: int, device: torch.device) -> None:
        if self.key_lengths is not None:
            check_lengths(self.key_lengths, B, Tk, device, "key_lengths")
        if isinstance(self.q_start, Tensor):
            check_lengths(self.q_start, B, Tk, device, "q_start")
        shape = None if self.ancestors is None else tuple(self.ancestors.shape)
        if shape is not None and (shape[:2] != (B, Tq) or Tk > shape[2] * Tq):
            raise ValueError(f"`ancestors` must be of {(B, Tq)} beams and {Tk} keys at most, but is of {shape}")
        if self.packing is not None:
            check_packing(self.packing, B, Tq, Tk, device)


def check_packing(packing: tuple[Packing, Packing], B: int, Tq: int, Tk: int, device: torch.device) -> None:
    devices = [side.segments.device for side in packing]
    if devices != [device, device]:
        raise ValueError(f"`packing` must be on {device} as the batch is, but is on {devices}; `to` moves it")
    shapes = (packing[0].shape, packing[1].shape)
    if shapes != ((B, Tq), (B, Tk)):
        raise ValueError(f"`packing` must be of {(B, Tq)} queries and {(B, Tk)} keys, but is of {shapes}")
    counts = [side.ends.shape[1] for side in packing]
    if counts[0] != counts[1]:
        raise ValueError(
            f"both sides of `packing` must hold the same sentences, but the fullest rows have {counts[0]} and "
            f"{counts[1]} of them; a sentence that one side lacks has length 0 there"
        )
