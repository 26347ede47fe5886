"""Span corruption (T5, Raffel et al. 2020): spans of a text are taken out, and are to be told behind their sentinels.

    thank you for inviting me to your party last week
    source  thank you <0> me to your party <1> week end         target  <0> for inviting <1> last end

A whole epoch is drawn at once, with arrays, and becomes a store of pairs, which `batches` packs as it packs
translations. A text of n tokens always gives sides of the same lengths, so that all epochs have one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attent.data.arrays import Array, concatenate_ranges
from attent.data.encoded_texts import EncodedTexts
from attent.data.token_store import CorpusPart, StoreMeta, StoreSide, TokenStore

NOISE_DENSITY, MEAN_SPAN_LENGTH = 0.15, 3.0  # of the tokens are taken out, in spans of so many on the average
MIN_TEXT_TOKENS = 2  # tokens of a text: one stays, one goes
KEPT_STREAM, SPAN_STREAM = 41, 42  # what is drawn: each with a seed of its own


@dataclass(frozen=True)
class SpanCorruption:
    """Calling it with the number of an epoch gives that epoch's pairs."""

    texts: EncodedTexts
    sentinel_ids: Sequence[int]
    eos_id: int
    pad_id: int
    seed: int
    name: str = "text"

    def __call__(self, epoch: int) -> TokenStore:
        lengths = self.texts.lengths
        noise, spans = compute_span_counts(lengths, len(self.sentinel_ids))
        kept = draw_partitions(lengths - noise, spans, (self.seed, epoch, KEPT_STREAM))
        gone = draw_partitions(noise, spans, (self.seed, epoch, SPAN_STREAM))
        number = np.arange(len(kept)) - np.repeat(spans.cumsum() - spans, spans)  # of each span in its text
        both = kept + gone
        before = both.cumsum() - both
        starts = before - np.repeat(before[spans.cumsum() - spans], spans) + np.repeat(self.texts.offsets[:-1], spans)
        marks = np.asarray(self.sentinel_ids, np.int64)[number]
        source = self._build_side(starts, kept, marks, spans, sentinel_first=False)
        target = self._build_side(starts + kept, gone, marks, spans, sentinel_first=True)
        return self._build_store(source, target)

    def _build_side(
        self, starts: Array, lengths: Array, sentinels: Array, spans: Array, *, sentinel_first: bool
    ) -> StoreSide:
        """Stretches of the texts, each with its sentinel before or behind it, and the end behind each text."""
        last = np.zeros(len(lengths), np.int64)
        last[spans.cumsum() - 1] = 1  # behind which the end stands
        slots = lengths + 1 + last
        at = slots.cumsum() - slots
        ids = np.empty(int(slots.sum()), "<u4")
        ids[concatenate_ranges(at + sentinel_first, lengths)] = self.texts.gather(starts, lengths)
        ids[at if sentinel_first else at + lengths] = sentinels
        ids[(at + slots - 1)[last == 1]] = self.eos_id
        ends = (at + slots)[last == 1]
        return StoreSide(ids, np.concatenate([[0], ends]).astype("<i8"))

    def _build_store(self, source: StoreSide, target: StoreSide) -> TokenStore:
        count = len(self.texts)
        meta = StoreMeta(
            format_version=1,
            pairs=count,
            dtype="<u4",
            token_counts={"source": len(source.ids), "target": len(target.ids)},
            pad_ids={"source": self.pad_id, "target": self.pad_id},
            files=[self.name],
            parts=[CorpusPart(name=self.name, pairs=count, dropped={}, examples={})],
        )
        return TokenStore(Path(self.texts.key), meta, source, target, np.arange(1, count + 1).astype("<u8"))


def compute_span_counts(lengths: Array, max_spans: int) -> tuple[Array, Array]:
    """(tokens that are taken out, in how many spans) of texts of these lengths, where there are `most` sentinels."""
    noise = np.clip(np.rint(lengths * NOISE_DENSITY).astype(np.int64), 1, lengths - 1)
    spans = np.clip(np.rint(noise / MEAN_SPAN_LENGTH).astype(np.int64), 1, max_spans)
    return noise, np.minimum(spans, lengths - noise)


def draw_partitions(totals: Array, parts: Array, seed: tuple[int, ...]) -> Array:
    """Each total cut into so many parts of 1 or more, every way with the same chance: all parts, one after another."""
    places = totals - 1  # between two tokens
    group = np.repeat(np.arange(len(totals)), places)
    rank = np.arange(len(group)) - np.repeat(places.cumsum() - places, places)
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(len(group))
    order = np.lexsort((keys, group))
    chosen = order[rank < np.repeat(parts - 1, places)]
    begins = totals.cumsum() - totals
    cuts = begins[group[chosen]] + rank[chosen] + 1
    return np.diff(np.sort(np.concatenate([begins, cuts])), append=totals.sum())
