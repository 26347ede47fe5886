"""Which pairs stand in which batch of an epoch: a pure function of the lengths, the settings, the seed and the epoch.

A plan is made once an epoch; after that, any batch of it is found at once. No other state is needed to go on
where training stopped: the numbers of the epoch and of the step say it all.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from attent.data import packing
from attent.data.arrays import Array, concatenate_ranges, draw_permutation, stable_argsort
from attent.data.packing import RowCapacity, best_fit, next_fit
from attent.storage.atomic import atomic_path

FORMAT_VERSION = 1  # of plans on disk, and of how they are made: another number, and old ones are not used
MAX_CACHED_PLANS = 4  # plans on disk
PAIR_STREAM, ROW_STREAM, PART_STREAM = 1, 2, 3  # what is mixed: each with a seed of its own
WIDTH_MULTIPLE = 8  # widths are multiples of it: what the matrix units of GPUs like
SORT_POOL_PAIRS = 2**19  # pairs that are sorted by length together for bucketed batches
MIN_FILL = 0.8  # of the sentences that fit a bucketed batch: where it ends among the rest is chosen by the padding
MAX_SENTENCES_FACTOR = 4  # times the average that a row may hold: it fixes a shape, and is seldom reached


Layout = Literal["packed", "flat", "bucketed"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How an epoch is cut into batches.

    tokens    room for tokens on a side of a batch, filler included. The side that has fewer tokens in this corpus has
              less room in proportion, so that both fill up together
    longest   tokens of a row in packed batches, and of the longest sentence in all. Here too the side that has fewer
              tokens has less, yet enough for 999 of 1,000 sentences: `Batches.too_long` tells what is over
    layout    packed: rows of whole sentences, laid end to end; every batch has the same shape
              flat: the same in one long row
              bucketed: a sentence a row, with others of about its length; shapes differ
    too_long  what becomes of longer sentences: drop the pair, or cut the sentence (it then has no end token)
    """

    batch_tokens: int = 4096
    max_tokens: int = 256
    layout: Layout = "packed"
    too_long: Literal["drop", "cut"] = "drop"

    def __post_init__(self) -> None:
        for name, value, known in (("layout", self.layout, LAYOUTS), ("too_long", self.too_long, ("drop", "cut"))):
            if value not in known:
                raise ValueError(f"`{name}` must be {' or '.join(known)}, but is {value!r}")
        if self.max_tokens < 1:
            raise ValueError(f"`max_tokens` must be 1 or more tokens, but is {self.max_tokens}")
        if self.batch_tokens < self.max_tokens:
            raise ValueError(
                f"`batch_tokens` must hold the longest sentence (`max_tokens`={self.max_tokens}), but is {self.batch_tokens}: "
                "raise one or lower the other"
            )


@dataclass(frozen=True)
class BatchShape:
    """What all batches of a corpus share."""

    rows: int  # 0 in bucketed batches, which have as many as fit
    row_capacity: RowCapacity  # of a row
    max_source_length: int  # tokens of the longest sentence
    max_target_length: int


