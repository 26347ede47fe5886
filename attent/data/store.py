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
from attent.data.arrays import Array, ragged
from attent.data.cache import clear_abandoned, made
from attent.data.corpus import Corpus
from attent.data.digests import file_digest
from attent.data.encode import BLOCK, Block, Names, Recipe, Tally, encode, told
from attent.data.filters import Seen
from attent.data.pairs import CorpusError
from attent.text.bulk import Sentences

# Part of the key: raised when readers, filters or encoders give other ids for the same files, or the arrays change.
FORMAT = 2
META = "store.json"
MOST_WORKERS = 4  # one process reads and writes as fast as about three encode
SIDES = ("source", "target")
OFFSETS, PLACES = "<i8", "<u8"
NEIGHBOURHOOD = 2**16  # bytes that Linux maps around a page that is touched
MAPPED = 2**26  # bytes of a side's ids that may stay mapped


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one corpus gave: its pairs stand together, behind those of the corpora before it."""

    name: str
    pairs: int
    dropped: dict[str, int]  # by reason
    examples: dict[str, list[str]]  # reason -> a few places, `file:line`


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What `store.json` tells."""

    format: int
    pairs: int
    dtype: str
    tokens: dict[str, int]  # side -> ids
    pad: dict[str, int]  # side -> the id that fills up rows
    files: list[str]
    parts: list[Part]

    @classmethod
    def read(cls, path: Path) -> Meta:
        facts = settings.read_json(path)
        try:
            return cls(**{**facts, "parts": [Part(**part) for part in facts["parts"]]})
        except (TypeError, KeyError) as error:
            raise CorpusError(f"{path} is not what attent writes: delete its folder, and it is made again") from error


@dataclass(frozen=True)
class Side:
    """One side of all pairs: sentence i is `ids[offsets[i]:offsets[i + 1]]`, its end token included."""

    ids: Array
    offsets: Array
    touched: list[int] = field(default_factory=lambda: [0], repr=False)  # sentences since ids were last let go of

    @classmethod
    def open(cls, folder: Path, side: str, meta: Meta) -> Side:
        ids = _mapped(folder / f"{side}.ids", meta.dtype, meta.tokens[side])
        return cls(ids, _mapped(folder / f"{side}.offsets", OFFSETS, meta.pairs + 1))

    def __getitem__(self, pair: int) -> Array:
        return self.ids[self.offsets[pair] : self.offsets[pair + 1]]

    def lengths(self) -> Array:
        lengths = np.empty(len(self.offsets) - 1, np.int32)
        return np.subtract(self.offsets[1:], self.offsets[:-1], out=lengths, casting="unsafe")

    def gather(self, starts: Array, lengths: Array) -> Array:
        """The ids of many sentences, end to end."""
        ids = np.take(self.ids, ragged(starts, lengths))
        self._forget(len(starts))
        return ids

    def _forget(self, sentences: int) -> None:
        """Let go, from time to time, of what random looks have brought into memory; the system still has it.

        Each brings 64 KiB around it, so that a walk through a large corpus would soon hold all of it.
        """
        self.touched[0] += sentences
        if self.touched[0] * NEIGHBOURHOOD > MAPPED and self.ids.nbytes > MAPPED:
            self.touched[0] = 0
            mapping: object = self.ids.base
            if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Store:
    """A corpus as numbers. Opening reads almost nothing; only what is used comes into memory."""

    folder: Path
    meta: Meta
    source: Side = field(repr=False)
    target: Side = field(repr=False)
    places: Array = field(repr=False)

    @classmethod
    def open(cls, folder: Path) -> Store:
        meta = Meta.read(folder / META)
        source, target = (Side.open(folder, side, meta) for side in SIDES)
        return cls(folder, meta, source, target, _mapped(folder / "places", PLACES, meta.pairs))

    def __len__(self) -> int:
        return self.meta.pairs

    def place(self, pair: int) -> str:
        """Where a pair stood in the corpus: `corpus.tsv:1234`."""
        return told(int(self.places[pair]), self.meta.files)


def _mapped(path: Path, dtype: str, count: int) -> Array:
    wanted, size = count * np.dtype(dtype).itemsize, path.stat().st_size
    if size != wanted:
        raise CorpusError(f"{path} must have {wanted} bytes but has {size}: delete its folder, and it is made again")
    return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)  # an empty file cannot be mapped


# --- making one ----------------------------------------------------------------------------------------------------


