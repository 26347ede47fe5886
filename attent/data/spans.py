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

from attent.data.arrays import Array, ragged
from attent.data.encoded import Encoded
from attent.data.store import Meta, Part, Side, Store

SHARE, MEAN = 0.15, 3.0  # of the tokens are taken out, in spans of so many on the average
FEWEST = 2  # tokens of a text: one stays, one goes
IN_KEPT, IN_SPANS = 41, 42  # what is drawn: each with a seed of its own


@dataclass(frozen=True)
class Corruption:
    """Calling it with the number of an epoch gives that epoch's pairs."""

    texts: Encoded
    sentinels: Sequence[int]
    end: int
    pad: int
    seed: int
    name: str = "text"

    def __call__(self, epoch: int) -> Store:
        lengths = self.texts.lengths
        noise, spans = sizes(lengths, len(self.sentinels))
        kept = pieces(lengths - noise, spans, (self.seed, epoch, IN_KEPT))
        gone = pieces(noise, spans, (self.seed, epoch, IN_SPANS))
        number = np.arange(len(kept)) - np.repeat(spans.cumsum() - spans, spans)  # of each span in its text
        both = kept + gone
        before = both.cumsum() - both
        starts = before - np.repeat(before[spans.cumsum() - spans], spans) + np.repeat(self.texts.offsets[:-1], spans)
        marks = np.asarray(self.sentinels, np.int64)[number]
        source = self._side(starts, kept, marks, spans, first=False)
        target = self._side(starts + kept, gone, marks, spans, first=True)
        return self._store(source, target)

    def _side(self, starts: Array, lengths: Array, marks: Array, spans: Array, *, first: bool) -> Side:
        """Stretches of the texts, each with its sentinel before or behind it, and the end behind each text."""
        last = np.zeros(len(lengths), np.int64)
        last[spans.cumsum() - 1] = 1  # behind which the end stands
        slots = lengths + 1 + last
        at = slots.cumsum() - slots
        ids = np.empty(int(slots.sum()), "<u4")
        ids[ragged(at + first, lengths)] = self.texts.gather(starts, lengths)
        ids[at if first else at + lengths] = marks
        ids[(at + slots - 1)[last == 1]] = self.end
        ends = (at + slots)[last == 1]
        return Side(ids, np.concatenate([[0], ends]).astype("<i8"))

    def _store(self, source: Side, target: Side) -> Store:
        count = len(self.texts)
        meta = Meta(
            format=1,
            pairs=count,
            dtype="<u4",
            tokens={"source": len(source.ids), "target": len(target.ids)},
            pad={"source": self.pad, "target": self.pad},
            files=[self.name],
            parts=[Part(name=self.name, pairs=count, dropped={}, examples={})],
        )
        return Store(Path(self.texts.key), meta, source, target, np.arange(1, count + 1).astype("<u8"))


def sizes(lengths: Array, most: int) -> tuple[Array, Array]:
    """(tokens that are taken out, in how many spans) of texts of these lengths, where there are `most` sentinels."""
    noise = np.clip(np.rint(lengths * SHARE).astype(np.int64), 1, lengths - 1)
    spans = np.clip(np.rint(noise / MEAN).astype(np.int64), 1, most)
    return noise, np.minimum(spans, lengths - noise)


def pieces(totals: Array, parts: Array, seed: tuple[int, ...]) -> Array:
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
