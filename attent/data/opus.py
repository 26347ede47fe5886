"""An archive of the OPUS collection -> train, valid and test files. Fetching it is left to `builtin`.

OPUS keeps a language pair as a zip of two files whose lines belong together, without a split. The split made here hangs
on hashes of the sentences alone, so that it is the same on every machine and in both directions, and no sentence of
either side stands in two parts of it: what shares a sentence with valid or test is left out of train.
"""

from __future__ import annotations

import errno
import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import IO

from attent.data.dates import hash_bytes
from attent.data.pairs import CorpusError

MAX_HELD_OUT_PAIRS = 2_000  # pairs each for valid and test of a corpus that has no split of its own
HELD_OUT_DIVISOR = 20  # but no more than one in 20
MAX_LINE_BYTES = 2**20  # bytes; longer ones are no sentences
MAX_COMPRESSION_RATIO = 50  # of text to archive; real text has 3 to 5, a zip bomb a thousand

PairReader = Callable[[], Iterator[tuple[bytes, bytes]]]  # reads the pairs of lines from the beginning, at each call


def unpack_archive(archive: Path, corpus: str, pair: tuple[str, str]) -> None:
    """Puts the split beside the archive, which goes. Its lines are read to the end before a file is written."""
    with _explain_damage(archive), _open_archive(archive, corpus, pair) as pairs:
        write_splits(pairs, archive.parent, pair)
    archive.unlink()


@contextmanager
def _explain_damage(archive: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is a place outside the archive
            raise
        archive.unlink()
        raise CorpusError(f"{archive}: was a damaged archive ({error}) and was removed; run again") from error


@contextmanager
def _open_archive(archive: Path, corpus: str, pair: tuple[str, str]) -> Iterator[PairReader]:
    """Nothing is unpacked under a name of the archive's choosing: two members are read, by names that we know."""
    with zipfile.ZipFile(archive) as opened:
        names = [f"{corpus}.{'-'.join(pair)}.{tag}" for tag in pair]
        _check_archive(archive, opened, names)
        yield lambda: _read_line_pairs(opened, names)


def _check_archive(archive: Path, zip_file: zipfile.ZipFile, names: list[str]) -> None:
    infos = zip_file.infolist()
    unsafe = [info.filename for info in infos if re.search(r"^[/\\]|^\w:|(^|[/\\])\.\.([/\\]|$)", info.filename)]
    if unsafe:
        raise zipfile.BadZipFile(f"`{unsafe[0][:80]}` points out of the archive")
    if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in infos):
        raise zipfile.BadZipFile("it is compressed in an unusual way")
    missing = sorted(set(names) - {info.filename for info in infos})
    if missing:
        raise zipfile.BadZipFile(f"there is no {missing[0]} in it")
    text = sum(info.file_size for info in infos if info.filename in names)
    if text > MAX_COMPRESSION_RATIO * archive.stat().st_size:
        raise zipfile.BadZipFile(f"it claims to hold {text:,} bytes of text")


def _read_line_pairs(zip_file: zipfile.ZipFile, names: list[str]) -> Iterator[tuple[bytes, bytes]]:
    with ExitStack() as stack:
        first, second = (stack.enter_context(zip_file.open(name)) for name in names)
        for one, other in zip_longest(_read_lines(first), _read_lines(second)):
            if one is None or other is None:
                raise zipfile.BadZipFile("its two sides have different numbers of lines")
            if one and other:
                yield one, other


def _read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines without their end and the white space around them; one that is too long is empty."""
    buffered = io.BufferedReader(file, 2**18)  # type: ignore[type-var]  # a ZipExtFile is a RawIOBase where it counts
    while line := buffered.readline(MAX_LINE_BYTES):
        is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        while not is_whole and (rest := buffered.readline(MAX_LINE_BYTES)):
            is_whole, line = rest.endswith(b"\n"), b""
        yield line.strip()


# Splits.


def write_splits(read_pairs: PairReader, folder: Path, pair: tuple[str, str]) -> None:
    """Writes train, valid and test files such that no sentence of either side stands in two of them.

    Memory stays flat: only what is held out is remembered.
    """
    held = _choose_held_out(read_pairs)
    taken = [{both[side] for pairs in held.values() for both in pairs} for side in (0, 1)]
    rest = ((one, other) for one, other in read_pairs() if one not in taken[0] and other not in taken[1])
    for name, pairs in {"train": rest, **held}.items():
        _write_pairs(folder, name, pair, pairs)


def _choose_held_out(read_pairs: PairReader) -> dict[str, list[tuple[bytes, bytes]]]:
    """valid and test: the pairs with the lowest hashes, the second free of all that stands in the first."""
    total = sum(1 for _ in read_pairs())
    if not total:
        raise zipfile.BadZipFile("it holds no pairs")
    size = min(MAX_HELD_OUT_PAIRS, total // HELD_OUT_DIVISOR)
    limit = 8 * size * 2**64 // total  # four times as many as are needed, since some share a sentence
    found: dict[bytes, bytes] = {}
    for one, other in read_pairs():
        if hash_bytes(one) < limit:
            found.setdefault(one, other)
    held: dict[str, list[tuple[bytes, bytes]]] = {"test": [], "valid": []}
    seen: set[bytes] = set()
    for one in sorted(found, key=hash_bytes):
        name = "test" if len(held["test"]) < size else "valid"
        if len(held[name]) < size and found[one] not in seen:
            seen.add(found[one])
            held[name].append((one, found[one]))
    return {name: pairs for name, pairs in held.items() if pairs}


def _write_pairs(folder: Path, name: str, pair: tuple[str, str], pairs: Iterable[tuple[bytes, bytes]]) -> None:
    paths = [folder / f"{name}.{tag.replace('_', '-')}" for tag in pair]
    with open(paths[0], "wb") as first, open(paths[1], "wb") as second:
        for one, other in pairs:
            first.write(one + b"\n")
            second.write(other + b"\n")
