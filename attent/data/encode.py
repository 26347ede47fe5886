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
from attent.data.filters import FilterConfig, PairFilter, hash_pairs, infer_scripts, strip_text
from attent.data.pairs import BadLine, CorpusError, Pair
from attent.data.process_pool import map_in_order
from attent.text.bulk_encoder import BulkEncoder, EncodedSentences
from attent.text.tokenizer import SubwordSampling, Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer

BLOCK_PAIRS = 4096  # pairs; sampling is seeded by the block
SERIAL_BLOCKS = 8  # blocks that one process makes in less time than it takes to start others
SCRIPT_SAMPLE_SIZE = 1000  # pairs from which the script of a side is told where its language does not tell it
MAX_EXAMPLES = 3  # of each kind of line that was left out
LINE_BITS = 40  # a place is one number: which file in the upper bits, the line in these


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """All that decides which ids a corpus becomes."""

    tokenizer: Tokenizer
    filters: FilterConfig = field(default_factory=FilterConfig)
    language_tags: bool = False  # each source begins with the tag of its target language, <2de>
    subword_sampling: SubwordSampling | None = (
        None  # another segmentation for every `draw`; None is always the best one
    )
    sampling_seed: tuple[int, int] = (0, 0)  # (seed, epoch)

    @property
    def dtype(self) -> str:
        """The smallest numbers that hold every id."""
        return "<u2" if max(self.tokenizer.source.size, self.tokenizer.target.size) <= 2**16 else "<u4"


@dataclass
class DropTally:
    """What was left out, by reason, with a few places to look at."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, location: str) -> None:
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(location)


class FileTable:
    """The files of a corpus, numbered as they come up, so that a place is one number."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._indices: dict[str, int] = {}

    def encode_location(self, pair: Pair) -> int:
        number = self._indices.setdefault(pair.file, len(self.files))
        if number == len(self.files):
            self.files.append(pair.file)
        return number << LINE_BITS | pair.line

    def format_location(self, location: int) -> str:
        return format_location(location, self.files)


def format_location(location: int, files: list[str]) -> str:
    """A place as a person reads it: `corpus.tsv:1234`."""
    file, line = divmod(location, 1 << LINE_BITS)
    return f"{files[file]}:{line}"


@dataclass(frozen=True)
class EncodedBlock:
    """Some pairs as arrays, in the order of the corpus, and those that the filters dropped."""

    keys: Array  # what two equal pairs share
    locations: Array
    source: EncodedSentences
    target: EncodedSentences
    dropped: list[tuple[str, int]]  # (why, place)

    def select(self, mask: Array) -> EncodedBlock:
        """The pairs for which `kept` is True."""
        source, target = self.source.select(mask), self.target.select(mask)
        return EncodedBlock(self.keys[mask], self.locations[mask], source, target, self.dropped)


@dataclass(frozen=True)
class BlockEncoder:
    """Pairs in, a block out."""

    config: EncodingConfig
    pair_filter: PairFilter
    target_language: str | None  # the language of the tag, where sources have one

    def __call__(self, block_index: int, sources: list[str], targets: list[str], locations: list[int]) -> EncodedBlock:
        why = list(map(self.pair_filter.drop_reason, sources, targets))
        dropped = [(reason, place) for reason, place in zip(why, locations, strict=True) if reason is not None]
        if dropped:
            kept = [reason is None for reason in why]
            sources, targets = list(compress(sources, kept)), list(compress(targets, kept))
            locations = list(compress(locations, kept))
        sources, targets = list(map(strip_text, sources)), list(map(strip_text, targets))
        keys = hash_pairs(sources, targets) ^ np.uint64(_stable_hash(self.target_language, 8))
        source, target = self._encode_sides(sources, targets, block_index)
        return EncodedBlock(keys, np.array(locations, "<u8"), source, target, dropped)

    def _encode_sides(
        self, sources: list[str], targets: list[str], block_index: int
    ) -> tuple[EncodedSentences, EncodedSentences]:
        tokenizer, sampling, dtype = self.config.tokenizer, self.config.subword_sampling, self.config.dtype
        if sampling is None:
            source, target = self._bulk_encoders
            tag = None if self.target_language is None else tokenizer.source.get_tag_id(self.target_language)
            return source.encode(sources, tag), target.encode(targets)
        seed = _stable_hash((*self.config.sampling_seed, block_index), 3)
        rows = tokenizer.sample_source(sources, sampling, seed, target_language=self.target_language)
        return EncodedSentences.from_lists(rows, dtype), EncodedSentences.from_lists(
            tokenizer.sample_target(targets, sampling, seed), dtype
        )

    @cached_property
    def _bulk_encoders(self) -> tuple[BulkEncoder, BulkEncoder]:
        """One for both sides when they share a vocabulary: what one has met, the other knows."""
        tokenizer = self.config.tokenizer
        source = BulkEncoder(tokenizer.source, self.config.dtype)
        return source, source if tokenizer.joint else BulkEncoder(tokenizer.target, self.config.dtype)


def learn_tokenizer(
    corpora: Sequence[Corpus], config: TokenizerConfig | None = None, *, language_tags: bool = False, seed: int = 0
) -> Tokenizer:
    """A tokenizer learnt from a sample of these corpora; with `tags`, one for each language translated into."""
    languages = dict.fromkeys(corpus.languages.target for corpus in corpora) if language_tags else {}
    pairs = [(entry for corpus in corpora for entry in corpus if isinstance(entry, Pair)) for _ in range(2)]
    sources, targets = (pair.source for pair in pairs[0]), (pair.target for pair in pairs[1])
    known = [tag for tag in languages if tag is not None]
    return train_tokenizer(sources, targets, config or TokenizerConfig(), known, seed)


def encode_corpus(
    corpus: Corpus, config: EncodingConfig, file_table: FileTable, tally: DropTally, workers: int
) -> Iterator[EncodedBlock]:
    """The corpus as blocks of arrays, in order. The first few are made here: a small corpus needs no other process."""
    pairs = _iter_pairs(corpus, tally)
    head = list(islice(pairs, SCRIPT_SAMPLE_SIZE))
    sieve = PairFilter(config.filters, infer_scripts(corpus.languages, head))
    if config.language_tags and corpus.languages.target is None:
        raise CorpusError(f"{corpus.name}: its target language must be known for tags such as <2de>: give it as --tgt")
    encoder = BlockEncoder(config, sieve, corpus.languages.target if config.language_tags else None)
    blocks = _iter_blocks(chain(head, pairs), file_table)
    for block in blocks if workers < 2 else islice(blocks, SERIAL_BLOCKS):
        yield encoder(*block)
    if (first := next(blocks, None)) is not None:
        yield from map_in_order(encoder, chain([first], blocks), workers)


def _iter_pairs(corpus: Corpus, tally: DropTally) -> Iterator[Pair]:
    for entry in corpus:
        if isinstance(entry, BadLine):
            tally.add(entry.reason, f"{entry.file}:{entry.line}")
        else:
            yield entry


def _iter_blocks(pairs: Iterable[Pair], file_table: FileTable) -> Iterator[tuple[int, list[str], list[str], list[int]]]:
    """Number, sources, targets and places of each block."""
    pairs = iter(pairs)
    for number in count():
        block = list(islice(pairs, BLOCK_PAIRS))
        if not block:
            return
        yield (
            number,
            [pair.source for pair in block],
            [pair.target for pair in block],
            list(map(file_table.encode_location, block)),
        )


def _stable_hash(key: object, size: int) -> int:
    """The same number for the same facts, in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=size).digest(), "little")
