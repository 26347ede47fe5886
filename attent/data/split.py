"""A part of the data is held out, before anything is learnt from the rest: validation on what no training has seen.

Which pairs are held out follows from a seeded hash of their sources, so that it is the same on every machine and in
whatever order the files come. All pairs of one source go together, and a pair that shares a text with a held-out one is
left out of training. Texts are compared as `leakage` compares them: in small letters, without spaces and punctuation.
How a `Corpus` reads its part again is its own affair (`corpus.Split`); test sets that people give are `leakage`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attent.data.contamination import fold_texts
from attent.data.corpus import Corpus, CorpusSplit
from attent.data.filters import KeyArray, combine_keys, hash_texts
from attent.data.pairs import BadLine, CorpusError, Pair

BoolArray = npt.NDArray[np.bool_]

CHUNK_LINES = 5_000  # lines that are read together
BUDGET_DIVISOR = 5  # at most one pair in so many is taken from training, by holding out or leaving out
SOURCE_BUDGET_DIVISOR, MIN_SOURCE_BUDGET = (
    10,
    3,
)  # and a single source takes at most one in ten of these, unless that is three or less
CANDIDATES_PER_PAIR = 8  # sources that are looked at for each pair wanted, since some would take too much from training
MIN_CANDIDATES = 1_000  # sources that are looked at in any case
SHARED_TARGETS_DIVISOR = (
    4  # if not one in so many of the pairs can be had with targets of their own, targets may be shared
)
EMPTY_KEY = np.uint64(0)  # the key of a text that is nothing but space


def default_validation_size(num_pairs: int) -> int:
    """How many of so many pairs to hold out: a tenth of little data, a fiftieth of much, 200 to 2,000 between.

    BLEU of fewer than 200 sentences mostly tells chance. About 2,000 are what shared tasks use for development, and
    more would only take time from training.
    """
    return max(1, min(num_pairs // 10, max(num_pairs // 50, 200), 2_000))


def hold_out(corpora: Sequence[Corpus], num_pairs: int, seed: int) -> tuple[list[Corpus], list[Corpus]]:
    """(to train on, held out): about `pairs` pairs over all corpora together, less where texts are often repeated.

    The first list has every corpus, the second those of which something is held out. No text of a held-out pair is
    in a pair to train on, on either side. Only where there are so few different targets that this cannot be had, as
    with labels, targets may be the same (`Split.targets` is then False), and sources still are not.
    """
    if num_pairs < 1:
        raise CorpusError(f"the number of pairs to hold out must be 1 or more, but is {num_pairs}")
    read = [_ScannedCorpus.scan(corpus) for corpus in corpora]
    choice = _choose_held_out(_PairKeys.concatenate([one.keys for one in read]), num_pairs, seed)
    if choice is None:
        names = ", ".join(corpus.name for corpus in corpora)
        raise CorpusError(
            f"{names}: to hold out a part there must be at least 2 different sources with translations, but there are "
            f"fewer; add pairs, or give data to validate on"
        )
    train = [one.select_part(choice, held_out=False) for one in read]
    held = [one.select_part(choice, held_out=True) for one in read]
    return train, [corpus for corpus in held if corpus.split and corpus.split.pair_count]


def summarize_split(train: Sequence[Corpus], held_out: Sequence[Corpus]) -> str:
    """What was held out, in a sentence for the log."""
    splits = [corpus.split for corpus in train if corpus.split]
    rest, out = (
        sum(split.pair_count for split in splits),
        sum(corpus.split.pair_count for corpus in held_out if corpus.split),
    )
    lost = sum(split.corpus_pair_count for split in splits) - rest - out
    shared = "a text" if all(split.has_disjoint_targets for split in splits) else "a source"
    told = f"held out {out:,} of {out + rest + lost:,} pairs for validation"
    told += f"; left {lost:,} more out of training, which share {shared} with them" if lost else ""
    return told if shared == "a text" else f"{told}; targets repeat so much that they are in training too"


# ---- reading ---------------------------------------------------------------------------------------------------------


class _PairKeys(NamedTuple):
    """A key for each source and each target."""

    source: KeyArray
    target: KeyArray

    @classmethod
    def from_pairs(cls, pairs: Sequence[Pair]) -> _PairKeys:
        return cls(
            hash_folded_texts([pair.source for pair in pairs]), hash_folded_texts([pair.target for pair in pairs])
        )

    @classmethod
    def concatenate(cls, pieces: Sequence[_PairKeys]) -> _PairKeys:
        whole = [cls.from_pairs([]), *pieces]
        return cls(np.concatenate([one.source for one in whole]), np.concatenate([one.target for one in whole]))

    def select(self, selection: BoolArray | npt.NDArray[np.intp]) -> _PairKeys:
        return _PairKeys(self.source[selection], self.target[selection])

    @property
    def nonempty_mask(self) -> BoolArray:
        """Is there text on both sides?"""
        return (self.source != EMPTY_KEY) & (self.target != EMPTY_KEY)


def hash_folded_texts(texts: Sequence[str]) -> KeyArray:
    """A number for each text, which texts share that differ in capitals, spaces and punctuation alone."""
    folded = fold_texts(texts).replace(" ", "").split("\n")[: len(texts)]
    if "" in folded:  # nothing but punctuation, which then counts
        folded = [short or text.strip() for short, text in zip(folded, texts, strict=True)]
    found = hash_texts(folded).copy()
    found[[not text for text in folded]] = EMPTY_KEY
    return found


@dataclass(frozen=True)
class _ScannedCorpus:
    """A corpus that was read through: what its files were then, which entries are pairs, and the keys of these."""

    corpus: Corpus
    stamps: tuple[tuple[str, int, int], ...]
    is_pair: BoolArray
    keys: _PairKeys

    @classmethod
    def scan(cls, corpus: Corpus) -> _ScannedCorpus:
        assert corpus.split is None, "a part of a part is not told apart"
        stamps = tuple(corpus.fingerprint())  # before reading, so that a change meanwhile is noticed
        is_pair, sides = [np.empty(0, bool)], []
        for chunk in _iter_chunks(iter(corpus)):
            is_pair.append(np.fromiter((isinstance(entry, Pair) for entry in chunk), bool, len(chunk)))
            sides.append(_PairKeys.from_pairs([entry for entry in chunk if isinstance(entry, Pair)]))
        return cls(corpus, stamps, np.concatenate(is_pair), _PairKeys.concatenate(sides))

    def select_part(self, choice: _HeldOutKeys, *, held_out: bool) -> Corpus:
        """The corpus with only what is held out, or with what is left to train on; bad lines belong to the latter."""
        mine = choice.held_out_mask(self.keys) if held_out else ~choice.excluded_mask(self.keys)
        kept = np.zeros(len(self.is_pair), bool) if held_out else ~self.is_pair
        kept[self.is_pair] = mine
        pairs, targets = int(mine.sum()), choice.exclude_targets
        split = CorpusSplit(
            membership=kept.tobytes(),
            fingerprint=self.stamps,
            pair_count=pairs,
            corpus_pair_count=len(mine),
            has_disjoint_targets=targets,
        )
        return replace(self.corpus, split=split)


def _iter_chunks(entries: Iterator[Pair | BadLine]) -> Iterator[list[Pair | BadLine]]:
    while chunk := list(islice(entries, CHUNK_LINES)):
        yield chunk


# ---- choosing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HeldOutKeys:
    """The sources that are held out, and every text that no pair to train on may have; both sorted."""

    sources: KeyArray
    excluded_texts: KeyArray
    exclude_targets: bool  # their targets are among the texts

    @classmethod
    def from_sources(cls, sources: KeyArray, keys: _PairKeys, *, exclude_targets: bool) -> _HeldOutKeys:
        sources = np.sort(sources)
        if not exclude_targets:
            return cls(sources, sources, exclude_targets)
        texts = np.union1d(sources, keys.target[_is_in_sorted(keys.source, sources)])
        return cls(sources, texts[texts != EMPTY_KEY], exclude_targets)

    def held_out_mask(self, keys: _PairKeys) -> BoolArray:
        return _is_in_sorted(keys.source, self.sources) & keys.nonempty_mask

    def excluded_mask(self, keys: _PairKeys) -> BoolArray:
        """Held out, or so close to what is that training on it would tell."""
        touched = _is_in_sorted(keys.source, self.excluded_texts)
        return touched | _is_in_sorted(keys.target, self.excluded_texts) if self.exclude_targets else touched


def _is_in_sorted(keys: KeyArray, sorted_keys: KeyArray) -> BoolArray:
    """Which of these are among the sorted `wanted`. np.isin would sort them all, and they are many."""
    if not len(sorted_keys):
        return np.zeros(len(keys), bool)
    return sorted_keys[np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)] == keys


def _choose_held_out(keys: _PairKeys, num_pairs: int, seed: int) -> _HeldOutKeys | None:
    """None where there are not two sources. Targets may be shared only where too little could be held out otherwise."""
    whole = keys.select(keys.nonempty_mask)
    candidates = _shuffle_sources(np.unique(whole.source), seed)
    if len(candidates) < 2:
        return None
    candidates = candidates[: max(CANDIDATES_PER_PAIR * num_pairs, MIN_CANDIDATES)]
    sizes = _count_keys(candidates, whole.source)
    alone, total = _count_keys(candidates, keys.source), len(whole.source)
    shared = alone + _count_shared_texts(candidates, keys)
    strict, loose = (
        _select_within_budget(sizes, shared, num_pairs, total),
        _select_within_budget(sizes, alone, num_pairs, total),
    )
    if sizes[strict].sum() * SHARED_TARGETS_DIVISOR >= sizes[loose].sum() > 0:
        return _HeldOutKeys.from_sources(candidates[strict], keys, exclude_targets=True)
    if len(loose):
        return _HeldOutKeys.from_sources(candidates[loose], keys, exclude_targets=False)
    cost, targets = (shared, True) if shared.min() < total else (alone, False)  # every source takes a large share
    return _HeldOutKeys.from_sources(candidates[[int(np.argmin(cost))]], keys, exclude_targets=targets)


def _shuffle_sources(sources: KeyArray, seed: int) -> KeyArray:
    """In an order by chance that is the same everywhere, and in which other sources change nothing."""
    salt = np.frombuffer(blake2b(str(seed).encode(), digest_size=8).digest(), "<u8").astype(np.uint64)
    mixed = (sources ^ salt) * np.uint64(0xBF58476D1CE4E5B9)  # two rounds of splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return sources[np.argsort(mixed ^ (mixed >> np.uint64(31)))]


def _count_keys(unique_keys: KeyArray, keys: KeyArray) -> npt.NDArray[np.int64]:
    """How often each of the different `wanted` is found."""
    order = np.argsort(unique_keys)
    at = np.searchsorted(unique_keys[order], keys[_is_in_sorted(keys, unique_keys[order])])
    counts = np.empty(len(unique_keys), np.int64)
    counts[order] = np.bincount(at, minlength=len(unique_keys))
    return counts


def _count_shared_texts(sources: KeyArray, keys: _PairKeys) -> npt.NDArray[np.int64]:
    """For each source the pairs of other sources that have one of its texts: if it is held out, they are left out.

    A pair that meets it twice is counted twice, which happens only where targets of one are sources of another.
    """
    mine = keys.select(_is_in_sorted(keys.source, np.sort(sources)) & keys.nonempty_mask)
    _, first, count = np.unique(combine_keys(mine.source, mine.target), return_index=True, return_counts=True)
    mine = mine.select(first)
    texts = np.unique(np.concatenate([sources, mine.target]))
    same = keys.source[keys.source == keys.target]
    met = _count_keys(texts, keys.source) + _count_keys(texts, keys.target) - _count_keys(texts, same)
    others = met[np.searchsorted(texts, mine.target)] - count
    others[mine.target == mine.source] = 0  # its own pairs, and those that have it as their target: counted below
    order = np.argsort(sources)
    cost = np.zeros(len(sources), np.int64)
    np.add.at(cost, order[np.searchsorted(sources[order], mine.source)], others)
    return cost + met[np.searchsorted(texts, sources)] - _count_keys(sources, keys.source)


def _select_within_budget(
    sizes: npt.NDArray[np.int64], costs: npt.NDArray[np.int64], num_pairs: int, total: int
) -> npt.NDArray[np.int64]:
    """The first candidates that give so many pairs, without those that cost training too many."""
    budget = max(total // BUDGET_DIVISOR, 1)
    taken, held, spent = [], 0, 0
    for i, (size, cost) in enumerate(zip(sizes.tolist(), costs.tolist(), strict=True)):
        if held >= num_pairs:
            break
        if cost <= max(budget // SOURCE_BUDGET_DIVISOR, MIN_SOURCE_BUDGET) and spent + cost <= budget:
            taken.append(i)
            held, spent = held + size, spent + cost
    return np.array(taken, np.int64)
