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
from attent.data.arrays import Array, ragged
from attent.data.pairs import CorpusError
from attent.data.plan import BatchConfig, Plan, epoch_order, plan, remembered, shape
from attent.data.store import Side, Store
from attent.nn import Packing

KEPT_EPOCHS = 3  # plans in memory: a walk is in one epoch, makes the next, and `batch` may ask for another
MOST_TIMES = 1000  # that a pair comes in an epoch: more is a mistake
EXAMPLES = 3  # of pairs that are too long
REMEMBERED = 10**6  # pairs from which planning takes a second: such plans are kept on disk


@dataclass(frozen=True)
class Text:
    """One side of a batch: ids (B, T) with the vocabulary's filler behind, and either lengths (B,) or a packing."""

    ids: Tensor
    lengths: Tensor | None
    packing: Packing | None
    tokens: int  # that are no filler

    def real(self) -> Tensor:
        """Which ids are no filler, (B, T). Its id does not tell: in some imported vocabularies it is text too."""
        if self.packing is not None:
            return self.packing.segments >= 0
        assert self.lengths is not None
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def rows(self, start: int, stop: int) -> Text:
        """Some of the rows. Padded ones are cut to the longest among them; packed ones keep their width."""
        if self.packing is not None:
            of = self.packing
            part = Packing(of.segments[start:stop], of.positions[start:stop], of.ends[start:stop], of.longest)
            return Text(self.ids[start:stop], None, part, int((part.segments >= 0).sum()))
        assert self.lengths is not None
        lengths = self.lengths[start:stop]
        width = max(1, int(lengths.max()))
        return Text(self.ids[start:stop, :width], lengths, None, int(lengths.sum()))

    def tensors(self) -> list[Tensor]:
        if self.packing is not None:
            return [self.ids, self.packing.segments, self.packing.positions, self.packing.ends]
        assert self.lengths is not None
        return [self.ids, self.lengths]

    def with_tensors(self, tensors: list[Tensor]) -> Text:
        """The same text with these in place of its own `tensors`."""
        if self.packing is None:
            return Text(tensors[0], tensors[1], None, self.tokens)
        ids, segments, positions, ends = tensors
        return Text(ids, None, Packing(segments, positions, ends, self.packing.longest), self.tokens)


@dataclass(frozen=True)
class Batch:
    """Pairs as tensors. The target is what is to be written, its end tokens included: `shift_right` makes from it
    what the decoder reads."""

    source: Text
    target: Text
    pairs: Array  # their numbers in the store, in the order in which they stand in the rows
    whole: Tensor | None = None  # all numbers of the batch in one tensor, of which the others are views

    def __len__(self) -> int:
        """Rows."""
        return len(self.target.ids)

    @property
    def units(self) -> int:
        """Terms of the loss: what is to be written."""
        return self.target.tokens

    @property
    def tokens(self) -> int:
        """Of both sides, without filler."""
        return self.source.tokens + self.target.tokens

    @property
    def slots(self) -> int:
        """Of the larger side, filler included."""
        return max(self.source.ids.numel(), self.target.ids.numel())

    @property
    def width(self) -> int:
        return max(self.source.ids.shape[1], self.target.ids.shape[1])

    @property
    def packing(self) -> tuple[Packing, Packing] | None:
        """As `Seq2Seq` takes it."""
        source, target = self.source.packing, self.target.packing
        return None if source is None or target is None else (source, target)

    def rows(self, start: int, stop: int) -> Batch:
        """Some of the rows, as a batch of its own."""
        if (start, stop) == (0, len(self.target.ids)):
            return self
        source, target = self.source.rows(start, stop), self.target.rows(start, stop)
        ends = np.concatenate([[0], self._sentences().cumsum()])
        return Batch(source, target, self.pairs[ends[start] : ends[stop]])

    def _sentences(self) -> Array:
        """How many stand in each row."""
        if self.target.packing is None:
            return (
                np.ones(len(self.target.ids), np.int64) if len(self.pairs) else np.zeros(len(self.target.ids), np.int64)
            )
        counts: Array = (self.target.packing.segments.amax(1) + 1).numpy()
        return counts

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._of(self._joined().to(device, non_blocking=non_blocking))

    def pinned(self) -> Batch:
        """A copy in memory that a GPU can fetch from by itself."""
        return self._of(self._joined().pin_memory())

    def _joined(self) -> Tensor:
        """One tensor, so that a batch goes to the GPU in one piece."""
        if self.whole is not None:
            return self.whole
        return torch.cat([tensor.flatten() for tensor in (*self.source.tensors(), *self.target.tensors())])

    def _of(self, whole: Tensor) -> Batch:
        old = [*self.source.tensors(), *self.target.tensors()]
        new = [part.view(like.shape) for part, like in zip(whole.split([t.numel() for t in old]), old, strict=True)]
        half = len(new) // 2
        return Batch(self.source.with_tensors(new[:half]), self.target.with_tensors(new[half:]), self.pairs, whole)


