"""Token stores: encoded corpora on disk, built once and then opened by every run that needs the same.

A store is a folder of memory-mapped arrays: for each side the concatenated token ids and the offsets of the sentences,
and the location of each pair in the corpus. Its name is a hash of everything that determines its content: files,
tokenizer, filters. It is built in a temporary folder and renamed, so that a killed run leaves no partial store.
"""

import hashlib
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Self

import numpy as np

from attent import settings
from attent.data import encode
from attent.data.arrays import Array, concatenate_ranges
from attent.data.corpus import Corpus
from attent.data.encode import BLOCK_PAIRS, EncodedBlock, EncodingConfig, encode_corpus, format_location
from attent.data.file_hashes import hash_file
from attent.data.filters import KeySet
from attent.data.pairs import CorpusError, ReasonTally
from attent.data.process_pool import count_free_workers, start_pool, submit_task
from attent.storage.cache import build_folder, remove_abandoned
from attent.text.bulk_encoder import EncodedSentences
from attent.text.vocabulary import Vocabulary

# Part of the key: raise it when the same files give other ids, or the arrays change.
FORMAT_VERSION = 5
META_FILE = "store.json"
MAX_WORKERS = 4  # one process reads and writes as fast as about three encode
MAX_SERIAL_PAIRS = 2**17  # of a corpus that one worker encodes in a few seconds
SIDES = ("source", "target")
OFFSET_DTYPE, LOCATION_DTYPE = "<i8", "<u8"
TEXT_ARRAYS = ("ids", "lengths")
FAULT_AROUND_BYTES = 2**16  # Linux maps this much around a page that is read
MAX_RESIDENT_BYTES = 2**26  # of the ids of one side


