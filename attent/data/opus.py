"""Unpack an archive of the OPUS collection into train, valid and test files.

The split depends on hashes of the sentences alone: it is the same on every machine and in both directions, and no
sentence of either side is in two splits, since pairs that share one with valid or test are removed from train.
"""

import errno
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import IO

from attent.data.file_hashes import hash_bytes
from attent.data.formats.streams import MAX_LINE_BYTES
from attent.data.pairs import CorpusError

MAX_HELD_OUT_PAIRS = 2_000  # each for valid and test
HELD_OUT_DIVISOR = 20  # and at most one pair in 20
MAX_COMPRESSION_RATIO = 50  # real text has 3 to 5, a zip bomb a thousand

LinePair = tuple[bytes, bytes]
PairReader = Callable[[], Iterator[LinePair]]  # each call reads from the beginning


def unpack_archive(archive: Path, corpus: str, pair: tuple[str, str]) -> None:
    """Write the splits into the archive's folder and delete the archive, which is read to its end before."""
    names = [f"{corpus}.{'-'.join(pair)}.{tag}" for tag in pair]  # nothing is unpacked under a name from the archive
    with _explain_damage(archive), zipfile.ZipFile(archive) as zip_file:
        _check_archive(archive, zip_file, names)
        write_splits(lambda: _read_line_pairs(zip_file, names), archive.parent, pair)
    archive.unlink()


@contextmanager
def _explain_damage(archive: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: an offset outside the archive
            raise
        archive.unlink()
        raise CorpusError(f"{archive}: was a damaged archive ({error}) and was removed; run again") from error


def _check_archive(archive: Path, zip_file: zipfile.ZipFile, names: list[str]) -> None:
    infos = zip_file.infolist()
    if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in infos):
        raise zipfile.BadZipFile("it is compressed in an unusual way")
    missing = sorted(set(names) - {info.filename for info in infos})
    if missing:
        raise zipfile.BadZipFile(f"there is no {missing[0]} in it")
    size = sum(info.file_size for info in infos if info.filename in names)
    if size > MAX_COMPRESSION_RATIO * archive.stat().st_size:
        raise zipfile.BadZipFile(f"it claims to contain {size:,} bytes of text")


def _read_line_pairs(zip_file: zipfile.ZipFile, names: list[str]) -> Iterator[LinePair]:
    with ExitStack() as stack:
        first, second = (stack.enter_context(zip_file.open(name)) for name in names)
        for source, target in zip_longest(_read_lines(first), _read_lines(second)):
            if source is None or target is None:
                raise zipfile.BadZipFile("its two sides have different numbers of lines")
            if source and target:
                yield source, target


def _read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield stripped lines; an overlong one is empty."""
    buffered = io.BufferedReader(file, 2**18)  # type: ignore[type-var]  # a ZipExtFile is a RawIOBase where it counts
    while line := buffered.readline(MAX_LINE_BYTES):
        is_complete = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        while not is_complete and (rest := buffered.readline(MAX_LINE_BYTES)):
            is_complete, line = rest.endswith(b"\n"), b""
        yield line.strip()


def write_splits(read_pairs: PairReader, folder: Path, pair: tuple[str, str]) -> None:
    """Write train, valid and test files that share no sentence on either side. Only held-out pairs are in memory."""
    held_out = _choose_held_out(read_pairs)
    sources, targets = ({line_pair[side] for pairs in held_out.values() for line_pair in pairs} for side in (0, 1))
    train = ((source, target) for source, target in read_pairs() if source not in sources and target not in targets)
    for name, pairs in {"train": train, **held_out}.items():
        paths = [folder / f"{name}.{tag.replace('_', '-')}" for tag in pair]
        with open(paths[0], "wb") as first, open(paths[1], "wb") as second:
            for source, target in pairs:
                first.write(source + b"\n")
                second.write(target + b"\n")


def _choose_held_out(read_pairs: PairReader) -> dict[str, list[LinePair]]:
    """Return the pairs of test and valid: those with the lowest hashes and without a repeated target."""
    total = sum(1 for _ in read_pairs())
    if not total:
        raise zipfile.BadZipFile("it has no pairs")
    size = min(MAX_HELD_OUT_PAIRS, total // HELD_OUT_DIVISOR)
    limit = 8 * size * 2**64 // total  # four times as many as needed, since some share a sentence
    candidates: dict[bytes, bytes] = {}
    for source, target in read_pairs():
        if hash_bytes(source) < limit:
            candidates.setdefault(source, target)
    held_out: dict[str, list[LinePair]] = {"test": [], "valid": []}
    seen: set[bytes] = set()
    for source in sorted(candidates, key=hash_bytes):
        name, target = "test" if len(held_out["test"]) < size else "valid", candidates[source]
        if len(held_out[name]) < size and target not in seen:
            seen.add(target)
            held_out[name].append((source, target))
    return {name: pairs for name, pairs in held_out.items() if pairs}
