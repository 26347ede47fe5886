"""Lines as they come: in blocks where there are many, at once where a pipe or a person gives them one by one.

A line is what `wc -l` counts. One that is no text ends the reading, with a sentence, once those before it are given.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import select
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from attent.cli.searching import TranslateError
from attent.data.pairs import CorpusError
from attent.data.readers.files import COMPRESSIONS
from attent.data.readers.files import blocks as file_blocks

STDIN = "standard input"
CHUNK = 2**16  # bytes read at a time: what a pipe holds
MOST_BYTES = 2**20  # of a block: lines that are very long are few at a time
LONGEST = 2**24  # bytes of a line, beyond which it is none
KEYS = ("text", "src", "prefix", "must", "must_not")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line to translate, and what its own translation must be like."""

    text: str
    prefix: str | None = None  # None: as all others
    must: tuple[str, ...] = ()
    must_not: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Nothing but text."""
        return self.prefix is None and not self.must and not self.must_not


@dataclass(frozen=True, kw_only=True)
class Block:
    """Lines that are translated together."""

    lines: list[Line]
    first: int  # the number of the first, from 0
    bytes: int  # that they are made of


Read = Callable[[bytes, str], Line]  # a line and where it stands


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where lines come from."""

    name: str
    chunks: Iterable[bytes]
    ready: Callable[[], bool]  # is there more right now?
    size: int | None = None  # in bytes, where that can be told

    def blocks(self, most: int, read: Read) -> Iterator[Block]:
        """At most so many lines each, fewer where there are no more for now."""
        first = 0
        for rows in in_blocks(rows_of(self.chunks, self.name), most, self.ready):
            lines, problem = self._read(rows, first, read)
            if lines:
                yield Block(lines=lines, first=first, bytes=sum(map(len, rows)) + len(rows))
            if problem:
                raise problem
            first += len(rows)

    def _read(self, rows: Sequence[bytes], first: int, read: Read) -> tuple[list[Line], TranslateError | None]:
        """The lines up to the first that is none."""
        lines: list[Line] = []
        for number, row in enumerate(rows, first + 1):
            try:
                lines.append(
                    read(row.removeprefix(codecs.BOM_UTF8) if number == 1 else row, f"{self.name}, line {number:,}")
                )
            except TranslateError as error:
                return lines, error
        return lines, None


def opened(file: Path | None, stdin: BinaryIO) -> AbstractContextManager[BinaryIO]:
    if file is None:
        return nullcontext(stdin)
    try:
        return open(file.expanduser(), "rb")
    except OSError as error:
        raise TranslateError(
            f"{file}: must be a text file, but cannot be opened ({error.strerror}); check its name, "
            f"or leave it out and give the text on {STDIN}"
        ) from error


def source_of(stream: BinaryIO, file: Path | None) -> Source:
    """A file is unpacked where it is compressed; of standard input nothing may be waited for but its next bytes."""
    size = size_of(stream)
    if file is None:
        chunks = iter(lambda: stream.read1(CHUNK), b"")  # type: ignore[attr-defined]  # a BufferedReader
        return Source(name=STDIN, chunks=chunks, ready=lambda: is_ready(stream), size=size)
    packed = any(str(file).lower().endswith(suffix) for suffix in COMPRESSIONS)
    chunks = file_blocks(stream, str(file))  # type: ignore[arg-type]
    return Source(name=str(file), chunks=chunks, ready=lambda: True, size=None if packed else size)


