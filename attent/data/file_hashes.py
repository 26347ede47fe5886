"""What a file holds, as a number: read once, then remembered for as long as the file is left alone.

Remembered under its path, size and both times that the system keeps of it. The second of them, of the last change of
any kind, cannot be set back by `cp -p` or `touch`, so that another content is noticed however it came there.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from attent.storage.atomic import write_atomic

MAX_ENTRIES = 1000  # files


def hash_file(path: Path, cache_file: Path) -> str:
    """A checksum of the content of `path`; `memory` is the file in which earlier ones are kept."""
    status = path.stat()
    stamp = f"{path.absolute()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    known = _read_cache(cache_file)
    if stamp not in known:
        with open(path, "rb") as file:
            known[stamp] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        _write_cache(cache_file, dict(list(known.items())[-MAX_ENTRIES:]))
    return known[stamp]


def _read_cache(cache_file: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        known = json.loads(cache_file.read_text(encoding="utf-8"))
        if isinstance(known, dict) and all(isinstance(digest, str) for digest in known.values()):
            return known
    return {}


def _write_cache(cache_file: Path, hashes: dict[str, str]) -> None:
    """Where it cannot be written, the files are read again next time."""
    with suppress(OSError):
        write_atomic(cache_file, json.dumps(hashes).encode())
