"""From pairs to arrays of ids: the part of making a token store that runs in parallel.

Pairs are taken in blocks, in the order in which they are read; each block is filtered and encoded by itself, in
any process, and the blocks come out in their order. What is in a block never depends on how many processes there were.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, count, islice

import numpy as np

from attent.data.arrays import Array
from attent.data.corpus import Corpus
from attent.data.crew import in_order
from attent.data.filters import Filters, Sieve, clean, expected_scripts, pair_keys
from attent.data.pairs import Bad, CorpusError, Pair
from attent.text.bulk import Bulk, Sentences
from attent.text.tokenizer import Sampling, Tokenizer
from attent.text.train import TokenizerConfig, train

BLOCK = 4096  # pairs; sampling is seeded by the block
ALONE = 8  # blocks that one process makes in less time than it takes to start others
SAMPLE = 1000  # pairs from which the script of a side is told where its language does not tell it
EXAMPLES = 3  # of each kind of line that was left out
LINE_BITS = 40  # a place is one number: which file in the upper bits, the line in these


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides which ids a corpus becomes."""

    tokenizer: Tokenizer
    filters: Filters = field(default_factory=Filters)
    tags: bool = False  # each source begins with the tag of its target language, <2de>
    sampling: Sampling | None = None  # another segmentation for every `draw`; None is always the best one
    draw: tuple[int, int] = (0, 0)  # (seed, epoch)

    @property
    def dtype(self) -> str:
        """The smallest numbers that hold every id."""
        return "<u2" if max(self.tokenizer.source.size, self.tokenizer.target.size) <= 2**16 else "<u4"


@dataclass
class Tally:
    """What was left out, by reason, with a few places to look at."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, why: str, place: str) -> None:
        self.counts[why] += 1
        examples = self.examples.setdefault(why, [])
        if len(examples) < EXAMPLES:
            examples.append(place)


class Names:
    """The files of a corpus, numbered as they come up, so that a place is one number."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._numbers: dict[str, int] = {}

    def place(self, pair: Pair) -> int:
        number = self._numbers.setdefault(pair.file, len(self.files))
        if number == len(self.files):
            self.files.append(pair.file)
        return number << LINE_BITS | pair.line

    def told(self, place: int) -> str:
        return told(place, self.files)


def told(place: int, files: list[str]) -> str:
    """A place as a person reads it: `corpus.tsv:1234`."""
    file, line = divmod(place, 1 << LINE_BITS)
    return f"{files[file]}:{line}"


@dataclass(frozen=True)
class Block:
    """Some pairs as arrays, in the order of the corpus, and those that the filters dropped."""

    keys: Array  # what two equal pairs share
    places: Array
    source: Sentences
    target: Sentences
    dropped: list[tuple[str, int]]  # (why, place)

    def where(self, kept: Array) -> Block:
        """The pairs for which `kept` is True."""
        source, target = self.source.where(kept), self.target.where(kept)
        return Block(self.keys[kept], self.places[kept], source, target, self.dropped)


@dataclass(frozen=True)
class Encoder:
    """Pairs in, a block out."""

    recipe: Recipe
    sieve: Sieve
    to: str | None  # the language of the tag, where sources have one

    def __call__(self, number: int, sources: list[str], targets: list[str], places: list[int]) -> Block:
        why = list(map(self.sieve.why, sources, targets))
        dropped = [(reason, place) for reason, place in zip(why, places, strict=True) if reason is not None]
        if dropped:
            kept = [reason is None for reason in why]
            sources, targets = list(compress(sources, kept)), list(compress(targets, kept))
            places = list(compress(places, kept))
        sources, targets = list(map(clean, sources)), list(map(clean, targets))
        keys = pair_keys(sources, targets) ^ np.uint64(_hashed(self.to, 8))
        source, target = self._encoded(sources, targets, number)
        return Block(keys, np.array(places, "<u8"), source, target, dropped)

    def _encoded(self, sources: list[str], targets: list[str], number: int) -> tuple[Sentences, Sentences]:
        tokenizer, sampling, dtype = self.recipe.tokenizer, self.recipe.sampling, self.recipe.dtype
        if sampling is None:
            source, target = self._bulk
            tag = None if self.to is None else tokenizer.source.tag(self.to)
            return source.encode(sources, tag), target.encode(targets)
        seed = _hashed((*self.recipe.draw, number), 3)
        rows = tokenizer.sample_source(sources, sampling, seed, to=self.to)
        return Sentences.of(rows, dtype), Sentences.of(tokenizer.sample_target(targets, sampling, seed), dtype)

    @cached_property
    def _bulk(self) -> tuple[Bulk, Bulk]:
        """One for both sides when they share a vocabulary: what one has met, the other knows."""
        tokenizer = self.recipe.tokenizer
        source = Bulk(tokenizer.source, self.recipe.dtype)
        return source, source if tokenizer.joint else Bulk(tokenizer.target, self.recipe.dtype)


def learn_tokenizer(
    corpora: Sequence[Corpus], config: TokenizerConfig | None = None, *, tags: bool = False, seed: int = 0
) -> Tokenizer:
    """A tokenizer learnt from a sample of these corpora; with `tags`, one for each language translated into."""
    languages = dict.fromkeys(corpus.languages.target for corpus in corpora) if tags else {}
    pairs = [(entry for corpus in corpora for entry in corpus if isinstance(entry, Pair)) for _ in range(2)]
    sources, targets = (pair.source for pair in pairs[0]), (pair.target for pair in pairs[1])
    known = [tag for tag in languages if tag is not None]
    return train(sources, targets, config or TokenizerConfig(), known, seed)


def encode(corpus: Corpus, recipe: Recipe, names: Names, tally: Tally, workers: int) -> Iterator[Block]:
    """The corpus as blocks of arrays, in order. The first few are made here: a small corpus needs no other process."""
    pairs = _pairs(corpus, tally)
    head = list(islice(pairs, SAMPLE))
    sieve = Sieve(recipe.filters, expected_scripts(corpus.languages, head))
    if recipe.tags and corpus.languages.target is None:
        raise CorpusError(f"{corpus.name}: its target language must be known for tags such as <2de>: give it as --tgt")
    encoder = Encoder(recipe, sieve, corpus.languages.target if recipe.tags else None)
    blocks = _blocks(chain(head, pairs), names)
    for block in blocks if workers < 2 else islice(blocks, ALONE):
        yield encoder(*block)
    if (first := next(blocks, None)) is not None:
        yield from in_order(encoder, chain([first], blocks), workers)


def _pairs(corpus: Corpus, tally: Tally) -> Iterator[Pair]:
    for entry in corpus:
        if isinstance(entry, Bad):
            tally.add(entry.why, f"{entry.file}:{entry.line}")
        else:
            yield entry


def _blocks(pairs: Iterable[Pair], names: Names) -> Iterator[tuple[int, list[str], list[str], list[int]]]:
    """Number, sources, targets and places of each block."""
    pairs = iter(pairs)
    for number in count():
        block = list(islice(pairs, BLOCK))
        if not block:
            return
        yield number, [pair.source for pair in block], [pair.target for pair in block], list(map(names.place, block))


def _hashed(facts: object, size: int) -> int:
    """The same number for the same facts, in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=size).digest(), "little")
