"""Batches of monolingual text with labels: the next token, masked tokens or spans, or a class per text.

`WindowLoader` cuts windows from documents, `TextLoader` packs or buckets whole texts. As in `loader`, every batch is a
pure function of seed, epoch and step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from attent.data.arrays import Array, concatenate_ranges, draw_permutation, index_in_group, random_bits
from attent.data.batch_plan import BatchConfig, BatchPlan, build_batch_plan, compute_batch_shape, draw_epoch_order
from attent.data.loader import EpochCache, FlatBatch, PrefetchLoader, RowLayout, TokenBatch
from attent.data.token_store import EncodedTexts, TokenSequences, TokenStore
from attent.nn import Packing

OFFSET_STREAM, WINDOW_STREAM, MASK_STREAM = 31, 32, 33  # random streams, part of the seed
# BERT, section 3.1: 15% of the tokens are predicted; 80% of them become a mask, 10% a random token.
MASKED_FRACTION, REPLACE_BY_MASK, REPLACE_BY_RANDOM = 0.15, 0.8, 0.1
MIN_WINDOWS_PER_DOCUMENT = 4  # on average; from here on a window holds one document only
IGNORE_INDEX = -1  # a label without loss
NOISE_DENSITY, MEAN_SPAN_LENGTH = 0.15, 3.0
MIN_TEXT_TOKENS = 2  # one is kept, one is removed
KEPT_STREAM, SPAN_STREAM = 41, 42  # random streams, part of the seed


@dataclass(frozen=True)
class LabeledBatch(FlatBatch):
    """Token ids and labels: one per token, one per text of a row, or one for each of `label_positions`."""

    inputs: TokenBatch
    labels: Tensor  # (B, M) token ids or classes; IGNORE_INDEX: no loss
    label_positions: Tensor | None  # (B, M) columns
    per_token: bool  # `labels` has the shape of the token ids
    num_targets: int
    example_ids: Array

    @classmethod
    def from_labels(
        cls, inputs: TokenBatch, labels: Tensor, example_ids: Array, positions: Tensor | None = None, *, per_token: bool
    ) -> Self:
        return cls(inputs, labels, positions, per_token, int((labels >= 0).sum()), example_ids)

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

    def slice_rows(self, start: int, stop: int) -> "LabeledBatch":
        if (start, stop) == (0, len(self)):
            return self
        inputs = self.inputs.slice_rows(start, stop)
        labels = self.labels[start:stop, : inputs.ids.shape[1]] if self.per_token else self.labels[start:stop]
        positions = None if self.label_positions is None else self.label_positions[start:stop]
        return LabeledBatch.from_labels(inputs, labels, self.example_ids, positions, per_token=self.per_token)


class WindowLoader(PrefetchLoader[LabeledBatch]):
    """Windows of `window_size` tokens with the next token as the label, for causal language models.

    Every epoch cuts at another offset and predicts each token once. Of long documents each window holds one; short
    documents are packed, several per window, without attention across them.
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
        """`fixed`: in order and always cut at the same offset, for validation."""
        self.documents, self.window_size, self.pad, self.seed, self.fixed = documents, window_size, pad, seed, fixed
        self.batch_rows = max(1, batch_tokens // window_size)
        self.is_packed = len(documents) > 1 and float(documents.lengths.mean()) < MIN_WINDOWS_PER_DOCUMENT * window_size
        starts = documents.offsets[:-1]
        overlapping = np.searchsorted(documents.offsets, starts + window_size, "left") - np.arange(len(starts))
        self.max_segments = int(overlapping.max(initial=0)) + 1 if self.is_packed else 0  # documents in a window
        self.epoch_windows = EpochCache(self._build_epoch)

    def _build_epoch(self, epoch: int) -> tuple[Array, Array]:
        """Return starts and stops of the windows in the order of the epoch."""
        starts, stops = self.cut_windows(epoch)
        if self.fixed:
            return starts, stops
        order = draw_permutation(len(starts), (self.seed, epoch, WINDOW_STREAM))
        return starts[order], stops[order]

    def draw_offset(self, epoch: int) -> int:
        return 0 if self.fixed else int(random_bits(1, (self.seed, epoch, OFFSET_STREAM))[0] % self.window_size)

    def cut_windows(self, epoch: int) -> tuple[Array, Array]:
        """Return the start of each window and the end of its input, in document order."""
        edges = self.documents.offsets[[0, -1]] if self.is_packed else self.documents.offsets
        input_lengths = np.diff(edges) - 1  # the last token has no next one
        offset = self.draw_offset(epoch)
        counts = np.where(input_lengths > 0, -(-(input_lengths + offset) // self.window_size), 0)
        first, last = np.repeat(edges[:-1], counts), np.repeat(edges[1:] - 1, counts)
        starts = first + index_in_group(counts) * self.window_size - offset
        return np.maximum(starts, first), np.minimum(starts + self.window_size, last)

    def num_batches(self, epoch: int) -> int:
        return -(-len(self.epoch_windows(epoch)[0]) // self.batch_rows)

    def build_batch(self, epoch: int, batch_index: int) -> LabeledBatch:
        selection = slice(batch_index * self.batch_rows, (batch_index + 1) * self.batch_rows)
        starts, stops = (edges[selection] for edges in self.epoch_windows(epoch))
        if not self.fixed:  # fill up with empty rows, so that all batches have one shape
            starts, stops = (np.pad(edges, (0, self.batch_rows - len(edges))) for edges in (starts, stops))
        return self._cut_batch(starts, stops)

    def _cut_batch(self, starts: Array, stops: Array) -> LabeledBatch:
        indices = starts[:, None] + np.arange(self.window_size)
        is_token = indices < stops[:, None]
        indices = np.where(is_token, indices, 0)
        stream, offsets = self.documents.ids, self.documents.offsets
        ids = np.where(is_token, stream[indices].astype(np.int64), self.pad)
        labels = np.where(is_token, stream[np.where(is_token, indices + 1, 0)].astype(np.int64), IGNORE_INDEX)
        lengths = stops - starts
        row_lengths, packing = torch.from_numpy(lengths), None
        if self.is_packed:
            document = np.searchsorted(offsets, indices, "right") - 1
            labels[document != np.searchsorted(offsets, indices + 1, "right") - 1] = IGNORE_INDEX
            packing = self._build_packing(indices, starts, lengths, document, is_token)
        inputs = TokenBatch(
            torch.from_numpy(ids), row_lengths if packing is None else None, packing, int(lengths.sum())
        )
        return LabeledBatch.from_labels(inputs, torch.from_numpy(labels), starts, per_token=True)

    def _build_packing(
        self, indices: Array, starts: Array, lengths: Array, document: Array, is_token: Array
    ) -> Packing:
        first = document[:, :1]
        segments = np.where(is_token, document - first, -1)
        segment_starts = np.maximum(self.documents.offsets[document], starts[:, None])
        positions = np.where(is_token, indices - segment_starts, 0)
        following = first + 1 + np.arange(self.max_segments)  # documents after that of the first token
        stops = self.documents.offsets[np.minimum(following, len(self.documents.offsets) - 1)]
        ends = np.minimum(stops - starts[:, None], lengths[:, None])
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in (segments, positions, ends)]
        return Packing(tensors[0], tensors[1], tensors[2], self.window_size)


Labeler = Callable[[RowLayout, TokenBatch, Array, tuple[int, ...]], LabeledBatch]  # layout, inputs, example ids, seed


class TextLoader(PrefetchLoader[LabeledBatch]):
    """Whole texts in packed rows or bucketed by length; `labeler` adds the labels of a batch."""

    def __init__(
        self,
        texts: EncodedTexts,
        config: BatchConfig,
        labeler: Labeler,
        *,
        pad: int,
        seed: int = 0,
        fixed: bool = False,
    ) -> None:
        self.texts, self.config, self.labeler = texts, config, labeler
        self.pad, self.seed, self.fixed = pad, seed, fixed
        self.shape = compute_batch_shape(texts.lengths, texts.lengths, config)
        self.plans = EpochCache(self._build_plan)

    def _build_plan(self, epoch: int) -> BatchPlan:
        epoch = 0 if self.fixed else epoch
        order = draw_epoch_order([len(self.texts)], [1.0], self.seed, epoch)
        lengths = self.texts.lengths
        return build_batch_plan(lengths, lengths, order, self.config, (self.seed, epoch), self.shape)

    def num_batches(self, epoch: int) -> int:
        return len(self.plans(epoch))

    def build_batch(self, epoch: int, batch_index: int) -> LabeledBatch:
        indices, rows = self.plans(epoch).get_batch(batch_index)
        is_packed, capacity = self.shape.rows > 0, self.shape.row_capacity
        shape = (self.shape.rows, capacity.source) if is_packed else (max(1, len(indices)), None)
        layout = RowLayout.from_sequences(
            self.texts, indices, rows, shape, pad_id=self.pad, max_length=self.shape.max_source_length
        )
        inputs = layout.to_batch(capacity.max_sentences if is_packed else None)
        return self.labeler(layout, inputs, indices, (self.seed, 0 if self.fixed else epoch, batch_index, MASK_STREAM))


@dataclass(frozen=True)
class TokenMasker:
    """Masked language modelling: 15% of the tokens are labels, of which 80% are masked and 10% replaced."""

    mask_id: int
    replacement_ids: Array
    prefix_length: int  # special tokens around each text
    suffix_length: int

    def __call__(
        self, layout: RowLayout, inputs: TokenBatch, example_ids: Array, seed: tuple[int, ...]
    ) -> LabeledBatch:
        ids = layout.ids.copy()
        height, width = ids.shape
        is_regular = np.zeros(ids.size, bool)
        inner_lengths = np.maximum(layout.lengths - self.prefix_length - self.suffix_length, 0)
        is_regular[concatenate_ranges(layout.rows * width + layout.columns + self.prefix_length, inner_lengths)] = True
        max_labels = max(1, -(-int(width * MASKED_FRACTION) // 8) * 8) if ids.size else 1
        bits = random_bits(ids.size + 2 * height * max_labels, seed)
        token_keys = bits[: ids.size].reshape(ids.shape)
        positions, counts = _choose_positions(token_keys, is_regular.reshape(ids.shape), max_labels)
        original = np.take_along_axis(ids, positions, 1)
        labels = np.where(np.arange(positions.shape[1]) < counts[:, None], original, IGNORE_INDEX)
        action_bits, token_bits = (
            part.reshape(height, max_labels)[:, : positions.shape[1]] for part in np.split(bits[ids.size :], 2)
        )
        action = action_bits.astype(np.float64) / 2.0**64
        replacements = self.replacement_ids[token_bits % len(self.replacement_ids)]
        is_replaced = (action >= REPLACE_BY_MASK) & (action < REPLACE_BY_MASK + REPLACE_BY_RANDOM)
        new = np.where(is_replaced, replacements, np.where(action < REPLACE_BY_MASK, self.mask_id, original))
        rows = np.broadcast_to(np.arange(height)[:, None], positions.shape)
        ids[rows[labels >= 0], positions[labels >= 0]] = new[labels >= 0]
        masked = inputs.with_tensors([torch.from_numpy(ids), *inputs.tensors()[1:]])
        tensors = torch.from_numpy(labels), example_ids, torch.from_numpy(positions)
        return LabeledBatch.from_labels(masked, *tensors, per_token=False)


def _choose_positions(keys: Array, is_regular: Array, max_labels: int) -> tuple[Array, Array]:
    """Return (B, M) columns, those of regular tokens with the lowest keys first, and how many per row are used."""
    keys = np.where(is_regular, keys >> np.uint64(1), np.uint64(2**64 - 1))
    totals = is_regular.sum(1)
    counts = np.where(totals > 0, np.maximum(1, np.rint(MASKED_FRACTION * totals)), 0).astype(np.int64)
    order = np.argsort(keys, axis=1, kind="stable")
    return order[:, : min(max_labels, keys.shape[1])].astype(np.int64), np.minimum(counts, max_labels)


@dataclass(frozen=True)
class TextLabeler:
    labels: Array  # by index of the text

    def __call__(
        self, layout: RowLayout, inputs: TokenBatch, example_ids: Array, seed: tuple[int, ...]
    ) -> LabeledBatch:
        texts_per_row = 1 if inputs.packing is None else inputs.packing.ends.shape[1]
        labels = np.full((len(layout.ids), texts_per_row), IGNORE_INDEX, np.int64)
        labels[layout.rows, layout.sentence_in_row()] = self.labels[example_ids]
        return LabeledBatch.from_labels(inputs, torch.from_numpy(labels), example_ids, per_token=False)


@dataclass(frozen=True)
class SpanCorruption:
    """Span corruption (T5, Raffel et al. 2020): spans of a text are replaced by sentinels and predicted in the target.

        thank you for inviting me to your party last week
        source  thank you <0> me to your party <1> week end         target  <0> for inviting <1> last end

    A whole epoch is drawn with arrays, a pure function of its number and the seed, and becomes a token store of pairs.
    A text of n tokens always gives sides of the same lengths, so that all epochs have one shape.
    """

    texts: EncodedTexts
    sentinel_ids: Sequence[int]
    eos_id: int
    pad_id: int
    seed: int
    name: str = "text"

    def build_epoch_store(self, epoch: int) -> TokenStore:
        lengths = self.texts.lengths.astype(np.int64)
        noise, num_spans = compute_span_counts(lengths, len(self.sentinel_ids))
        kept_lengths = draw_partitions(lengths - noise, num_spans, (self.seed, epoch, KEPT_STREAM))
        removed_lengths = draw_partitions(noise, num_spans, (self.seed, epoch, SPAN_STREAM))
        before = (kept_lengths + removed_lengths).cumsum() - (kept_lengths + removed_lengths)
        first_span = num_spans.cumsum() - num_spans
        starts = before - np.repeat(before[first_span] - self.texts.offsets[:-1], num_spans)
        sentinels = np.asarray(self.sentinel_ids, np.int64)[index_in_group(num_spans)]
        source = self._build_side(starts, kept_lengths, sentinels, num_spans, sentinel_first=False)
        target = self._build_side(starts + kept_lengths, removed_lengths, sentinels, num_spans, sentinel_first=True)
        pads = self.pad_id, self.pad_id
        return TokenStore.from_sequences(source, target, pads, self.name, Path(self.texts.key))

    def _build_side(
        self, starts: Array, lengths: Array, sentinels: Array, num_spans: Array, *, sentinel_first: bool
    ) -> TokenSequences:
        """Return the segments of each text, each with its sentinel before or after it, and an end token."""
        is_last = np.zeros(len(lengths), bool)
        is_last[num_spans.cumsum() - 1] = True
        sizes = lengths + 1 + is_last
        ends = sizes.cumsum()
        begins = ends - sizes
        ids = np.empty(int(sizes.sum()), "<u4")
        ids[concatenate_ranges(begins + sentinel_first, lengths)] = self.texts.gather(starts, lengths)
        ids[begins if sentinel_first else begins + lengths] = sentinels
        ids[ends[is_last] - 1] = self.eos_id
        return TokenSequences(ids, np.concatenate([[0], ends[is_last]]).astype("<i8"))


def compute_span_counts(lengths: Array, max_spans: int) -> tuple[Array, Array]:
    """Return (removed tokens, number of spans) for texts of these lengths, with `max_spans` sentinels."""
    noise = np.clip(np.rint(lengths * NOISE_DENSITY).astype(np.int64), 1, lengths - 1)
    num_spans = np.clip(np.rint(noise / MEAN_SPAN_LENGTH).astype(np.int64), 1, max_spans)
    return noise, np.minimum(num_spans, lengths - noise)


def draw_partitions(totals: Array, parts: Array, seed: tuple[int, ...]) -> Array:
    """Split each total into `parts` positive integers, uniformly at random; return all of them, concatenated."""
    gaps = totals - 1  # possible cuts
    group = np.repeat(np.arange(len(totals)), gaps)
    rank = index_in_group(gaps)
    order = np.lexsort((random_bits(len(group), seed), group))
    selected = order[rank < np.repeat(parts - 1, gaps)]
    starts = totals.cumsum() - totals
    cuts = starts[group[selected]] + rank[selected] + 1
    return np.diff(np.sort(np.concatenate([starts, cuts])), append=totals.sum())
