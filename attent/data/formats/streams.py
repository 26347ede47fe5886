"""Bytes of a file or of standard input, decompressed, and their lines: what every reader begins with.

Text that is damaged costs only its own line: a line that is not UTF-8 or longer than 1 MiB becomes a `Bad`, and each
item that `lines` gives is exactly one line of the file, so that two files can be read side by side. Only a broken
compression ends the reading. What a line means is left to the readers.
"""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from attent.data.pairs import BadLine, CorpusError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK_SIZE = 2**18  # bytes read at a time: larger is no faster, and the lines of one block are held in memory
HEAD_SIZE = 2**16  # bytes in which a file tells what it is, whatever comments come first
MAX_LINE_BYTES = 2**20  # bytes of one line, and characters of one text
EXCERPT_CHARS = 80  # characters of a bad line that are kept
COMPRESSION_MAGIC = {
    ".gz": b"\x1f\x8b",
    ".xz": b"\xfd7zXZ\x00",
    ".zst": b"\x28\xb5\x2f\xfd",
}  # none can begin UTF-8 text
TOO_LONG = "longer than 1 MiB"
NOT_UTF8 = "not UTF-8"
STDIN = "standard input"


class DamagedFileError(CorpusError):
    """Compressed data that break off or make no sense; `after` tells how far the reading came."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}: fetch or copy it again")
        self.name, self.problem = name, problem

    def at_line(self, line: int) -> CorpusError:
        return CorpusError(f"{self.name} {self.problem} after line {line:,}: fetch or copy it again")


@dataclass(frozen=True)
class InputFile:
    """Where bytes come from: a path, or standard input (None)."""

    path: Path | None

    @property
    def name(self) -> str:
        """What a person knows it by."""
        return STDIN if self.path is None else str(self.path)

    @property
    def is_regular(self) -> bool:
        """Can it be read more than once? Standard input and pipes cannot."""
        return self.path is not None and self.path.is_file()

    def read_blocks(self) -> Iterator[bytes]:
        """The decompressed content. Standard input can be read once."""
        if self.path is not None:
            raw: io.BufferedIOBase = open(self.path, "rb")  # noqa: SIM115 - closed below, as standard input is
        elif sys.stdin is None or sys.stdin.buffer.closed:
            raise CorpusError("standard input can be read only once: save it to a file and name that file")
        else:
            raw = sys.stdin.buffer  # type: ignore[assignment]  # typed as BinaryIO, but a BufferedReader
        with raw:
            yield from read_blocks(raw, self.name)


class _PrefixedStream(io.RawIOBase):
    """What was read already and what is still to come, as one file."""

    def __init__(self, head: bytes, rest: io.BufferedIOBase) -> None:
        self.head, self.rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        block = self.head[: len(view)] or self.rest.read1(len(view))
        self.head = self.head[len(view) :]
        view[: len(block)] = block
        return len(block)


def read_blocks(raw: io.BufferedIOBase, name: str) -> Iterator[bytes]:
    """The content in blocks, decompressed as its first bytes say. The first block has six bytes or is all."""
    head = raw.read(6)
    kind = next((suffix for suffix, magic in COMPRESSION_MAGIC.items() if head.startswith(magic)), None)
    claimed = get_compression_suffix(name)
    if kind is None and claimed:
        problem = f"is not {claimed[1:]} data, though its name says so"
        raise CorpusError(f"{name} {problem}: fetch it again, or rename it if it is plain text")
    if kind is not None:
        yield from _read_compressed(_open_compressed(_PrefixedStream(head, raw), kind), name)
        return
    block = head + raw.read1(BLOCK_SIZE)
    while block:
        yield block
        block = raw.read1(BLOCK_SIZE)


def peek_head(content: Iterable[bytes], size: int = HEAD_SIZE) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, where a file tells what it is, and all of it again. Damage met so early is told in its place."""
    stream, head = iter(content), b""
    try:
        while len(head) < size and (block := next(stream, b"")):
            head += block
    except DamagedFileError as damage:
        return head, _replay_then_raise(head, damage)
    return head, chain([head], stream)


def _replay_then_raise(head: bytes, damage: DamagedFileError) -> Iterator[bytes]:
    yield head
    raise damage


def get_compression_suffix(name: str) -> str:
    """The suffix of `name` if it is one of a compression, else nothing."""
    return next((suffix for suffix in COMPRESSION_MAGIC if name.lower().endswith(suffix)), "")


def _open_compressed(raw: io.RawIOBase, suffix: str) -> gzip.GzipFile | lzma.LZMAFile | zstd.ZstdFile:
    source = io.BufferedReader(raw)
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=source, mode="rb")
    return lzma.LZMAFile(source, format=lzma.FORMAT_XZ) if suffix == ".xz" else zstd.ZstdFile(source)


