"""Which pairs stand in which batch of an epoch: a pure function of the lengths, the settings, the seed and the epoch.

A plan is made once an epoch; after that, any batch of it is found at once. No other state is needed to go on
where training stopped: the numbers of the epoch and of the step say it all.
"""

from __future__ import annotations

import hashlib
import os
import uuid
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from attent.data import packing
from attent.data.arrays import Array, mixed, ragged, stable_order
from attent.data.packing import Room, best_fit, next_fit

FORMAT = 1  # of plans on disk, and of how they are made: another number, and old ones are not used
KEPT = 4  # plans on disk
IN_PAIRS, IN_ROWS, IN_PARTS = 1, 2, 3  # what is mixed: each with a seed of its own
MULTIPLE = 8  # widths are multiples of it: what the matrix units of GPUs like
SORTED = 2**19  # pairs that are sorted by length together for bucketed batches
ALMOST_ALL = 0.8  # of the sentences that fit a bucketed batch: where it ends among the rest is chosen by the padding
MOST_SENTENCES = 4  # times the average that a row may hold: it fixes a shape, and is seldom reached


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

    tokens: int = 4096
    longest: int = 256
    layout: Layout = "packed"
    too_long: Literal["drop", "cut"] = "drop"

    def __post_init__(self) -> None:
        for name, value, known in (("layout", self.layout, LAYOUTS), ("too_long", self.too_long, ("drop", "cut"))):
            if value not in known:
                raise ValueError(f"`{name}` must be {' or '.join(known)}, but is {value!r}")
        if self.longest < 1:
            raise ValueError(f"`longest` must be 1 or more tokens, but is {self.longest}")
        if self.tokens < self.longest:
            raise ValueError(
                f"`tokens` must hold the longest sentence (`longest`={self.longest}), but is {self.tokens}: "
                "raise one or lower the other"
            )


@dataclass(frozen=True)
class Shape:
    """What all batches of a corpus share."""

    rows: int  # 0 in bucketed batches, which have as many as fit
    room: Room  # of a row
    source_limit: int  # tokens of the longest sentence
    target_limit: int


