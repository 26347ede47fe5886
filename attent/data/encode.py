"""Encode corpora and texts: sentences in, arrays of token ids out.

Pairs are read in blocks, each filtered and encoded on its own in any process; the result does not depend on the number
of processes. `token_store` writes the arrays to disk.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, count, islice

import numpy as np

from attent.data.arrays import Array, concatenate_ranges, index_in_group
from attent.data.augment import Augmenter
from attent.data.corpus import Corpus
from attent.data.filters import FILTER_SAMPLE_SIZE, FilterConfig, PairFilter, hash_pairs
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair, ReasonTally
from attent.data.process_pool import map_in_order
from attent.text.bulk_encoder import BulkEncoder, EncodedSentences
from attent.text.language_id import LanguageIdentifier
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.text.vocabulary import ESCAPE, SentencePieceVocabulary, Vocabulary

BLOCK_PAIRS = 4096  # augmentation is seeded per block
BLOCK_TEXTS = 4096
SERIAL_BLOCKS = 8  # encoded in less time than it takes to start other processes
LANGUAGE_SAMPLE_SIZE = 20_000  # pairs from which the languages are learned
LINE_BITS = 40  # a location is one integer: the file's index above these bits, the line in them
CHUNK_CHARS = 2**16  # a document is encoded in chunks of about this size
TEXT_DTYPE = "<u4"


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    tokenizer: Tokenizer
    filters: FilterConfig = field(default_factory=FilterConfig)
    language_tags: bool = False  # prefix each source with the tag of its target language, <2de>
    augmenters: Mapping[LanguagePair, Augmenter] = field(default_factory=dict)  # change texts before they are encoded
    augmentation_seed: tuple[int, int] = (0, 0)  # (seed, epoch)

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds every token id."""
        return "<u2" if max(self.tokenizer.source.size, self.tokenizer.target.size) <= 2**16 else "<u4"


def format_location(location: int, files: Sequence[str]) -> str:
    file, line = divmod(location, 1 << LINE_BITS)
    return f"{files[file]}:{line}"


@dataclass(frozen=True)
class EncodedBlock:
    keys: Array  # equal for equal pairs
    locations: Array
    source: EncodedSentences
    target: EncodedSentences
    dropped: list[tuple[str, int]]  # (reason, location)

    def select(self, mask: Array) -> "EncodedBlock":
        source, target = self.source.select(mask), self.target.select(mask)
        return EncodedBlock(self.keys[mask], self.locations[mask], source, target, self.dropped)


@dataclass(frozen=True)
class BlockEncoder:
    """Filters and encodes blocks of pairs; sent to each worker process."""

    config: EncodingConfig
    pair_filter: PairFilter
    target_language: str | None  # of the language tag, if sources have one
    augmenter: Augmenter | None = None

    def __call__(
        self, block_index: int, sources: list[str], targets: list[str], locations: list[int], contexts: list[str]
    ) -> EncodedBlock:
        reasons = list(map(self.pair_filter.drop_reason, sources, targets))
        dropped = [(reason, location) for reason, location in zip(reasons, locations, strict=True) if reason]
        if dropped:
            mask = [reason is None for reason in reasons]
            sources, targets = list(compress(sources, mask)), list(compress(targets, mask))
            locations, contexts = list(compress(locations, mask)), list(compress(contexts, mask))
        sources, targets = list(map(str.strip, sources)), list(map(str.strip, targets))
        keys = hash_pairs(sources, targets) ^ np.uint64(_stable_hash(self.target_language, 8))
        if self.augmenter is not None:
            seed = _stable_hash((*self.config.augmentation_seed, block_index), 8)
            sources, targets = self.augmenter.augment(sources, targets, seed)
        if any(contexts):
            sources = [context + source for context, source in zip(contexts, sources, strict=True)]
        source, target = self._encode_sides(sources, targets)
        return EncodedBlock(keys, np.array(locations, "<u8"), source, target, dropped)

    def _encode_sides(self, sources: list[str], targets: list[str]) -> tuple[EncodedSentences, EncodedSentences]:
        tokenizer, (source, target) = self.config.tokenizer, self._bulk_encoders
        tag = None if self.target_language is None else tokenizer.source.get_tag_id(self.target_language)
        first_source, first_target = (next(iter(ids), None) for ids in tokenizer.prefixes)
        return source.encode(sources, first_source if tag is None else tag), target.encode(targets, first_target)

    @cached_property
    def _bulk_encoders(self) -> tuple[BulkEncoder, BulkEncoder]:
        """One encoder for both sides if they share a vocabulary, so that they share its word cache."""
        tokenizer = self.config.tokenizer
        source = BulkEncoder(tokenizer.source, self.config.dtype)
        return source, source if tokenizer.joint else BulkEncoder(tokenizer.target, self.config.dtype)


