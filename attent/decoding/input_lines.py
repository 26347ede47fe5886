"""Read lines in blocks: large ones from a file, whatever is available from a pipe or a terminal.

A line is what `wc -l` counts. An invalid line raises `InputError` after the lines before it have been yielded.
"""

import codecs
import io
import os
import select
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from attent.data.formats.registry import check_plain_text
from attent.data.formats.streams import COMPRESSION_MAGIC, peek_head
from attent.data.formats.streams import read_blocks as file_blocks
from attent.data.pairs import CorpusError
from attent.decoding.options import InputError

STDIN_NAME = "standard input"
CHUNK_BYTES = 2**16  # the capacity of a pipe
MAX_BLOCK_BYTES = 2**20  # limits blocks of very long lines
MAX_LINE_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class LineBlock:
    """Lines that are processed together."""

    source_name: str
    lines: list[str]
    first_index: int
    byte_count: int


@dataclass(frozen=True, kw_only=True)
class LineSource:
    name: str
    chunks: Iterable[bytes]
    has_more: Callable[[], bool]  # without waiting
    total_bytes: int | None = None  # None: unknown
    first_index: int = 0  # of the first line

    def read_blocks(self, max_lines: int) -> Iterator[LineBlock]:
        """Yield blocks of at most `max_lines`, fewer if no more are available right now."""
        first = self.first_index
        for rows in group_lines(split_lines(self.chunks, self.name), max_lines, self.has_more):
            lines: list[str] = []
            error = None
            for number, row in enumerate(rows, first + 1):
                try:
                    row = row.removeprefix(codecs.BOM_UTF8) if number == 1 else row
                    lines.append(decode_line(row.rstrip(b"\r"), f"{self.name}, line {number:,}"))
                except InputError as invalid:
                    error = invalid
                    break
            if lines:
                size = sum(map(len, rows)) + len(rows)
                yield LineBlock(source_name=self.name, lines=lines, first_index=first, byte_count=size)
            if error:
                raise error
            first += len(rows)


def open_input(file: Path | None, stdin: BinaryIO) -> AbstractContextManager[BinaryIO]:
    if file is None:
        return nullcontext(stdin)
    try:
        return open(file.expanduser(), "rb")
    except OSError as error:
        raise InputError(
            f"{file}: must be a text file, but cannot be opened ({error.strerror}); check its name, "
            f"or leave it out to read {STDIN_NAME}"
        ) from error


def build_line_source(stream: BinaryIO, file: Path | None, *, text_only: bool = False) -> LineSource:
    """Return the lines of a file, maybe compressed, or of standard input; `text_only` refuses other formats."""
    size = get_file_size(stream)
    chunks: Iterator[bytes]
    if file is None:
        chunks = iter(lambda: stream.read1(CHUNK_BYTES), b"")  # type: ignore[attr-defined]  # a BufferedReader
        chunks = refuse_other_formats(chunks, STDIN_NAME) if text_only else chunks
        return LineSource(name=STDIN_NAME, chunks=chunks, has_more=lambda: is_readable(stream), total_bytes=size)
    is_compressed = any(str(file).lower().endswith(suffix) for suffix in COMPRESSION_MAGIC)
    chunks = file_blocks(stream, str(file))  # type: ignore[arg-type]
    if text_only and size is not None:
        head, chunks = peek_head(chunks, 1)
        check_plain_text(head, str(file))
    elif text_only:  # a pipe may wait for its first bytes
        chunks = refuse_other_formats(chunks, str(file))
    return LineSource(name=str(file), chunks=chunks, has_more=lambda: True, total_bytes=None if is_compressed else size)


def refuse_other_formats(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    head, chunks = peek_head(chunks, 1)
    check_plain_text(head, name)
    yield from chunks


def get_file_size(stream: BinaryIO) -> int | None:
    try:
        status = os.fstat(stream.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def is_readable(stream: BinaryIO) -> bool:
    """True if a read would not block; False where that is unknown, so that available lines are processed first."""
    try:
        return bool(select.select([stream.fileno()], [], [], 0)[0])
    except (OSError, ValueError):
        return False


def split_lines(chunks: Iterable[bytes], name: str) -> Iterator[list[bytes]]:
    """Yield the lines that each chunk completes; only a line feed ends a line."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        *complete, rest = chunk.split(b"\n")
        if complete:
            complete[0] = b"".join([*parts, complete[0]])
            parts, size = [], 0
            yield complete
        parts.append(rest)
        size += len(rest)
        if size > MAX_LINE_BYTES:
            raise InputError(
                f"{name}: a line must have at most {MAX_LINE_BYTES // 2**20} MiB, but one is longer; is it a text file?"
            )
    if size:
        yield [b"".join(parts)]


def group_lines(rows: Iterable[list[bytes]], max_lines: int, has_more: Callable[[], bool]) -> Iterator[list[bytes]]:
    """Yield blocks of lines, each as soon as it is full or no more lines are available."""
    block: list[bytes] = []
    size = 0
    try:
        for chunk_rows in rows:
            for row in chunk_rows:
                block.append(row)
                size += len(row)
                if len(block) >= max_lines or size >= MAX_BLOCK_BYTES:
                    yield block
                    block, size = [], 0
            if block and not has_more():
                yield block
                block, size = [], 0
    except (InputError, CorpusError):
        if block:
            yield block
        raise
    if block:
        yield block


def decode_line(row: bytes, location: str) -> str:
    if b"\0" in row:
        raise InputError(
            f"{location}: must be text, but byte {row.index(0) + 1} is 0; is it a text file, in UTF-8 and not UTF-16?"
        )
    try:
        return row.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{location}: must be UTF-8, but byte {error.start + 1} is 0x{row[error.start]:02x}; "
            f"convert the file first, for example with `iconv -f latin1 -t utf-8`"
        ) from error
