"""Atomic writes: after a crash the old content or the new one is there, never a part of it.

A file is written under a temporary name in the same folder, synced to disk and renamed. `write_files` does the same for
several files that belong together.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

NEW_SUFFIX = ".new"


def write_atomic(path: Path, content: bytes) -> None:
    """Write a small file. An existing file keeps its permissions."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` when the block ends without an error.

    It keeps the suffix of `path`, since writers such as matplotlib derive the format from it.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{NEW_SUFFIX}{path.suffix}")
    try:
        yield temporary
        fsync_path(temporary)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """True for a temporary file or folder of this module, which a killed process leaves behind."""
    return path.name.startswith(".") and NEW_SUFFIX in path.suffixes


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder, which becomes `folder` when the block ends without an error.

    An existing `folder` is replaced; whether it may be is up to the caller.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=NEW_SUFFIX, dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~get_umask())
        fsync_tree(temporary)
        replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`; an old folder is moved away first, since rename cannot replace a full one."""
    if not folder.exists():
        os.rename(temporary, folder)
    else:
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
        os.rename(folder, old / folder.name)
        os.rename(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    fsync_path(folder.parent)


def get_umask() -> int:
    """Return the umask of this process, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


# ---- syncing ---------------------------------------------------------------------------------------------------------


def fsync_path(path: Path) -> None:
    """Sync a file or folder to disk. Windows cannot open a folder and needs no sync of it."""
    if os.name == "nt" and path.is_dir():
        return
    writable = path.is_file() and os.access(path, os.W_OK)
    descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        fsync_path(path)
    fsync_path(folder)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet and sync it to disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folder(folder: Path) -> None:
    """Create a folder and its parents and sync the new entries to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_path(path.parent)


# ---- several files ---------------------------------------------------------------------------------------------------


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files that belong together. One process at a time may write into a folder.

    All are written as NAME.new in order and then renamed in the same order. The first NAME.new exists as long as any
    is being written: if it is gone and a later one is not, renaming had begun, and NAME.new is the valid file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = list(files)
    for name in names:  # finish an interrupted write
        with suppress(FileNotFoundError):
            os.replace(find_file(folder, name, names), folder / name)
    for name in names:
        (folder / (name + NEW_SUFFIX)).unlink(missing_ok=True)
        write_synced(folder / (name + NEW_SUFFIX), files[name])
    for name in names:
        os.replace(folder / (name + NEW_SUFFIX), folder / name)
    with suppress(OSError):  # some network disks refuse to sync a folder
        fsync_path(folder)


def find_file(folder: Path, name: str, names: Sequence[str]) -> Path:
    """Return the valid path of a file: NAME, or NAME.new if renaming was interrupted before it."""
    new = folder / (name + NEW_SUFFIX)
    renaming = not (folder / (names[0] + NEW_SUFFIX)).exists()
    return new if renaming and new.exists() else folder / name