def learn_tokenizer(
    corpora: Sequence[Corpus],
    config: TokenizerConfig | None = None,
    *,
    language_tags: bool = False,
    augmenter: Augmenter | None = None,
) -> Tokenizer:
    """Train a tokenizer on a sample of the corpora, changed by `augmenter`."""

    def iterate_texts(side: int) -> Iterator[str]:
        pairs = (entry for corpus in corpora for entry in corpus if isinstance(entry, Pair))
        for index in count():
            if not (block := list(islice(pairs, BLOCK_PAIRS))):
                return
            texts = [pair.source for pair in block], [pair.target for pair in block]
            yield from (texts if augmenter is None else augmenter.augment(*texts, _stable_hash((index,), 8)))[side]

    languages = dict.fromkeys(corpus.languages.target for corpus in corpora) if language_tags else {}
    tags = [tag for tag in languages if tag is not None]
    return train_tokenizer(iterate_texts(0), iterate_texts(1), config or TokenizerConfig(), tags)


def learn_languages(corpora: Sequence[Corpus]) -> LanguageIdentifier | None:
    sides: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    for corpus in corpora:
        if corpus.languages.source is None or corpus.languages.target is None:
            return None
        pairs = islice((entry for entry in corpus if isinstance(entry, Pair)), LANGUAGE_SAMPLE_SIZE)
        texts = sides[0].setdefault(corpus.languages.source, []), sides[1].setdefault(corpus.languages.target, [])
        for pair in pairs:
            texts[0].append(pair.source)
            texts[1].append(pair.target)
    identifier = LanguageIdentifier.learn(*sides)
    return identifier if identifier.sources and identifier.targets else None


def encode_corpus(
    corpus: Corpus, config: EncodingConfig, file_table: dict[str, int], tally: ReasonTally[str], workers: int
) -> Iterator[EncodedBlock]:
    """Yield the corpus as encoded blocks, in order, the first few by this process; `file_table` numbers the files."""
    pairs = _iter_pairs(corpus, tally)
    sample = list(islice(pairs, FILTER_SAMPLE_SIZE))
    pair_filter = PairFilter.from_sample(config.filters, corpus.languages, sample)
    if config.language_tags and corpus.languages.target is None:
        raise CorpusError(f"{corpus.name}: language tags such as <2de> need the target language; give it as --tgt")
    target = corpus.languages.target if config.language_tags else None
    encoder = BlockEncoder(config, pair_filter, target, config.augmenters.get(corpus.languages))
    blocks = _iter_blocks(chain(sample, pairs), file_table)
    for block in blocks if workers < 2 else islice(blocks, SERIAL_BLOCKS):
        yield encoder(*block)
    if (first := next(blocks, None)) is not None:
        yield from map_in_order(encoder, chain([first], blocks), workers)


def _iter_pairs(corpus: Corpus, tally: ReasonTally[str]) -> Iterator[Pair]:
    for entry in corpus:
        if isinstance(entry, BadLine):
            tally.add(entry.reason, f"{entry.file}:{entry.line}")
        else:
            yield entry


