"""Span corruption (T5, Raffel et al. 2020): spans of a text are replaced by sentinels and predicted in the target.

    thank you for inviting me to your party last week
    source  thank you <0> me to your party <1> week end         target  <0> for inviting <1> last end

A whole epoch is drawn with arrays and becomes a token store of pairs. A text of n tokens always gives sides of the same
lengths, so that all epochs have one shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attent.data.arrays import Array, concatenate_ranges, index_in_group, random_bits
from attent.data.token_store import EncodedTexts, TokenSequences, TokenStore

NOISE_DENSITY, MEAN_SPAN_LENGTH = 0.15, 3.0
MIN_TEXT_TOKENS = 2  # one is kept, one is removed
KEPT_STREAM, SPAN_STREAM = 41, 42  # random streams, part of the seed


@dataclass(frozen=True)
class SpanCorruption:
    """Draws the spans of each epoch, a pure function of its number and the seed."""

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