def _read_compressed(file: gzip.GzipFile | lzma.LZMAFile | zstd.ZstdFile, name: str) -> Iterator[bytes]:
    """`read1` and never `read`: at a broken place `read` would lose what it had already decompressed."""
    while True:
        try:
            block = file.read1(BLOCK_SIZE)
        except EOFError:
            raise DamagedFileError(name, "is cut short") from None
        except (zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstd.ZstdError) as error:
            raise DamagedFileError(name, f"is damaged ({error})") from None
        if not block:
            return
        yield block


# Lines.


def read_lines(content: Iterable[bytes], name: str) -> Iterator[str | BadLine]:
    """Each line, without its end, or what is wrong with it. Only a newline ends a line: U+2028 and others do not.

    In a file that begins with 64 KiB without a newline, or is shorter and has none, a carriage return ends a line:
    so did programs on old Macs, and spreadsheets there do to this day.
    """
    number = 0
    try:
        for chunk in _cut_at_newlines(_normalize_newlines(_convert_to_utf8(content))):
            found = _decode_lines(chunk, name, number)
            number += len(found)
            yield from found
    except DamagedFileError as damage:
        raise damage.at_line(number) from None


def _normalize_newlines(content: Iterable[bytes]) -> Iterator[bytes]:
    head, whole = peek_head(content)
    begin = head[:HEAD_SIZE]
    return _replace_carriage_returns(whole) if b"\n" not in begin and b"\r" in begin[:-1] else whole


def _replace_carriage_returns(content: Iterable[bytes]) -> Iterator[bytes]:
    """Newlines for carriage returns. One at the end of a block waits for the next, which may begin with a newline."""
    waiting = b""
    for block in content:
        text = waiting + block
        waiting = b"\r" if text.endswith(b"\r") else b""
        yield text.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    yield waiting.replace(b"\r", b"\n")


def _cut_at_newlines(content: Iterable[bytes]) -> Iterator[bytes]:
    """Blocks cut at newlines. Of a line that is too long only so much is kept that its length still tells."""
    rest = b""
    for block in content:
        begin, newline, end = block.rpartition(b"\n")
        if newline:
            yield rest + begin
            rest = end
        else:
            rest = (rest + block)[: MAX_LINE_BYTES + 1]
    if rest:
        yield rest


def _decode_lines(chunk: bytes, name: str, lines_before: int) -> list[str] | list[str | BadLine]:
    """The lines of a chunk: all at once, which is fast, or one by one when something is wrong with one of them."""
    if len(chunk) <= MAX_LINE_BYTES:
        try:
            text = chunk.decode()
        except UnicodeDecodeError:
            pass
        else:
            found = text.split("\n")
            return [line.removesuffix("\r") for line in found] if "\r" in text else found
    return [_decode_line(raw, name, at) for at, raw in enumerate(chunk.split(b"\n"), lines_before + 1)]


def _decode_line(raw: bytes, name: str, line_number: int) -> str | BadLine:
    if len(raw) > MAX_LINE_BYTES:
        return BadLine(TOO_LONG, name, line_number, raw[:EXCERPT_CHARS].decode(errors="replace"))
    try:
        return raw.decode().removesuffix("\r")
    except UnicodeDecodeError:
        return BadLine(NOT_UTF8, name, line_number, raw[:EXCERPT_CHARS].decode(errors="replace"))


def _convert_to_utf8(content: Iterable[bytes]) -> Iterator[bytes]:
    """UTF-16, which spreadsheets export as "Unicode text", as UTF-8; anything else as it is, without its mark."""
    head, whole = peek_head(content, len(codecs.BOM_UTF8))
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        whole = transcode_to_utf8(whole, "utf-16")
        head = next(whole)
    elif head:
        next(whole)
    return chain([head.removeprefix(codecs.BOM_UTF8)], whole)


def transcode_to_utf8(content: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Text of another encoding as UTF-8. What makes no sense in it becomes bytes that are no UTF-8 either."""
    codecs.register_error("attent.marked", _replace_undecodable)
    decoder = codecs.getincrementaldecoder(encoding)("attent.marked")
    for block in content:
        yield decoder.decode(block).encode("utf-8", "surrogatepass")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")


def _replace_undecodable(error: UnicodeError) -> tuple[str, int]:
    """Half a surrogate pair where bytes cannot be decoded: no text holds one, and strict UTF-8 refuses it."""
    assert isinstance(error, UnicodeDecodeError)
    return "\udcff", error.end
