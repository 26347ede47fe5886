"""The files of a tokenizer in a model folder, written together so that a crash leaves the old or the new ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attent.storage.atomic import find_file
from attent.text.vocabulary import TokenizerError

MAX_FILE_BYTES = 128 * 2**20  # the largest published tokenizers have about 35 MB


def read_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read those files that exist."""
    paths = {name: find_file(folder, name, names) for name in names}
    return {name: read_file(path) for name, path in paths.items() if path.exists()}


def read_file(path: Path) -> bytes:
    if not path.is_file():
        raise TokenizerError(f"{path}: must be a file, but is not; copy the model again")
    if path.stat().st_size > MAX_FILE_BYTES:
        limit = MAX_FILE_BYTES // 2**20
        raise TokenizerError(f"{path}: must have at most {limit} MiB, but has more; is it a tokenizer?")
    return path.read_bytes()
