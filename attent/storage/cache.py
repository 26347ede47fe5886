"""The cache folder for generated and downloaded data, and lock files.

A folder is built under a staging name, synced to disk and renamed, by one process at a time; others wait for it.
Staging folders of interrupted builds stay, so that a build can resume.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from attent.storage.atomic import fsync_path, fsync_tree
from attent.storage.errors import StorageError

CACHE_ENV_VAR = "ATTENT_CACHE"
CACHE_ADVICE = f"set {CACHE_ENV_VAR} to a writable folder"


def get_cache_folder() -> Path:
    named = os.environ.get(CACHE_ENV_VAR)
    if named:
        return _expand_home(Path(named))
    xdg_cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg_cache):  # the XDG standard tells programs to ignore a relative one
        return Path(xdg_cache) / "attent"
    if sys.platform == "win32":
        return _expand_home(Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local")) / "attent"
    return _expand_home(Path("~/Library/Caches/attent" if sys.platform == "darwin" else "~/.cache/attent"))


def _expand_home(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise StorageError(f"{path}: there is no home folder for downloads; {CACHE_ADVICE}") from error


def build_folder(folder: Path, build: Callable[[Path], None], is_complete: Callable[[Path], bool]) -> Path:
    """Return `folder`; unless it is complete, `build` fills a staging folder that is renamed to it."""
    if is_complete(folder):
        return folder
    with ensure_writable(folder.parent), hold_lock(_get_lock_path(folder)):
        if not is_complete(folder):
            staging = folder.with_name(f"{folder.name}.part")
            staging.mkdir(exist_ok=True)
            if folder.is_dir():  # incomplete; a person may have put files there
                for path in folder.iterdir():
                    os.replace(path, staging / path.name)
                folder.rmdir()
            build(staging)
            fsync_tree(staging)
            os.rename(staging, folder)
            fsync_path(folder.parent)
    return folder


def remove_abandoned(parent: Path) -> None:
    """Remove the staging folders of killed processes: those whose lock is free."""
    for staging in parent.glob("*.part"):
        with try_hold_lock(_get_lock_path(staging.with_suffix(""))) as is_held:
            if is_held:
                shutil.rmtree(staging, ignore_errors=True)


def _get_lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def ensure_writable(folder: Path) -> Iterator[None]:
    """Create `folder` if needed and turn OS errors of the block into a StorageError with advice."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StorageError(f"{error.filename or folder}: cannot be written ({reason}); {CACHE_ADVICE}") from error


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on a file and hold it. The OS releases it when the process ends."""
    with open(path, "ab") as file:
        if not _try_lock(file):
            print(f"waiting for another attent process, which holds {path}", file=sys.stderr)
            while not _try_lock(file):
                time.sleep(0.2)
        try:
            yield
        finally:
            _unlock(file)


@contextmanager
def try_hold_lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on a file if it is free, and yield whether it is held."""
    with open(path, "ab") as file:
        is_held = _try_lock(file)
        try:
            yield is_held
        finally:
            if is_held:
                _unlock(file)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)