@dataclass(frozen=True)
class BatchPlan:
    """Batch b of the epoch is the rows from `batches[b]` to `batches[b + 1]`; likewise a row is some of `pairs`."""

    pair_ids: Array
    row_offsets: Array
    batch_offsets: Array
    too_long_pairs: Array  # pairs with a sentence over the limit, dropped or cut

    def __len__(self) -> int:
        return len(self.batch_offsets) - 1

    def get_batch(self, index: int) -> tuple[Array, Array]:
        """The pairs of a batch and the row of each; behind the last batch there are none."""
        bounds = (
            self.row_offsets[self.batch_offsets[index] : self.batch_offsets[index + 1] + 1]
            if index < len(self)
            else np.zeros(1, int)
        )
        pairs = self.pair_ids[bounds[0] : bounds[-1]].astype(np.int64)
        return pairs, np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def compute_batch_shape(source_lengths: Array, target_lengths: Array, config: BatchConfig) -> BatchShape:
    """The room of a batch for a corpus with these lengths."""
    limits = _side_widths(source_lengths, target_lengths, config.max_tokens)
    widths = limits if config.layout == "packed" else _side_widths(source_lengths, target_lengths, config.batch_tokens)
    shortest = max(1.0, min(_mean_length(source_lengths), _mean_length(target_lengths)))
    sentences = _round_up(MAX_SENTENCES_FACTOR * max(widths) / shortest)
    rows = {"packed": config.batch_tokens // config.max_tokens, "flat": 1, "bucketed": 0}[config.layout]
    return BatchShape(rows, RowCapacity(*widths, sentences), *limits)


def _side_widths(source_lengths: Array, target_lengths: Array, max_width: int) -> tuple[int, int]:
    """Room for each side: `width` where there are more tokens, less in proportion on the other.

    But not less than almost all sentences need: a summary is short on the average, yet not always.
    """
    totals = [max(1, int(side.sum(dtype=np.int64))) for side in (source_lengths, target_lengths)]
    needed = [int(np.quantile(side, 0.999)) if len(side) else 1 for side in (source_lengths, target_lengths)]
    shares = [max(max_width * total / max(totals), need) for total, need in zip(totals, needed, strict=True)]
    source_width, target_width = (min(max_width, _round_up(share)) for share in shares)
    return source_width, target_width


def _mean_length(lengths: Array) -> float:
    return float(lengths.mean()) if len(lengths) else 1.0


def _round_up(number: float) -> int:
    return int(-(-number // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def build_batch_plan(
    source_lengths: Array,
    target_lengths: Array,
    order: Array,
    config: BatchConfig,
    seed: tuple[int, ...],
    shape: BatchShape,
) -> BatchPlan:
    """Cut an epoch into batches. `order` has the pairs of the epoch, mixed; `source` and `target` all lengths."""
    fits = (source_lengths[order] <= shape.max_source_length) & (target_lengths[order] <= shape.max_target_length)
    too_long = np.sort(order[~fits])
    if config.too_long == "drop":
        order = order[fits]
    sources, targets = (
        np.minimum(source_lengths[order], shape.max_source_length),
        np.minimum(target_lengths[order], shape.max_target_length),
    )
    if config.layout == "bucketed":
        pairs, batches = _build_buckets(order, sources, targets, shape.row_capacity, seed)
        return BatchPlan(pairs, np.arange(len(pairs) + 1, dtype=np.uint32), batches, too_long)
    row = (best_fit if config.layout == "packed" else next_fit)(sources, targets, shape.row_capacity)
    pairs, rows = _shuffle_groups(order, row, seed)
    batches = np.minimum(np.arange(-(-(len(rows) - 1) // shape.rows) + 1) * shape.rows, len(rows) - 1)
    return BatchPlan(pairs, rows, batches, too_long)


def draw_epoch_order(sizes: list[int], weights: list[float], seed: int, epoch: int) -> Array:
    """The pairs of an epoch, mixed. Part p has `sizes[p]` pairs, each of which comes `weights[p]` times an epoch:

    2.5 is every pair twice, and half of them, others in each epoch, a third time.
    """
    chosen, first = [np.empty(0, np.uint32)], 0
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        whole, rest = divmod(weight, 1)
        chosen += [np.arange(first, first + size, dtype=np.uint32)] * int(whole)
        if rest:
            chosen.append(
                draw_permutation(size, (seed, epoch, PART_STREAM + number))[: round(rest * size)] + np.uint32(first)
            )
        first += size
    pairs = np.concatenate(chosen)
    return pairs[draw_permutation(len(pairs), (seed, epoch, PAIR_STREAM))]


def _shuffle_groups(pair_ids: Array, groups: Array, seed: tuple[int, ...]) -> tuple[Array, Array]:
    """The groups in another order: the pairs, group by group, and where each group begins."""
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
    """Sorted by length within pools, cut where a batch is full, and the batches mixed."""
    by_length = np.empty(len(order), np.uint32)
    for start in range(0, len(order), SORT_POOL_PAIRS):
        pool = slice(start, start + SORT_POOL_PAIRS)
        by_length[pool] = start + _sort_by_length(source_lengths[pool], target_lengths[pool], capacity)
    sources, targets = source_lengths[by_length], target_lengths[by_length]
    group, at, batch = np.empty(len(order), np.uint32), 0, 0
    while at < len(order):
        size = _choose_batch_size(sources[at:], targets[at:], capacity)
        group[at : at + size] = batch
        at, batch = at + size, batch + 1
    return _shuffle_groups(order[by_length], group, seed)


def _sort_by_length(source_lengths: Array, target_lengths: Array, capacity: RowCapacity) -> Array:
    """An order in which neighbours are alike on both sides.

    Sorted by target it is cut into strips, about half as many batches in a strip as there are strips, and each strip
    is sorted by source, every second one downwards so that strips meet where they are alike.
    """
    by_target = np.argsort(target_lengths, kind="stable")
    filled = (source_lengths / capacity.source + target_lengths / capacity.target)[by_target].cumsum() / 2  # batches
    strip = (filled / max(1.0, 0.5 * np.sqrt(filled[-1]))).astype(np.int64)
    return by_target[np.lexsort((np.where(strip % 2, -1, 1) * source_lengths[by_target], strip))]


def _choose_batch_size(source_lengths: Array, target_lengths: Array, capacity: RowCapacity) -> int:
    """How many of the first sentences to take: almost all that fit when padded, and the fullest such choice."""
    most = min(
        len(source_lengths),
        capacity.source // max(1, int(source_lengths[0])),
        capacity.target // max(1, int(target_lengths[0])),
    )
    source_lengths, target_lengths, count = source_lengths[:most], target_lengths[:most], np.arange(1, most + 1)
    source_width, target_width = np.maximum.accumulate(source_lengths), np.maximum.accumulate(target_lengths)
    fits = (count * source_width <= capacity.source) & (count * target_width <= capacity.target)
    most = max(1, int(np.count_nonzero(fits)))  # those that fit come first: padded sizes only grow
    if most == len(source_lengths):
        return most
    full = (source_lengths.cumsum() + target_lengths.cumsum()) / (count * (source_width + target_width))
    least = max(1, int(MIN_FILL * most))
    return least + int(full[least - 1 : most].argmax())


# --- kept on disk ----------------------------------------------------------------------------------------------------

_CONSTANTS = (
    WIDTH_MULTIPLE,
    SORT_POOL_PAIRS,
    MIN_FILL,
    MAX_SENTENCES_FACTOR,
    packing.MIN_POOL_PAIRS,
    packing.MIN_POOL_ROWS,
    packing.MAX_CELLS,
)


def load_or_build_plan(folder: Path, key: object, build: Callable[[], BatchPlan]) -> BatchPlan:
    """The plan that `facts` decide: read from `folder` where it was made before, else made and kept there."""
    path = folder / f"{hashlib.sha256(repr((FORMAT_VERSION, _CONSTANTS, key)).encode()).hexdigest()[:24]}.npz"
    with suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile), np.load(path) as arrays:
        return BatchPlan(*(arrays[field.name] for field in fields(BatchPlan)))
    # not there, or damaged
    made = build()
    with suppress(OSError):  # a folder that cannot be written to, or a full disk: it is made again next time
        _save_plan(made, path)
    return made


def _save_plan(plan: BatchPlan, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with atomic_path(path) as temporary:
        np.savez(temporary, **{field.name: getattr(plan, field.name) for field in fields(plan)})
    newest_first = sorted(path.parent.glob("*.npz"), key=lambda kept: kept.stat().st_mtime, reverse=True)
    for old in newest_first[MAX_CACHED_PLANS:]:
        old.unlink(missing_ok=True)
