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

from attent.data.pairs import Bad, CorpusError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 2**18  # bytes read at a time: larger is no faster, and the lines of one block are held in memory
HEAD = 2**16  # bytes in which a file tells what it is, whatever comments come first
LONGEST = 2**20  # bytes of one line, and characters of one text
SHOWN = 80  # characters of a bad line that are kept
COMPRESSIONS = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}  # none can begin UTF-8 text
TOO_LONG = "longer than 1 MiB"
NOT_UTF8 = "not UTF-8"
STDIN = "standard input"


class Damaged(CorpusError):
    """Compressed data that break off or make no sense; `after` tells how far the reading came."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}: fetch or copy it again")
        self.name, self.what = name, what

    def after(self, line: int) -> CorpusError:
        return CorpusError(f"{self.name} {self.what} after line {line:,}: fetch or copy it again")


@dataclass(frozen=True)
class File:
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

    def blocks(self) -> Iterator[bytes]:
        """The decompressed content. Standard input can be read once."""
        if self.path is not None:
            raw: io.BufferedIOBase = open(self.path, "rb")  # noqa: SIM115 - closed below, as standard input is
        elif sys.stdin is None or sys.stdin.buffer.closed:
            raise CorpusError("standard input can be read only once: save it to a file and name that file")
        else:
            raw = sys.stdin.buffer  # type: ignore[assignment]  # typed as BinaryIO, but a BufferedReader
        with raw:
            yield from blocks(raw, self.name)


class _Joined(io.RawIOBase):
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


def blocks(raw: io.BufferedIOBase, name: str) -> Iterator[bytes]:
    """The content in blocks, decompressed as its first bytes say. The first block has six bytes or is all."""
    head = raw.read(6)
    kind = next((suffix for suffix, magic in COMPRESSIONS.items() if head.startswith(magic)), None)
    claimed = compression(name)
    if kind is None and claimed:
        problem = f"is not {claimed[1:]} data, though its name says so"
        raise CorpusError(f"{name} {problem}: fetch it again, or rename it if it is plain text")
    if kind is not None:
        yield from _decompressed(_opened(_Joined(head, raw), kind), name)
        return
    block = head + raw.read1(BLOCK)
    while block:
        yield block
        block = raw.read1(BLOCK)


def beginning(content: Iterable[bytes], size: int = HEAD) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, where a file tells what it is, and all of it again. Damage met so early is told in its place."""
    stream, head = iter(content), b""
    try:
        while len(head) < size and (block := next(stream, b"")):
            head += block
    except Damaged as damage:
        return head, _then(head, damage)
    return head, chain([head], stream)


def _then(head: bytes, damage: Damaged) -> Iterator[bytes]:
    yield head
    raise damage


def compression(name: str) -> str:
    """The suffix of `name` if it is one of a compression, else nothing."""
    return next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), "")


def _opened(raw: io.RawIOBase, kind: str) -> gzip.GzipFile | lzma.LZMAFile | zstd.ZstdFile:
    source = io.BufferedReader(raw)
    if kind == ".gz":
        return gzip.GzipFile(fileobj=source, mode="rb")
    return lzma.LZMAFile(source, format=lzma.FORMAT_XZ) if kind == ".xz" else zstd.ZstdFile(source)


def _decompressed(file: gzip.GzipFile | lzma.LZMAFile | zstd.ZstdFile, name: str) -> Iterator[bytes]:
    """`read1` and never `read`: at a broken place `read` would lose what it had already decompressed."""
    while True:
        try:
            block = file.read1(BLOCK)
        except EOFError:
            raise Damaged(name, "is cut short") from None
        except (zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstd.ZstdError) as error:
            raise Damaged(name, f"is damaged ({error})") from None
        if not block:
            return
        yield block


# Lines.


def lines(content: Iterable[bytes], name: str) -> Iterator[str | Bad]:
    """Each line, without its end, or what is wrong with it. Only a newline ends a line: U+2028 and others do not.

    In a file that begins with 64 KiB without a newline, or is shorter and has none, a carriage return ends a line:
    so did programs on old Macs, and spreadsheets there do to this day.
    """
    number = 0
    try:
        for chunk in _whole_lines(_newlines(_utf8(content))):
            found = _decoded(chunk, name, number)
            number += len(found)
            yield from found
    except Damaged as damage:
        raise damage.after(number) from None


def _newlines(content: Iterable[bytes]) -> Iterator[bytes]:
    head, whole = beginning(content)
    begin = head[:HEAD]
    return _without_returns(whole) if b"\n" not in begin and b"\r" in begin[:-1] else whole


def _without_returns(content: Iterable[bytes]) -> Iterator[bytes]:
    """Newlines for carriage returns. One at the end of a block waits for the next, which may begin with a newline."""
    waiting = b""
    for block in content:
        text = waiting + block
        waiting = b"\r" if text.endswith(b"\r") else b""
        yield text.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    yield waiting.replace(b"\r", b"\n")


def _whole_lines(content: Iterable[bytes]) -> Iterator[bytes]:
    """Blocks cut at newlines. Of a line that is too long only so much is kept that its length still tells."""
    rest = b""
    for block in content:
        begin, newline, end = block.rpartition(b"\n")
        if newline:
            yield rest + begin
            rest = end
        else:
            rest = (rest + block)[: LONGEST + 1]
    if rest:
        yield rest


def _decoded(chunk: bytes, name: str, number: int) -> list[str] | list[str | Bad]:
    """The lines of a chunk: all at once, which is fast, or one by one when something is wrong with one of them."""
    if len(chunk) <= LONGEST:
        try:
            text = chunk.decode()
        except UnicodeDecodeError:
            pass
        else:
            found = text.split("\n")
            return [line.removesuffix("\r") for line in found] if "\r" in text else found
    return [_line(raw, name, at) for at, raw in enumerate(chunk.split(b"\n"), number + 1)]


def _line(raw: bytes, name: str, number: int) -> str | Bad:
    if len(raw) > LONGEST:
        return Bad(TOO_LONG, name, number, raw[:SHOWN].decode(errors="replace"))
    try:
        return raw.decode().removesuffix("\r")
    except UnicodeDecodeError:
        return Bad(NOT_UTF8, name, number, raw[:SHOWN].decode(errors="replace"))


def _utf8(content: Iterable[bytes]) -> Iterator[bytes]:
    """UTF-16, which spreadsheets export as "Unicode text", as UTF-8; anything else as it is, without its mark."""
    head, whole = beginning(content, len(codecs.BOM_UTF8))
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        whole = recoded(whole, "utf-16")
        head = next(whole)
    elif head:
        next(whole)
    return chain([head.removeprefix(codecs.BOM_UTF8)], whole)


def recoded(content: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Text of another encoding as UTF-8. What makes no sense in it becomes bytes that are no UTF-8 either."""
    codecs.register_error("attent.marked", _marked)
    decoder = codecs.getincrementaldecoder(encoding)("attent.marked")
    for block in content:
        yield decoder.decode(block).encode("utf-8", "surrogatepass")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")


def _marked(error: UnicodeError) -> tuple[str, int]:
    """Half a surrogate pair where bytes cannot be decoded: no text holds one, and strict UTF-8 refuses it."""
    assert isinstance(error, UnicodeDecodeError)
    return "\udcff", error.end