def size_of(stream: BinaryIO) -> int | None:
    try:
        found = os.fstat(stream.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_ready(stream: BinaryIO) -> bool:
    """Would a read be answered at once? Where that cannot be asked, no: what is there is translated first."""
    try:
        return bool(select.select([stream.fileno()], [], [], 0)[0])
    except (OSError, ValueError):
        return False


def rows_of(chunks: Iterable[bytes], name: str) -> Iterator[list[bytes]]:
    """The lines that each chunk ends, without their ends: a line feed and no other sign."""
    parts: list[bytes] = []
    size = 0
    for number, chunk in enumerate(chunks):
        if number == 0:
            check_head(chunk, name)
        *ended, rest = chunk.split(b"\n")
        if ended:
            ended[0] = b"".join([*parts, ended[0]])
            parts, size = [], 0
            yield ended
        parts.append(rest)
        size += len(rest)
        if size > LONGEST:
            raise TranslateError(
                f"{name}: a line must be text of at most {LONGEST // 2**20} MiB, but one is longer; is this a text?"
            )
    if size:
        yield [b"".join(parts)]


def check_head(chunk: bytes, name: str) -> None:
    """Files are unpacked before they come here."""
    for suffix, magic in COMPRESSIONS.items():
        if chunk.startswith(magic):
            tool = {".gz": "gzip -dc", ".xz": "xz -dc", ".zst": "zstd -dc"}[suffix]
            raise TranslateError(
                f"{name}: must be text, but is {suffix[1:]} data; unpack it first: {tool} | attent ..."
            )


def in_blocks(rows: Iterable[list[bytes]], most: int, ready: Callable[[], bool]) -> Iterator[list[bytes]]:
    """Lines in blocks: as many as there may be, or as there are for now."""
    waiting: list[bytes] = []
    size = 0
    try:
        for some in rows:
            for row in some:
                waiting.append(row)
                size += len(row)
                if len(waiting) >= most or size >= MOST_BYTES:
                    yield waiting
                    waiting, size = [], 0
            if waiting and not ready():
                yield waiting
                waiting, size = [], 0
    except (TranslateError, CorpusError):
        if waiting:
            yield waiting
        raise
    if waiting:
        yield waiting


# --- what a line holds ---------------------------------------------------------------------------------------------


def plain(row: bytes, where: str) -> Line:
    return Line(text=decoded(row.rstrip(b"\r"), where))


def decoded(row: bytes, where: str) -> str:
    if b"\0" in row:
        raise TranslateError(
            f"{where}: must be text, but byte {row.index(0) + 1} is 0; is this a text file, and in UTF-8, not UTF-16?"
        )
    try:
        return row.decode()
    except UnicodeDecodeError as error:
        raise TranslateError(
            f"{where}: must be UTF-8, but byte {error.start + 1} is 0x{row[error.start]:02x}; "
            f"convert the text first, such as by `iconv -f latin1 -t utf-8`"
        ) from error


def from_json(row: bytes, where: str) -> Line:
    """A line of JSON; an empty one stays empty."""
    text = decoded(row, where).strip()
    if not text:
        return Line(text="")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TranslateError(f"{where}: must be a JSON object, but is not JSON ({error}); correct it") from error
    if not isinstance(facts, dict):
        raise TranslateError(f'{where}: must be a JSON object such as {{"text": "A dog."}}, but is {text[:40]}')
    check_keys(facts, where)
    return Line(
        text=words_of(facts.get("text", facts.get("src")), "text", where),
        prefix=None if facts.get("prefix") is None else words_of(facts["prefix"], "prefix", where),
        must=many_of(facts.get("must"), "must", where),
        must_not=many_of(facts.get("must_not"), "must_not", where),
    )


def check_keys(facts: dict[str, Any], where: str) -> None:
    for key in facts:
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(KEYS)}"
            raise TranslateError(f"{where}: `{key[:40]}` is no key of a line to translate: {hint}")
    if ("text" in facts) == ("src" in facts):
        raise TranslateError(f"{where}: must have a `text` (or `src`, not both) to translate")


def words_of(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or any("\ud800" <= sign <= "\udfff" for sign in value):
        raise TranslateError(f"{where}: `{key}` must be text, but is {json.dumps(value)[:40]}")
    return value


def many_of(value: Any, key: str, where: str) -> tuple[str, ...]:
    """A word or a list of words."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(words_of(one, key, where) for one in values)
