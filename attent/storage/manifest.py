"""Manifests: `manifest.json` lists the files of a folder with size and SHA-256, so that loading detects damage."""

import errno
import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attent.storage.atomic import is_same_file, is_stream, write_synced
from attent.storage.errors import FolderError

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 2**16  # a model's has about 300


@dataclass(frozen=True)
class ManifestEntry:
    sha256: str
    bytes: int


def hash_file(path: Path) -> ManifestEntry:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ManifestEntry(digest, os.fstat(file.fileno()).st_size)


def write_manifest(path: Path, files: Mapping[str, ManifestEntry]) -> None:
    """Write a manifest, without a newline at its end so that every truncation is noticed."""
    manifest = {"format_version": FORMAT_VERSION, "files": {name: vars(entry) for name, entry in files.items()}}
    write_synced(path, json.dumps(manifest, indent=2).encode())


def read_manifest(path: Path, label: str = "model") -> dict[str, ManifestEntry]:
    """Return the entries by file name; the caller checks that they are the expected ones."""
    status = stat_plain_file(path)
    if status is None:
        raise FolderError(f"{path}: is missing; copy the {label} again")
    if status.st_size > MAX_MANIFEST_BYTES:
        raise FolderError(f"{path}: is damaged: it has {status.st_size} bytes; copy the {label} again")
    try:
        data = json.loads(path.read_bytes().decode(), object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise FolderError(
            f"{path}: is not valid JSON: {error}; the manifest is damaged: copy the {label} again"
        ) from error
    files = data.get("files") if isinstance(data, dict) else None
    version = data.get("format_version") if isinstance(data, dict) else None
    if type(version) is not int or version != FORMAT_VERSION or not isinstance(files, dict) or len(data) != 2:
        raise FolderError(
            f"{path}: must have `format_version` {FORMAT_VERSION} and `files`; copy the {label} again or update attent"
        )
    entries = {}
    for name, entry in files.items():
        match entry:
            case {"sha256": str(digest), "bytes": int(size), **rest} if not rest and type(size) is int:
                entries[name] = ManifestEntry(digest, size)
            case _:
                raise FolderError(f"{path}: `files.{name:.80}` must have `sha256` and `bytes`; copy the {label} again")
    return entries


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        duplicate, _ = Counter(name for name, _ in pairs).most_common()[0]
        raise ValueError(f"duplicate key `{duplicate:.80}`")
    return data


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Refuse an output that is an input, a listed file of a folder among the inputs, or the same file as another."""
    sources = [file for path in filter(None, inputs) for file in (path, *_list_files(path.expanduser()))]
    checked: list[Path] = []
    for output in (path.expanduser() for path in outputs if path is not None):
        if any(is_same_file(output, source.expanduser()) for source in sources):
            raise OSError(errno.EINVAL, "must not be an input; write to another file", str(output))
        target = Path(os.path.realpath(output))
        if target in checked and not is_stream(output):
            raise OSError(errno.EINVAL, "must not be the file of two outputs; name another for one", str(output))
        checked.append(target)


def _list_files(folder: Path) -> list[Path]:
    path = folder / MANIFEST_FILE
    try:
        return [path, *(folder / name for name in read_manifest(path))]
    except (FolderError, OSError):
        return []


def find_damage(path: Path, entry: ManifestEntry) -> str | None:
    status = stat_plain_file(path)
    if status is None:
        return f"is missing, though {MANIFEST_FILE} lists it"
    if status.st_size != entry.bytes:
        return f"is damaged: by {MANIFEST_FILE} it must have {entry.bytes} bytes, but it has {status.st_size}"
    if hash_file(path) != entry:
        return f"is damaged or was changed: its SHA-256 is not the one in {MANIFEST_FILE}"
    return None


def stat_plain_file(path: Path) -> os.stat_result | None:
    """Return the status of a regular file; None if missing. Links out, whose targets could change, are refused."""
    if not os.path.lexists(path):
        return None
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):  # resolve() fails for a link to itself
        raise FolderError(f"{path}: is a link out of the folder; put the file itself there (cp -L)")
    if not path.exists():
        raise FolderError(f"{path}: is a link to nothing; put the file itself there")
    if not stat.S_ISREG(path.stat().st_mode):
        raise FolderError(f"{path}: must be a plain file; put the file itself there")
    return path.stat()


@contextmanager
def explain_save_errors(
    folder: Path, label: str = "model", holds_older: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Turn an OSError while saving `label` into a FolderError; `holds_older`: whether the folder has an older one."""
    try:
        yield
    except OSError as error:
        has_manifest = any((folder / name).is_file() for name in (MANIFEST_FILE, "checksums.json"))
        has_older = has_manifest if holds_older is None else holds_older()
        reason = _explain_os_error(folder, error, f"an older {label} in the folder is intact; " if has_older else "")
        raise FolderError(f"{folder}: the {label} could not be saved: {reason}") from error


def _explain_os_error(folder: Path, error: OSError, older: str) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError) and not folder.is_dir():
        return "there is a file where the folder must be; give another folder, or move that file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full; {older}free some space and save again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "the folder cannot be written to; give another folder, or change its permissions"
    if not folder.is_dir():
        return f"the folder cannot be created ({error.strerror}); give another"
    return f"{error}; {older}save again"
