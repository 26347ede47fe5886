"""The token store: a corpus as numbers, made once, then opened at once by every run that asks for the same.

A store is a folder of memory-mapped arrays: for each side all ids end to end, the offsets between which each sentence
stands, and where each pair stood in the corpus. Its name is a hash of all that decides what is in it: the contents of
the files, tokenizer, filters. It is written aside and renamed when it is whole, so that a killed run leaves no half
store to be found. Encoding is done in `encode`; how the sentences are laid into batches is left to `batches`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from attent import settings
from attent.data.arrays import Array, concatenate_ranges
from attent.data.corpus import Corpus
from attent.data.encode import (
    BLOCK_PAIRS,
    DropTally,
    EncodedBlock,
    EncodingConfig,
    FileTable,
    encode_corpus,
    format_location,
)
from attent.data.file_hashes import hash_file
from attent.data.filters import KeySet
from attent.data.pairs import CorpusError
from attent.storage.cache import build_folder, remove_abandoned
from attent.text.bulk_encoder import EncodedSentences

# Part of the key: raised when readers, filters or encoders give other ids for the same files, or the arrays change.
FORMAT_VERSION = 2
META_FILE = "store.json"
MAX_WORKERS = 4  # one process reads and writes as fast as about three encode
SIDES = ("source", "target")
OFFSET_DTYPE, LOCATION_DTYPE = "<i8", "<u8"
FAULT_AROUND_BYTES = 2**16  # bytes that Linux maps around a page that is touched
MAX_RESIDENT_BYTES = 2**26  # bytes of a side's ids that may stay mapped


@dataclass(frozen=True, kw_only=True)
class CorpusPart:
    """What one corpus gave: its pairs stand together, behind those of the corpora before it."""

    name: str
    pairs: int
    dropped: dict[str, int]  # by reason
    examples: dict[str, list[str]]  # reason -> a few places, `file:line`


@dataclass(frozen=True, kw_only=True)
class StoreMeta:
    """What `store.json` tells."""

    format_version: int
    pairs: int
    dtype: str
    token_counts: dict[str, int]  # side -> ids
    pad_ids: dict[str, int]  # side -> the id that fills up rows
    files: list[str]
    parts: list[CorpusPart]

    @classmethod
    def read(cls, path: Path) -> StoreMeta:
        facts = settings.read_json(path)
        try:
            return cls(**{**facts, "parts": [CorpusPart(**part) for part in facts["parts"]]})
        except (TypeError, KeyError) as error:
            raise CorpusError(f"{path} is not what attent writes: delete its folder, and it is made again") from error


@dataclass(frozen=True)
class StoreSide:
    """One side of all pairs: sentence i is `ids[offsets[i]:offsets[i + 1]]`, its end token included."""

    ids: Array
    offsets: Array
    sentences_read: list[int] = field(
        default_factory=lambda: [0], repr=False
    )  # sentences since ids were last let go of

    @classmethod
    def open(cls, folder: Path, side: str, meta: StoreMeta) -> StoreSide:
        ids = _map_array(folder / f"{side}.ids", meta.dtype, meta.token_counts[side])
        return cls(ids, _map_array(folder / f"{side}.offsets", OFFSET_DTYPE, meta.pairs + 1))

    def __getitem__(self, pair: int) -> Array:
        return self.ids[self.offsets[pair] : self.offsets[pair + 1]]

    def lengths(self) -> Array:
        lengths = np.empty(len(self.offsets) - 1, np.int32)
        return np.subtract(self.offsets[1:], self.offsets[:-1], out=lengths, casting="unsafe")

    def gather(self, starts: Array, lengths: Array) -> Array:
        """The ids of many sentences, end to end."""
        ids = np.take(self.ids, concatenate_ranges(starts, lengths))
        self._release_pages(len(starts))
        return ids

    def _release_pages(self, sentences: int) -> None:
        """Let go, from time to time, of what random looks have brought into memory; the system still has it.

        Each brings 64 KiB around it, so that a walk through a large corpus would soon hold all of it.
        """
        self.sentences_read[0] += sentences
        if self.sentences_read[0] * FAULT_AROUND_BYTES > MAX_RESIDENT_BYTES and self.ids.nbytes > MAX_RESIDENT_BYTES:
            self.sentences_read[0] = 0
            mapping: object = self.ids.base
            if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class TokenStore:
    """A corpus as numbers. Opening reads almost nothing; only what is used comes into memory."""

    folder: Path
    meta: StoreMeta
    source: StoreSide = field(repr=False)
    target: StoreSide = field(repr=False)
    locations: Array = field(repr=False)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        meta = StoreMeta.read(folder / META_FILE)
        source, target = (StoreSide.open(folder, side, meta) for side in SIDES)
        return cls(folder, meta, source, target, _map_array(folder / "locations", LOCATION_DTYPE, meta.pairs))

    def __len__(self) -> int:
        return self.meta.pairs

    def format_location(self, pair: int) -> str:
        """Where a pair stood in the corpus: `corpus.tsv:1234`."""
        return format_location(int(self.locations[pair]), self.meta.files)


def _map_array(path: Path, dtype: str, count: int) -> Array:
    wanted, size = count * np.dtype(dtype).itemsize, path.stat().st_size
    if size != wanted:
        raise CorpusError(f"{path} must have {wanted} bytes but has {size}: delete its folder, and it is made again")
    return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)  # an empty file cannot be mapped


# --- making one ----------------------------------------------------------------------------------------------------


def prepare_store(
    corpora: Sequence[Corpus],
    config: EncodingConfig,
    root: str | Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """The store of these corpora in `root`: opened where it stands, else made. `progress` is told the pairs done."""
    root = Path(root)

    def make(aside: Path) -> None:
        try:
            with _StoreWriter(aside, config) as writer:
                for corpus in corpora:
                    writer.add(corpus, workers or min(MAX_WORKERS, os.cpu_count() or 1), progress)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    root.mkdir(parents=True, exist_ok=True)
    folder = root / store_key(corpora, config, root)
    if not _is_complete(folder):
        remove_abandoned(root)
    return TokenStore.open(build_folder(folder, make, _is_complete))


def _is_complete(folder: Path) -> bool:
    try:
        TokenStore.open(folder)
    except (OSError, ValueError):  # not there, or damaged
        return False
    return True


def store_key(corpora: Sequence[Corpus], config: EncodingConfig, root: Path) -> str:
    """Two stores of one key have the same bytes. Weights of corpora are not in it: they belong to the batches."""
    facts = {
        "format": FORMAT_VERSION,
        "corpora": [_corpus_identity(corpus, root) for corpus in corpora],
        "tokenizer": config.tokenizer.fingerprint,
        "filters": settings.to_dict(config.filters),
        "tags": config.language_tags,
        "sampling": config.subword_sampling
        and [settings.to_dict(config.subword_sampling), config.sampling_seed, BLOCK_PAIRS],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _corpus_identity(corpus: Corpus, root: Path) -> list[object]:
    digests = [hash_file(Path(path), root / "digests.json") for path, *_ in corpus.fingerprint()]
    part = [] if corpus.split is None else [hashlib.sha256(corpus.split.membership).hexdigest()]
    return [corpus.file_names, digests, astuple(corpus.languages), astuple(corpus.options), *part]


class ResampledStores:
    """The stores of a training with subword sampling: each epoch has its own, made when it is asked for.

    They stand in a folder that is theirs alone, and only those of the epoch asked for and its neighbours stay there.
    """

    def __init__(self, corpora: Sequence[Corpus], config: EncodingConfig, folder: str | Path, seed: int) -> None:
        self.corpora, self.config, self.folder, self.seed = corpora, config, Path(folder), seed

    def __call__(self, epoch: int) -> TokenStore:
        store = prepare_store(self.corpora, self._config_for_epoch(epoch), self.folder)
        near = {
            store_key(self.corpora, self._config_for_epoch(near), self.folder)
            for near in range(max(0, epoch - 1), epoch + 2)
        }
        for other in self.folder.iterdir():
            if other.is_dir() and other.name not in near and not other.name.endswith(".part"):
                shutil.rmtree(other, ignore_errors=True)
                other.with_name(f".{other.name}.lock").unlink(missing_ok=True)
        return store

    def _config_for_epoch(self, epoch: int) -> EncodingConfig:
        return replace(self.config, sampling_seed=(self.seed, epoch))


class _StoreWriter:
    """The open files of a store that is being made; leaving it without an error makes the store whole."""

    def __init__(self, folder: Path, config: EncodingConfig) -> None:
        self.folder, self.config = folder, config
        self.files: dict[str, BinaryIO] = {}
        self.token_counts = dict.fromkeys(SIDES, 0)
        self.pairs = self.pairs_done = 0
        self.file_table, self.seen_pairs = FileTable(), KeySet()
        self.parts: list[CorpusPart] = []

    def __enter__(self) -> _StoreWriter:
        for name in (*(f"{side}.{what}" for side in SIDES for what in ("ids", "offsets")), "locations"):
            self.files[name] = open(self.folder / name, "wb")
        for side in SIDES:
            self.files[f"{side}.offsets"].write(np.zeros(1, OFFSET_DTYPE).tobytes())
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        for file in self.files.values():
            if failed is None:
                file.flush()
                os.fsync(file.fileno())
            file.close()
        if failed is None:
            self._write_meta()

    def add(self, corpus: Corpus, workers: int, progress: Callable[[int], None] | None) -> None:
        before, tally = self.pairs, DropTally()
        for block in encode_corpus(corpus, self.config, self.file_table, tally, workers):
            self.pairs_done += len(block.keys) + len(block.dropped)
            self._write(self._drop_duplicates(block, tally))
            if progress is not None:
                progress(self.pairs_done)
        part = CorpusPart(
            name=corpus.name, pairs=self.pairs - before, dropped=dict(tally.counts), examples=tally.examples
        )
        self.parts.append(part)

    def _drop_duplicates(self, block: EncodedBlock, tally: DropTally) -> EncodedBlock:
        """Count what the filters dropped, and drop the pairs that came before."""
        for why, place in block.dropped:
            tally.add(why, self.file_table.format_location(place))
        if not self.config.filters.duplicates:
            return block
        new = self.seen_pairs.add(block.keys)
        for place in block.locations[~new]:
            tally.add("duplicates", self.file_table.format_location(int(place)))
        return block if new.all() else block.select(new)

    def _write(self, block: EncodedBlock) -> None:
        self._write_side("source", block.source)
        self._write_side("target", block.target)
        self.files["locations"].write(block.locations.tobytes())
        self.pairs += len(block.locations)

    def _write_side(self, side: str, sentences: EncodedSentences) -> None:
        offsets = self.token_counts[side] + sentences.lengths.cumsum()
        self.token_counts[side] += len(sentences.ids)
        self.files[f"{side}.ids"].write(sentences.ids.tobytes())
        self.files[f"{side}.offsets"].write(offsets.astype(OFFSET_DTYPE).tobytes())

    def _write_meta(self) -> None:
        """Last, so that a folder with it is whole."""
        meta = StoreMeta(
            format_version=FORMAT_VERSION,
            pairs=self.pairs,
            dtype=self.config.dtype,
            token_counts=self.token_counts,
            pad_ids={"source": self.config.tokenizer.source.pad, "target": self.config.tokenizer.target.pad},
            files=self.file_table.files,
            parts=self.parts,
        )
        with open(self.folder / META_FILE, "w", encoding="utf-8") as file:
            json.dump(asdict(meta), file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
