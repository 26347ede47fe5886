"""Batches of text that is read by itself: windows of a running text, or whole texts packed into rows, and for each what
is to be told: the next word, the words behind masks, or a label.

Every batch is a pure function of the seed, the epoch and the step. Pairs of texts are `batches`' business, spans
`spans`'; where the ids come from is told in `encoded`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from attent.data.arrays import Array, concatenate_ranges, draw_permutation
from attent.data.base_loader import PrefetchLoader
from attent.data.batch_plan import BatchConfig, BatchPlan, build_batch_plan, compute_batch_shape, draw_epoch_order
from attent.data.encoded_texts import EncodedTexts
from attent.data.loader import RowLayout, TokenBatch
from attent.data.token_store import StoreSide
from attent.nn import Packing

OFFSET_STREAM, WINDOW_STREAM, MASK_STREAM = 31, 32, 33  # what is drawn: each with a seed of its own
MASKED_FRACTION, REPLACE_BY_MASK, REPLACE_BY_RANDOM = (
    0.15,
    0.8,
    0.1,
)  # of the words are to be told; of these become a mask, or another word (BERT)
MIN_WINDOWS_PER_DOCUMENT = (
    4  # windows that a document fills on the average, from which on each window is of one document only
)
MAX_CACHED_EPOCHS = 3
IGNORE_INDEX = -1  # in `wanted`
T = TypeVar("T")


@dataclass(frozen=True)
class LabeledBatch:
    """What is read, and what is to be told of it: of each token (`places` is None), at some places of each row, or of
    each text of a row."""

    inputs: TokenBatch
    labels: Tensor  # (B, M) ids or labels; -1: nothing is to be told here
    label_positions: Tensor | None  # (B, M) where in its row
    per_token: bool  # `wanted` stands beside the tokens
    num_targets: int
    example_ids: Array
    flat_tensor: Tensor | None = None

    @classmethod
    def from_labels(
        cls,
        inputs: TokenBatch,
        labels: Tensor,
        example_ids: Array,
        *,
        label_positions: Tensor | None = None,
        per_token: bool,
    ) -> LabeledBatch:
        return cls(inputs, labels, label_positions, per_token, int((labels >= 0).sum()), example_ids)

    def __len__(self) -> int:
        return len(self.inputs.ids)

    @property
    def num_tokens(self) -> int:
        return self.inputs.num_tokens

    @property
    def num_padded_tokens(self) -> int:
        return self.inputs.ids.numel()

    @property
    def row_length(self) -> int:
        return self.inputs.ids.shape[1]

    def slice_rows(self, start: int, stop: int) -> LabeledBatch:
        if (start, stop) == (0, len(self)):
            return self
        text = self.inputs.slice_rows(start, stop)
        wanted = self.labels[start:stop, : text.ids.shape[1]] if self.per_token else self.labels[start:stop]
        places = None if self.label_positions is None else self.label_positions[start:stop]
        return LabeledBatch.from_labels(
            text, wanted, self.example_ids, label_positions=places, per_token=self.per_token
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LabeledBatch:
        return self._from_flat(self._flatten().to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LabeledBatch:
        """A copy in memory that a GPU can fetch from by itself."""
        return self._from_flat(self._flatten().pin_memory())

    def _tensors(self) -> list[Tensor]:
        return [self.labels, *([] if self.label_positions is None else [self.label_positions]), *self.inputs.tensors()]

    def _flatten(self) -> Tensor:
        """One tensor, so that a batch goes to the GPU in one piece."""
        return (
            torch.cat([tensor.flatten() for tensor in self._tensors()])
            if self.flat_tensor is None
            else self.flat_tensor
        )

    def _from_flat(self, flat_tensor: Tensor) -> LabeledBatch:
        old = self._tensors()
        new = [
            part.view(like.shape) for part, like in zip(flat_tensor.split([t.numel() for t in old]), old, strict=True)
        ]
        wanted, rest = new[0], new[1:]
        places = None if self.label_positions is None else rest.pop(0)
        return LabeledBatch(
            self.inputs.with_tensors(rest),
            wanted,
            places,
            self.per_token,
            self.num_targets,
            self.example_ids,
            flat_tensor,
        )


class EpochCache(Generic[T]):
    """What is worked out once for each epoch; the last few are remembered, whichever thread asks."""

    def __init__(self, build: Callable[[int], T]) -> None:
        self._build, self._lock = build, threading.Lock()
        self._entries: OrderedDict[int, T] = OrderedDict()

    def __call__(self, epoch: int) -> T:
        with self._lock:
            if epoch not in self._entries:
                self._entries[epoch] = self._build(epoch)
                while len(self._entries) > MAX_CACHED_EPOCHS:
                    self._entries.popitem(last=False)
            return self._entries[epoch]


# ---- windows of running text -----------------------------------------------------------------------------------------


class WindowLoader(PrefetchLoader[LabeledBatch]):
    """Documents cut into windows of `longest` tokens, behind each of which the next is to be told.

    Every epoch cuts elsewhere, and all of them together tell each token once. Of long documents each window is of one
    alone; short ones stand several in a window, packed, so that none sees another. Which it is, the corpus decides.
    """

    def __init__(
        self,
        documents: EncodedTexts,
        *,
        batch_tokens: int,
        window_size: int,
        pad: int,
        seed: int = 0,
        fixed: bool = False,
    ) -> None:
        """`fixed`: as they come and always cut at the same places, for validation."""
        self.documents, self.window_size, self.pad, self.seed, self.fixed = documents, window_size, pad, seed, fixed
        self.batch_rows = max(1, batch_tokens // window_size)
        self.is_packed = len(documents) > 1 and float(documents.lengths.mean()) < MIN_WINDOWS_PER_DOCUMENT * window_size
        self.max_segments = _max_segments_in_window(documents.offsets, window_size) if self.is_packed else 0
        self.epoch_windows = EpochCache(self._build_epoch)

    def _build_epoch(self, epoch: int) -> tuple[Array, Array]:
        """Windows in the order in which they come: where each begins and ends."""
        starts, stops = self.cut_windows(epoch)
        if self.fixed:
            return starts, stops
        order = draw_permutation(len(starts), (self.seed, epoch, WINDOW_STREAM))
        return starts[order], stops[order]

    def draw_offset(self, epoch: int) -> int:
        """How much shorter the first window of a document is."""
        return 0 if self.fixed else int(_draw_bits(1, (self.seed, epoch, OFFSET_STREAM))[0] % self.window_size)

    def cut_windows(self, epoch: int) -> tuple[Array, Array]:
        """Where each window begins, and where what it reads ends."""
        edges = self.documents.offsets[[0, -1]] if self.is_packed else self.documents.offsets
        reads = np.diff(edges) - 1  # the last token has none behind it
        offset = self.draw_offset(epoch)
        counts = np.where(reads > 0, -(-(reads + offset) // self.window_size), 0)
        number = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
        first, last = np.repeat(edges[:-1], counts), np.repeat(edges[1:] - 1, counts)
        starts = first + number * self.window_size - offset
        return np.maximum(starts, first), np.minimum(starts + self.window_size, last)

    def num_steps(self, epoch: int) -> int:
        return -(-len(self.epoch_windows(epoch)[0]) // self.batch_rows)

    def get_batch(self, epoch: int, step: int) -> LabeledBatch:
        chosen = slice(step * self.batch_rows, (step + 1) * self.batch_rows)
        starts, stops = (side[chosen] for side in self.epoch_windows(epoch))
        if not self.fixed:  # rows without text behind them, so that all shapes are the same
            starts, stops = (np.pad(side, (0, self.batch_rows - len(side))) for side in (starts, stops))
        return self._build_batch(starts, stops)

    def _build_batch(self, starts: Array, stops: Array) -> LabeledBatch:
        at = starts[:, None] + np.arange(self.window_size)
        real = at < stops[:, None]
        at = np.where(real, at, 0)
        stream = self.documents.ids
        ids = np.where(real, stream[at].astype(np.int64), self.pad)
        wanted = np.where(real, stream[np.where(real, at + 1, 0)].astype(np.int64), IGNORE_INDEX)
        lengths = stops - starts
        if not self.is_packed:
            text = TokenBatch(torch.from_numpy(ids), torch.from_numpy(lengths), None, int(lengths.sum()))
            return LabeledBatch.from_labels(text, torch.from_numpy(wanted), starts, per_token=True)
        document = np.searchsorted(self.documents.offsets, at, "right") - 1
        of_next = np.searchsorted(self.documents.offsets, at + 1, "right") - 1
        wanted[document != of_next] = IGNORE_INDEX
        packing = self._build_packing(at, starts, lengths, document, real)
        text = TokenBatch(torch.from_numpy(ids), None, packing, int(lengths.sum()))
        return LabeledBatch.from_labels(text, torch.from_numpy(wanted), starts, per_token=True)

    def _build_packing(self, at: Array, starts: Array, lengths: Array, document: Array, real: Array) -> Packing:
        first = document[:, :1]
        segments = np.where(real, document - first, -1)
        begins = np.maximum(self.documents.offsets[document], starts[:, None])
        positions = np.where(real, at - begins, 0)
        edges = first + 1 + np.arange(self.max_segments)  # the documents behind that of the first token
        after = self.documents.offsets[np.minimum(edges, len(self.documents.offsets) - 1)]
        ends = np.minimum(after - starts[:, None], lengths[:, None])
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in (segments, positions, ends)]
        return Packing(tensors[0], tensors[1], tensors[2], self.window_size)


def _max_segments_in_window(offsets: Array, window_size: int) -> int:
    """Documents of which a window can hold a part."""
    inside = np.searchsorted(offsets, offsets[:-1] + window_size, "left") - np.arange(len(offsets) - 1)
    return int(inside.max(initial=0)) + 1


def _draw_bits(count: int, seed: tuple[int, ...]) -> Array:
    """64 random bits each; numpy promises this stream for all its versions."""
    return np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)


# ---- whole texts -----------------------------------------------------------------------------------------------------

MakeLabels = Callable[
    [RowLayout, TokenBatch, Array, tuple[int, ...]], LabeledBatch
]  # sentences laid into rows, as text; their numbers; a seed


class TextLoader(PrefetchLoader[LabeledBatch]):
    """Whole texts, in packed rows or bucketed by length; `ask` says what is to be told of a batch."""

    def __init__(
        self,
        texts: EncodedTexts,
        config: BatchConfig,
        make_labels: MakeLabels,
        *,
        pad: int,
        seed: int = 0,
        fixed: bool = False,
    ) -> None:
        self.texts, self.config, self.make_labels, self.pad, self.seed, self.fixed = (
            texts,
            config,
            make_labels,
            pad,
            seed,
            fixed,
        )
        self.lengths = texts.lengths.astype(np.int32)
        self.sentences = StoreSide(texts.ids, texts.offsets)
        self.shape = compute_batch_shape(self.lengths, self.lengths, config)
        self.plans = EpochCache(self._build_plan)

    def _build_plan(self, epoch: int) -> BatchPlan:
        epoch = 0 if self.fixed else epoch
        order = draw_epoch_order([len(self.texts)], [1.0], self.seed, epoch)
        return build_batch_plan(self.lengths, self.lengths, order, self.config, (self.seed, epoch), self.shape)

    def num_steps(self, epoch: int) -> int:
        return len(self.plans(epoch))

    def get_batch(self, epoch: int, step: int) -> LabeledBatch:
        pairs, row = self.plans(epoch).get_batch(step)
        room = self.shape.row_capacity
        frame = (self.shape.rows or max(1, len(pairs)), room.source if self.shape.rows else None, self.pad)
        laid = RowLayout.from_pairs(self.sentences, pairs, row, frame, self.shape.max_source_length)
        text = laid.to_packed(room.max_sentences) if self.shape.rows else laid.to_padded()
        return self.make_labels(laid, text, pairs, (self.seed, 0 if self.fixed else epoch, step, MASK_STREAM))


@dataclass(frozen=True)
class TokenMasker:
    """15% of the words are to be told, drawn anew each time: of these 80% become a mask, 10% another word."""

    mask_id: int
    replacement_ids: Array  # ids that may stand for another word
    prefix_length: int  # tokens around each text that are no words
    suffix_length: int

    def __call__(
        self, layout: RowLayout, inputs: TokenBatch, example_ids: Array, seed: tuple[int, ...]
    ) -> LabeledBatch:
        ids = layout.ids.copy()
        height, width = ids.shape
        words = np.zeros(ids.size, bool)
        inner = np.maximum(layout.lengths - self.prefix_length - self.suffix_length, 0)
        words[concatenate_ranges(layout.rows * width + layout.columns + self.prefix_length, inner)] = True
        most = max(1, -(-int(width * MASKED_FRACTION) // 8) * 8) if layout.ids.size else 1
        raw = _draw_bits(ids.size + 2 * height * most, seed)
        places, count = self._choose_positions(raw[: ids.size].reshape(ids.shape), words.reshape(ids.shape), most)
        wanted = np.where(np.arange(places.shape[1]) < count[:, None], np.take_along_axis(ids, places, 1), IGNORE_INDEX)
        fate, other = (part.reshape(height, most)[:, : places.shape[1]] for part in np.split(raw[ids.size :], 2))
        share = fate.astype(np.float64) / 2.0**64
        new = np.where(share < REPLACE_BY_MASK, self.mask_id, np.take_along_axis(ids, places, 1))
        new = np.where(
            (share >= REPLACE_BY_MASK) & (share < REPLACE_BY_MASK + REPLACE_BY_RANDOM),
            self.replacement_ids[other % len(self.replacement_ids)],
            new,
        )
        rows = np.broadcast_to(np.arange(height)[:, None], places.shape)
        ids[rows[wanted >= 0], places[wanted >= 0]] = new[wanted >= 0]
        masked = inputs.with_tensors([torch.from_numpy(ids), *inputs.tensors()[1:]])
        return LabeledBatch.from_labels(
            masked, torch.from_numpy(wanted), example_ids, label_positions=torch.from_numpy(places), per_token=False
        )

    def _choose_positions(self, keys: Array, is_word: Array, max_labels: int) -> tuple[Array, Array]:
        """(B, M) places in each row, and how many of them count: the words with the lowest keys."""
        keys = np.where(is_word, keys >> np.uint64(1), np.uint64(2**64 - 1))
        there = is_word.sum(1)
        count = np.minimum(
            np.where(there > 0, np.maximum(1, np.rint(MASKED_FRACTION * there)), 0).astype(np.int64), max_labels
        )
        max_labels = min(max_labels, keys.shape[1])
        return np.argsort(keys, axis=1, kind="stable")[:, :max_labels].astype(np.int64), count


@dataclass(frozen=True)
class TextLabeler:
    """A label is to be told of each text."""

    labels: Array  # by the text's number

    def __call__(
        self, layout: RowLayout, inputs: TokenBatch, example_ids: Array, seed: tuple[int, ...]
    ) -> LabeledBatch:
        packing = inputs.packing
        wanted = np.full((len(layout.ids), 1 if packing is None else packing.ends.shape[1]), IGNORE_INDEX, np.int64)
        number = np.arange(len(layout.rows)) - np.searchsorted(layout.rows, layout.rows)
        wanted[layout.rows, number] = self.labels[example_ids]
        return LabeledBatch.from_labels(inputs, torch.from_numpy(wanted), example_ids, per_token=False)


def list_regular_ids(vocabulary_size: int, special_ids: Sequence[int]) -> Array:
    """The ids that stand for words."""
    return np.setdiff1d(np.arange(vocabulary_size), np.array(sorted(set(special_ids)), np.int64))
