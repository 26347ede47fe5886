"""Small files that belong together, written so that a crash leaves the old ones or the new ones, never a mixture.

All are first written as NAME.new and synced, in order, then renamed, in the same order. The first NAME.new is there as
long as anything is still being written: so when it is gone and a later one is not, the renaming had begun, and the
file is the one under NAME.new. One process at a time may write into a folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from attent.text.vocabulary import TokenizerError

NEW_SUFFIX = ".new"
MAX_FILE_BYTES = 128 * 2**20  # bytes of one file; the largest published tokenizers have some 35 MB


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(files)
    for name in names:  # what an interrupted write has left
        with suppress(FileNotFoundError):
            os.replace(find_file(folder, name, names), folder / name)
    for name in names:
        with open(folder / (name + NEW_SUFFIX), "wb") as file:
            file.write(files[name])
            file.flush()
            os.fsync(file.fileno())
    for name in names:
        os.replace(folder / (name + NEW_SUFFIX), folder / name)
    sync_folder(folder)


def read_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The contents of those that are there."""
    places = {name: find_file(folder, name, names) for name in names}
    return {name: read_file(path) for name, path in places.items() if path.exists()}


def find_file(folder: Path, name: str, names: Sequence[str]) -> Path:
    """Where a file stands: under NAME, or under NAME.new if the renaming was interrupted before it."""
    new = folder / (name + NEW_SUFFIX)
    renaming = not (folder / (names[0] + NEW_SUFFIX)).exists()
    return new if renaming and new.exists() else folder / name


def read_file(path: Path) -> bytes:
    if not path.is_file():
        raise TokenizerError(f"{path}: must be a file, but is not; copy the model again")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise TokenizerError(
            f"{path}: must have at most {MAX_FILE_BYTES // 2**20} MiB, but has more; is it a tokenizer?"
        )
    return path.read_bytes()


def sync_folder(folder: Path) -> None:
    """The renames themselves onto the disk; Windows cannot open a folder, and needs no sync of it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks refuse it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
