"""Hold out validation pairs that share no text with the training pairs.

A seeded hash of the source decides which pairs are held out, so that the split is the same on every machine and for any
order of the files. All pairs of one source go together, and a pair that shares a text with a held-out one is excluded
from training. Texts are compared as in `contamination`: case-folded, without spaces and punctuation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Self

import numpy as np
import numpy.typing as npt

from attent.data.arrays import search_sorted
from attent.data.corpus import Corpus, CorpusSplit
from attent.data.filters import KeyArray, combine_keys, hash_texts
from attent.data.pairs import CorpusError, Pair
from attent.data.report import fold_texts

BoolArray = npt.NDArray[np.bool_]
CountArray = npt.NDArray[np.int64]

CHUNK_LINES = 5_000  # read together
BUDGET_DIVISOR = 5  # at most one pair in five is taken from training, held out or excluded
SOURCE_BUDGET_DIVISOR, MIN_SOURCE_BUDGET = 10, 3  # one source takes at most a tenth of that, or three pairs
CANDIDATES_PER_PAIR = 8  # sources considered per requested pair, since some would exclude too much
MIN_CANDIDATES = 1_000
SHARED_TARGETS_DIVISOR = 4  # targets may be shared if only a quarter of the pairs could be held out otherwise
EMPTY_KEY = np.uint64(0)  # of a text without visible characters


def default_validation_size(num_pairs: int) -> int:
    """Return how many pairs to hold out: a tenth of little data, a fiftieth of much, 200 to 2,000 between.

    BLEU of fewer than 200 sentences is mostly noise. Shared tasks use development sets of about 2,000; more would only
    take time from training.
    """
    return max(1, min(num_pairs // 10, max(num_pairs // 50, 200), 2_000))


def hold_out(
    corpora: Sequence[Corpus], num_pairs: int, seed: int, others: Sequence[Corpus] = ()
) -> tuple[list[Corpus], list[Corpus]]:
    """Return (training, held-out) corpora: about `num_pairs` held out in total, fewer if texts are often repeated.

    The first list has every corpus, and then the others, of which none is held out; the second has those of `corpora`
    with held-out pairs. No text of these occurs in a training pair, on either side; only if there are too few distinct
    targets, as with class labels, targets may be shared (`CorpusSplit.has_disjoint_targets` is then False).
    """
    if num_pairs < 1:
        raise CorpusError(f"the number of pairs to hold out must be 1 or more, but is {num_pairs}")
    scans = [_ScannedCorpus.scan(corpus) for corpus in corpora]
    keys = np.concatenate([_hash_pairs([]), *(scan.keys for scan in scans)], 1)
    selection = _choose_held_out(keys, num_pairs, seed)
    if selection is None:
        names = ", ".join(corpus.name for corpus in corpora)
        required = "at least 2 different sources with translations to hold out validation data"
        raise CorpusError(f"{names}: must have {required}, but has fewer; add pairs, or give validation data")
    train = [scan.select_part(selection, held_out=False) for scan in (*scans, *map(_ScannedCorpus.scan, others))]
    held_out = [scan.select_part(selection, held_out=True) for scan in scans]
    return train, [corpus for corpus in held_out if corpus.split and corpus.split.pair_count]


def summarize_split(train: Sequence[Corpus], held_out: Sequence[Corpus]) -> str:
    splits = [corpus.split for corpus in train if corpus.split]
    total = sum(split.corpus_pair_count for split in splits)
    num_held_out = sum(corpus.split.pair_count for corpus in held_out if corpus.split)
    excluded = total - num_held_out - sum(split.pair_count for split in splits)
    is_disjoint = all(split.has_disjoint_targets for split in splits)
    summary = f"held out {num_held_out:,} of {total:,} pairs for validation"
    if excluded:
        shared = "text" if is_disjoint else "source"
        summary += f"; excluded {excluded:,} more from training, which share a {shared} with them"
    return summary if is_disjoint else f"{summary}; targets repeat too often to be disjoint"


def _hash_pairs(pairs: Sequence[Pair]) -> KeyArray:
    """Return the keys of the sources and of the targets, (2, N)."""
    return np.stack([hash_folded_texts(texts) for texts in ([p.source for p in pairs], [p.target for p in pairs])])


def _find_nonempty(keys: KeyArray) -> BoolArray:
    return (keys != EMPTY_KEY).all(0)


def hash_folded_texts(texts: Sequence[str]) -> KeyArray:
    """Return a key per text; texts that differ only in case, spaces and punctuation share it."""
    folded = [text.replace(" ", "") for text in fold_texts(texts)]
    if "" in folded:  # only punctuation, which then counts
        folded = [short or text.strip() for short, text in zip(folded, texts, strict=True)]
    keys = hash_texts(folded).copy()
    keys[[not text for text in folded]] = EMPTY_KEY
    return keys


@dataclass(frozen=True)
class _ScannedCorpus:
    """A corpus with the fingerprint of its files, masks of its entries, and the keys of its pairs."""

    corpus: Corpus
    fingerprint: tuple[tuple[str, int, int], ...]
    is_pair: BoolArray
    is_bad_line: BoolArray
    keys: KeyArray  # (2, N)

    @classmethod
    def scan(cls, corpus: Corpus) -> Self:
        """Read a corpus, or the part of it that an earlier split has left."""
        fingerprint = tuple(corpus.fingerprint())  # before reading, so that a change meanwhile is noticed
        is_pair, keys = [np.empty(0, bool)], [_hash_pairs([])]
        entries = iter(replace(corpus, split=None))
        while chunk := list(islice(entries, CHUNK_LINES)):
            is_pair.append(np.fromiter((isinstance(entry, Pair) for entry in chunk), bool, len(chunk)))
            keys.append(_hash_pairs([entry for entry in chunk if isinstance(entry, Pair)]))
        mask, all_keys = np.concatenate(is_pair), np.concatenate(keys, 1)
        is_member = np.frombuffer(corpus.split.membership, bool) if corpus.split else np.ones(len(mask), bool)
        return cls(corpus, fingerprint, mask & is_member, ~mask & is_member, all_keys[:, is_member[mask]])

    def select_part(self, selection: "_HeldOutKeys", *, held_out: bool) -> Corpus:
        """Return the held-out or the training part of the corpus; bad lines belong to the latter."""
        pair_mask = selection.select_pairs(self.keys, held_out=held_out)
        membership = np.zeros(len(self.is_pair), bool) if held_out else self.is_bad_line.copy()
        membership[self.is_pair] = pair_mask
        split = CorpusSplit(
            membership=membership.tobytes(),
            fingerprint=self.fingerprint,
            pair_count=int(pair_mask.sum()),
            corpus_pair_count=len(pair_mask),
            has_disjoint_targets=selection.exclude_targets,
        )
        return replace(self.corpus, split=split)


@dataclass(frozen=True)
class _HeldOutKeys:
    """The held-out sources, and every text that no training pair may have; both sorted."""

    sources: KeyArray
    excluded_texts: KeyArray
    exclude_targets: bool  # their targets are among the excluded texts

    @classmethod
    def from_sources(cls, sources: KeyArray, keys: KeyArray, *, exclude_targets: bool) -> Self:
        sources = np.sort(sources)
        if not exclude_targets:
            return cls(sources, sources, exclude_targets)
        texts = np.union1d(sources, keys[1, _is_in_sorted(keys[0], sources)])
        return cls(sources, texts[texts != EMPTY_KEY], exclude_targets)

    def select_pairs(self, keys: KeyArray, *, held_out: bool) -> BoolArray:
        """Return True for held-out pairs, or else for training pairs, which share no text with one."""
        if held_out:
            return _is_in_sorted(keys[0], self.sources) & _find_nonempty(keys)
        is_excluded = _is_in_sorted(keys[0], self.excluded_texts)
        return ~(is_excluded | _is_in_sorted(keys[1], self.excluded_texts) if self.exclude_targets else is_excluded)


def _is_in_sorted(keys: KeyArray, sorted_keys: KeyArray) -> BoolArray:
    return search_sorted(sorted_keys, keys)[1]


def _choose_held_out(keys: KeyArray, num_pairs: int, seed: int) -> _HeldOutKeys | None:
    """Choose the sources to hold out; None if fewer than two. Targets may be shared only if there are too few."""
    sources = keys[0, _find_nonempty(keys)]
    candidates = np.unique(sources)
    salt = np.frombuffer(blake2b(str(seed).encode(), digest_size=8).digest(), "<u8").astype(np.uint64)
    # Two rounds of splitmix64: an order that is the same everywhere, and for two sources whatever the others are.
    mixed = (candidates ^ salt) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    candidates = candidates[np.argsort(mixed ^ (mixed >> np.uint64(31)))]
    if len(candidates) < 2:
        return None
    candidates = candidates[: max(CANDIDATES_PER_PAIR * num_pairs, MIN_CANDIDATES)]
    sizes, total = _count_keys(candidates, sources), len(sources)
    source_cost = _count_keys(candidates, keys[0])
    full_cost = source_cost + _count_shared_texts(candidates, keys)
    strict = _select_within_budget(sizes, full_cost, num_pairs, total)
    loose = _select_within_budget(sizes, source_cost, num_pairs, total)
    if sizes[strict].sum() * SHARED_TARGETS_DIVISOR >= sizes[loose].sum() > 0:
        return _HeldOutKeys.from_sources(candidates[strict], keys, exclude_targets=True)
    if len(loose):
        return _HeldOutKeys.from_sources(candidates[loose], keys, exclude_targets=False)
    # Every source exceeds the budget: take the cheapest.
    is_strict = bool(full_cost.min() < total)
    cheapest = candidates[[int(np.argmin(full_cost if is_strict else source_cost))]]
    return _HeldOutKeys.from_sources(cheapest, keys, exclude_targets=is_strict)


def _count_keys(unique_keys: KeyArray, keys: KeyArray) -> CountArray:
    order = np.argsort(unique_keys)
    indices, is_found = search_sorted(unique_keys[order], keys)
    counts = np.empty(len(unique_keys), np.int64)
    counts[order] = np.bincount(indices[is_found], minlength=len(unique_keys))
    return counts


def _count_shared_texts(sources: KeyArray, keys: KeyArray) -> CountArray:
    """Return for each source how many pairs of other sources would be excluded, twice if they share both texts."""
    is_own = _is_in_sorted(keys[0], np.sort(sources)) & _find_nonempty(keys)
    _, first, count = np.unique(combine_keys(*keys[:, is_own]), return_index=True, return_counts=True)
    own_sources, own_targets = keys[:, is_own][:, first]
    texts = np.unique(np.concatenate([sources, own_targets]))
    same = keys[0, keys[0] == keys[1]]
    occurrences = _count_keys(texts, keys[0]) + _count_keys(texts, keys[1]) - _count_keys(texts, same)
    others = occurrences[np.searchsorted(texts, own_targets)] - count
    others[own_targets == own_sources] = 0  # its own pairs, and those with it as their target: counted below
    order = np.argsort(sources)
    cost = np.zeros(len(sources), np.int64)
    np.add.at(cost, order[np.searchsorted(sources[order], own_sources)], others)
    return cost + occurrences[np.searchsorted(texts, sources)] - _count_keys(sources, keys[0])


def _select_within_budget(sizes: CountArray, costs: CountArray, num_pairs: int, total: int) -> CountArray:
    """Return the first candidates that give `num_pairs`, without those that exclude too many training pairs."""
    budget = max(total // BUDGET_DIVISOR, 1)
    max_cost = max(budget // SOURCE_BUDGET_DIVISOR, MIN_SOURCE_BUDGET)
    selected, held_out, spent = [], 0, 0
    for i, (size, cost) in enumerate(zip(sizes.tolist(), costs.tolist(), strict=True)):
        if held_out >= num_pairs:
            break
        if cost <= max_cost and spent + cost <= budget:
            selected.append(i)
            held_out, spent = held_out + size, spent + cost
    return np.array(selected, np.int64)
