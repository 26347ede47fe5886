"""Batch loaders: batches as tensors, fetched by (epoch, batch index) or iterated with prefetching threads.

A batch is a pure function of its epoch, its index and the seed: resuming needs two integers, ranks need no
communication, and the number of threads changes nothing. `batch_plan` decides which pairs form a batch.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from attent.data import batch_plan
from attent.data.arrays import Array, concatenate_ranges, index_in_group
from attent.data.batch_plan import BatchConfig, BatchPlan
from attent.data.pairs import CorpusError
from attent.data.token_store import EpochStores, TokenSequences, TokenStore
from attent.nn import Packing
from attent.storage.errors import AttentError

MAX_CACHED_EPOCHS = 3  # the current one, the next, and one that `get_batch` may be called with
MAX_WEIGHT = 1000  # repetitions of a pair in an epoch; more is a mistake
MAX_EXAMPLES = 3  # locations of pairs that are too long

T = TypeVar("T")


@dataclass(frozen=True)
class TokenBatch:
    """Token ids (B, T), padded at the end, with either lengths (B,) or a packing."""

    ids: Tensor
    lengths: Tensor | None
    packing: Packing | None
    num_tokens: int  # without padding

    def token_mask(self) -> Tensor:
        """Return True where there is no padding, (B, T). Some imported vocabularies use the pad id in text too."""
        if self.packing is not None:
            return self.packing.segments >= 0
        assert self.lengths is not None
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def slice_rows(self, start: int, stop: int) -> "TokenBatch":
        """Return some rows: padded ones cut to the longest among them, packed ones with their width."""
        if self.packing is not None:
            old = self.packing
            packing = Packing(old.segments[start:stop], old.positions[start:stop], old.ends[start:stop], old.max_length)
            return TokenBatch(self.ids[start:stop], None, packing, int((packing.segments >= 0).sum()))
        assert self.lengths is not None
        lengths = self.lengths[start:stop]
        width = max(1, int(lengths.max()))
        return TokenBatch(self.ids[start:stop, :width], lengths, None, int(lengths.sum()))

    def tensors(self) -> list[Tensor]:
        if self.packing is not None:
            return [self.ids, self.packing.segments, self.packing.positions, self.packing.ends]
        assert self.lengths is not None
        return [self.ids, self.lengths]

    def with_tensors(self, tensors: list[Tensor]) -> "TokenBatch":
        if self.packing is None:
            return TokenBatch(tensors[0], tensors[1], None, self.num_tokens)
        ids, segments, positions, ends = tensors
        return TokenBatch(ids, None, Packing(segments, positions, ends, self.packing.max_length), self.num_tokens)


@dataclass(frozen=True)
class TensorBatch:
    """A batch whose fields are tensors, token batches and values that stay on the host."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors, also those of token batches."""
        values = (value for name, value in vars(self).items() if name != "flat_tensor")
        groups = (value.tensors() if isinstance(value, TokenBatch) else [value] for value in values)
        return [value for group in groups for value in group if isinstance(value, Tensor)]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """Replace all tensors, in the same order."""
        remaining, changes = iter(tensors), dict[str, Any]()
        for name, value in vars(self).items():
            if isinstance(value, TokenBatch):
                changes[name] = value.with_tensors(list(islice(remaining, len(value.tensors()))))
            elif isinstance(value, Tensor) and name != "flat_tensor":
                changes[name] = next(remaining)
        return replace(self, **changes)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self.with_tensors(tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors())

    def pin_memory(self) -> Self:
        return self.with_tensors(tensor.pin_memory() for tensor in self.tensors())


