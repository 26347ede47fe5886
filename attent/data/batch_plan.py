"""Batch plans: which pairs form which batch of an epoch, a pure function of lengths, config, seed and epoch.

Rows of fixed length are packed by best fit: the longest pair first, each into the row where it leaves the least space.
With lengths as in WMT (about 30 tokens a side), this fills rows of 256 to 98%.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from attent.data.arrays import Array, concatenate_ranges, draw_permutation, stable_argsort
from attent.storage.errors import AttentError

MIN_POOL_PAIRS = 2048  # from which best fit chooses; twice as many fill 0.3% more and take twice the time
MIN_POOL_ROWS = 64  # filled per pool; the last of them stays partly empty
MAX_CELLS = 2**15  # rows of all pools in one operation, so that they stay in a core's cache
EXTRA_ROWS = 8
PAIR_STREAM, ROW_STREAM, PART_STREAM = 1, 2, 3  # random streams, part of the seed
WIDTH_MULTIPLE = 8  # of row widths, for tensor cores
SORT_POOL_PAIRS = 2**19  # sorted by length together for bucketed batches
MIN_FILL = 0.8  # a bucketed batch takes at least this share of what fits; the exact size minimizes padding
MAX_SENTENCES_FACTOR = 4  # times the mean number of sentences per row; fixes the shape and is seldom reached

Layout = Literal["packed", "bucketed", "fixed"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class RowCapacity:
    """Tokens of each side and sentences that fit in a row."""

    source: int
    target: int
    max_sentences: int


def best_fit(source: Array, target: Array, capacity: RowCapacity) -> Array:
    """Return the row of each pair, for rows of few sentences. Pairs are packed in pools, many pools at once."""
    if not len(source):
        return np.empty(0, np.uint32)
    # A very short target counts as longer, which limits the sentences per row.
    target = np.maximum(target, -(-capacity.target // capacity.max_sentences))
    per_row = len(source) / max(source.sum() / capacity.source, target.sum() / capacity.target, 1)
    pool_size = int(max(MIN_POOL_PAIRS, MIN_POOL_ROWS * per_row))
    chunk_size = max(1, int(MAX_CELLS * per_row / pool_size)) * pool_size
    rows, first_row = np.empty(len(source), np.uint32), 0
    for start in range(0, len(source), chunk_size):
        chunk = slice(start, start + chunk_size)
        rows[chunk] = first_row + _fit_pools(source[chunk], target[chunk], capacity, pool_size)
        first_row = int(rows[chunk].max()) + 1
    return rows


def _fit_pools(source: Array, target: Array, capacity: RowCapacity, pool_size: int) -> Array:
    """Return the row of each pair for several pools; rows are numbered from 0 across pools."""
    n, pools = len(source), -(-len(source) // pool_size)
    pool = np.arange(n) // pool_size
    longest_first = np.lexsort((-(source + target), pool))
    dtype = np.int16 if capacity.source + capacity.target < np.iinfo(np.int16).max else np.int32
    needs = np.zeros((2, pools * pool_size), dtype)  # zeros pad the last pool
    needs[0, :n], needs[1, :n] = source[longest_first], target[longest_first]
    pool_rows = _fit_rows(needs[0].reshape(pools, pool_size), needs[1].reshape(pools, pool_size), capacity)
    rows = np.empty(n, np.int64)
    rows[longest_first] = pool_rows.reshape(-1)[:n]
    rows += pool * (pool_rows.max() + 1)
    return np.unique(rows, return_inverse=True)[1]  # without gaps


def _fit_rows(source: Array, target: Array, capacity: RowCapacity) -> Array:
    """Return each pair's row in its pool: needs (pools, pairs), longest first; an empty row only if no other fits."""
    pools, pairs = source.shape
    min_rows = max(source.sum(1).max() / capacity.source, target.sum(1).max() / capacity.target)
    shape = (pools, int(1.05 * min_rows) + 2)
    remaining = [np.full(shape, size, source.dtype) for size in (capacity.source, capacity.target)]
    all_pools, sentinel = np.arange(pools), np.iinfo(source.dtype).max
    rows = np.empty((pairs, pools), np.int64)
    for i in range(pairs):
        needs = source[:, i], target[:, i]
        row, fits = _find_tightest_row(remaining, needs, sentinel)
        while not fits[all_pools, row].all():
            sizes = (capacity.source, capacity.target)
            remaining = [
                np.pad(side, ((0, 0), (0, EXTRA_ROWS)), constant_values=size)
                for side, size in zip(remaining, sizes, strict=True)
            ]
            row, fits = _find_tightest_row(remaining, needs, sentinel)
        for side, need in zip(remaining, needs, strict=True):
            side[all_pools, row] -= need
        rows[i] = row
    return rows.T


