"""Subword regularization by BPE-dropout (Provilkov et al. 2020), whose seeds give the same ids in every process.

SentencePiece's do not. Words are segmented independently, since no piece of ours has an inner space, and cached.
"""

import math
import random
import re
from functools import lru_cache
from itertools import chain, pairwise

from sentencepiece import SentencePieceProcessor

SPACE = "▁"  # SentencePiece's space; a literal `▁` would be decoded as a space
MAX_CACHED = 100_000  # words or merge steps; about 50 MB when full
MAX_CACHED_LENGTH = 32  # letters; longer words, such as a line without spaces, hardly repeat

Ids = tuple[int, ...]


class BPEDropout:
    """At each step every possible merge is skipped with probability `rate`, and the best remaining one is applied.

    The pieces of a model that attent trained are specials, tags, symbols, 256 bytes, then the learned ones.
    """

    def __init__(self, processor: SentencePieceProcessor, first_symbol: str) -> None:
        all_ids = list(range(processor.get_piece_size()))
        names, all_scores = processor.id_to_piece(all_ids), processor.get_score(all_ids)
        symbols, first_byte = processor.piece_to_id(first_symbol), processor.piece_to_id("<0x00>")
        learned = slice(first_byte + 256, None)
        longest_first = sorted(names[symbols:first_byte], key=len, reverse=True)
        self._symbols = re.compile(f"({'|'.join(map(re.escape, longest_first))})")  # never split
        self._ids = ids = dict(zip(names, all_ids, strict=True))
        self._scores = scores = dict(zip(names[learned], all_scores[learned], strict=True))
        self._merges = {  # left, right -> rank, merged
            (ids[piece[:cut]], ids[piece[cut:]]): (-score, ids[piece])
            for piece, score in scores.items()
            for cut in range(1, len(piece))
            if piece[:cut] in scores and piece[cut:] in scores
        }
        self._letter_ids = lru_cache(MAX_CACHED)(
            lambda part: tuple(chain.from_iterable(map(self._get_piece_ids, part)))
        )
        self._cached_merge_path = lru_cache(MAX_CACHED)(self._merge_path)

    def _get_piece_ids(self, piece: str) -> list[int]:
        if piece in self._scores:
            return [self._ids[piece]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in piece.encode()]

    def sample(self, text: str, rate: float, rng: random.Random) -> list[int]:
        ids: list[int] = []
        for word in text.split(" ") if text else ():
            for index, part in enumerate(self._symbols.split(SPACE + word)):
                if index % 2:  # a symbol; between two of them, the part may be empty
                    ids.append(self._ids[part])
                elif part:
                    ids += self._sample_part(part, rate, rng)
        return ids

    def _sample_part(self, part: str, rate: float, rng: random.Random) -> Ids:
        """Sample a segmentation of a word, or of the part between two symbols.

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
