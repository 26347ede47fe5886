"""Content hashes of files, cached by path, size, mtime and ctime (which `cp -p` and `touch` cannot set back)."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from attent.storage.atomic import write_atomic

MAX_ENTRIES = 1000


def hash_file(path: Path, cache_file: Path) -> str:
    stamp = stamp_file(path)
    hashes: dict[str, str] = {}
    with suppress(OSError, ValueError):
        cached = json.loads(cache_file.read_text(encoding="utf-8"))
        if isinstance(cached, dict) and all(isinstance(digest, str) for digest in cached.values()):
            hashes = cached
    if stamp not in hashes:
        with open(path, "rb") as file:
            hashes[stamp] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        with suppress(OSError):  # without the cache, the file is hashed again next time
            write_atomic(cache_file, json.dumps(dict(list(hashes.items())[-MAX_ENTRIES:])).encode())
    return hashes[stamp]


def stamp_file(path: Path) -> str:
    """Return a string that changes with the content of a file, without reading it."""
    status = path.stat()
    return f"{path.absolute()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def hash_bytes(content: bytes) -> int:
    """Return a 64-bit hash that is the same on every machine, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
