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

from attent.data.pairs import CorpusError

VARIABLE = "ATTENT_CACHE"
ADVICE = f"set {VARIABLE} to a folder that can"


def cache_folder() -> Path:
    """The folder for everything that can be made or downloaded again. It is not made until something goes there."""
    named = os.environ.get(VARIABLE)
    if named:
        return _home(Path(named))
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # the XDG standard tells programs to ignore a relative one
        return Path(shared) / "attent"
    return _customary(sys.platform)


def _customary(platform: str) -> Path:
    """Where programs of this platform keep what can be made again."""
    if platform == "win32":
        return _home(Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local")) / "attent"
    return _home(Path("~/Library/Caches/attent" if platform == "darwin" else "~/.cache/attent"))


def _home(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise CorpusError(f"{path}: there is no home folder to keep downloads in; {ADVICE} be written to") from error


def made(folder: Path, make: Callable[[Path], None], is_there: Callable[[Path], bool]) -> Path:
    """`folder`, made by `make` in a folder aside unless it `is_there`."""
    if is_there(folder):
        return folder
    with usable(folder.parent), locked(_lock(folder)):
        if not is_there(folder):
            aside = _aside(folder)
            aside.mkdir(exist_ok=True)
            _move_in(folder, aside)
            make(aside)
            _sync_all(aside)
            os.rename(aside, folder)
            _sync(folder.parent)
    return folder


def clear_abandoned(parent: Path) -> None:
    """Removes what killed processes have left aside in `parent`: that whose lock nobody holds."""
    for aside in parent.glob("*.part"):
        with open(_lock(aside.with_suffix("")), "ab") as file:
            if _try_lock(file):
                shutil.rmtree(aside, ignore_errors=True)
                _unlock(file)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.part")


def _lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _move_in(folder: Path, aside: Path) -> None:
    """Files that a person has put into an incomplete `folder` are as good as those made or downloaded before."""
    if folder.is_dir():
        for path in folder.iterdir():
            os.replace(path, aside / path.name)
        folder.rmdir()


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Makes `folder` if need be, and turns a refusal of the system while it is used into a sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CorpusError(f"{error.filename or folder}: cannot be written to ({reason}); {ADVICE}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
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
def try_locked(path: Path) -> Iterator[bool]:
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


def _sync_all(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder, and needs no sync of it
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() and os.access(path, os.W_OK) else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
