"""Batches for training: any one of them made at once from the store, or a walk through them with some made ahead.

`Batches.batch(epoch, step)` is a pure function of its numbers, the seed and the rank: seeking costs no more than taking
the next, several machines each take their own without a word between them, and how many threads work ahead
changes nothing. Which pairs stand in which batch is `plan`'s; a batch here becomes tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attent import settings
from attent.data.arrays import Array, concatenate_ranges
from attent.data.batch_plan import (
    BatchConfig,
    BatchPlan,
    build_batch_plan,
    compute_batch_shape,
    draw_epoch_order,
    load_or_build_plan,
)
from attent.data.pairs import CorpusError
from attent.data.token_store import StoreSide, TokenStore
from attent.nn import Packing

MAX_CACHED_EPOCHS = 3  # plans in memory: a walk is in one epoch, makes the next, and `batch` may ask for another
MAX_WEIGHT = 1000  # that a pair comes in an epoch: more is a mistake
MAX_EXAMPLES = 3  # of pairs that are too long
PLAN_CACHE_MIN_PAIRS = 10**6  # pairs from which planning takes a second: such plans are kept on disk


@dataclass(frozen=True)
class TokenBatch:
    """One side of a batch: ids (B, T) with the vocabulary's filler behind, and either lengths (B,) or a packing."""

    ids: Tensor
    lengths: Tensor | None
    packing: Packing | None
    num_tokens: int  # that are no filler

    def token_mask(self) -> Tensor:
        """Which ids are no filler, (B, T). Its id does not tell: in some imported vocabularies it is text too."""
        if self.packing is not None:
            return self.packing.segments >= 0
        assert self.lengths is not None
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def slice_rows(self, start: int, stop: int) -> TokenBatch:
        """Some of the rows. Padded ones are cut to the longest among them; packed ones keep their width."""
        if self.packing is not None:
            of = self.packing
            part = Packing(of.segments[start:stop], of.positions[start:stop], of.ends[start:stop], of.max_length)
            return TokenBatch(self.ids[start:stop], None, part, int((part.segments >= 0).sum()))
        assert self.lengths is not None
        lengths = self.lengths[start:stop]
        width = max(1, int(lengths.max()))
        return TokenBatch(self.ids[start:stop, :width], lengths, None, int(lengths.sum()))

    def tensors(self) -> list[Tensor]:
        if self.packing is not None:
            return [self.ids, self.packing.segments, self.packing.positions, self.packing.ends]
        assert self.lengths is not None
        return [self.ids, self.lengths]

    def with_tensors(self, tensors: list[Tensor]) -> TokenBatch:
        """The same text with these in place of its own `tensors`."""
        if self.packing is None:
            return TokenBatch(tensors[0], tensors[1], None, self.num_tokens)
        ids, segments, positions, ends = tensors
        return TokenBatch(ids, None, Packing(segments, positions, ends, self.packing.max_length), self.num_tokens)