def _iter_blocks(
    pairs: Iterable[Pair], file_table: dict[str, int]
) -> Iterator[tuple[int, list[str], list[str], list[int], list[str]]]:
    pairs = iter(pairs)
    for index in count():
        if not (block := list(islice(pairs, BLOCK_PAIRS))):
            return
        locations = [file_table.setdefault(pair.file, len(file_table)) << LINE_BITS | pair.line for pair in block]
        contexts = [pair.context for pair in block]
        yield index, [pair.source for pair in block], [pair.target for pair in block], locations, contexts


def _stable_hash(key: object, size: int) -> int:
    """Return the same integer for the same key in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=size).digest(), "little")


def encode_lines(texts: Sequence[str], vocabulary: Vocabulary) -> EncodedSentences:
    encoder = BulkEncoder(vocabulary, TEXT_DTYPE)
    blocks = [encoder.encode(texts[start : start + BLOCK_TEXTS]) for start in range(0, len(texts), BLOCK_TEXTS)]
    ids, lengths = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("ids", "lengths"))
    end_indices = lengths.cumsum() - 1  # of the end token that `BulkEncoder` appends to each sentence
    return EncodedSentences(np.delete(ids, end_indices), lengths - 1)


def encode_documents(texts: Sequence[str], vocabulary: Vocabulary) -> EncodedSentences:
    return EncodedSentences.from_lists([list(iter_document_ids(text, vocabulary)) for text in texts], TEXT_DTYPE)


def iter_document_ids(text: str, vocabulary: Vocabulary) -> Iterator[int]:
    """Yield the token ids of a text, encoded in chunks with the same result as in one piece."""
    # Imported vocabularies may merge across a newline, so that a text must be encoded in one piece.
    is_native = isinstance(vocabulary, SentencePieceVocabulary) and (
        vocabulary.processor.piece_to_id(ESCAPE) != vocabulary.unknown
    )
    encoded = (vocabulary.encode([chunk])[0] for chunk in (_iter_chunks(text) if is_native else [text]))
    return chain.from_iterable(ids[1:] if index else ids for index, ids in enumerate(encoded))


def _iter_chunks(text: str) -> Iterator[str]:
    """Split before newlines. SentencePiece adds a space, a token before a newline: later chunks drop their first id."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + CHUNK_CHARS)
        stop = len(text) if stop < 0 else stop
        yield text[start:stop]
        start = stop


def add_special_tokens(sentences: EncodedSentences, prefix: Sequence[int], suffix: Sequence[int]) -> EncodedSentences:
    lengths = sentences.lengths + len(prefix) + len(suffix)
    starts = lengths.cumsum() - lengths
    ids = np.empty(int(lengths.sum()), TEXT_DTYPE)
    ids[concatenate_ranges(starts + len(prefix), sentences.lengths)] = sentences.ids
    for first, tokens in ((starts, prefix), (starts + lengths - len(suffix), suffix)):
        for i, token in enumerate(tokens):
            ids[first + i] = token
    return EncodedSentences(ids, lengths)


def truncate_texts(sentences: EncodedSentences, max_tokens: int) -> EncodedSentences:
    lengths = np.minimum(sentences.lengths, max_tokens)
    starts = sentences.lengths.cumsum() - sentences.lengths
    return EncodedSentences(np.take(sentences.ids, concatenate_ranges(starts, lengths)), lengths)


def split_long_texts(sentences: EncodedSentences, max_tokens: int) -> EncodedSentences:
    counts = np.maximum(1, -(-sentences.lengths // max_tokens))
    part = index_in_group(counts)
    lengths, num_parts = np.repeat(sentences.lengths, counts), np.repeat(counts, counts)
    return EncodedSentences(sentences.ids, lengths * (part + 1) // num_parts - lengths * part // num_parts)
