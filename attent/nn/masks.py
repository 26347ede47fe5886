"""Who may look at whom. `Mask.allows` is the one rule; every backend's form of a mask is derived from it.

A mask is a description, not a tensor: nothing is computed until a backend asks for the form that it needs, and each
form is computed once, however many layers share the mask. Biases (T5, ALiBi) are numbers, not permissions: they live
in `positions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attent.nn.argument_checks import check_lengths, check_window, is_count


@dataclass(frozen=True, eq=False)
class Packing:
    """Rows of whole sentences laid end to end: which sentence each token is of, and where in it.

    A packed pair of source and target is two of these with the same sentences in the same order: sentence s of row b
    on one side belongs to sentence s of row b on the other.
    """

    segments: Tensor  # (B, T) the sentence's number in its row; -1 for the filler behind the last sentence
    positions: Tensor  # (B, T) the token's place in its own sentence, from 0
    ends: Tensor  # (B, S) where each sentence stops; a row with fewer sentences repeats its last end
    max_length: int  # tokens in the longest sentence, known without asking the device

    @classmethod
    def from_lengths(
        cls,
        sentence_lengths: Sequence[Sequence[int]],
        width: int | None = None,
        max_sentences: int | None = None,
        device: torch.device | str | None = None,
    ) -> Packing:
        """Row b holds sentences of the lengths `rows[b]`, then filler up to `width` (None: as wide as the fullest).

        Fixing `width` and `sentences` (S, the most that a row may hold) gives every batch the same shapes, and so one
        compiled graph.
        """
        for b, row in enumerate(sentence_lengths):
            if not all(map(is_count, row)):
                raise ValueError(f"sentence lengths must be integers of 0 or more, but row {b} has {list(row)}")
        fullest = max((sum(row) for row in sentence_lengths), default=0)
        width = fullest if width is None else width
        if fullest > width:
            raise ValueError(f"the sentences of a row must fit `width`={width} tokens, but one row has {fullest}")
        most = max((len(row) for row in sentence_lengths), default=0)
        if max_sentences is not None and most > max_sentences:
            raise ValueError(f"a row must hold at most `sentences`={max_sentences}, but one row has {most}")
        most = most if max_sentences is None else max_sentences
        lengths = torch.tensor([[*row, *[0] * (most - len(row))] for row in sentence_lengths], dtype=torch.long)
        ends = lengths.view(len(sentence_lengths), most).cumsum(1)
        at = torch.arange(width).expand(len(sentence_lengths), width).contiguous()
        sentence = torch.searchsorted(ends, at, right=True)  # how many sentences have ended by here
        starts = torch.nn.functional.pad(ends, (1, 0))
        longest = max((length for row in sentence_lengths for length in row), default=0)
        filler = sentence == most
        positions = (at - starts.gather(1, sentence)).masked_fill(filler, 0)  # filler too needs a place that exists
        packing = cls(sentence.masked_fill(filler, -1), positions, ends, longest)
        return packing if device is None else packing.to(device)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packing:
        segments, positions, ends = (
            tensor.to(device, non_blocking=non_blocking) for tensor in (self.segments, self.positions, self.ends)
        )
        return Packing(segments, positions, ends, self.max_length)

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.segments.shape
        return rows, width

    def query_offsets(self) -> Tensor:
        """Where each sentence begins when all rows are laid end to end, as flash kernels ask (cu_seqlens).

        Two more stretches close each row, this side's filler and the other side's. Each is empty on the side that it
        is not of, so filler queries meet no key and filler keys meet no query.
        """
        return self._offsets(self._row_ends(), self._row_ends())

    def key_offsets(self) -> Tensor:
        return self._offsets(self._text_ends(), self._row_ends())

    def _row_ends(self) -> Tensor:
        return torch.full_like(self.positions[:, :1], self.segments.shape[1])

    def _text_ends(self) -> Tensor:
        return (self.segments >= 0).sum(1, keepdim=True)

    def _offsets(self, first_filler: Tensor, second_filler: Tensor) -> Tensor:
        rows, width = self.shape
        ends = torch.cat([self.ends, first_filler, second_filler], 1)  # (B, S + 2)
        ends = ends + width * torch.arange(rows, device=ends.device)[:, None]
        return torch.nn.functional.pad(ends.flatten(), (1, 0)).to(torch.int32)


@dataclass(frozen=True, eq=False)
class Mask:
    """A description of what queries may look at; True in any form of it means "may look".

    causal       a query looks at no later token
    window       (before, after): how many other tokens it may see on each side, ends included; None is no limit
    q_start      index of query 0 among the keys: how many keys the cache held before; (B,) for one per row
    key_lengths  (B,) how many keys of each row are real; the rest is padding
    ancestors    (B, K, places) for K beams side by side, all at place `q_start`: key i is that of beam i % K at place
                 i // K, and beam k sees, of each place, that of its ancestor; -1: none
    packing      (of the queries, of the keys): tokens see their own sentence only, and places are counted inside it

    Forms are kept once worked out: do not change the tensors in place afterwards.
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
            raise ValueError(f"`q_start` must be 0 or more, how many keys come before, but is {self.q_start}")
        if self.packing is not None and self.key_lengths is not None:
            raise ValueError("`key_lengths` must be None with `packing`: a packing already tells which keys are filler")
        if self.packing is not None and (isinstance(self.q_start, Tensor) or self.q_start != 0):
            raise ValueError("`q_start` must be 0 with `packing`: packed sentences cannot continue a cache")

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """THE rule: may query `q` of row `b` look at key `k`? Index arithmetic only, so any backend can trace it."""
        if self.packing is None:
            start = self.q_start[b] if isinstance(self.q_start, Tensor) else self.q_start
            allowed, q_at, k_at = k >= 0, q + start, k  # all, until something below forbids it
            if self.ancestors is not None:
                K = self.ancestors.shape[1]
                q_at, k_at = q * 0 + start, k // K
                allowed = self.ancestors[b, q, k_at] == k % K
        else:
            queries, keys = self.packing
            sentence, q_at, k_at = queries.segments[b, q], queries.positions[b, q], keys.positions[b, k]
            allowed = (sentence == keys.segments[b, k]) & (sentence >= 0)
        if self.causal:
            allowed = allowed & (k_at <= q_at)
        if self.window is not None:
            before, after = self.window
            allowed = allowed if before is None else allowed & (k_at >= q_at - before)
            allowed = allowed if after is None else allowed & (k_at <= q_at + after)
        if self.key_lengths is not None:
            allowed = allowed & (k < self.key_lengths[b])
        return allowed

    def to_dense(self, B: int, Tq: int, Tk: int, device: torch.device) -> Tensor:
        """The rule written out, as small as it can be: broadcasts to (B, 1, Tq, Tk).

        Padding alone is (B, 1, 1, Tk): what it takes grows with the length, not with its square.
        """
        return self._memoize(
            ("dense", B, Tq, Tk, device), lambda: self._to_dense(B if self.is_per_row else 1, Tq, Tk, device)
        )

    def _to_dense(self, B: int, Tq: int, Tk: int, device: torch.device) -> Tensor:
        b, q, k = (torch.arange(n, device=device) for n in (B, Tq, Tk))
        allowed = self.allows(b[:, None, None, None], b.new_zeros(()), q[:, None], k)
        return allowed[(None,) * (4 - allowed.dim())]

    def to_block_mask(self, B: int, Tq: int, Tk: int, device: torch.device) -> Any:
        """The rule as FlexAttention's BlockMask."""
        from torch.nn.attention.flex_attention import create_block_mask

        def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # a bound method is refused
            return self.allows(b, h, q, k)

        rows = B if self.is_per_row else None
        return self._memoize(
            ("blocks", B, Tq, Tk, device), lambda: create_block_mask(rule, rows, None, Tq, Tk, device=device)
        )

    def has_visible_keys(self, B: int, Tq: int, Tk: int, device: torch.device) -> Tensor:
        """Which queries may look at any key at all; broadcasts to (B, 1, Tq, 1)."""
        dense = self.to_dense(B, Tq, Tk, device)
        return self._memoize(("sees_something", B, Tq, Tk, device), lambda: dense.any(-1, keepdim=True))

    def offsets(self) -> tuple[Tensor, Tensor]:
        """The packing of the queries and of the keys as flash kernels ask for it: (S * B + 2 * B + 1,) each."""
        assert self.packing is not None
        queries, keys = self.packing
        return self._memoize(("offsets",), lambda: (queries.query_offsets(), keys.key_offsets()))

    @property
    def is_per_row(self) -> bool:
        """Does the rule differ between the rows of a batch?"""
        parts = (self.key_lengths, self.ancestors, self.packing)
        return isinstance(self.q_start, Tensor) or any(part is not None for part in parts)

    @property
    def is_order_only(self) -> bool:
        return not self.is_per_row and self.window is None

    def allows_all_keys(self, Tk: int) -> bool:
        """Known on the host: every query sees all Tk keys."""
        reaches_end = not self.causal or (isinstance(self.q_start, int) and self.q_start >= Tk - 1)
        return self.is_order_only and reaches_end

    def is_plain_causal(self, Tq: int, Tk: int) -> bool:
        """The one case that SDPA's `is_causal` means the same as we do: a square that starts at the first key."""
        at_first = isinstance(self.q_start, int) and self.q_start == 0
        # Sizes may be symbols while compiling: SDPA wants a plain bool.
        return True if self.is_order_only and self.causal and at_first and Tq == Tk else False  # noqa: SIM210

    def check(self, B: int, Tq: int, Tk: int, device: torch.device) -> None:
        """Refuse a description that does not fit the tensors."""
        self._memoize(("check", B, Tq, Tk, device), lambda: self._check(B, Tq, Tk, device))

    def _check(self, B: int, Tq: int, Tk: int, device: torch.device) -> None:
        if self.key_lengths is not None:
            check_lengths(self.key_lengths, B, Tk, device, "key_lengths")
        if isinstance(self.q_start, Tensor):
            check_lengths(self.q_start, B, Tk, device, "q_start")
        if self.ancestors is not None:
            room = self.ancestors.shape[2] * Tq
            if self.ancestors.shape[:2] != (B, Tq) or Tk > room:
                is_now = tuple(self.ancestors.shape)
                raise ValueError(f"`ancestors` must be of {(B, Tq)} beams and {Tk} keys at most, but is of {is_now}")
        if self.packing is not None:
            devices = [packing.segments.device for packing in self.packing]
            if devices != [device, device]:
                raise ValueError(f"`packing` must be on {device} as the batch is, but is on {devices}; `to` moves it")
            shapes = (self.packing[0].shape, self.packing[1].shape)
            if shapes != ((B, Tq), (B, Tk)):
                raise ValueError(f"`packing` must be of {(B, Tq)} queries and {(B, Tk)} keys, but is of {shapes}")
            most = [packing.ends.shape[1] for packing in self.packing]
            if most[0] != most[1]:
                raise ValueError(
                    f"both sides of `packing` must hold the same sentences, but the fullest rows have {most[0]} and "
                    f"{most[1]} of them; a sentence that one side lacks has length 0 there"
                )

    def _memoize(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        if torch.compiler.is_compiling():  # the compiler finds equal work itself; a key would pin every size
            return compute()
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]