@dataclass(frozen=True)
class PairBatch:
    """Pairs as tensors. The target is what is to be written, its end tokens included: `shift_right` makes from it
    what the decoder reads."""

    source: TokenBatch
    target: TokenBatch
    example_ids: Array  # their numbers in the store, in the order in which they stand in the rows
    flat_tensor: Tensor | None = None  # all numbers of the batch in one tensor, of which the others are views

    def __len__(self) -> int:
        """Rows."""
        return len(self.target.ids)

    @property
    def num_targets(self) -> int:
        """Terms of the loss: what is to be written."""
        return self.target.num_tokens

    @property
    def num_tokens(self) -> int:
        """Of both sides, without filler."""
        return self.source.num_tokens + self.target.num_tokens

    @property
    def num_padded_tokens(self) -> int:
        """Of the larger side, filler included."""
        return max(self.source.ids.numel(), self.target.ids.numel())

    @property
    def row_length(self) -> int:
        return max(self.source.ids.shape[1], self.target.ids.shape[1])

    @property
    def packing(self) -> tuple[Packing, Packing] | None:
        """As `Seq2Seq` takes it."""
        source, target = self.source.packing, self.target.packing
        return None if source is None or target is None else (source, target)

    def slice_rows(self, start: int, stop: int) -> PairBatch:
        """Some of the rows, as a batch of its own."""
        if (start, stop) == (0, len(self.target.ids)):
            return self
        source, target = self.source.slice_rows(start, stop), self.target.slice_rows(start, stop)
        ends = np.concatenate([[0], self._count_sentences().cumsum()])
        return PairBatch(source, target, self.example_ids[ends[start] : ends[stop]])

    def _count_sentences(self) -> Array:
        """How many stand in each row."""
        if self.target.packing is None:
            return (
                np.ones(len(self.target.ids), np.int64)
                if len(self.example_ids)
                else np.zeros(len(self.target.ids), np.int64)
            )
        counts: Array = (self.target.packing.segments.amax(1) + 1).numpy()
        return counts

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PairBatch:
        return self._from_flat(self._flatten().to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PairBatch:
        """A copy in memory that a GPU can fetch from by itself."""
        return self._from_flat(self._flatten().pin_memory())

    def _flatten(self) -> Tensor:
        """One tensor, so that a batch goes to the GPU in one piece."""
        if self.flat_tensor is not None:
            return self.flat_tensor
        return torch.cat([tensor.flatten() for tensor in (*self.source.tensors(), *self.target.tensors())])

    def _from_flat(self, flat_tensor: Tensor) -> PairBatch:
        old = [*self.source.tensors(), *self.target.tensors()]
        new = [
            part.view(like.shape) for part, like in zip(flat_tensor.split([t.numel() for t in old]), old, strict=True)
        ]
        half = len(new) // 2
        return PairBatch(
            self.source.with_tensors(new[:half]), self.target.with_tensors(new[half:]), self.example_ids, flat_tensor
        )


class LoaderPosition(NamedTuple):
    """Where a walk stands: all the state there is."""

    epoch: int
    step: int  # in the epoch


START_POSITION = LoaderPosition(0, 0)


@dataclass(frozen=True)
class EpochData:
    """The store of an epoch and how it is cut into batches."""

    store: TokenStore
    plan: BatchPlan


class PairLoader:
    """The batches of a store, for one of `world_size` machines: each step has one batch for every rank.

    With subword sampling every epoch has other ids: `resampled` then gives the store of an epoch.
    """

    def __init__(
        self,
        store: TokenStore,
        config: BatchConfig,
        *,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        rank: int = 0,
        world_size: int = 1,
        store_for_epoch: Callable[[int], TokenStore] | None = None,
    ) -> None:
        if seed < 0:
            raise ValueError(f"`seed` must be 0 or more, but is {seed}")
        if not 0 <= rank < world_size:
            raise ValueError(f"`rank` must be from 0 to {world_size - 1} (`world_size`={world_size}), but is {rank}")
        self.store, self.config, self.seed, self.rank, self.world_size = store, config, seed, rank, world_size
        self.weights = _check_weights(weights, len(store.meta.parts))
        self.store_for_epoch = store_for_epoch
        self.shape = compute_batch_shape(store.source.lengths(), store.target.lengths(), config)
        self._epochs: OrderedDict[int, EpochData] = OrderedDict()

    def get_epoch(self, epoch: int) -> EpochData:
        """The plan of an epoch; the last few are kept."""
        found = self._epochs.get(epoch)
        if found is None:
            store = self.store if self.store_for_epoch is None else self.store_for_epoch(epoch)
            found = self._epochs[epoch] = EpochData(store, self._load_plan(store, epoch))
            while len(self._epochs) > MAX_CACHED_EPOCHS:
                self._epochs.popitem(last=False)
        return found

    def _load_plan(self, store: TokenStore, epoch: int) -> BatchPlan:
        source, target = store.source.lengths(), store.target.lengths()

        def make() -> BatchPlan:
            order = draw_epoch_order([part.pairs for part in store.meta.parts], self.weights, self.seed, epoch)
            return build_batch_plan(source, target, order, self.config, (self.seed, epoch), self.shape)

        facts = (settings.to_dict(self.config), self.shape, self.weights, self.seed, epoch)
        return load_or_build_plan(store.folder / "plans", facts, make) if len(store) >= PLAN_CACHE_MIN_PAIRS else make()

    def num_steps(self, epoch: int) -> int:
        """How many steps the epoch has; the same for every rank."""
        return -(-len(self.get_epoch(epoch).plan) // self.world_size)

    def describe_too_long(self, epoch: int = 0) -> str | None:
        """A sentence about the pairs that are too long, or None if there are none: they are never left out silently."""
        found = self.get_epoch(epoch)
        long = np.unique(found.plan.too_long_pairs)
        if not len(long):
            return None
        what = "dropped" if self.config.too_long == "drop" else "cut"
        such = ", ".join(found.store.format_location(pair) for pair in long[:MAX_EXAMPLES])
        return (
            f"{len(long):,} of {len(found.store):,} pairs have more than {self.shape.max_source_length} source or "
            f"{self.shape.max_target_length} target tokens and are {what} (such as {such}); a larger `max_tokens` keeps more"
        )

    def get_batch(self, epoch: int, step: int) -> PairBatch:
        """This rank's batch. Where the last step has none left for it, one without pairs."""
        if not 0 <= step < self.num_steps(epoch):
            raise IndexError(f"epoch {epoch} has {self.num_steps(epoch)} steps, so there is no step {step}")
        return self._build_batch(self.get_epoch(epoch), step)

    def _build_batch(self, epoch: EpochData, step: int) -> PairBatch:
        """A pure function, called by several threads at once."""
        pairs, row = epoch.plan.get_batch(step * self.world_size + self.rank)
        rows, room = self.shape.rows or max(1, len(pairs)), self.shape.row_capacity
        widths = (room.source, room.target) if self.shape.rows else (None, None)
        pad = epoch.store.meta.pad_ids
        source = RowLayout.from_pairs(
            epoch.store.source, pairs, row, (rows, widths[0], pad["source"]), self.shape.max_source_length
        )
        target = RowLayout.from_pairs(
            epoch.store.target, pairs, row, (rows, widths[1], pad["target"]), self.shape.max_target_length
        )
        if self.shape.rows:
            return PairBatch(source.to_packed(room.max_sentences), target.to_packed(room.max_sentences), pairs)
        return PairBatch(source.to_padded(), target.to_padded(), pairs)

    def iter_batches(
        self, start: LoaderPosition = START_POSITION, *, workers: int = 1, prefetch: int = 8, pin_memory: bool = False
    ) -> Iterator[tuple[LoaderPosition, PairBatch]]:
        """All batches from `start` on, epoch after epoch, without end.

        `workers` threads make up to `ahead` of them beforehand; with none, each is made when it is asked for. The
        batches are the same.
        """

        def make(epoch: EpochData, step: int) -> PairBatch:
            batch = self._build_batch(epoch, step)
            return batch.pin_memory() if pin_memory else batch

        if not workers:
            for position, epoch in self._iter_positions(start):
                yield position, make(epoch, position.step)
            return
        pool = ThreadPoolExecutor(workers)
        waiting: deque[tuple[LoaderPosition, Future[PairBatch]]] = deque()
        try:
            for position, epoch in self._iter_positions(start):
                waiting.append((position, pool.submit(make, epoch, position.step)))
                if len(waiting) >= max(1, prefetch):
                    place, batch = waiting.popleft()
                    yield place, batch.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _iter_positions(self, start: LoaderPosition) -> Iterator[tuple[LoaderPosition, EpochData]]:
        """Every step from `start` on. The next epoch is planned while this one is walked."""
        number, step = start
        if not 0 <= step < max(1, self.num_steps(number)):
            raise IndexError(
                f"epoch {number} has {self.num_steps(number)} steps, so that no walk can start at step {step}"
            )
        with ThreadPoolExecutor(1) as planner:
            epoch = self.get_epoch(number)
            while True:
                steps = -(-len(epoch.plan) // self.world_size)
                if not steps:
                    raise CorpusError(f"epoch {number} has no pairs: none was left by the filters and the length limit")
                following = planner.submit(self.get_epoch, number + 1)
                for at in range(step, steps):
                    yield LoaderPosition(number, at), epoch
                epoch, number, step = following.result(), number + 1, 0


def _check_weights(weights: Sequence[float] | None, num_parts: int) -> list[float]:
    if weights is None:
        return [1.0] * num_parts
    if len(weights) != num_parts or not all(0 < weight < MAX_WEIGHT for weight in weights):
        raise ValueError(
            f"`weights` must be {num_parts} numbers over 0 and under {MAX_WEIGHT}, one a corpus, but are {list(weights)}"
        )
    return [float(weight) for weight in weights]


# --- from numbers in the store to tensors ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RowLayout:
    """Sentences of one side laid into rows: for each token where it comes from and where it goes."""

    ids: Array  # (B, T)
    token_slots: Array  # of each token, in the rows laid end to end
    lengths: Array  # of each sentence
    rows: Array  # of each sentence
    columns: Array  # where in its row a sentence begins
    max_length: int

    @classmethod
    def from_pairs(
        cls, side: StoreSide, pair_ids: Array, row: Array, frame: tuple[int, int | None, int], max_length: int
    ) -> RowLayout:
        """`frame` is rows, width (None: as wide as need be) and what to fill up with."""
        rows, width, pad = frame
        starts = side.offsets[pair_ids]
        lengths = np.minimum(side.offsets[pair_ids + 1] - starts, max_length)
        before = lengths.cumsum() - lengths
        column = before - before[np.searchsorted(row, row)]  # less what stands in the rows above
        width = int((column + lengths).max(initial=1)) if width is None else width
        slots = concatenate_ranges(row * width + column, lengths)
        ids = np.full(rows * width, pad, np.int64)
        ids[slots] = side.gather(starts, lengths)
        return cls(ids.reshape(rows, width), slots, lengths, row, column, max_length)

    def to_padded(self) -> TokenBatch:
        """A sentence a row."""
        lengths = np.zeros(len(self.ids), np.int64)
        lengths[self.rows] = self.lengths
        return TokenBatch(torch.from_numpy(self.ids), torch.from_numpy(lengths), None, len(self.token_slots))

    def to_packed(self, max_sentences: int) -> TokenBatch:
        """Rows of several. `max_tokens` is that of the corpus, not of the batch, so that one compiled graph serves all."""
        number = np.arange(len(self.rows)) - np.searchsorted(self.rows, self.rows)  # of the sentence in its row
        segments = np.full(self.ids.size, -1, np.int64)
        positions = np.zeros(self.ids.size, np.int64)
        ends = np.zeros((len(self.ids), max_sentences), np.int64)
        segments[self.token_slots] = np.repeat(number, self.lengths)
        positions[self.token_slots] = concatenate_ranges(np.zeros_like(self.lengths), self.lengths)
        ends[self.rows, number] = self.columns + self.lengths
        ends = np.maximum.accumulate(ends, 1)
        shaped = [torch.from_numpy(tokens.reshape(self.ids.shape)) for tokens in (segments, positions)]
        packing = Packing(shaped[0], shaped[1], torch.from_numpy(ends), self.max_length)
        return TokenBatch(torch.from_numpy(self.ids), None, packing, len(self.token_slots))
