"""The key/value cache of a decoder, with which a step costs one token and not the whole prefix.

The cache belongs to the caller: `Stack.new_cache` creates it, each forward pass with it appends, `reorder` permutes its
rows. Nothing here synchronizes with the device: used columns are counted on the host, and lengths that differ between
rows stay on the device.

Beams share their past instead of copying it. A row may hold K beams: a step reads one token of each, all at one
position, and writes K columns. `ancestors` holds, for each beam and each earlier position, the beam whose column it
attends to, so `reorder_beams` moves these indices only, and all beams of a row share its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attent.nn.argument_checks import can_read_values


@dataclass(eq=False)
class KV:
    """Keys and values, (B, Hkv, T, D) each: of some tokens, or a buffer of T columns that `append` fills."""

    keys: Tensor
    values: Tensor

    def append(self, new: KV, start: int | Tensor, used_columns: int) -> KV:
        """Write `new` after the tokens of each row, and return all columns in use."""
        T = new.keys.shape[2]
        if isinstance(start, int):
            self.keys[:, :, start : start + T], self.values[:, :, start : start + T] = new.keys, new.values
        else:
            columns = start[:, None] + torch.arange(T, device=start.device)  # (B, T)
            rows = torch.arange(len(start), device=start.device)[:, None]
            for buffer, x in ((self.keys, new.keys), (self.values, new.values)):
                buffer[rows, :, columns] = x.transpose(1, 2).to(buffer.dtype)  # (B, T, Hkv, D): indexed axes come first
        end = used_columns + T
        return KV(self.keys[:, :, :end], self.values[:, :, :end])

    def to(self, dtype: torch.dtype) -> KV:
        """Cast to the dtype of the queries, which under autocast may differ from the cache's."""
        return self if self.keys.dtype == dtype else KV(self.keys.to(dtype), self.values.to(dtype))

    def reorder(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def write_rows(self, rows: Tensor, new: KV) -> None:
        """Overwrite the first columns of some rows; later columns keep old values, which a mask must hide."""
        T = new.keys.shape[2]
        self.keys[rows, :, :T] = new.keys
        self.values[rows, :, :T] = new.values


@dataclass(eq=False)
class LayerCache:
    """The cache of one block: a buffer for self-attention, and the keys and values of the memory, projected once."""

    self_attn: KV
    cross_attn: KV | None = None


@dataclass(eq=False)
class Cache:
    """The cache of one stack.

    used_columns    columns written, counted on the host; no row holds more
    row_columns     (B,) columns that each row holds, where rows differ; None: every row holds `used_columns`
    memory_lengths  (B,) lengths of the memory's rows; None: no padding
    beams           beams per row; each position has a column for each
    ancestors       (B, K, positions) the beam whose column beam k attends to at each position; -1: not written yet
    """

    layers: list[LayerCache]
    used_columns: int = 0
    row_columns: Tensor | None = None
    memory_lengths: Tensor | None = None
    beams: int = 1
    ancestors: Tensor | None = None

    @property
    def next_column(self) -> int | Tensor:
        return self.used_columns if self.row_columns is None else self.row_columns

    @property
    def next_position(self) -> int | Tensor:
        return self.next_column // self.beams

    @property
    def max_columns(self) -> int:
        return self.layers[0].self_attn.keys.shape[2]

    @property
    def rows(self) -> int:
        return self.layers[0].self_attn.keys.shape[0]

    def check_step(self, B: int, T: int) -> None:
        if self.beams > 1 and self.beams != T:
            raise ValueError(f"a step must have a token for each of the cache's {self.beams} beams, but has {T}")
        if self.used_columns + T > self.max_columns:
            capacity, used, new = (columns // self.beams for columns in (self.max_columns, self.used_columns, T))
            raise ValueError(
                f"the cache must have room for {used + new} tokens, but its capacity is {capacity} "
                f"({used} used, {new} to add); create it with `capacity={used + new}` or more"
            )
        if self.rows != B:
            raise ValueError(f"the batch must have the cache's {self.rows} rows, but has {B}; `reorder` changes them")

    def advance(self, T: int, new_lengths: Tensor | None) -> None:
        """Count T written columns, of which `new_lengths` per row are real tokens (None: all)."""
        if new_lengths is not None:
            if self.beams > 1:
                raise ValueError("`lengths` must be None in a cache of beams: each of them is given one token")
            old = torch.full_like(new_lengths, self.used_columns) if self.row_columns is None else self.row_columns
            self.row_columns = old + new_lengths
        elif self.row_columns is not None:
            self.row_columns = self.row_columns + T
        self.used_columns += T

    def reorder(self, rows: Tensor) -> None:
        """Make row i a copy of the former row `rows[i]`; there may be fewer or more rows than before."""
        if not isinstance(rows, Tensor) or rows.dim() != 1:
            raise ValueError(f"`rows` must be a tensor of row indices, but is {rows!r}")
        if rows.numel() and can_read_values(rows) and not bool(((rows >= 0) & (rows < self.rows)).all()):
            raise ValueError(f"`rows` must be rows of the cache, 0 to {self.rows - 1}, but are {rows.tolist()}")
        for layer in self.layers:
            layer.self_attn.reorder(rows)
            if layer.cross_attn is not None:
                layer.cross_attn.reorder(rows)
        old = (self.row_columns, self.memory_lengths, self.ancestors)
        selected = (None if x is None else x.index_select(0, rows) for x in old)
        self.row_columns, self.memory_lengths, self.ancestors = selected

    def reorder_beams(self, parents: Tensor) -> None:
        """(B, K): beam k of row b continues the former beam `parents[b, k]`."""
        if self.ancestors is not None:
            self.ancestors = self.ancestors.gather(1, parents[:, :, None].expand_as(self.ancestors))

    def mark_new_columns(self) -> None:
        """Before a step: let each beam attend to the column that it is about to write."""
        if self.ancestors is None:
            return
        beams = torch.arange(self.beams, device=self.ancestors.device)[None, :, None]
        position = self.next_position
        if isinstance(position, int):
            self.ancestors[:, :, position : position + 1] = beams
        else:
            index = position[:, None, None].expand(-1, self.beams, 1)
            self.ancestors = self.ancestors.scatter(2, index, beams.expand_as(index))

    def replace_sources(self, rows: Tensor, new: Cache) -> None:
        """Give some rows the memory of an empty cache with as many beams; `set_row_lengths` then restarts them."""
        for layer, new_layer in zip(self.layers, new.layers, strict=True):
            if layer.cross_attn is not None and new_layer.cross_attn is not None:
                layer.cross_attn.write_rows(rows, new_layer.cross_attn)
        if self.memory_lengths is not None:
            assert new.memory_lengths is not None
            self.memory_lengths = self.memory_lengths.index_copy(0, rows, new.memory_lengths)

    def set_row_lengths(self, lengths: Sequence[int]) -> None:
        """Set each row's length, its current one or 0 to restart it: counted on the host, so no synchronization."""
        device = self.layers[0].self_attn.keys.device
        self.used_columns = max(lengths) * self.beams
        ragged = min(lengths) != max(lengths)
        self.row_columns = torch.tensor(lengths, device=device) * self.beams if ragged else None
        if self.ancestors is not None:
            restarted = torch.tensor([length == 0 for length in lengths], device=device)
            self.ancestors = self.ancestors.masked_fill(restarted[:, None, None], -1)


@dataclass(eq=False)
class StateCache(Cache):
    """S state vectors of each of N recurrent or convolutional layers instead of keys and values; beams copy them."""

    initial: Tensor = field(kw_only=True)  # (B, 1, N, S, E) states of a beam that has read nothing
    states: Tensor = field(kw_only=True)  # (B, K, N, S, E)

    @classmethod
    def create(
        cls, initial: Tensor, memory: Sequence[KV | None], memory_lengths: Tensor | None, capacity: int, beams: int
    ) -> StateCache:
        """Create a cache for `capacity` tokens of each beam; `memory` is projected for each layer that attends."""
        columns = initial.new_empty(len(initial), 1, capacity * beams, 0)  # without features: tokens are only counted
        layers = [LayerCache(KV(columns, columns), kv) for kv in memory]
        states = initial.expand(-1, beams, -1, -1, -1)
        return cls(layers, memory_lengths=memory_lengths, beams=beams, initial=initial, states=states)

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        self.initial, self.states = self.initial.index_select(0, rows), self.states.index_select(0, rows)

    def reorder_beams(self, parents: Tensor) -> None:
        self.states = self.states.gather(1, parents[:, :, None, None, None].expand_as(self.states))

    def replace_sources(self, rows: Tensor, new: Cache) -> None:
        assert isinstance(new, StateCache)
        super().replace_sources(rows, new)
        self.initial = self.initial.index_copy(0, rows, new.initial)

    def set_row_lengths(self, lengths: Sequence[int]) -> None:
        super().set_row_lengths(lengths)
        restarted = torch.tensor([length == 0 for length in lengths], device=self.states.device)
        self.states = torch.where(restarted[:, None, None, None, None], self.initial, self.states)
