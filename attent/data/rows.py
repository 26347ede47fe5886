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

from attent.data.arrays import Array, mixed, ragged
from attent.data.batches import Laid, Text
from attent.data.drawn import Drawn
from attent.data.encoded import Encoded
from attent.data.plan import BatchConfig, Plan, epoch_order, plan, shape
from attent.data.store import Side
from attent.nn import Packing

IN_OFFSET, IN_WINDOWS, IN_MASKS = 31, 32, 33  # what is drawn: each with a seed of its own
SHARE, MASKED, OTHER = 0.15, 0.8, 0.1  # of the words are to be told; of these become a mask, or another word (BERT)
APART = 4  # windows that a document fills on the average, from which on each window is of one document only
KEPT_EPOCHS = 3
NOTHING = -1  # in `wanted`
T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """What is read, and what is to be told of it: of each token (`places` is None), at some places of each row, or of
    each text of a row."""

    text: Text
    wanted: Tensor  # (B, M) ids or labels; -1: nothing is to be told here
    places: Tensor | None  # (B, M) where in its row
    beside: bool  # `wanted` stands beside the tokens
    units: int
    pairs: Array
    whole: Tensor | None = None

    @classmethod
    def of(cls, text: Text, wanted: Tensor, pairs: Array, *, places: Tensor | None = None, beside: bool) -> Rows:
        return cls(text, wanted, places, beside, int((wanted >= 0).sum()), pairs)

    def __len__(self) -> int:
        return len(self.text.ids)

    @property
    def tokens(self) -> int:
        return self.text.tokens

    @property
    def slots(self) -> int:
        return self.text.ids.numel()

    @property
    def width(self) -> int:
        return self.text.ids.shape[1]

    def rows(self, start: int, stop: int) -> Rows:
        if (start, stop) == (0, len(self)):
            return self
        text = self.text.rows(start, stop)
        wanted = self.wanted[start:stop, : text.ids.shape[1]] if self.beside else self.wanted[start:stop]
        places = None if self.places is None else self.places[start:stop]
        return Rows.of(text, wanted, self.pairs, places=places, beside=self.beside)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Rows:
        return self._of(self._joined().to(device, non_blocking=non_blocking))

    def pinned(self) -> Rows:
        """A copy in memory that a GPU can fetch from by itself."""
        return self._of(self._joined().pin_memory())

    def _tensors(self) -> list[Tensor]:
        return [self.wanted, *([] if self.places is None else [self.places]), *self.text.tensors()]

    def _joined(self) -> Tensor:
        """One tensor, so that a batch goes to the GPU in one piece."""
        return torch.cat([tensor.flatten() for tensor in self._tensors()]) if self.whole is None else self.whole

    def _of(self, whole: Tensor) -> Rows:
        old = self._tensors()
        new = [part.view(like.shape) for part, like in zip(whole.split([t.numel() for t in old]), old, strict=True)]
        wanted, rest = new[0], new[1:]
        places = None if self.places is None else rest.pop(0)
        return Rows(self.text.with_tensors(rest), wanted, places, self.beside, self.units, self.pairs, whole)


