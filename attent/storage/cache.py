"""Where attent keeps what it has made or downloaded, and how a folder there comes to be whole or not at all.

A folder is made under a name aside, synced to disk and then renamed, by one process at a time: whoever asks meanwhile
waits and finds it done. What an interrupted making has left aside stays there, so that a broken download goes on where
it broke. What belongs into a folder is left to its maker.
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
CACHE_ADVICE = f"set {CACHE_ENV_VAR} to a folder that can"


def get_cache_folder() -> Path:
    """The folder for everything that can be made or downloaded again. It is not made until something goes there."""
    named = os.environ.get(CACHE_ENV_VAR)
    if named:
        return _expand_home(Path(named))
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # the XDG standard tells programs to ignore a relative one
        return Path(shared) / "attent"
    return _get_platform_cache(sys.platform)


def _get_platform_cache(platform: str) -> Path:
    """Where programs of this platform keep what can be made again."""
    if platform == "win32":
        return _expand_home(Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local")) / "attent"
    return _expand_home(Path("~/Library/Caches/attent" if platform == "darwin" else "~/.cache/attent"))


def _expand_home(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise StorageError(
            f"{path}: there is no home folder to keep downloads in; {CACHE_ADVICE} be written to"
        ) from error


def build_folder(folder: Path, build: Callable[[Path], None], is_complete: Callable[[Path], bool]) -> Path:
    """`folder`, made by `make` in a folder aside unless it `is_there`."""
    if is_complete(folder):
        return folder
    with ensure_writable(folder.parent), hold_lock(_get_lock_path(folder)):
        if not is_complete(folder):
            aside = _get_staging_path(folder)
            aside.mkdir(exist_ok=True)
            _adopt_files(folder, aside)
            build(aside)
            fsync_tree(aside)
            os.rename(aside, folder)
            fsync_path(folder.parent)
    return folder


def remove_abandoned(parent: Path) -> None:
    """Removes what killed processes have left aside in `parent`: that whose lock nobody holds."""
    for aside in parent.glob("*.part"):
        with open(_get_lock_path(aside.with_suffix("")), "ab") as file:
            if _try_lock(file):
                shutil.rmtree(aside, ignore_errors=True)
                _unlock(file)


def _get_staging_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.part")


def _get_lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _adopt_files(folder: Path, staging: Path) -> None:
    """Files that a person has put into an incomplete `folder` are as good as those made or downloaded before."""
    if folder.is_dir():
        for path in folder.iterdir():
            os.replace(path, staging / path.name)
        folder.rmdir()


@contextmanager
def ensure_writable(folder: Path) -> Iterator[None]:
    """Makes `folder` if need be, and turns a refusal of the system while it is used into a sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StorageError(f"{error.filename or folder}: cannot be written to ({reason}); {CACHE_ADVICE}") from error


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Holds the lock file `path` alone. The system lets go of it when the process ends, however it ends."""
    with open(path, "ab") as file:
        if not _try_lock(file):
            print(f"waiting for another attent that holds {path}", file=sys.stderr)
            while not _try_lock(file):
                time.sleep(0.2)
        try:
            yield
        finally:
            _unlock(file)


@contextmanager
def try_hold_lock(path: Path) -> Iterator[bool]:
    """Holds the lock file `path` alone, if nobody else does: True; else False, at once."""
    with open(path, "ab") as file:
        held = _try_lock(file)
        try:
            yield held
        finally:
            if held:
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
