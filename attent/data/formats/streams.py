"""Input files as decompressed byte blocks and as text lines.

A line that is not UTF-8 or longer than 1 MiB becomes a `BadLine`. `read_lines` yields exactly one item per line of the
file, so that two files can be read in parallel. Only damaged compressed data ends the reading early.
"""

import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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

BLOCK_SIZE = 2**18  # bytes: larger is no faster, and the lines of one block are in memory
HEAD_SIZE = 2**16  # bytes, enough to detect a format behind leading comments
MAX_LINE_BYTES = 2**20  # also the limit in characters of one XML or PO text
EXCERPT_CHARS = 80
COMPRESSION_MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}  # none is valid UTF-8
_DECOMPRESSORS: dict[str, Callable[[io.BufferedReader], gzip.GzipFile | lzma.LZMAFile | zstd.ZstdFile]] = {
    ".gz": lambda source: gzip.GzipFile(fileobj=source, mode="rb"),
    ".xz": partial(lzma.LZMAFile, format=lzma.FORMAT_XZ),
    ".zst": zstd.ZstdFile,
}
TOO_LONG = "longer than 1 MiB"
NOT_UTF8 = "not UTF-8"
UNTRANSLATED = "no translation"
STDIN = "standard input"


class DamagedFileError(CorpusError):
    """Compressed data that is truncated or invalid."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}: fetch or copy it again")
        self.name, self.problem = name, problem

    def at_line(self, line: int) -> CorpusError:
        return CorpusError(f"{self.name} {self.problem} after line {line:,}: fetch or copy it again")


@dataclass(frozen=True)
class InputFile:
    """A path, or standard input (None)."""

    path: Path | None

    @property
    def name(self) -> str:
        return STDIN if self.path is None else str(self.path)

    @property
    def is_regular(self) -> bool:
        """True if it can be read more than once, unlike standard input and pipes."""
        return self.path is not None and self.path.is_file()

    def read_blocks(self) -> Iterator[bytes]:
        """Yield the decompressed content. Standard input can be read once."""
        if self.path is not None:
            raw: io.BufferedIOBase = open(self.path, "rb")  # noqa: SIM115 - closed below, as standard input is
        elif sys.stdin is None or sys.stdin.buffer.closed:
            raise CorpusError("standard input can be read only once: save it to a file and give its path")
        else:
            raw = sys.stdin.buffer  # type: ignore[assignment]  # typed as BinaryIO, but a BufferedReader
        with raw:
            yield from read_blocks(raw, self.name)


class _PrefixedStream(io.RawIOBase):
    """A stream with its first bytes, which were already read, put back."""

    def __init__(self, head: bytes, rest: io.BufferedIOBase) -> None:
        self.head, self.rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        block = self.head[: len(view)] or self.rest.read1(len(view))
        self.head = self.head[len(view) :]
        view[: len(block)] = block
        return len(block)


def read_blocks(raw: io.BufferedIOBase, name: str) -> Iterator[bytes]:
    """Yield blocks, decompressed according to the magic bytes. The first has at least six bytes or is the file."""
    head = raw.read(6)
    suffix = next((suffix for suffix, magic in COMPRESSION_MAGIC.items() if head.startswith(magic)), None)
    claimed = get_compression_suffix(name)
    if suffix is None and claimed:
        problem = f"is not {claimed[1:]} data, though its name says so"
        raise CorpusError(f"{name} {problem}: fetch it again, or rename it if it is plain text")
    if suffix is not None:
        yield from _read_compressed(io.BufferedReader(_PrefixedStream(head, raw)), suffix, name)
        return
    block = head + raw.read1(BLOCK_SIZE)
    while block:
        yield block
        block = raw.read1(BLOCK_SIZE)


def peek_head(content: Iterable[bytes], size: int = HEAD_SIZE) -> tuple[bytes, Iterator[bytes]]:
    """Return the first bytes and the whole content. Damage within the head is raised when the content is read."""
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


def decode_head(head: bytes) -> str:
    """Return the first bytes of a file as text without leading space, to detect its format."""
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return head.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace").lstrip()


def get_compression_suffix(name: str) -> str:
    return next((suffix for suffix in COMPRESSION_MAGIC if name.lower().endswith(suffix)), "")


def strip_compression_suffix(name: str) -> str:
    return name[: len(name) - len(get_compression_suffix(name))]


def _read_compressed(source: io.BufferedReader, suffix: str, name: str) -> Iterator[bytes]:
    """Yield blocks by `read1`: at damaged data `read` would lose what it has already decompressed."""
    file = _DECOMPRESSORS[suffix](source)
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


def read_lines(content: Iterable[bytes], name: str) -> Iterator[str | BadLine]:
    """Yield each line without its line ending. Only a newline ends a line: U+2028 and the like do not."""
    line_count = 0
    try:
        for chunk in _cut_at_newlines(_convert_to_utf8(content)):
            lines = _decode_lines(chunk, name, line_count)
            line_count += len(lines)
            yield from lines
    except DamagedFileError as damage:
        raise damage.at_line(line_count) from None


def _cut_at_newlines(content: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks that end at a newline. Overlong lines are truncated just above the limit to keep memory flat."""
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
    """Decode a chunk at once, which is fast, or line by line if one of its lines is bad."""
    if len(chunk) <= MAX_LINE_BYTES:
        with suppress(UnicodeDecodeError):
            text = chunk.decode()
            lines = text.split("\n")
            return [line.removesuffix("\r") for line in lines] if "\r" in text else lines
    return [_decode_line(raw, name, number) for number, raw in enumerate(chunk.split(b"\n"), lines_before + 1)]


def _decode_line(raw: bytes, name: str, line_number: int) -> str | BadLine:
    reason = TOO_LONG
    if len(raw) <= MAX_LINE_BYTES:
        with suppress(UnicodeDecodeError):
            return raw.decode().removesuffix("\r")
        reason = NOT_UTF8
    return BadLine(reason, name, line_number, raw[:EXCERPT_CHARS].decode(errors="replace"))


def _convert_to_utf8(content: Iterable[bytes]) -> Iterator[bytes]:
    """Transcode UTF-16, which spreadsheets export as "Unicode text"; remove a byte order mark."""
    head, blocks = peek_head(content, len(codecs.BOM_UTF8))
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        blocks = transcode_to_utf8(blocks, "utf-16")
        head = next(blocks)
    elif head:
        next(blocks)
    return chain([head.removeprefix(codecs.BOM_UTF8)], blocks)


def transcode_to_utf8(content: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Transcode text. Bytes that are invalid in `encoding` become bytes that are invalid in UTF-8."""
    codecs.register_error("attent.lone_surrogate", _replace_undecodable)
    decoder = codecs.getincrementaldecoder(encoding)("attent.lone_surrogate")
    for block in content:
        yield decoder.decode(block).encode("utf-8", "surrogatepass")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")


def _replace_undecodable(error: UnicodeError) -> tuple[str, int]:
    """Insert a lone surrogate: no text contains one, and strict UTF-8 refuses it."""
    assert isinstance(error, UnicodeDecodeError)
    return "\udcff", error.end
