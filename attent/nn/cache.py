"""What a decoder keeps between steps, so that a step costs one token and not the whole prefix.

The cache belongs to the caller: `Stack.new_cache` makes it, each call of the stack with it appends, `reorder` moves its
rows. Nothing here waits for the device: how much is used is counted on the host, and lengths that differ between rows
stay on the device.

Beams do not copy their past. A row may hold K of them: a step reads one token of each, all at one place, and writes K
columns. `ancestors` tells whose column each beam looks at for each place of the past, so that `follow` moves small
numbers only; and all beams of a row share its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attent.nn.argument_checks import can_read_values


@dataclass(eq=False)
class KV:
    """Keys and values, (B, Hkv, T, D) each."""

    keys: Tensor
    values: Tensor

    def to(self, dtype: torch.dtype) -> KV:
        """Autocast may compute queries in another format than the cache was made in."""
        return self if self.keys.dtype == dtype else KV(self.keys.to(dtype), self.values.to(dtype))

    def reorder(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def write_rows(self, rows: Tensor, new: KV) -> None:
        """Overwrite rows; of what they had, what lies behind the new columns stays, and must be hidden by a mask."""
        T = new.keys.shape[2]
        self.keys[rows, :, :T] = new.keys
        self.values[rows, :, :T] = new.values


@dataclass(eq=False)
class KVCache:
    """Room for keys and values, (B, Hkv, capacity, D) each. What is in it comes out of `append` only."""

    buffer: KV

    @property
    def capacity(self) -> int:
        return self.buffer.keys.shape[2]

    @property
    def rows(self) -> int:
        return self.buffer.keys.shape[0]

    def append(self, new: KV, start: int | Tensor, used_columns: int) -> KV:
        """Write `new` behind what each row holds, and give back all columns in use."""
        self._write(self.buffer.keys, new.keys, start)
        self._write(self.buffer.values, new.values, start)
        upto = used_columns + new.keys.shape[2]
        return KV(self.buffer.keys[:, :, :upto], self.buffer.values[:, :, :upto])

    def reorder(self, rows: Tensor) -> None:
        self.buffer.reorder(rows)

    @staticmethod
    def _write(buffer: Tensor, new: Tensor, start: int | Tensor) -> None:
        T = new.shape[2]
        if isinstance(start, int):
            buffer[:, :, start : start + T] = new
            return
        column = start[:, None] + torch.arange(T, device=buffer.device)  # (B, T)
        row = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
        buffer[row, :, column] = new.transpose(1, 2).to(buffer.dtype)  # advanced indices come first: (B, T, Hkv, D)


@dataclass(eq=False)
class LayerCache:
    """One block's share: its own growing keys and values, and those of the encoder's output, projected once."""

    self_attn: KVCache
    cross_attn: KV | None = None

    def reorder(self, rows: Tensor) -> None:
        self.self_attn.reorder(rows)
        if self.cross_attn is not None:
            self.cross_attn.reorder(rows)


@dataclass(eq=False)
class Cache:
    """All blocks of one stack.

    used            columns written, counted on the host; no row holds more
    lengths         (B,) columns that each row holds, where rows differ; None: every row holds `used`
    memory_lengths  (B,) how much of the encoder's output is real; None: all of it
    beams           that a row holds: each place has a column for each
    ancestors       (B, K, places) whose column beam k looks at, of each place; -1 where nothing is written yet
    """

    layers: list[LayerCache]
    used_columns: int = 0
    lengths: Tensor | None = None
    memory_lengths: Tensor | None = None
    beams: int = 1
    ancestors: Tensor | None = None

    @property
    def next_column(self) -> int | Tensor:
        """Where the next token of each row goes."""
        return self.used_columns if self.lengths is None else self.lengths

    @property
    def capacity(self) -> int:
        return self.layers[0].self_attn.capacity

    @property
    def rows(self) -> int:
        return self.layers[0].self_attn.rows

    @property
    def next_position(self) -> int | Tensor:
        """The position of the next token of each row: a place has a column for each beam."""
        return self.next_column // self.beams

    def check_capacity(self, B: int, T: int) -> None:
        if self.beams > 1 and self.beams != T:
            raise ValueError(f"a step must have a token for each of the cache's {self.beams} beams, but has {T}")
        if self.used_columns + T > self.capacity:
            raise ValueError(
                f"the cache must have room for {self.used_columns + T} tokens, but its capacity is {self.capacity} "
                f"({self.used_columns} used, {T} to add); make it with `capacity={self.used_columns + T}` or more"
            )
        if self.rows != B:
            raise ValueError(f"the batch must have the cache's {self.rows} rows, but has {B}; `reorder` changes them")

    def advance(self, T: int, new_lengths: Tensor | None) -> None:
        """T columns were written; of these, `new_lengths` per row are real (None: all)."""
        if new_lengths is not None:
            if self.beams > 1:
                raise ValueError("`lengths` must be None in a cache of beams: each of them is given one token")
            held = torch.full_like(new_lengths, self.used_columns) if self.lengths is None else self.lengths
            self.lengths = held + new_lengths
        elif self.lengths is not None:
            self.lengths = self.lengths + T
        self.used_columns += T

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was: beams that survive take their past along; rows may be fewer or more."""
        if not isinstance(rows, Tensor) or rows.dim() != 1:
            raise ValueError(f"`rows` must be a tensor of row numbers, but is {rows!r}")
        if rows.numel() and can_read_values(rows) and not bool(((rows >= 0) & (rows < self.rows)).all()):
            raise ValueError(f"`rows` must be rows of the cache, 0 to {self.rows - 1}, but are {rows.tolist()}")
        for layer in self.layers:
            layer.reorder(rows)
        self.lengths, self.memory_lengths, self.ancestors = (
            None if x is None else x.index_select(0, rows) for x in (self.lengths, self.memory_lengths, self.ancestors)
        )

    def reorder_beams(self, parents: Tensor) -> None:
        """(B, K): beam k of a row goes on from what its beam `beams[b, k]` has written."""
        if self.ancestors is not None:
            self.ancestors = self.ancestors.gather(1, parents[:, :, None].expand_as(self.ancestors))

    def mark_new_columns(self) -> None:
        """Before a step: each beam may look at the column that it is about to write."""
        if self.ancestors is None:
            return
        own = torch.arange(self.beams, device=self.ancestors.device)[None, :, None]
        place = self.next_position
        if isinstance(place, int):
            self.ancestors[:, :, place : place + 1] = own
        else:
            place = place[:, None, None].expand(-1, self.beams, 1)
            self.ancestors = self.ancestors.scatter(2, place, own.expand_as(place))

    def replace_rows(self, rows: Tensor, source: Cache) -> None:
        """Rows get the memory of an empty cache of as many beams; `rewind` then lets them begin."""
        for layer, other in zip(self.layers, source.layers, strict=True):
            if layer.cross_attn is not None and other.cross_attn is not None:
                layer.cross_attn.write_rows(rows, other.cross_attn)
        if self.memory_lengths is not None:
            assert source.memory_lengths is not None
            self.memory_lengths = self.memory_lengths.index_copy(0, rows, source.memory_lengths)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Row by row, how many places are held: all, or none where a row begins anew. The caller knows, so that nobody
        has to ask the device."""
        device = self.layers[0].self_attn.buffer.keys.device
        self.used_columns = max(lengths) * self.beams
        even = min(lengths) == max(lengths)
        self.lengths = None if even else torch.tensor(lengths, device=device) * self.beams
        if self.ancestors is not None:
            empty = torch.tensor([place == 0 for place in lengths], device=device)
            self.ancestors = self.ancestors.masked_fill(empty[:, None, None], -1)
