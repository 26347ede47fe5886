"""The cache folder for generated and downloaded data, and lock files.

A folder is built under a staging name, synced to disk and renamed, by one process at a time; others wait for it.
Staging folders of interrupted builds stay, so that a build can resume.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

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
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(_get_lock_path(folder)):
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
    except OSError as error:
        where, reason = error.filename or folder.parent, error.strerror or type(error).__name__
        raise StorageError(f"{where}: cannot be written ({reason}); {CACHE_ADVICE}") from error
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
def hold_lock(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on a file and hold it. The OS releases it when the process ends."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for another attent process, which holds {path}", file=sys.stderr)
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def try_hold_lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on a file if it is free, and yield whether it is held."""
    lock = FileLock(path, blocking=False)
    with suppress(Timeout):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()