def prepare(
    corpora: Sequence[Corpus],
    recipe: Recipe,
    root: str | Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """The store of these corpora in `root`: opened where it stands, else made. `progress` is told the pairs done."""
    root = Path(root)

    def make(aside: Path) -> None:
        try:
            with _Writer(aside, recipe) as writer:
                for corpus in corpora:
                    writer.add(corpus, workers or min(MOST_WORKERS, os.cpu_count() or 1), progress)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    root.mkdir(parents=True, exist_ok=True)
    folder = root / key(corpora, recipe, root)
    if not _is_whole(folder):
        clear_abandoned(root)
    return Store.open(made(folder, make, _is_whole))


def _is_whole(folder: Path) -> bool:
    try:
        Store.open(folder)
    except (OSError, ValueError):  # not there, or damaged
        return False
    return True


def key(corpora: Sequence[Corpus], recipe: Recipe, root: Path) -> str:
    """Two stores of one key have the same bytes. Weights of corpora are not in it: they belong to the batches."""
    facts = {
        "format": FORMAT,
        "corpora": [_identity(corpus, root) for corpus in corpora],
        "tokenizer": recipe.tokenizer.fingerprint,
        "filters": settings.to_dict(recipe.filters),
        "tags": recipe.tags,
        "sampling": recipe.sampling and [settings.to_dict(recipe.sampling), recipe.draw, BLOCK],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _identity(corpus: Corpus, root: Path) -> list[object]:
    digests = [file_digest(Path(path), root / "digests.json") for path, *_ in corpus.fingerprint()]
    part = [] if corpus.split is None else [hashlib.sha256(corpus.split.kept).hexdigest()]
    return [corpus.files, digests, astuple(corpus.languages), astuple(corpus.options), *part]


class Resampled:
    """The stores of a training with subword sampling: each epoch has its own, made when it is asked for.

    They stand in a folder that is theirs alone, and only those of the epoch asked for and its neighbours stay there.
    """

    def __init__(self, corpora: Sequence[Corpus], recipe: Recipe, folder: str | Path, seed: int) -> None:
        self.corpora, self.recipe, self.folder, self.seed = corpora, recipe, Path(folder), seed

    def __call__(self, epoch: int) -> Store:
        store = prepare(self.corpora, self._of(epoch), self.folder)
        near = {key(self.corpora, self._of(near), self.folder) for near in range(max(0, epoch - 1), epoch + 2)}
        for other in self.folder.iterdir():
            if other.is_dir() and other.name not in near and not other.name.endswith(".part"):
                shutil.rmtree(other, ignore_errors=True)
                other.with_name(f".{other.name}.lock").unlink(missing_ok=True)
        return store

    def _of(self, epoch: int) -> Recipe:
        return replace(self.recipe, draw=(self.seed, epoch))


class _Writer:
    """The open files of a store that is being made; leaving it without an error makes the store whole."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe
        self.files: dict[str, BinaryIO] = {}
        self.tokens = dict.fromkeys(SIDES, 0)
        self.pairs = self.done = 0
        self.names, self.seen = Names(), Seen()
        self.parts: list[Part] = []

    def __enter__(self) -> _Writer:
        for name in (*(f"{side}.{what}" for side in SIDES for what in ("ids", "offsets")), "places"):
            self.files[name] = open(self.folder / name, "wb")
        for side in SIDES:
            self.files[f"{side}.offsets"].write(np.zeros(1, OFFSETS).tobytes())
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
        before, tally = self.pairs, Tally()
        for block in encode(corpus, self.recipe, self.names, tally, workers):
            self.done += len(block.keys) + len(block.dropped)
            self._write(self._without_known(block, tally))
            if progress is not None:
                progress(self.done)
        part = Part(name=corpus.name, pairs=self.pairs - before, dropped=dict(tally.counts), examples=tally.examples)
        self.parts.append(part)

    def _without_known(self, block: Block, tally: Tally) -> Block:
        """Count what the filters dropped, and drop the pairs that came before."""
        for why, place in block.dropped:
            tally.add(why, self.names.told(place))
        if not self.recipe.filters.duplicates:
            return block
        new = self.seen.add(block.keys)
        for place in block.places[~new]:
            tally.add("duplicates", self.names.told(int(place)))
        return block if new.all() else block.where(new)

    def _write(self, block: Block) -> None:
        self._write_side("source", block.source)
        self._write_side("target", block.target)
        self.files["places"].write(block.places.tobytes())
        self.pairs += len(block.places)

    def _write_side(self, side: str, sentences: Sentences) -> None:
        offsets = self.tokens[side] + sentences.lengths.cumsum()
        self.tokens[side] += len(sentences.ids)
        self.files[f"{side}.ids"].write(sentences.ids.tobytes())
        self.files[f"{side}.offsets"].write(offsets.astype(OFFSETS).tobytes())

    def _write_meta(self) -> None:
        """Last, so that a folder with it is whole."""
        meta = Meta(
            format=FORMAT,
            pairs=self.pairs,
            dtype=self.recipe.dtype,
            tokens=self.tokens,
            pad={"source": self.recipe.tokenizer.source.pad, "target": self.recipe.tokenizer.target.pad},
            files=self.names.files,
            parts=self.parts,
        )
        with open(self.folder / META, "w", encoding="utf-8") as file:
            json.dump(asdict(meta), file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
