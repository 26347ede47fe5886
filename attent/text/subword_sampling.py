"""Segmentations by chance: BPE-dropout (Provilkov et al. 2020) and sampling from a unigram model (Kudo 2018).

SentencePiece can do both, but its generator is salted anew in each process, so that a seed means something else in
every worker and after every restart. Here the same seed gives the same ids everywhere. Both work word by word, since
no piece of ours reaches over a space; most words come again and again, so what was computed for one is remembered.
As the rate goes to 0, both give the usual segmentation.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Protocol

from sentencepiece import SentencePieceProcessor

SPACE = "▁"  # how SentencePiece writes a space; a text's own `▁` would come back as one
MAX_CACHED = 100_000  # words, or steps of merging one; some 50 MB when full
MAX_CACHED_LENGTH = (
    32  # letters: what is longer, such as a line without spaces, does not come again and is not remembered
)
# Kudo takes alpha 0.2 for small corpora, and that is our rate of 0.1: sentences of Multi30k grow by a third
# (by a fifth with BPE-dropout, whose authors advise 0.1).
ALPHA_PER_RATE = 0.02

Ids = tuple[int, ...]


class SegmentationSampler(Protocol):
    def sample_ids(self, part: str, rate: float, rng: random.Random) -> Sequence[int]:
        """Ids of a word, or of what stands between two symbols."""


@dataclass(frozen=True)
class PieceTable:
    """The pieces of a model that we trained: specials, tags, symbols, 256 bytes, then those that it learnt."""

    ids: Mapping[str, int]
    scores: Mapping[str, float]  # of the learnt ones only
    symbols: re.Pattern[str]  # the user's and our own, which are never cut

    @classmethod
    def from_processor(cls, processor: SentencePieceProcessor, first_symbol: str) -> PieceTable:
        everything = list(range(processor.get_piece_size()))
        names, scores = processor.id_to_piece(everything), processor.get_score(everything)
        symbols, first_byte = processor.piece_to_id(first_symbol), processor.piece_to_id("<0x00>")
        learnt = slice(first_byte + 256, None)
        longest_first = sorted(names[symbols:first_byte], key=len, reverse=True)
        return cls(
            ids=dict(zip(names, everything, strict=True)),
            scores=dict(zip(names[learnt], scores[learnt], strict=True)),
            symbols=re.compile(f"({'|'.join(map(re.escape, longest_first))})"),
        )

    def build_sampler(self) -> SegmentationSampler:
        is_bpe = all(score.is_integer() for score in self.scores.values())  # they count the merges there
        return BPEDropout(self) if is_bpe else UnigramSampler(self)

    def split_words(self, text: str) -> Iterator[tuple[str, bool]]:
        """The words of a text, cut before and behind each symbol, and which parts are one."""
        words = (SPACE + word for word in text.split(" ")) if text else ()
        for word in words:
            for index, part in enumerate(self.symbols.split(word)):
                if part:
                    yield part, index % 2 == 1

    def get_piece_ids(self, piece: str) -> list[int]:
        """A learnt piece's id, or those of the bytes of a letter that has none."""
        if piece in self.scores:
            return [self.ids[piece]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]

    def sample(self, text: str, sampler: SegmentationSampler, rate: float, rng: random.Random) -> list[int]:
        ids: list[int] = []
        for part, is_symbol in self.split_words(text):
            if is_symbol:
                ids.append(self.ids[part])
            else:
                ids += sampler.sample_ids(part, rate, rng)
        return ids


class BPEDropout:
    """BPE-dropout: at each step every merge that a word allows is left out with the same chance, and the best of the
    others is done; the word is finished when none is left."""

    def __init__(self, pieces: PieceTable) -> None:
        ids, scores = pieces.ids, pieces.scores
        self._merges = {  # left, right -> how late, what they become
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
        """Draws only when the best merge is next left out, and how many of the next best are with it: the others'
        fate makes no difference, so this is the same as a draw for every candidate at every step."""
        ids = self._letter_ids(part)
        while True:
            path = self._cached_merge_path(ids) if len(ids) <= MAX_CACHED_LENGTH else self._merge_path(ids)
            done = int(math.log(1 - rng.random()) / math.log(1 - rate))
            if done >= len(path) - 1:
                return path[-1]
            candidates = self._candidates(path[done])
            left_out = 1 + int(math.log(1 - rng.random()) / math.log(rate))
            if left_out >= len(candidates):
                return path[done]
            ids = merge_pair(path[done], *candidates[left_out])

    def _merge_path(self, ids: Ids) -> list[Ids]:
        """The steps of a word to its usual segmentation."""
        path = [ids]
        while candidates := self._candidates(path[-1]):
            path.append(merge_pair(path[-1], *candidates[0]))
        return path

    def _candidates(self, ids: Ids) -> list[tuple[int, int]]:
        """Where two ids can merge, and into what: the best first, of equal ones the leftmost."""
        found = sorted((*self._merges[pair], at) for at, pair in enumerate(pairwise(ids)) if pair in self._merges)
        return [(at, merged) for _, merged, at in found]


def merge_pair(ids: Ids, at: int, merged: int) -> Ids:
    return (*ids[:at], merged, *ids[at + 2 :])


class UnigramSampler:
    """Sampling from a unigram model: each segmentation by its probability to the power of alpha."""

    def __init__(self, pieces: PieceTable) -> None:
        self._table = pieces
        self._max_piece_length = max(map(len, pieces.scores), default=1)
        self._cached_lattice = lru_cache(MAX_CACHED)(self._build_lattice)

    def sample_ids(self, part: str, rate: float, rng: random.Random) -> list[int]:
        """From the end to the beginning, each last piece by its share of all the ways to spell what it ends."""
        ways = self._cached_lattice(part, rate) if len(part) <= MAX_CACHED_LENGTH else self._build_lattice(part, rate)
        end, drawn = len(part), []
        while end:
            begins, shares = ways[end]
            begin = begins[bisect(shares, rng.random() * shares[-1], hi=len(shares) - 1)]
            drawn.append(part[begin:end])
            end = begin
        return list(chain.from_iterable(map(self._table.get_piece_ids, reversed(drawn))))

    def _build_lattice(self, part: str, rate: float) -> list[tuple[list[int], list[float]]]:
        """For each end: where the piece before it may begin, and the running sum of those ways' shares."""
        total, ways = [0.0], [([0], [1.0])]  # total: the logarithm of the sum of all ways up to here
        for end in range(1, len(part) + 1):
            pieces = self._pieces_ending_at(part, end)
            logs = [total[begin] + ALPHA_PER_RATE / rate * score for begin, score in pieces]
            best = max(logs)
            shares = list(accumulate(math.exp(log - best) for log in logs))
            total.append(best + math.log(shares[-1]))
            ways.append(([begin for begin, _ in pieces], shares))
        return ways

    def _pieces_ending_at(self, part: str, end: int) -> list[tuple[int, float]]:
        scores = self._table.scores
        begins = range(max(0, end - self._max_piece_length), end)
        found = [(begin, scores[part[begin:end]]) for begin in begins if part[begin:end] in scores]
        return found or [(end - 1, 0.0)]  # a letter without a piece: its bytes are the only way