@dataclass(frozen=True)
class TokenSequences:
    """Concatenated token sequences: number i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: Array
    offsets: Array
    _read_count: list[int] = field(default_factory=lambda: [0], init=False, repr=False)  # since pages were released

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Self:
        return cls(np.concatenate(rows).astype("<u4"), np.cumsum([0, *map(len, rows)]).astype(OFFSET_DTYPE))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Array:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Array:
        lengths = np.empty(len(self), np.int32)
        return np.subtract(self.offsets[1:], self.offsets[:-1], out=lengths, casting="unsafe")

    def gather(self, starts: Array, lengths: Array) -> Array:
        """Return the ids from each start on, concatenated.

        Each random read maps 64 KiB around it, so that an epoch over a large corpus would soon hold all of it: mapped
        pages are released from time to time, and stay in the system's page cache.
        """
        ids = np.take(self.ids, concatenate_ranges(starts, lengths))
        self._read_count[0] += len(starts)
        if self._read_count[0] * FAULT_AROUND_BYTES > MAX_RESIDENT_BYTES and self.ids.nbytes > MAX_RESIDENT_BYTES:
            self._read_count[0] = 0
            mapping: object = self.ids.base
            if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)
        return ids


@dataclass(frozen=True)
class EncodedTexts(TokenSequences):
    key: str  # a digest of everything that determines them

    @classmethod
    def from_sentences(cls, sentences: EncodedSentences, key: str) -> Self:
        return cls(sentences.ids, np.concatenate([[0], sentences.lengths.cumsum()]), key)


def encode_texts(
    texts: Sequence[str], vocabulary: Vocabulary, fingerprint: str, folder: Path, *, as_documents: bool
) -> tuple[EncodedSentences, str]:
    """Return the token ids of each text without special tokens, and the key under which `folder` caches them."""
    digest = hashlib.sha256(f"{FORMAT_VERSION} {fingerprint} {as_documents}\n".encode())
    for text in texts:
        content = text.encode(errors="surrogatepass")
        digest.update(f"{len(content)}\n".encode())
        digest.update(content)
    key = digest.hexdigest()[:24]

    def build(staging: Path) -> None:
        sentences = (encode.encode_documents if as_documents else encode.encode_lines)(texts, vocabulary)
        for name, array in zip(TEXT_ARRAYS, (sentences.ids, sentences.lengths), strict=True):
            np.save(staging / f"{name}.npy", array, allow_pickle=False)

    def is_complete(path: Path) -> bool:
        return all((path / f"{name}.npy").is_file() for name in TEXT_ARRAYS)

    path = build_folder(folder / f"texts-{key}", build, is_complete)
    ids, lengths = (np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in TEXT_ARRAYS)
    return EncodedSentences(ids, np.asarray(lengths)), key


@dataclass(frozen=True, kw_only=True)
class CorpusPart:
    """The contribution of one corpus; its pairs are contiguous in the store."""

    name: str
    pairs: int
    dropped: dict[str, int]  # by reason
    examples: dict[str, list[str]]  # reason -> a few locations, `file:line`


@dataclass(frozen=True, kw_only=True)
class StoreMeta:
    """Content of `store.json`."""

    format_version: int
    pairs: int
    dtype: str
    token_counts: dict[str, int]  # by side
    pad_ids: dict[str, int]  # by side
    files: list[str]
    parts: list[CorpusPart]

    @classmethod
    def read(cls, path: Path) -> Self:
        data = settings.read_json(path)
        try:
            return cls(**{**data, "parts": [CorpusPart(**part) for part in data["parts"]]})
        except (TypeError, KeyError) as error:
            problem = "is not a token store of this version; delete its folder to rebuild it"
            raise CorpusError(f"{path}: {problem}") from error


@dataclass(frozen=True)
class TokenStore:
    """An encoded parallel corpus. Opening reads almost nothing; arrays are mapped on demand."""

    folder: Path
    meta: StoreMeta
    source: TokenSequences = field(repr=False)  # with end tokens
    target: TokenSequences = field(repr=False)
    locations: Array = field(repr=False)

    @classmethod
    def open(cls, folder: Path) -> Self:
        meta = StoreMeta.read(folder / META_FILE)
        source, target = (
            TokenSequences(
                _map_array(folder / f"{side}.ids", meta.dtype, meta.token_counts[side]),
                _map_array(folder / f"{side}.offsets", OFFSET_DTYPE, meta.pairs + 1),
            )
            for side in SIDES
        )
        return cls(folder, meta, source, target, _map_array(folder / "locations", LOCATION_DTYPE, meta.pairs))

    @classmethod
    def from_sequences(
        cls, source: TokenSequences, target: TokenSequences, pad_ids: tuple[int, int], name: str, folder: Path
    ) -> Self:
        """Return a store in memory."""
        count = len(source)
        meta = StoreMeta(
            format_version=FORMAT_VERSION,
            pairs=count,
            dtype=source.ids.dtype.str,
            token_counts={"source": len(source.ids), "target": len(target.ids)},
            pad_ids=dict(zip(SIDES, pad_ids, strict=True)),
            files=[name],
            parts=[CorpusPart(name=name, pairs=count, dropped={}, examples={})],
        )
        return cls(folder, meta, source, target, np.arange(1, count + 1).astype(LOCATION_DTYPE))

    def __len__(self) -> int:
        return self.meta.pairs

    def format_location(self, pair: int) -> str:
        """Return the location of a pair in the corpus as `corpus.tsv:1234`."""
        return format_location(int(self.locations[pair]), self.meta.files)


def _map_array(path: Path, dtype: str, count: int) -> Array:
    expected, size = count * np.dtype(dtype).itemsize, path.stat().st_size
    if size != expected:
        raise CorpusError(f"{path}: must have {expected} bytes, but has {size}; delete its folder to rebuild it")
    return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)  # an empty file cannot be mapped


def prepare_store(
    corpora: Sequence[Corpus],
    config: EncodingConfig,
    root: str | Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """Open the store of these corpora in `root`, or build it. `progress` is called with the pairs done."""
    root = Path(root)

    def build(staging: Path) -> None:
        try:
            with _StoreWriter(staging, config) as writer:
                for corpus in corpora:
                    writer.add(corpus, workers or min(MAX_WORKERS, os.cpu_count() or 1), progress)
            writer.write_meta()
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    root.mkdir(parents=True, exist_ok=True)
    folder = root / store_key(corpora, config, root)
    if not _is_complete(folder):
        remove_abandoned(root)
    return TokenStore.open(build_folder(folder, build, _is_complete))


def _is_complete(folder: Path) -> bool:
    try:
        TokenStore.open(folder)
    except (OSError, ValueError):  # missing or damaged
        return False
    return True


def store_key(corpora: Sequence[Corpus], config: EncodingConfig, root: Path) -> str:
    """Return the same key for stores with the same bytes. Corpus weights are no part of it: the loader applies them."""
    rates = [augmenter.rates for augmenter in config.augmenters.values()]
    content = {
        "format_version": FORMAT_VERSION,
        "corpora": [identify_corpus(corpus, root) for corpus in corpora],
        "tokenizer": config.tokenizer.fingerprint,
        "filters": settings.to_dict(config.filters),
        "language_tags": config.language_tags,
        "augmentation": [config.augmentation_seed, BLOCK_PAIRS, *rates] if rates else None,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def identify_corpus(corpus: Corpus, root: Path) -> list[object]:
    """Return what determines the text of a corpus; `root` has a cache of the hashes of its files."""
    hashes = [hash_file(Path(path), root / "hashes.json") for path, *_ in corpus.fingerprint()]
    split = [] if corpus.split is None else [hashlib.sha256(corpus.split.membership).hexdigest()]
    context = [corpus.context] if corpus.context else []
    return [corpus.file_names, hashes, astuple(corpus.languages), astuple(corpus.options), *split, *context]


@dataclass(frozen=True)
class EpochStoreBuilder:
    """Builds the store of an epoch; its content does not depend on the process and the number of workers."""

    corpora: Sequence[Corpus]
    config: EncodingConfig
    folder: Path
    seed: int
    cancelled: Event | None = None

    def __call__(self, epoch: int, workers: int | None = None) -> TokenStore:
        return prepare_store(self.corpora, self.config_for(epoch), self.folder, workers=workers, progress=self._check)

    def build(self, epoch: int, workers: int) -> None:
        """Build a store in a worker process, without sending it back."""
        self(epoch, workers)

    def config_for(self, epoch: int) -> EncodingConfig:
        return replace(self.config, augmentation_seed=(self.seed, epoch))

    def _check(self, _: int) -> None:
        if self.cancelled is not None and self.cancelled.is_set():
            raise CancelledError


class EpochStores:
    """One store of augmented text per epoch. From the second on, worker processes build them ahead.

    The folder is theirs alone; only the store of the last requested epoch, the one before and those ahead are kept.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        config: EncodingConfig,
        folder: str | Path,
        seed: int,
        workers: int | None = None,
    ) -> None:
        self.builder = EpochStoreBuilder(corpora, config, Path(folder), seed)
        self.workers = count_free_workers() if workers is None else workers
        self._pool: ProcessPoolExecutor | None = None
        self._cancelled: Event | None = None
        self._pending: dict[int, Future[None]] = {}
        self._is_large: bool | None = None  # unknown
        self._lock = threading.Lock()

    def __call__(self, epoch: int) -> TokenStore:
        if self._is_large is not None and self.workers:
            self._wait_for(epoch)
        store = self.builder(epoch)
        self._is_large = len(store) > MAX_SERIAL_PAIRS
        self._remove_others(epoch)
        return store

    @property
    def _epochs_ahead(self) -> int:
        """Small corpora are encoded an epoch per worker; the blocks of a large one are shared by all workers."""
        return 1 if self._is_large else self.workers

    def _wait_for(self, epoch: int) -> None:
        """Wait until a worker has built the store, and have the next ones built meanwhile."""
        with self._lock:
            if self._pool is None:
                self._cancelled = get_context("spawn").Event()
                self._pool = start_pool(replace(self.builder, cancelled=self._cancelled).build, self._epochs_ahead)
            cancelled = self._cancelled
            block_workers = self.workers if self._is_large else 1
            for other in range(epoch, epoch + 1 + self._epochs_ahead):
                if other not in self._pending:
                    self._pending[other] = submit_task(self._pool, other, block_workers)
            pending = self._pending[epoch]
            self._pending = {other: future for other, future in self._pending.items() if other >= epoch}
        wait([pending])  # if it failed, the caller builds the store again and gets the error
        if cancelled is not None and cancelled.is_set():
            raise CancelledError

    def _remove_others(self, epoch: int) -> None:
        configs = map(self.builder.config_for, range(max(0, epoch - 1), epoch + 3 + self._epochs_ahead))
        keys = {store_key(self.builder.corpora, config, self.builder.folder) for config in configs}
        for folder in self.builder.folder.iterdir():
            if folder.is_dir() and folder.name not in keys and not folder.name.endswith(".part"):
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_name(f".{folder.name}.lock").unlink(missing_ok=True)

    def close(self) -> None:
        """Stop the workers; the next call starts others."""
        with self._lock:
            pool, self._pool, self._pending = self._pool, None, {}
            if pool is not None and self._cancelled is not None:
                self._cancelled.set()
                pool.shutdown(cancel_futures=True)