def _find_tightest_row(remaining: list[Array], needs: tuple[Array, Array], sentinel: int) -> tuple[Array, Array]:
    """Return for each pool the fitting row with the least space left, and a mask of the rows that fit."""
    fits = (remaining[0] >= needs[0][:, None]) & (remaining[1] >= needs[1][:, None])
    return np.where(fits, remaining[0] + remaining[1], sentinel).argmin(1), fits


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How an epoch is divided into batches.

    batch_tokens  tokens on one side of a batch, with padding. The side with fewer tokens in this corpus gets
                  proportionally less, so that both fill up together
    max_tokens    tokens of a row in packed batches, and of the longest sentence in all layouts. The side with fewer
                  tokens gets less, but enough for 99.9% of its sentences; see `PairLoader.describe_too_long`
    layout        packed: rows of several sentences; every batch has the same shape
                  bucketed: one sentence per row, with others of similar length; shapes differ
                  fixed: one sentence per row, in few shapes, which CUDA graphs can replay: widths are multiples of 8,
                  equal on both sides, and each width has its own number of rows
    too_long      longer sentences: drop the pair, or truncate the sentence (without end token)
    """

    batch_tokens: int = 4096
    max_tokens: int = 256
    layout: Layout = "packed"
    too_long: Literal["drop", "truncate"] = "drop"

    def __post_init__(self) -> None:
        for name, value, known in (("layout", self.layout, LAYOUTS), ("too_long", self.too_long, ("drop", "truncate"))):
            if value not in known:
                raise AttentError(f"`{name}` must be {' or '.join(known)}, but is {value!r}")
        if self.max_tokens < 1:
            raise AttentError(f"`max_tokens` must be 1 or more, but is {self.max_tokens}")
        if self.batch_tokens < self.max_tokens:
            problem = f"must hold the longest sentence (`max_tokens`={self.max_tokens}), but is {self.batch_tokens}"
            raise AttentError(f"`batch_tokens` {problem}; raise one or lower the other")


@dataclass(frozen=True)
class BatchShape:
    rows: int  # 0 in bucketed and fixed batches, where it varies
    row_capacity: RowCapacity
    max_source_length: int
    max_target_length: int


@dataclass(frozen=True)
class BatchPlan:
    """Batch b has the rows `batch_offsets[b]` to `batch_offsets[b + 1]`; a row has pairs by `row_offsets` likewise."""

    pair_ids: Array
    row_offsets: Array
    batch_offsets: Array
    too_long_pairs: Array  # dropped or truncated

    def __len__(self) -> int:
        return len(self.batch_offsets) - 1

    def get_batch(self, index: int) -> tuple[Array, Array]:
        """Return the pairs of a batch and their rows."""
        bounds = self.row_offsets[self.batch_offsets[index] : self.batch_offsets[index + 1] + 1]
        pair_ids = self.pair_ids[bounds[0] : bounds[-1]].astype(np.int64)
        return pair_ids, np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def compute_batch_shape(source_lengths: Array, target_lengths: Array, config: BatchConfig) -> BatchShape:
    limits = _side_widths(source_lengths, target_lengths, config.max_tokens)
    widths = limits if config.layout == "packed" else _side_widths(source_lengths, target_lengths, config.batch_tokens)
    sides = [lengths for lengths in (source_lengths, target_lengths) if len(lengths)]
    mean_length = max(1.0, min((float(lengths.mean()) for lengths in sides), default=1.0))
    max_sentences = _round_up(MAX_SENTENCES_FACTOR * max(widths) / mean_length)
    rows = config.batch_tokens // config.max_tokens if config.layout == "packed" else 0
    return BatchShape(rows, RowCapacity(*widths, max_sentences), *limits)


def _side_widths(source_lengths: Array, target_lengths: Array, max_width: int) -> tuple[int, int]:
    """Return the widths: `max_width` for the side of more tokens, else less, but enough for 99.9% of sentences."""
    sides = source_lengths, target_lengths
    totals = [max(1, int(lengths.sum(dtype=np.int64))) for lengths in sides]
    minima = [int(np.quantile(lengths, 0.999)) if len(lengths) else 1 for lengths in sides]
    widths = [max(max_width * total / max(totals), minimum) for total, minimum in zip(totals, minima, strict=True)]
    source_width, target_width = (min(max_width, _round_up(width)) for width in widths)
    return source_width, target_width


def _round_up(number: float) -> int:
    return int(-(-number // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def draw_epoch_order(sizes: list[int], weights: list[float], seed: int, epoch: int) -> Array:
    """Return the pairs of an epoch, shuffled. Part p has `sizes[p]` pairs, each repeated `weights[p]` times.

    With weight 2.5 every pair occurs twice, and half of them, others in each epoch, a third time.
    """
    parts, first = [np.empty(0, np.uint32)], 0
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        repeats, fraction = divmod(weight, 1)
        parts += [np.arange(first, first + size, dtype=np.uint32)] * int(repeats)
        if fraction:
            permutation = draw_permutation(size, (seed, epoch, PART_STREAM + index))
            parts.append(permutation[: round(fraction * size)] + np.uint32(first))
        first += size
    pair_ids = np.concatenate(parts)
    return pair_ids[draw_permutation(len(pair_ids), (seed, epoch, PAIR_STREAM))]


def build_batch_plan(
    source_lengths: Array,
    target_lengths: Array,
    order: Array,
    config: BatchConfig,
    seed: tuple[int, ...],
    shape: BatchShape,
) -> BatchPlan:
    """Divide an epoch into batches. `order` has the shuffled pairs of the epoch, the lengths are those of all pairs."""
    fits = (source_lengths[order] <= shape.max_source_length) & (target_lengths[order] <= shape.max_target_length)
    too_long = np.sort(order[~fits])
    if config.too_long == "drop":
        order = order[fits]
    source = np.minimum(source_lengths[order], shape.max_source_length)
    target = np.minimum(target_lengths[order], shape.max_target_length)
    if config.layout == "bucketed":
        pair_ids, batch_offsets = _build_buckets(order, source, target, shape.row_capacity, seed)
        return BatchPlan(pair_ids, np.arange(len(pair_ids) + 1, dtype=np.uint32), batch_offsets, too_long)
    if config.layout == "fixed":
        batches = _build_fixed_batches(np.maximum(source, target), shape.row_capacity)
        pair_ids, batch_offsets = _shuffle_groups(order, batches, seed)
        return BatchPlan(pair_ids, np.arange(len(pair_ids) + 1, dtype=np.uint32), batch_offsets, too_long)
    rows = best_fit(source, target, shape.row_capacity)
    pair_ids, row_offsets = _shuffle_groups(order, rows, seed)
    num_rows = len(row_offsets) - 1
    batch_offsets = np.minimum(np.arange(-(-num_rows // shape.rows) + 1) * shape.rows, num_rows)
    return BatchPlan(pair_ids, row_offsets, batch_offsets, too_long)


def _shuffle_groups(pair_ids: Array, groups: Array, seed: tuple[int, ...]) -> tuple[Array, Array]:
    """Shuffle whole groups; return the pairs, group by group, and the offsets of the groups."""
    if not len(groups):
        return pair_ids, np.zeros(1, np.int64)
    by_group = pair_ids[stable_argsort(groups)]
    sizes = np.bincount(groups)
    order = draw_permutation(len(sizes), (*seed, ROW_STREAM))
    starts, sizes = (sizes.cumsum() - sizes)[order], sizes[order]
    return by_group[concatenate_ranges(starts.astype(np.uint32), sizes)], np.concatenate([[0], sizes.cumsum()])


def _build_buckets(
    order: Array, source_lengths: Array, target_lengths: Array, capacity: RowCapacity, seed: tuple[int, ...]
) -> tuple[Array, Array]:
    """Sort by length within pools, cut where a batch is full, and shuffle the batches."""
    by_length = np.empty(len(order), np.uint32)
    for start in range(0, len(order), SORT_POOL_PAIRS):
        pool = slice(start, start + SORT_POOL_PAIRS)
        by_length[pool] = start + _sort_by_length(source_lengths[pool], target_lengths[pool], capacity)
    source, target = source_lengths[by_length], target_lengths[by_length]
    batches, start, batch = np.empty(len(order), np.uint32), 0, 0
    while start < len(order):
        size = _choose_batch_size(source[start:], target[start:], capacity)
        batches[start : start + size] = batch
        start, batch = start + size, batch + 1
    return _shuffle_groups(order[by_length], batches, seed)


def compute_fixed_shape(longest: int, capacity: RowCapacity) -> tuple[int, int]:
    """Return (rows, width) of fixed batches, given the tokens of their longest sentence."""
    batch_tokens = max(capacity.source, capacity.target)
    width = min(_round_up(max(1, longest)), batch_tokens)
    return batch_tokens // width, width


def _build_fixed_batches(lengths: Array, capacity: RowCapacity) -> Array:
    """Return the batch of each pair: the pairs of one width in order, until the rows are full."""
    batches, num_batches = np.empty(len(lengths), np.int64), 0
    widths = -(-np.maximum(lengths, 1) // WIDTH_MULTIPLE)
    for width in np.unique(widths):
        (members,) = np.nonzero(widths == width)
        rows, _ = compute_fixed_shape(int(width) * WIDTH_MULTIPLE, capacity)
        batches[members] = num_batches + np.arange(len(members)) // rows
        num_batches += -(-len(members) // rows)
    return batches


def _sort_by_length(source_lengths: Array, target_lengths: Array, capacity: RowCapacity) -> Array:
    """Return an order in which neighbours have similar lengths on both sides.

    Sorted by target length it is cut into strips, each of about half as many batches as there are strips; each strip
    is sorted by source length, every second one descending, so that adjacent ends of strips are similar.
    """
    by_target = np.argsort(target_lengths, kind="stable")
    fill = (source_lengths / capacity.source + target_lengths / capacity.target)[by_target].cumsum() / 2  # batches
    strip = (fill / max(1.0, 0.5 * np.sqrt(fill[-1]))).astype(np.int64)
    return by_target[np.lexsort((np.where(strip % 2, -1, 1) * source_lengths[by_target], strip))]


def _choose_batch_size(source_lengths: Array, target_lengths: Array, capacity: RowCapacity) -> int:
    """Return how many of the first sentences form a batch: at least MIN_FILL of those that fit, with least padding."""
    max_size = min(
        len(source_lengths),
        capacity.source // max(1, int(source_lengths[0])),
        capacity.target // max(1, int(target_lengths[0])),
    )
    source, target, count = source_lengths[:max_size], target_lengths[:max_size], np.arange(1, max_size + 1)
    source_width, target_width = np.maximum.accumulate(source), np.maximum.accumulate(target)
    fits = (count * source_width <= capacity.source) & (count * target_width <= capacity.target)
    max_size = max(1, int(np.count_nonzero(fits)))  # those that fit come first: padded sizes only grow
    if max_size == len(source):
        return max_size
    density = (source.cumsum() + target.cumsum()) / (count * (source_width + target_width))
    min_size = max(1, int(MIN_FILL * max_size))
    return min_size + int(density[min_size - 1 : max_size].argmax())
