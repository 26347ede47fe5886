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

from attent.data.corpus import Corpus, Split
from attent.data.filters import Keys, join_keys, text_keys
from attent.data.leakage import fold
from attent.data.pairs import Bad, CorpusError, Pair

Flags = npt.NDArray[np.bool_]

CHUNK = 5_000  # lines that are read together
BUDGET = 5  # at most one pair in so many is taken from training, by holding out or leaving out
SHARE, FEW = 10, 3  # and a single source takes at most one in ten of these, unless that is three or less
CANDIDATES = 8  # sources that are looked at for each pair wanted, since some would take too much from training
FEWEST = 1_000  # sources that are looked at in any case
ENOUGH = 4  # if not one in so many of the pairs can be had with targets of their own, targets may be shared
NOTHING = np.uint64(0)  # the key of a text that is nothing but space


def default_size(pairs: int) -> int:
    """How many of so many pairs to hold out: a tenth of little data, a fiftieth of much, 200 to 2,000 between.

    BLEU of fewer than 200 sentences mostly tells chance. About 2,000 are what shared tasks use for development, and
    more would only take time from training.
    """
    return max(1, min(pairs // 10, max(pairs // 50, 200), 2_000))


def hold_out(corpora: Sequence[Corpus], pairs: int, seed: int) -> tuple[list[Corpus], list[Corpus]]:
    """(to train on, held out): about `pairs` pairs over all corpora together, less where texts are often repeated.

    The first list has every corpus, the second those of which something is held out. No text of a held-out pair is
    in a pair to train on, on either side. Only where there are so few different targets that this cannot be had, as
    with labels, targets may be the same (`Split.targets` is then False), and sources still are not.
    """
    if pairs < 1:
        raise CorpusError(f"the number of pairs to hold out must be 1 or more, but is {pairs}")
    read = [_Read.of(corpus) for corpus in corpora]
    choice = _choose(_Sides.joined([one.sides for one in read]), pairs, seed)
    if choice is None:
        names = ", ".join(corpus.name for corpus in corpora)
        raise CorpusError(
            f"{names}: to hold out a part there must be at least 2 different sources with translations, but there are "
            f"fewer; add pairs, or give data to validate on"
        )
    train = [one.part(choice, held=False) for one in read]
    held = [one.part(choice, held=True) for one in read]
    return train, [corpus for corpus in held if corpus.split and corpus.split.pairs]


def summary(train: Sequence[Corpus], held: Sequence[Corpus]) -> str:
    """What was held out, in a sentence for the log."""
    splits = [corpus.split for corpus in train if corpus.split]
    rest, out = sum(split.pairs for split in splits), sum(corpus.split.pairs for corpus in held if corpus.split)
    lost = sum(split.of for split in splits) - rest - out
    shared = "a text" if all(split.targets for split in splits) else "a source"
    told = f"held out {out:,} of {out + rest + lost:,} pairs for validation"
    told += f"; left {lost:,} more out of training, which share {shared} with them" if lost else ""
    return told if shared == "a text" else f"{told}; targets repeat so much that they are in training too"


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Sides(NamedTuple):
    """A key for each source and each target."""

    source: Keys
    target: Keys

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> _Sides:
        return cls(keys([pair.source for pair in pairs]), keys([pair.target for pair in pairs]))

    @classmethod
    def joined(cls, pieces: Sequence[_Sides]) -> _Sides:
        whole = [cls.of([]), *pieces]
        return cls(np.concatenate([one.source for one in whole]), np.concatenate([one.target for one in whole]))

    def where(self, wanted: Flags | npt.NDArray[np.intp]) -> _Sides:
        return _Sides(self.source[wanted], self.target[wanted])

    @property
    def whole(self) -> Flags:
        """Is there text on both sides?"""
        return (self.source != NOTHING) & (self.target != NOTHING)


def keys(texts: Sequence[str]) -> Keys:
    """A number for each text, which texts share that differ in capitals, spaces and punctuation alone."""
    folded = fold(texts).replace(" ", "").split("\n")[: len(texts)]
    if "" in folded:  # nothing but punctuation, which then counts
        folded = [short or text.strip() for short, text in zip(folded, texts, strict=True)]
    found = text_keys(folded).copy()
    found[[not text for text in folded]] = NOTHING
    return found


@dataclass(frozen=True)
class _Read:
    """A corpus that was read through: what its files were then, which entries are pairs, and the keys of these."""

    corpus: Corpus
    stamps: tuple[tuple[str, int, int], ...]
    is_pair: Flags
    sides: _Sides

    @classmethod
    def of(cls, corpus: Corpus) -> _Read:
        assert corpus.split is None, "a part of a part is not told apart"
        stamps = tuple(corpus.fingerprint())  # before reading, so that a change meanwhile is noticed
        is_pair, sides = [np.empty(0, bool)], []
        for chunk in _chunks(iter(corpus)):
            is_pair.append(np.fromiter((isinstance(entry, Pair) for entry in chunk), bool, len(chunk)))
            sides.append(_Sides.of([entry for entry in chunk if isinstance(entry, Pair)]))
        return cls(corpus, stamps, np.concatenate(is_pair), _Sides.joined(sides))

    def part(self, choice: _Choice, *, held: bool) -> Corpus:
        """The corpus with only what is held out, or with what is left to train on; bad lines belong to the latter."""
        mine = choice.held(self.sides) if held else ~choice.touched(self.sides)
        kept = np.zeros(len(self.is_pair), bool) if held else ~self.is_pair
        kept[self.is_pair] = mine
        pairs, targets = int(mine.sum()), choice.targets
        split = Split(kept=kept.tobytes(), stamps=self.stamps, pairs=pairs, of=len(mine), targets=targets)
        return replace(self.corpus, split=split)


def _chunks(entries: Iterator[Pair | Bad]) -> Iterator[list[Pair | Bad]]:
    while chunk := list(islice(entries, CHUNK)):
        yield chunk


# ---- choosing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """The sources that are held out, and every text that no pair to train on may have; both sorted."""

    sources: Keys
    texts: Keys
    targets: bool  # their targets are among the texts

    @classmethod
    def of(cls, sources: Keys, sides: _Sides, *, targets: bool) -> _Choice:
        sources = np.sort(sources)
        if not targets:
            return cls(sources, sources, targets)
        texts = np.union1d(sources, sides.target[_within(sides.source, sources)])
        return cls(sources, texts[texts != NOTHING], targets)

    def held(self, sides: _Sides) -> Flags:
        return _within(sides.source, self.sources) & sides.whole

    def touched(self, sides: _Sides) -> Flags:
        """Held out, or so close to what is that training on it would tell."""
        touched = _within(sides.source, self.texts)
        return touched | _within(sides.target, self.texts) if self.targets else touched


def _within(found: Keys, wanted: Keys) -> Flags:
    """Which of these are among the sorted `wanted`. np.isin would sort them all, and they are many."""
    if not len(wanted):
        return np.zeros(len(found), bool)
    return wanted[np.minimum(np.searchsorted(wanted, found), len(wanted) - 1)] == found


def _choose(sides: _Sides, pairs: int, seed: int) -> _Choice | None:
    """None where there are not two sources. Targets may be shared only where too little could be held out otherwise."""
    whole = sides.where(sides.whole)
    candidates = _shuffled(np.unique(whole.source), seed)
    if len(candidates) < 2:
        return None
    candidates = candidates[: max(CANDIDATES * pairs, FEWEST)]
    sizes = _counts(candidates, whole.source)
    alone, total = _counts(candidates, sides.source), len(whole.source)
    shared = alone + _cost_of_targets(candidates, sides)
    strict, loose = _affordable(sizes, shared, pairs, total), _affordable(sizes, alone, pairs, total)
    if sizes[strict].sum() * ENOUGH >= sizes[loose].sum() > 0:
        return _Choice.of(candidates[strict], sides, targets=True)
    if len(loose):
        return _Choice.of(candidates[loose], sides, targets=False)
    cost, targets = (shared, True) if shared.min() < total else (alone, False)  # every source takes a large share
    return _Choice.of(candidates[[int(np.argmin(cost))]], sides, targets=targets)


def _shuffled(sources: Keys, seed: int) -> Keys:
    """In an order by chance that is the same everywhere, and in which other sources change nothing."""
    salt = np.frombuffer(blake2b(str(seed).encode(), digest_size=8).digest(), "<u8").astype(np.uint64)
    mixed = (sources ^ salt) * np.uint64(0xBF58476D1CE4E5B9)  # two rounds of splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return sources[np.argsort(mixed ^ (mixed >> np.uint64(31)))]


def _counts(wanted: Keys, found: Keys) -> npt.NDArray[np.int64]:
    """How often each of the different `wanted` is found."""
    order = np.argsort(wanted)
    at = np.searchsorted(wanted[order], found[_within(found, wanted[order])])
    counts = np.empty(len(wanted), np.int64)
    counts[order] = np.bincount(at, minlength=len(wanted))
    return counts


def _cost_of_targets(sources: Keys, sides: _Sides) -> npt.NDArray[np.int64]:
    """For each source the pairs of other sources that have one of its texts: if it is held out, they are left out.

    A pair that meets it twice is counted twice, which happens only where targets of one are sources of another.
    """
    mine = sides.where(_within(sides.source, np.sort(sources)) & sides.whole)
    _, first, count = np.unique(join_keys(mine.source, mine.target), return_index=True, return_counts=True)
    mine = mine.where(first)
    texts = np.unique(np.concatenate([sources, mine.target]))
    same = sides.source[sides.source == sides.target]
    met = _counts(texts, sides.source) + _counts(texts, sides.target) - _counts(texts, same)
    others = met[np.searchsorted(texts, mine.target)] - count
    others[mine.target == mine.source] = 0  # its own pairs, and those that have it as their target: counted below
    order = np.argsort(sources)
    cost = np.zeros(len(sources), np.int64)
    np.add.at(cost, order[np.searchsorted(sources[order], mine.source)], others)
    return cost + met[np.searchsorted(texts, sources)] - _counts(sources, sides.source)


def _affordable(
    sizes: npt.NDArray[np.int64], costs: npt.NDArray[np.int64], pairs: int, total: int
) -> npt.NDArray[np.int64]:
    """The first candidates that give so many pairs, without those that cost training too many."""
    budget = max(total // BUDGET, 1)
    taken, held, spent = [], 0, 0
    for i, (size, cost) in enumerate(zip(sizes.tolist(), costs.tolist(), strict=True)):
        if held >= pairs:
            break
        if cost <= max(budget // SHARE, FEW) and spent + cost <= budget:
            taken.append(i)
            held, spent = held + size, spent + cost
    return np.array(taken, np.int64)