class Position(NamedTuple):
    """Where a walk stands: all the state there is."""

    epoch: int
    step: int  # in the epoch


START = Position(0, 0)


@dataclass(frozen=True)
class Epoch:
    """The store of an epoch and how it is cut into batches."""

    store: Store
    plan: Plan


class Batches:
    """The batches of a store, for one of `ranks` machines: each step has one batch for every rank.

    With subword sampling every epoch has other ids: `resampled` then gives the store of an epoch.
    """

    def __init__(
        self,
        store: Store,
        config: BatchConfig,
        *,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        rank: int = 0,
        ranks: int = 1,
        resampled: Callable[[int], Store] | None = None,
    ) -> None:
        if seed < 0:
            raise ValueError(f"`seed` must be 0 or more, but is {seed}")
        if not 0 <= rank < ranks:
            raise ValueError(f"`rank` must be from 0 to {ranks - 1} (`ranks`={ranks}), but is {rank}")
        self.store, self.config, self.seed, self.rank, self.ranks = store, config, seed, rank, ranks
        self.weights = _checked_weights(weights, len(store.meta.parts))
        self.resampled = resampled
        self.shape = shape(store.source.lengths(), store.target.lengths(), config)
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()

    def epoch(self, number: int) -> Epoch:
        """The plan of an epoch; the last few are kept."""
        found = self._epochs.get(number)
        if found is None:
            store = self.store if self.resampled is None else self.resampled(number)
            found = self._epochs[number] = Epoch(store, self._plan(store, number))
            while len(self._epochs) > KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        return found

    def _plan(self, store: Store, number: int) -> Plan:
        source, target = store.source.lengths(), store.target.lengths()

        def make() -> Plan:
            order = epoch_order([part.pairs for part in store.meta.parts], self.weights, self.seed, number)
            return plan(source, target, order, self.config, (self.seed, number), self.shape)

        facts = (settings.to_dict(self.config), self.shape, self.weights, self.seed, number)
        return remembered(store.folder / "plans", facts, make) if len(store) >= REMEMBERED else make()

    def steps(self, epoch: int) -> int:
        """How many steps the epoch has; the same for every rank."""
        return -(-len(self.epoch(epoch).plan) // self.ranks)

    def too_long(self, epoch: int = 0) -> str | None:
        """A sentence about the pairs that are too long, or None if there are none: they are never left out silently."""
        found = self.epoch(epoch)
        long = np.unique(found.plan.too_long)
        if not len(long):
            return None
        what = "dropped" if self.config.too_long == "drop" else "cut"
        such = ", ".join(found.store.place(pair) for pair in long[:EXAMPLES])
        return (
            f"{len(long):,} of {len(found.store):,} pairs have more than {self.shape.source_limit} source or "
            f"{self.shape.target_limit} target tokens and are {what} (such as {such}); a larger `longest` keeps more"
        )

    def batch(self, epoch: int, step: int) -> Batch:
        """This rank's batch. Where the last step has none left for it, one without pairs."""
        if not 0 <= step < self.steps(epoch):
            raise IndexError(f"epoch {epoch} has {self.steps(epoch)} steps, so there is no step {step}")
        return self._batch(self.epoch(epoch), step)

    def _batch(self, epoch: Epoch, step: int) -> Batch:
        """A pure function, called by several threads at once."""
        pairs, row = epoch.plan.batch(step * self.ranks + self.rank)
        rows, room = self.shape.rows or max(1, len(pairs)), self.shape.room
        widths = (room.source, room.target) if self.shape.rows else (None, None)
        pad = epoch.store.meta.pad
        source = Laid.of(epoch.store.source, pairs, row, (rows, widths[0], pad["source"]), self.shape.source_limit)
        target = Laid.of(epoch.store.target, pairs, row, (rows, widths[1], pad["target"]), self.shape.target_limit)
        if self.shape.rows:
            return Batch(source.packed(room.sentences), target.packed(room.sentences), pairs)
        return Batch(source.padded(), target.padded(), pairs)

    def walk(
        self, start: Position = START, *, workers: int = 1, ahead: int = 8, pin: bool = False
    ) -> Iterator[tuple[Position, Batch]]:
        """All batches from `start` on, epoch after epoch, without end.

        `workers` threads make up to `ahead` of them beforehand; with none, each is made when it is asked for. The
        batches are the same.
        """

        def make(epoch: Epoch, step: int) -> Batch:
            batch = self._batch(epoch, step)
            return batch.pinned() if pin else batch

        if not workers:
            for position, epoch in self._positions(start):
                yield position, make(epoch, position.step)
            return
        pool = ThreadPoolExecutor(workers)
        waiting: deque[tuple[Position, Future[Batch]]] = deque()
        try:
            for position, epoch in self._positions(start):
                waiting.append((position, pool.submit(make, epoch, position.step)))
                if len(waiting) >= max(1, ahead):
                    place, batch = waiting.popleft()
                    yield place, batch.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _positions(self, start: Position) -> Iterator[tuple[Position, Epoch]]:
        """Every step from `start` on. The next epoch is planned while this one is walked."""
        number, step = start
        if not 0 <= step < max(1, self.steps(number)):
            raise IndexError(f"epoch {number} has {self.steps(number)} steps, so that no walk can start at step {step}")
        with ThreadPoolExecutor(1) as planner:
            epoch = self.epoch(number)
            while True:
                steps = -(-len(epoch.plan) // self.ranks)
                if not steps:
                    raise CorpusError(f"epoch {number} has no pairs: none was left by the filters and the length limit")
                following = planner.submit(self.epoch, number + 1)
                for at in range(step, steps):
                    yield Position(number, at), epoch
                epoch, number, step = following.result(), number + 1, 0


def _checked_weights(weights: Sequence[float] | None, parts: int) -> list[float]:
    if weights is None:
        return [1.0] * parts
    if len(weights) != parts or not all(0 < weight < MOST_TIMES for weight in weights):
        raise ValueError(
            f"`weights` must be {parts} numbers over 0 and under {MOST_TIMES}, one a corpus, but are {list(weights)}"
        )
    return [float(weight) for weight in weights]


# --- from numbers in the store to tensors ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Laid:
    """Sentences of one side laid into rows: for each token where it comes from and where it goes."""

    ids: Array  # (B, T)
    slots: Array  # of each token, in the rows laid end to end
    lengths: Array  # of each sentence
    row: Array  # of each sentence
    column: Array  # where in its row a sentence begins
    longest: int

    @classmethod
    def of(cls, side: Side, pairs: Array, row: Array, frame: tuple[int, int | None, int], limit: int) -> Laid:
        """`frame` is rows, width (None: as wide as need be) and what to fill up with."""
        rows, width, pad = frame
        starts = side.offsets[pairs]
        lengths = np.minimum(side.offsets[pairs + 1] - starts, limit)
        before = lengths.cumsum() - lengths
        column = before - before[np.searchsorted(row, row)]  # less what stands in the rows above
        width = int((column + lengths).max(initial=1)) if width is None else width
        slots = ragged(row * width + column, lengths)
        ids = np.full(rows * width, pad, np.int64)
        ids[slots] = side.gather(starts, lengths)
        return cls(ids.reshape(rows, width), slots, lengths, row, column, limit)

    def padded(self) -> Text:
        """A sentence a row."""
        lengths = np.zeros(len(self.ids), np.int64)
        lengths[self.row] = self.lengths
        return Text(torch.from_numpy(self.ids), torch.from_numpy(lengths), None, len(self.slots))

    def packed(self, sentences: int) -> Text:
        """Rows of several. `longest` is that of the corpus, not of the batch, so that one compiled graph serves all."""
        number = np.arange(len(self.row)) - np.searchsorted(self.row, self.row)  # of the sentence in its row
        segments = np.full(self.ids.size, -1, np.int64)
        positions = np.zeros(self.ids.size, np.int64)
        ends = np.zeros((len(self.ids), sentences), np.int64)
        segments[self.slots] = np.repeat(number, self.lengths)
        positions[self.slots] = ragged(np.zeros_like(self.lengths), self.lengths)
        ends[self.row, number] = self.column + self.lengths
        ends = np.maximum.accumulate(ends, 1)
        shaped = [torch.from_numpy(tokens.reshape(self.ids.shape)) for tokens in (segments, positions)]
        packing = Packing(shaped[0], shaped[1], torch.from_numpy(ends), self.longest)
        return Text(torch.from_numpy(self.ids), None, packing, len(self.slots))