@dataclass(frozen=True)
class Plan:
    """Batch b of the epoch is the rows from `batches[b]` to `batches[b + 1]`; likewise a row is some of `pairs`."""

    pairs: Array
    rows: Array
    batches: Array
    too_long: Array  # pairs with a sentence over the limit, dropped or cut

    def __len__(self) -> int:
        return len(self.batches) - 1

    def batch(self, number: int) -> tuple[Array, Array]:
        """The pairs of a batch and the row of each; behind the last batch there are none."""
        bounds = (
            self.rows[self.batches[number] : self.batches[number + 1] + 1] if number < len(self) else np.zeros(1, int)
        )
        pairs = self.pairs[bounds[0] : bounds[-1]].astype(np.int64)
        return pairs, np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def shape(source: Array, target: Array, config: BatchConfig) -> Shape:
    """The room of a batch for a corpus with these lengths."""
    limits = _widths(source, target, config.longest)
    widths = limits if config.layout == "packed" else _widths(source, target, config.tokens)
    shortest = max(1.0, min(_mean(source), _mean(target)))
    sentences = _rounded(MOST_SENTENCES * max(widths) / shortest)
    rows = {"packed": config.tokens // config.longest, "flat": 1, "bucketed": 0}[config.layout]
    return Shape(rows, Room(*widths, sentences), *limits)


def _widths(source: Array, target: Array, width: int) -> tuple[int, int]:
    """Room for each side: `width` where there are more tokens, less in proportion on the other.

    But not less than almost all sentences need: a summary is short on the average, yet not always.
    """
    totals = [max(1, int(side.sum(dtype=np.int64))) for side in (source, target)]
    needed = [int(np.quantile(side, 0.999)) if len(side) else 1 for side in (source, target)]
    shares = [max(width * total / max(totals), need) for total, need in zip(totals, needed, strict=True)]
    source_width, target_width = (min(width, _rounded(share)) for share in shares)
    return source_width, target_width


def _mean(lengths: Array) -> float:
    return float(lengths.mean()) if len(lengths) else 1.0


def _rounded(number: float) -> int:
    return int(-(-number // MULTIPLE) * MULTIPLE)


def plan(source: Array, target: Array, order: Array, config: BatchConfig, seed: tuple[int, ...], form: Shape) -> Plan:
    """Cut an epoch into batches. `order` has the pairs of the epoch, mixed; `source` and `target` all lengths."""
    fits = (source[order] <= form.source_limit) & (target[order] <= form.target_limit)
    too_long = np.sort(order[~fits])
    if config.too_long == "drop":
        order = order[fits]
    sources, targets = np.minimum(source[order], form.source_limit), np.minimum(target[order], form.target_limit)
    if config.layout == "bucketed":
        pairs, batches = _buckets(order, sources, targets, form.room, seed)
        return Plan(pairs, np.arange(len(pairs) + 1, dtype=np.uint32), batches, too_long)
    row = (best_fit if config.layout == "packed" else next_fit)(sources, targets, form.room)
    pairs, rows = _mixed_groups(order, row, seed)
    batches = np.minimum(np.arange(-(-(len(rows) - 1) // form.rows) + 1) * form.rows, len(rows) - 1)
    return Plan(pairs, rows, batches, too_long)


def epoch_order(sizes: list[int], weights: list[float], seed: int, epoch: int) -> Array:
    """The pairs of an epoch, mixed. Part p has `sizes[p]` pairs, each of which comes `weights[p]` times an epoch:

    2.5 is every pair twice, and half of them, others in each epoch, a third time.
    """
    chosen, first = [np.empty(0, np.uint32)], 0
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        whole, rest = divmod(weight, 1)
        chosen += [np.arange(first, first + size, dtype=np.uint32)] * int(whole)
        if rest:
            chosen.append(mixed(size, (seed, epoch, IN_PARTS + number))[: round(rest * size)] + np.uint32(first))
        first += size
    pairs = np.concatenate(chosen)
    return pairs[mixed(len(pairs), (seed, epoch, IN_PAIRS))]


def _mixed_groups(pairs: Array, group: Array, seed: tuple[int, ...]) -> tuple[Array, Array]:
    """The groups in another order: the pairs, group by group, and where each group begins."""
    if not len(group):
        return pairs, np.zeros(1, np.int64)
    by_group = pairs[stable_order(group)]
    sizes = np.bincount(group)
    order = mixed(len(sizes), (*seed, IN_ROWS))
    starts, sizes = (sizes.cumsum() - sizes)[order], sizes[order]
    return by_group[ragged(starts.astype(np.uint32), sizes)], np.concatenate([[0], sizes.cumsum()])


def _buckets(order: Array, source: Array, target: Array, room: Room, seed: tuple[int, ...]) -> tuple[Array, Array]:
    """Sorted by length within pools, cut where a batch is full, and the batches mixed."""
    by_length = np.empty(len(order), np.uint32)
    for start in range(0, len(order), SORTED):
        pool = slice(start, start + SORTED)
        by_length[pool] = start + _by_length(source[pool], target[pool], room)
    sources, targets = source[by_length], target[by_length]
    group, at, batch = np.empty(len(order), np.uint32), 0, 0
    while at < len(order):
        size = _batch_size(sources[at:], targets[at:], room)
        group[at : at + size] = batch
        at, batch = at + size, batch + 1
    return _mixed_groups(order[by_length], group, seed)


def _by_length(source: Array, target: Array, room: Room) -> Array:
    """An order in which neighbours are alike on both sides.

    Sorted by target it is cut into strips, about half as many batches in a strip as there are strips, and each strip
    is sorted by source, every second one downwards so that strips meet where they are alike.
    """
    by_target = np.argsort(target, kind="stable")
    filled = (source / room.source + target / room.target)[by_target].cumsum() / 2  # batches
    strip = (filled / max(1.0, 0.5 * np.sqrt(filled[-1]))).astype(np.int64)
    return by_target[np.lexsort((np.where(strip % 2, -1, 1) * source[by_target], strip))]


def _batch_size(source: Array, target: Array, room: Room) -> int:
    """How many of the first sentences to take: almost all that fit when padded, and the fullest such choice."""
    most = min(len(source), room.source // max(1, int(source[0])), room.target // max(1, int(target[0])))
    source, target, count = source[:most], target[:most], np.arange(1, most + 1)
    source_width, target_width = np.maximum.accumulate(source), np.maximum.accumulate(target)
    fits = (count * source_width <= room.source) & (count * target_width <= room.target)
    most = max(1, int(np.count_nonzero(fits)))  # those that fit come first: padded sizes only grow
    if most == len(source):
        return most
    full = (source.cumsum() + target.cumsum()) / (count * (source_width + target_width))
    least = max(1, int(ALMOST_ALL * most))
    return least + int(full[least - 1 : most].argmax())


# --- kept on disk ----------------------------------------------------------------------------------------------------

_CONSTANTS = (MULTIPLE, SORTED, ALMOST_ALL, MOST_SENTENCES, packing.POOL, packing.POOL_ROWS, packing.CELLS)


def remembered(folder: Path, facts: object, make: Callable[[], Plan]) -> Plan:
    """The plan that `facts` decide: read from `folder` where it was made before, else made and kept there."""
    path = folder / f"{hashlib.sha256(repr((FORMAT, _CONSTANTS, facts)).encode()).hexdigest()[:24]}.npz"
    with suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile), np.load(path) as arrays:
        return Plan(*(arrays[field.name] for field in fields(Plan)))
    # not there, or damaged
    made = make()
    with suppress(OSError):  # a folder that cannot be written to, or a full disk: it is made again next time
        _keep(made, path)
    return made


def _keep(made: Plan, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
    try:
        with open(aside, "wb") as file:
            np.savez(file, **{field.name: getattr(made, field.name) for field in fields(made)})
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    newest_first = sorted(path.parent.glob("*.npz"), key=lambda kept: kept.stat().st_mtime, reverse=True)
    for old in newest_first[KEPT:]:
        old.unlink(missing_ok=True)