@dataclass(frozen=True)
class FlatBatch(TensorBatch):
    """A batch whose tensors are copied as one, so that it takes a single transfer to the GPU."""

    flat_tensor: Tensor | None = field(default=None, kw_only=True)  # all values; the other tensors are views of it

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self._from_flat(self._flatten().to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._from_flat(self._flatten().pin_memory())

    def _flatten(self) -> Tensor:
        flat = self.flat_tensor
        return torch.cat([tensor.flatten() for tensor in self.tensors()]) if flat is None else flat

    def _from_flat(self, flat_tensor: Tensor) -> Self:
        old = self.tensors()
        parts = flat_tensor.split([tensor.numel() for tensor in old])
        views = (part.view(tensor.shape) for part, tensor in zip(parts, old, strict=True))
        return replace(self.with_tensors(views), flat_tensor=flat_tensor)


@dataclass(frozen=True)
class PairBatch(FlatBatch):
    """Source and target sentences. The target has its end tokens; `shift_right` makes the decoder input from it."""

    source: TokenBatch
    target: TokenBatch
    example_ids: Array  # indices of the pairs in the store, in row order

    def __len__(self) -> int:
        return len(self.target.ids)

    @property
    def num_targets(self) -> int:
        """Terms of the loss."""
        return self.target.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides without padding."""
        return self.source.num_tokens + self.target.num_tokens

    @property
    def num_padded_tokens(self) -> int:
        """Tokens of the larger side with padding."""
        return max(self.source.ids.numel(), self.target.ids.numel())

    @property
    def row_length(self) -> int:
        return max(self.source.ids.shape[1], self.target.ids.shape[1])

    @property
    def packing(self) -> tuple[Packing, Packing] | None:
        """Packing of both sides, the argument of `Seq2Seq`."""
        source, target = self.source.packing, self.target.packing
        return None if source is None or target is None else (source, target)

    def slice_rows(self, start: int, stop: int) -> "PairBatch":
        if (start, stop) == (0, len(self)):
            return self
        source, target = self.source.slice_rows(start, stop), self.target.slice_rows(start, stop)
        if self.target.packing is None:  # one sentence per row
            return PairBatch(source, target, self.example_ids[start:stop])
        ends = [0, *(self.target.packing.segments.amax(1) + 1).cumsum(0).tolist()]
        return PairBatch(source, target, self.example_ids[ends[start] : ends[stop]])


class LoaderPosition(NamedTuple):
    """The whole state of a loader."""

    epoch: int
    batch_index: int  # in the epoch


START_POSITION = LoaderPosition(0, 0)


BatchT = TypeVar("BatchT", bound=TensorBatch)


class PrefetchLoader(Generic[BatchT]):
    """Base of all loaders; subclasses define `num_batches` and `build_batch`, which several threads may call."""

    def num_batches(self, epoch: int) -> int:
        raise NotImplementedError

    def build_batch(self, epoch: int, batch_index: int) -> BatchT:
        raise NotImplementedError

    def get_batch(self, epoch: int, batch_index: int) -> BatchT:
        if not 0 <= batch_index < self.num_batches(epoch):
            raise IndexError(f"epoch {epoch} has {self.num_batches(epoch)} batches, so there is no batch {batch_index}")
        return self.build_batch(epoch, batch_index)

    def describe_too_long(self, epoch: int = 0) -> str | None:
        """Describe the examples that are dropped or truncated, if there are any."""
        return None

    def iter_batches(
        self, start: LoaderPosition = START_POSITION, *, workers: int = 1, prefetch: int = 8, pin_memory: bool = False
    ) -> Iterator[tuple[LoaderPosition, BatchT]]:
        """Yield all batches from `start` on, epoch after epoch, without end.

        `workers` threads keep up to `prefetch` of them ready; with no workers, each is built on demand.
        """

        def load(position: LoaderPosition) -> BatchT:
            batch = self.get_batch(*position)
            return batch.pin_memory() if pin_memory else batch

        if not workers:
            try:
                for position in self._iter_positions(start):
                    yield position, load(position)
            finally:
                self.release_workers()
            return
        pool = ThreadPoolExecutor(workers)
        queue: deque[tuple[LoaderPosition, Future[BatchT]]] = deque()
        try:
            for position in self._iter_positions(start):
                queue.append((position, pool.submit(load, position)))
                if len(queue) >= max(1, prefetch):
                    first, batch = queue.popleft()
                    yield first, batch.result()
        finally:
            self.release_workers()
            pool.shutdown(cancel_futures=True)

    def release_workers(self) -> None:
        """Stop the worker processes that prepare epochs, if there are any."""

    def _iter_positions(self, start: LoaderPosition) -> Iterator[LoaderPosition]:
        """Yield every position from `start` on. The next epoch is planned in the background meanwhile."""
        epoch, first = start
        with ThreadPoolExecutor(1) as planner:
            while True:
                num_batches = self.num_batches(epoch)
                if not num_batches:
                    raise CorpusError(f"epoch {epoch} has no batches: filters and length limit leave no examples")
                if not 0 <= first < num_batches:
                    raise IndexError(f"epoch {epoch} has {num_batches} batches, so it cannot start at batch {first}")
                next_epoch = planner.submit(self.num_batches, epoch + 1)
                for batch_index in range(first, num_batches):
                    yield LoaderPosition(epoch, batch_index)
                next_epoch.result()
                epoch, first = epoch + 1, 0


class EpochCache(Generic[T]):
    """Values built once per epoch, of which the last few are kept. One thread builds, others wait."""

    def __init__(self, build: Callable[[int], T]) -> None:
        self._build, self._lock = build, threading.Lock()
        self._entries: OrderedDict[int, Future[T]] = OrderedDict()

    def __call__(self, epoch: int) -> T:
        with self._lock:
            if is_new := epoch not in self._entries:
                self._entries[epoch] = Future()
            entry = self._entries[epoch]
            while len(self._entries) > MAX_CACHED_EPOCHS:
                self._entries.popitem(last=False)
        if is_new:
            try:
                entry.set_result(self._build(epoch))
            except BaseException as error:  # noqa: BLE001 - raised by `result` in every waiting thread
                with self._lock:
                    self._entries.pop(epoch, None)  # the next call tries again
                entry.set_exception(error)
        return entry.result()


@dataclass(frozen=True)
class EpochData:
    store: TokenStore
    plan: BatchPlan


class PairLoader(PrefetchLoader[PairBatch]):
    """Batches of a token store, the same for every rank.

    With augmentation every epoch has other token ids: `store_for_epoch` returns the store of an epoch.
    """

    def __init__(
        self,
        store: TokenStore,
        config: BatchConfig,
        *,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        store_for_epoch: Callable[[int], TokenStore] | None = None,
    ) -> None:
        if seed < 0:
            raise AttentError(f"`seed` must be 0 or more, but is {seed}")
        self.store, self.config, self.seed = store, config, seed
        num_parts = len(store.meta.parts)
        self.weights = [1.0] * num_parts if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != num_parts or not all(0 < weight < MAX_WEIGHT for weight in self.weights):
            required = f"{num_parts} numbers over 0 and under {MAX_WEIGHT}, one per corpus"
            raise AttentError(f"`weights` must be {required}, but are {self.weights}")
        self.store_for_epoch = store_for_epoch
        self.shape = batch_plan.compute_batch_shape(store.source.lengths, store.target.lengths, config)
        self.get_epoch = EpochCache(self._build_epoch)

    def _build_epoch(self, epoch: int) -> EpochData:
        store = self.store if self.store_for_epoch is None else self.store_for_epoch(epoch)
        sizes = [part.pairs for part in store.meta.parts]
        order = batch_plan.draw_epoch_order(sizes, self.weights, self.seed, epoch)
        lengths = store.source.lengths, store.target.lengths
        plan = batch_plan.build_batch_plan(*lengths, order, self.config, (self.seed, epoch), self.shape)
        return EpochData(store, plan)

    def num_batches(self, epoch: int) -> int:
        return len(self.get_epoch(epoch).plan)

    def release_workers(self) -> None:
        if isinstance(self.store_for_epoch, EpochStores):
            self.store_for_epoch.close()

    def describe_too_long(self, epoch: int = 0) -> str | None:
        store, shape = self.store, self.shape
        source, target = store.source.lengths, store.target.lengths
        (pairs,) = np.nonzero((source > shape.max_source_length) | (target > shape.max_target_length))
        if not len(pairs):
            return None
        action = "dropped" if self.config.too_long == "drop" else "truncated"
        examples = ", ".join(store.format_location(pair) for pair in pairs[:MAX_EXAMPLES])
        limits = f"{shape.max_source_length} source or {shape.max_target_length} target tokens"
        problem = f"{len(pairs):,} of {len(store):,} pairs have more than {limits} and are {action}"
        return f"{problem} (such as {examples}); raise `max_tokens` to keep more"

    def build_batch(self, epoch: int, batch_index: int) -> PairBatch:
        data, shape, capacity = self.get_epoch(epoch), self.shape, self.shape.row_capacity
        pairs, rows = data.plan.get_batch(batch_index)
        fixed_shape: tuple[int, int | None] = (len(pairs), None)
        if self.config.layout == "fixed":
            sides = (data.store.source, data.store.target)
            longest = [int((side.offsets[pairs + 1] - side.offsets[pairs]).max(initial=1)) for side in sides]
            limits = (shape.max_source_length, shape.max_target_length)
            fixed_shape = batch_plan.compute_fixed_shape(max(map(min, longest, limits)), capacity)

        def build_side(sequences: TokenSequences, width: int, pad_id: int, max_length: int) -> TokenBatch:
            batch_shape = (shape.rows, width) if shape.rows else fixed_shape
            layout = RowLayout.from_sequences(sequences, pairs, rows, batch_shape, pad_id=pad_id, max_length=max_length)
            return layout.to_batch(capacity.max_sentences if shape.rows else None)

        store, pad_ids = data.store, data.store.meta.pad_ids
        source = build_side(store.source, capacity.source, pad_ids["source"], shape.max_source_length)
        target = build_side(store.target, capacity.target, pad_ids["target"], shape.max_target_length)
        return PairBatch(source, target, pairs)


@dataclass(frozen=True)
class RowLayout:
    """Sentences placed in the rows of a batch."""

    ids: Array  # (B, T)
    token_slots: Array  # of each token: its index in the flattened rows
    lengths: Array  # of each sentence
    rows: Array  # of each sentence
    columns: Array  # of each sentence: where it begins in its row
    max_length: int

    @classmethod
    def from_sequences(
        cls,
        sequences: TokenSequences,
        indices: Array,
        rows: Array,
        shape: tuple[int, int | None],
        *,
        pad_id: int,
        max_length: int,
    ) -> Self:
        """Place the sequences `indices` in their `rows`, in order; a width of None is the widest row's."""
        num_rows, width = shape
        starts = sequences.offsets[indices]
        lengths = np.minimum(sequences.offsets[indices + 1] - starts, max_length)
        before = lengths.cumsum() - lengths
        columns = before - before[np.searchsorted(rows, rows)]  # less the tokens of earlier rows
        width = int((columns + lengths).max(initial=1)) if width is None else width
        slots = concatenate_ranges(rows * width + columns, lengths)
        ids = np.full(num_rows * width, pad_id, np.int64)
        ids[slots] = sequences.gather(starts, lengths)
        return cls(ids.reshape(num_rows, width), slots, lengths, rows, columns, max_length)

    def to_batch(self, max_sentences: int | None) -> TokenBatch:
        """Return packed rows with up to `max_sentences` each, or padded rows with one sentence each (None)."""
        ids = torch.from_numpy(self.ids)
        if max_sentences is None:
            lengths = np.zeros(len(self.ids), np.int64)
            lengths[self.rows] = self.lengths
            return TokenBatch(ids, torch.from_numpy(lengths), None, len(self.token_slots))
        segment = self.sentence_in_row()
        segments = np.full(self.ids.size, -1, np.int64)
        positions = np.zeros(self.ids.size, np.int64)
        ends = np.zeros((len(self.ids), max_sentences), np.int64)
        segments[self.token_slots] = np.repeat(segment, self.lengths)
        positions[self.token_slots] = index_in_group(self.lengths)
        ends[self.rows, segment] = self.columns + self.lengths
        ends = np.maximum.accumulate(ends, 1)
        shaped = [torch.from_numpy(array.reshape(self.ids.shape)) for array in (segments, positions)]
        # `max_length` is that of the corpus, not of the batch, so that one compiled graph serves all batches.
        packing = Packing(shaped[0], shaped[1], torch.from_numpy(ends), self.max_length)
        return TokenBatch(ids, None, packing, len(self.token_slots))

    def sentence_in_row(self) -> Array:
        return np.arange(len(self.rows)) - np.searchsorted(self.rows, self.rows)
