"""Subword regularization: BPE-dropout (Provilkov et al. 2020) and sampling from a unigram model (Kudo 2018).

SentencePiece implements both, but seeds its generator differently in each process; here a seed gives the same ids in
every process. Words are segmented independently, since no piece of ours contains an inner space, and results are
cached. At rate 0 both give the deterministic segmentation.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Protocol

from sentencepiece import SentencePieceProcessor

SPACE = "▁"  # SentencePiece's space; a literal `▁` would be decoded as a space
MAX_CACHED = 100_000  # words or merge steps; about 50 MB when full
MAX_CACHED_LENGTH = 32  # letters; longer words, such as a line without spaces, hardly repeat
# Our rate of 0.1 is alpha = 0.2, which Kudo uses for small corpora: sentences of Multi30k become a third longer
# (a fifth with BPE-dropout at 0.1, the rate that its authors recommend).
ALPHA_PER_RATE = 0.02

Ids = tuple[int, ...]


class SegmentationSampler(Protocol):
    def sample_ids(self, part: str, rate: float, rng: random.Random) -> Sequence[int]:
        """Sample the ids of a word, or of the part between two symbols."""


@dataclass(frozen=True)
class PieceTable:
    """The pieces of a model that attent trained: specials, tags, symbols, 256 bytes, then the learned ones."""

    ids: Mapping[str, int]
    scores: Mapping[str, float]  # of the learned pieces
    symbols: re.Pattern[str]  # never split

    @classmethod
    def from_processor(cls, processor: SentencePieceProcessor, first_symbol: str) -> PieceTable:
        all_ids = list(range(processor.get_piece_size()))
        names, scores = processor.id_to_piece(all_ids), processor.get_score(all_ids)
        symbols, first_byte = processor.piece_to_id(first_symbol), processor.piece_to_id("<0x00>")
        learned = slice(first_byte + 256, None)
        longest_first = sorted(names[symbols:first_byte], key=len, reverse=True)
        return cls(
            ids=dict(zip(names, all_ids, strict=True)),
            scores=dict(zip(names[learned], scores[learned], strict=True)),
            symbols=re.compile(f"({'|'.join(map(re.escape, longest_first))})"),
        )

    def get_piece_ids(self, piece: str) -> list[int]:
        """Return the id of a learned piece, or the byte ids of a letter without one."""
        if piece in self.scores:
            return [self.ids[piece]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]

    def sample(self, text: str, sampler: SegmentationSampler, rate: float, rng: random.Random) -> list[int]:
        ids: list[int] = []
        for word in text.split(" ") if text else ():
            for index, part in enumerate(self.symbols.split(SPACE + word)):
                if index % 2:  # a symbol; between two of them, the part may be empty
                    ids.append(self.ids[part])
                elif part:
                    ids += sampler.sample_ids(part, rate, rng)
        return ids


class BPEDropout:
    """BPE-dropout: at each step, every possible merge is skipped with probability `rate`, and the best remaining one is
    applied, until none is left."""

    def __init__(self, pieces: PieceTable) -> None:
        ids, scores = pieces.ids, pieces.scores
        self._merges = {  # left, right -> rank, merged
            (ids[piece[:cut]], ids[piece[cut:]]): (-score, ids[piece])
            for piece, score in scores.items()
            for cut in range(1, len(piece))
            if piece[:cut] in scores and piece[cut:] in scores
        }
        self._letter_ids = lru_cache(MAX_CACHED)(
            lambda part: tuple(chain.from_iterable(map(pieces.get_piece_ids, part)))
        )
        self._cached_merge_path = lru_cache(MAX_CACHED)(self._merge_path)

    def sample_ids(self, part: str, rate: float, rng: random.Random) -> Ids:
        """Sample a segmentation.

        It draws only after how many merges the best one is skipped, and how many of the next best with it; this has
        the same distribution as a draw for every candidate at every step.
        """
        ids = self._letter_ids(part)
        while True:
            path = self._cached_merge_path(ids) if len(ids) <= MAX_CACHED_LENGTH else self._merge_path(ids)
            applied = int(math.log(1 - rng.random()) / math.log(1 - rate))
            if applied >= len(path) - 1:
                return path[-1]
            candidates = self._candidates(path[applied])
            skipped = 1 + int(math.log(1 - rng.random()) / math.log(rate))
            if skipped >= len(candidates):
                return path[applied]
            ids = merge_pair(path[applied], *candidates[skipped])

    def _merge_path(self, ids: Ids) -> list[Ids]:
        """Return the ids after each merge, up to the deterministic segmentation."""
        path = [ids]
        while candidates := self._candidates(path[-1]):
            path.append(merge_pair(path[-1], *candidates[0]))
        return path

    def _candidates(self, ids: Ids) -> list[tuple[int, int]]:
        """Return (index, merged id) of all possible merges, best first, then leftmost."""
        ranked = sorted((*self._merges[pair], i) for i, pair in enumerate(pairwise(ids)) if pair in self._merges)
        return [(index, merged) for _, merged, index in ranked]


def merge_pair(ids: Ids, index: int, merged: int) -> Ids:
    return (*ids[:index], merged, *ids[index + 2 :])


class UnigramSampler:
    """Samples segmentations of a unigram model with their probability to the power of alpha."""

    def __init__(self, pieces: PieceTable) -> None:
        self._table = pieces
        self._max_piece_length = max(map(len, pieces.scores), default=1)
        self._cached_lattice = lru_cache(MAX_CACHED)(self._build_lattice)

    def sample_ids(self, part: str, rate: float, rng: random.Random) -> list[int]:
        """Sample pieces backwards from the end, each with its share of all segmentations up to its end."""
        lattice = (
            self._cached_lattice(part, rate) if len(part) <= MAX_CACHED_LENGTH else self._build_lattice(part, rate)
        )
        end, pieces_reversed = len(part), []
        while end:
            starts, shares = lattice[end]
            start = starts[bisect(shares, rng.random() * shares[-1], hi=len(shares) - 1)]
            pieces_reversed.append(part[start:end])
            end = start
        return list(chain.from_iterable(map(self._table.get_piece_ids, reversed(pieces_reversed))))

    def _build_lattice(self, part: str, rate: float) -> list[tuple[list[int], list[float]]]:
        """Return for each end the starts of the last piece, and the cumulative shares of the segmentations."""
        scores = self._table.scores
        total, lattice = [0.0], [([0], [1.0])]  # total: log of the summed weights of all segmentations
        for end in range(1, len(part) + 1):
            starts = range(max(0, end - self._max_piece_length), end)
            pieces = [(start, scores[part[start:end]]) for start in starts if part[start:end] in scores]
            pieces = pieces or [(end - 1, 0.0)]  # a letter without a piece is encoded as bytes
            logs = [total[start] + ALPHA_PER_RATE / rate * score for start, score in pieces]
            best = max(logs)
            shares = list(accumulate(math.exp(log - best) for log in logs))
            total.append(best + math.log(shares[-1]))
            lattice.append(([start for start, _ in pieces], shares))
        return lattice
