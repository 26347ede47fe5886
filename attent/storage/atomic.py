"""Atomic writes: after a crash the old content or the new one is there, never a part of it.

A file is written under a temporary name in the same folder, synced to disk and renamed. `write_files` does the same for
several files that belong together; `open_output` and `write_output` for files that a user names.
"""

import errno
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

NEW_SUFFIX = ".new"
PARTIAL_SUFFIX = ".partial"


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
def output_path(path: Path) -> Iterator[Path]:
    """Yield the path to write to: `atomic_path` of a file or of a link's target, but a pipe or device itself."""
    path = path.expanduser()
    if is_stream(path):
        yield path
    else:
        with atomic_path(resolve_output(path)) as temporary:
            yield temporary


def resolve_output(path: Path) -> Path:
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            problem = "is a symbolic link that leads back to itself; remove it, or choose another name"
            raise OSError(errno.ELOOP, problem, str(path)) from error
    return path.resolve()


def write_output(path: Path, content: bytes) -> None:
    with output_path(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def open_output(path: Path, notify: Callable[[str], None]) -> Iterator[TextIO]:
    """Open an output that takes long: a file is written as NAME.partial, which is renamed when it is complete.

    If the block fails or the process is killed, the old file and the partial one remain; no run overwrites the partial
    file of another. A pipe or a device is written directly.
    """
    path = path.expanduser()
    if is_stream(path):
        with open(path, "w", encoding="utf-8", newline="\n") as out:
            yield out
        return
    target = resolve_output(path) if path.is_symlink() else path
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "is write-protected; choose another name", str(path))
    for number in itertools.count(1):  # NAME.partial, NAME.partial2, ...
        partial = target.with_name(f"{target.name}{PARTIAL_SUFFIX}{number if number > 1 else ''}")
        if not partial.exists():
            break
        notify(f"{partial}: is left from a run that did not finish, or that is still running; it is not changed")
    try:
        with open(partial, "x", encoding="utf-8", newline="\n") as out:
            yield out
        fsync_path(partial)
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
    except BaseException:
        with suppress(FileNotFoundError):
            if partial.stat().st_size == 0:
                partial.unlink()
            else:
                state = "keeps its old content" if target.exists() else "is not written"
                notify(f"{path} {state}, because the run did not finish; its output so far is in {partial}")
        raise


def is_stream(path: Path) -> bool:
    """True for a pipe, a terminal, a device or an open descriptor such as /dev/stdout: never to be replaced."""
    folder = f"{path.parent.resolve()}/"
    is_descriptor = folder == "/dev/" or folder.startswith(("/dev/fd/", "/proc/"))
    return is_descriptor or (path.exists() and not path.is_file())


def is_same_file(*files: Path | IO[Any]) -> bool:
    """True if two paths or open files, such as standard input, are the same regular file."""
    try:
        status, other = (os.stat(file if isinstance(file, Path) else file.fileno()) for file in files)
    except (OSError, ValueError):  # no such file, or a stream without a descriptor
        return False
    return stat.S_ISREG(status.st_mode) and os.path.samestat(status, other)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder, which replaces or becomes `folder` when the block ends without an error."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=NEW_SUFFIX, dir=folder.parent))
    try:
        yield temporary
        umask = os.umask(0o022)  # it can only be read by setting it
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
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
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process changes the folder. Windows and some network disks have no such locks."""
    if os.name == "nt":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents and sync the new entries to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_path(path.parent)


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