class _StoreWriter(ExitStack):
    """The open files of a store; the caller syncs them to disk."""

    def __init__(self, folder: Path, config: EncodingConfig) -> None:
        super().__init__()
        self.folder, self.config = folder, config
        names = [*(f"{side}.{array}" for side in SIDES for array in ("ids", "offsets")), "locations"]
        self.files = {name: self.enter_context((folder / name).open("wb")) for name in names}
        for side in SIDES:
            self.files[f"{side}.offsets"].write(np.zeros(1, OFFSET_DTYPE).tobytes())
        self.token_counts = dict.fromkeys(SIDES, 0)
        self.pairs = self.pairs_done = 0
        self.file_table: dict[str, int] = {}
        self.seen_pairs = KeySet()
        self.parts: list[CorpusPart] = []

    def add(self, corpus: Corpus, workers: int, progress: Callable[[int], None] | None) -> None:
        before, tally = self.pairs, ReasonTally[str]()
        for block in encode_corpus(corpus, self.config, self.file_table, tally, workers):
            self.pairs_done += len(block.keys) + len(block.dropped)
            self._write(self._drop_duplicates(block, tally))
            if progress is not None:
                progress(self.pairs_done)
        dropped = dict(tally.counts)
        part = CorpusPart(name=corpus.name, pairs=self.pairs - before, dropped=dropped, examples=tally.examples)
        self.parts.append(part)

    def _drop_duplicates(self, block: EncodedBlock, tally: ReasonTally[str]) -> EncodedBlock:
        """Count the pairs that the filters dropped, and drop duplicates."""
        files = list(self.file_table)
        for reason, location in block.dropped:
            tally.add(reason, format_location(location, files))
        if not self.config.filters.duplicates:
            return block
        is_new = self.seen_pairs.add(block.keys)
        for location in block.locations[~is_new]:
            tally.add("duplicates", format_location(int(location), files))
        return block if is_new.all() else block.select(is_new)

    def _write(self, block: EncodedBlock) -> None:
        for side, sentences in (("source", block.source), ("target", block.target)):
            offsets = self.token_counts[side] + sentences.lengths.cumsum()
            self.token_counts[side] += len(sentences.ids)
            self.files[f"{side}.ids"].write(sentences.ids.tobytes())
            self.files[f"{side}.offsets"].write(offsets.astype(OFFSET_DTYPE).tobytes())
        self.files["locations"].write(block.locations.tobytes())
        self.pairs += len(block.locations)

    def write_meta(self) -> None:
        """Write the description last: a folder with it is complete."""
        meta = StoreMeta(
            format_version=FORMAT_VERSION,
            pairs=self.pairs,
            dtype=self.config.dtype,
            token_counts=self.token_counts,
            pad_ids={"source": self.config.tokenizer.source.pad, "target": self.config.tokenizer.target.pad},
            files=list(self.file_table),
            parts=self.parts,
        )
        (self.folder / META_FILE).write_text(json.dumps(asdict(meta), ensure_ascii=False), encoding="utf-8")
