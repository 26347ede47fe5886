"""Recordings or images, decoded once into one memory-mapped file. Those that cannot be decoded are skipped."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from attent.data.arrays import Array
from attent.data.pairs import CorpusError
from attent.formatting import format_count
from attent.storage.cache import build_folder

VALUES_FILE, ENTRIES_FILE = "values", "entries.jsonl"
DECODE_BATCH = 64  # items in memory while a store is built
MAX_DECODERS = 8
MAX_LISTED_ENTRIES = 3

T = TypeVar("T")


def prepare_media_store(
    items: Sequence[T],
    decode: Callable[[T], Array],
    dtype: str,
    folder: Path,
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[Array, list[int | str]]:
    """Return the values of all items, concatenated, and of each item their number, or why it is skipped.

    decode    returns the values of an item; a `CorpusError` skips it
    folder    where the values are stored; it is built if missing, and an interrupted build resumes
    progress  is called with the number of items done
    """

    def decode_or_explain(item: T) -> Array | str:
        try:
            return decode(item).astype(dtype, copy=False)
        except CorpusError as error:
            return str(error)

    def build(staging: Path) -> None:
        entries = _read_entries(staging, dtype)
        (staging / ENTRIES_FILE).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
        with (
            open(staging / VALUES_FILE, "ab") as values_file,
            open(staging / ENTRIES_FILE, "a", encoding="utf-8") as entries_file,
            ThreadPoolExecutor(min(MAX_DECODERS, os.cpu_count() or 1)) as pool,
        ):
            values_file.truncate(_count_bytes(entries, dtype))
            for start in range(len(entries), len(items), DECODE_BATCH):
                decoded = list(pool.map(decode_or_explain, items[start : start + DECODE_BATCH]))
                values_file.writelines(values.tobytes() for values in decoded if not isinstance(values, str))
                values_file.flush()  # entries must not claim more values than are there
                entries = [values if isinstance(values, str) else values.size for values in decoded]
                entries_file.writelines(f"{json.dumps(entry)}\n" for entry in entries)
                progress(start + len(decoded))

    build_folder(folder, build, lambda path: path.is_dir() and len(_read_entries(path, dtype)) == len(items))
    entries = _read_entries(folder, dtype)
    if not _count_bytes(entries, dtype):  # an empty file cannot be mapped
        return np.empty(0, dtype), entries
    return np.memmap(folder / VALUES_FILE, dtype, "r"), entries


def _read_entries(folder: Path, dtype: str) -> list[int | str]:
    """Return the entries of a store; nothing if values are missing."""
    entries: list[int | str] = []
    with suppress(OSError, ValueError):
        lines = (folder / ENTRIES_FILE).read_text(encoding="utf-8").split("\n")[:-1]
        entries = [json.loads(line) for line in lines]
    path = folder / VALUES_FILE
    return entries if path.is_file() and path.stat().st_size >= _count_bytes(entries, dtype) else []


def _count_bytes(entries: Iterable[int | str], dtype: str) -> int:
    return np.dtype(dtype).itemsize * sum(entry for entry in entries if isinstance(entry, int))


def compute_media_key(settings: object, versions: Iterable[str]) -> str:
    """Hash what a store is made from: settings as plain data, and a string for each item that changes with it."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    for version in versions:
        digest.update(f"{version}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:24]


def describe_skipped(name: str, skipped: Sequence[str]) -> str | None:
    """Return a sentence about what is left out of a dataset, or None."""
    if not skipped:
        return None
    examples = "; ".join(skipped[:MAX_LISTED_ENTRIES])
    return f"{name}: skipped {format_count(len(skipped), 'entry', 'entries')}, such as {examples}"