class Kept(Generic[T]):
    """What is worked out once for each epoch; the last few are remembered, whichever thread asks."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: OrderedDict[int, T] = OrderedDict()

    def __call__(self, epoch: int) -> T:
        with self._lock:
            if epoch not in self._made:
                self._made[epoch] = self._make(epoch)
                while len(self._made) > KEPT_EPOCHS:
                    self._made.popitem(last=False)
            return self._made[epoch]


# ---- windows of running text -----------------------------------------------------------------------------------------


class Windows(Drawn[Rows]):
    """Documents cut into windows of `longest` tokens, behind each of which the next is to be told.

    Every epoch cuts elsewhere, and all of them together tell each token once. Of long documents each window is of one
    alone; short ones stand several in a window, packed, so that none sees another. Which it is, the corpus decides.
    """

    def __init__(
        self, documents: Encoded, *, tokens: int, longest: int, pad: int, seed: int = 0, fixed: bool = False
    ) -> None:
        """`fixed`: as they come and always cut at the same places, for validation."""
        self.documents, self.longest, self.pad, self.seed, self.fixed = documents, longest, pad, seed, fixed
        self.height = max(1, tokens // longest)
        self.packed = len(documents) > 1 and float(documents.lengths.mean()) < APART * longest
        self.most = _most_in_window(documents.offsets, longest) if self.packed else 0
        self.epoch = Kept(self._epoch)

    def _epoch(self, epoch: int) -> tuple[Array, Array]:
        """Windows in the order in which they come: where each begins and ends."""
        starts, stops = self.cuts(epoch)
        if self.fixed:
            return starts, stops
        order = mixed(len(starts), (self.seed, epoch, IN_WINDOWS))
        return starts[order], stops[order]

    def offset(self, epoch: int) -> int:
        """How much shorter the first window of a document is."""
        return 0 if self.fixed else int(_draws(1, (self.seed, epoch, IN_OFFSET))[0] % self.longest)

    def cuts(self, epoch: int) -> tuple[Array, Array]:
        """Where each window begins, and where what it reads ends."""
        edges = self.documents.offsets[[0, -1]] if self.packed else self.documents.offsets
        reads = np.diff(edges) - 1  # the last token has none behind it
        offset = self.offset(epoch)
        counts = np.where(reads > 0, -(-(reads + offset) // self.longest), 0)
        number = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
        first, last = np.repeat(edges[:-1], counts), np.repeat(edges[1:] - 1, counts)
        starts = first + number * self.longest - offset
        return np.maximum(starts, first), np.minimum(starts + self.longest, last)

    def steps(self, epoch: int) -> int:
        return -(-len(self.epoch(epoch)[0]) // self.height)

    def batch(self, epoch: int, step: int) -> Rows:
        chosen = slice(step * self.height, (step + 1) * self.height)
        starts, stops = (side[chosen] for side in self.epoch(epoch))
        if not self.fixed:  # rows without text behind them, so that all shapes are the same
            starts, stops = (np.pad(side, (0, self.height - len(side))) for side in (starts, stops))
        return self._laid(starts, stops)

    def _laid(self, starts: Array, stops: Array) -> Rows:
        at = starts[:, None] + np.arange(self.longest)
        real = at < stops[:, None]
        at = np.where(real, at, 0)
        stream = self.documents.ids
        ids = np.where(real, stream[at].astype(np.int64), self.pad)
        wanted = np.where(real, stream[np.where(real, at + 1, 0)].astype(np.int64), NOTHING)
        lengths = stops - starts
        if not self.packed:
            text = Text(torch.from_numpy(ids), torch.from_numpy(lengths), None, int(lengths.sum()))
            return Rows.of(text, torch.from_numpy(wanted), starts, beside=True)
        document = np.searchsorted(self.documents.offsets, at, "right") - 1
        of_next = np.searchsorted(self.documents.offsets, at + 1, "right") - 1
        wanted[document != of_next] = NOTHING
        packing = self._packing(at, starts, lengths, document, real)
        text = Text(torch.from_numpy(ids), None, packing, int(lengths.sum()))
        return Rows.of(text, torch.from_numpy(wanted), starts, beside=True)

    def _packing(self, at: Array, starts: Array, lengths: Array, document: Array, real: Array) -> Packing:
        first = document[:, :1]
        segments = np.where(real, document - first, -1)
        begins = np.maximum(self.documents.offsets[document], starts[:, None])
        positions = np.where(real, at - begins, 0)
        edges = first + 1 + np.arange(self.most)  # the documents behind that of the first token
        after = self.documents.offsets[np.minimum(edges, len(self.documents.offsets) - 1)]
        ends = np.minimum(after - starts[:, None], lengths[:, None])
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in (segments, positions, ends)]
        return Packing(tensors[0], tensors[1], tensors[2], self.longest)


def _most_in_window(offsets: Array, longest: int) -> int:
    """Documents of which a window can hold a part."""
    inside = np.searchsorted(offsets, offsets[:-1] + longest, "left") - np.arange(len(offsets) - 1)
    return int(inside.max(initial=0)) + 1


def _draws(count: int, seed: tuple[int, ...]) -> Array:
    """64 random bits each; numpy promises this stream for all its versions."""
    return np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)


# ---- whole texts -----------------------------------------------------------------------------------------------------

Ask = Callable[[Laid, Text, Array, tuple[int, ...]], Rows]  # sentences laid into rows, as text; their numbers; a seed


class Packed(Drawn[Rows]):
    """Whole texts, in packed rows or bucketed by length; `ask` says what is to be told of a batch."""

    def __init__(
        self, texts: Encoded, config: BatchConfig, ask: Ask, *, pad: int, seed: int = 0, fixed: bool = False
    ) -> None:
        self.texts, self.config, self.ask, self.pad, self.seed, self.fixed = texts, config, ask, pad, seed, fixed
        self.lengths = texts.lengths.astype(np.int32)
        self.side = Side(texts.ids, texts.offsets)
        self.shape = shape(self.lengths, self.lengths, config)
        self.plan = Kept(self._plan)

    def _plan(self, epoch: int) -> Plan:
        epoch = 0 if self.fixed else epoch
        order = epoch_order([len(self.texts)], [1.0], self.seed, epoch)
        return plan(self.lengths, self.lengths, order, self.config, (self.seed, epoch), self.shape)

    def steps(self, epoch: int) -> int:
        return len(self.plan(epoch))

    def batch(self, epoch: int, step: int) -> Rows:
        pairs, row = self.plan(epoch).batch(step)
        room = self.shape.room
        frame = (self.shape.rows or max(1, len(pairs)), room.source if self.shape.rows else None, self.pad)
        laid = Laid.of(self.side, pairs, row, frame, self.shape.source_limit)
        text = laid.packed(room.sentences) if self.shape.rows else laid.padded()
        return self.ask(laid, text, pairs, (self.seed, 0 if self.fixed else epoch, step, IN_MASKS))


@dataclass(frozen=True)
class Masks:
    """15% of the words are to be told, drawn anew each time: of these 80% become a mask, 10% another word."""

    mask: int
    others: Array  # ids that may stand for another word
    before: int  # tokens around each text that are no words
    after: int

    def __call__(self, laid: Laid, text: Text, pairs: Array, seed: tuple[int, ...]) -> Rows:
        ids = laid.ids.copy()
        height, width = ids.shape
        words = np.zeros(ids.size, bool)
        inner = np.maximum(laid.lengths - self.before - self.after, 0)
        words[ragged(laid.row * width + laid.column + self.before, inner)] = True
        most = max(1, -(-int(width * SHARE) // 8) * 8) if laid.ids.size else 1
        raw = _draws(ids.size + 2 * height * most, seed)
        places, count = self._chosen(raw[: ids.size].reshape(ids.shape), words.reshape(ids.shape), most)
        wanted = np.where(np.arange(places.shape[1]) < count[:, None], np.take_along_axis(ids, places, 1), NOTHING)
        fate, other = (part.reshape(height, most)[:, : places.shape[1]] for part in np.split(raw[ids.size :], 2))
        share = fate.astype(np.float64) / 2.0**64
        new = np.where(share < MASKED, self.mask, np.take_along_axis(ids, places, 1))
        new = np.where((share >= MASKED) & (share < MASKED + OTHER), self.others[other % len(self.others)], new)
        rows = np.broadcast_to(np.arange(height)[:, None], places.shape)
        ids[rows[wanted >= 0], places[wanted >= 0]] = new[wanted >= 0]
        masked = text.with_tensors([torch.from_numpy(ids), *text.tensors()[1:]])
        return Rows.of(masked, torch.from_numpy(wanted), pairs, places=torch.from_numpy(places), beside=False)

    def _chosen(self, keys: Array, words: Array, most: int) -> tuple[Array, Array]:
        """(B, M) places in each row, and how many of them count: the words with the lowest keys."""
        keys = np.where(words, keys >> np.uint64(1), np.uint64(2**64 - 1))
        there = words.sum(1)
        count = np.minimum(np.where(there > 0, np.maximum(1, np.rint(SHARE * there)), 0).astype(np.int64), most)
        most = min(most, keys.shape[1])
        return np.argsort(keys, axis=1, kind="stable")[:, :most].astype(np.int64), count


@dataclass(frozen=True)
class Labels:
    """A label is to be told of each text."""

    of_text: Array  # by the text's number

    def __call__(self, laid: Laid, text: Text, pairs: Array, seed: tuple[int, ...]) -> Rows:
        packing = text.packing
        wanted = np.full((len(laid.ids), 1 if packing is None else packing.ends.shape[1]), NOTHING, np.int64)
        number = np.arange(len(laid.row)) - np.searchsorted(laid.row, laid.row)
        wanted[laid.row, number] = self.of_text[pairs]
        return Rows.of(text, torch.from_numpy(wanted), pairs, beside=False)


def other_words(size: int, specials: Sequence[int]) -> Array:
    """The ids that stand for words."""
    return np.setdiff1d(np.arange(size), np.array(sorted(set(specials)), np.int64))
