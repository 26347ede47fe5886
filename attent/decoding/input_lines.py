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

from attent.cli.search_flags import InputError
from attent.data.formats.streams import COMPRESSION_MAGIC
from attent.data.formats.streams import read_blocks as file_blocks
from attent.data.pairs import CorpusError

STDIN_NAME = "standard input"
CHUNK_BYTES = 2**16  # bytes read at a time: what a pipe holds
MAX_BLOCK_BYTES = 2**20  # of a block: lines that are very long are few at a time
MAX_LINE_BYTES = 2**24  # bytes of a line, beyond which it is none
JSON_KEYS = ("text", "src", "prefix", "require", "ban")


@dataclass(frozen=True, kw_only=True)
class InputLine:
    """A line to translate, and what its own translation must be like."""

    text: str
    prefix: str | None = None  # None: as all others
    required: tuple[str, ...] = ()
    banned: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nothing but text."""
        return self.prefix is None and not self.required and not self.banned


@dataclass(frozen=True, kw_only=True)
class LineBlock:
    """Lines that are translated together."""

    lines: list[InputLine]
    first_index: int  # the number of the first, from 0
    byte_count: int  # that they are made of


LineParser = Callable[[bytes, str], InputLine]  # a line and where it stands


@dataclass(frozen=True, kw_only=True)
class LineSource:
    """Where lines come from."""

    name: str
    chunks: Iterable[bytes]
    has_more: Callable[[], bool]  # is there more right now?
    total_bytes: int | None = None  # in bytes, where that can be told

    def read_blocks(self, max_lines: int, parse_line: LineParser) -> Iterator[LineBlock]:
        """At most so many lines each, fewer where there are no more for now."""
        first = 0
        for rows in group_lines(split_lines(self.chunks, self.name), max_lines, self.has_more):
            lines, problem = self._parse_rows(rows, first, parse_line)
            if lines:
                yield LineBlock(lines=lines, first_index=first, byte_count=sum(map(len, rows)) + len(rows))
            if problem:
                raise problem
            first += len(rows)

    def _parse_rows(
        self, rows: Sequence[bytes], first_index: int, parse_line: LineParser
    ) -> tuple[list[InputLine], InputError | None]:
        """The lines up to the first that is none."""
        lines: list[InputLine] = []
        for number, row in enumerate(rows, first_index + 1):
            try:
                lines.append(
                    parse_line(
                        row.removeprefix(codecs.BOM_UTF8) if number == 1 else row, f"{self.name}, line {number:,}"
                    )
                )
            except InputError as error:
                return lines, error
        return lines, None


def open_input(file: Path | None, stdin: BinaryIO) -> AbstractContextManager[BinaryIO]:
    if file is None:
        return nullcontext(stdin)
    try:
        return open(file.expanduser(), "rb")
    except OSError as error:
        raise InputError(
            f"{file}: must be a text file, but cannot be opened ({error.strerror}); check its name, "
            f"or leave it out and give the text on {STDIN_NAME}"
        ) from error


def build_line_source(stream: BinaryIO, file: Path | None) -> LineSource:
    """A file is unpacked where it is compressed; of standard input nothing may be waited for but its next bytes."""
    size = get_file_size(stream)
    if file is None:
        chunks = iter(lambda: stream.read1(CHUNK_BYTES), b"")  # type: ignore[attr-defined]  # a BufferedReader
        return LineSource(name=STDIN_NAME, chunks=chunks, has_more=lambda: is_readable(stream), total_bytes=size)
    packed = any(str(file).lower().endswith(suffix) for suffix in COMPRESSION_MAGIC)
    chunks = file_blocks(stream, str(file))  # type: ignore[arg-type]
    return LineSource(name=str(file), chunks=chunks, has_more=lambda: True, total_bytes=None if packed else size)


def get_file_size(stream: BinaryIO) -> int | None:
    try:
        found = os.fstat(stream.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_readable(stream: BinaryIO) -> bool:
    """Would a read be answered at once? Where that cannot be asked, no: what is there is translated first."""
    try:
        return bool(select.select([stream.fileno()], [], [], 0)[0])
    except (OSError, ValueError):
        return False


def split_lines(chunks: Iterable[bytes], name: str) -> Iterator[list[bytes]]:
    """The lines that each chunk ends, without their ends: a line feed and no other sign."""
    parts: list[bytes] = []
    size = 0
    for number, chunk in enumerate(chunks):
        if number == 0:
            check_not_compressed(chunk, name)
        *ended, rest = chunk.split(b"\n")
        if ended:
            ended[0] = b"".join([*parts, ended[0]])
            parts, size = [], 0
            yield ended
        parts.append(rest)
        size += len(rest)
        if size > MAX_LINE_BYTES:
            raise InputError(
                f"{name}: a line must be text of at most {MAX_LINE_BYTES // 2**20} MiB, but one is longer; is this a text?"
            )
    if size:
        yield [b"".join(parts)]


def check_not_compressed(chunk: bytes, name: str) -> None:
    """Files are unpacked before they come here."""
    for suffix, magic in COMPRESSION_MAGIC.items():
        if chunk.startswith(magic):
            tool = {".gz": "gzip -dc", ".xz": "xz -dc", ".zst": "zstd -dc"}[suffix]
            raise InputError(f"{name}: must be text, but is {suffix[1:]} data; unpack it first: {tool} | attent ...")


def group_lines(rows: Iterable[list[bytes]], max_lines: int, has_more: Callable[[], bool]) -> Iterator[list[bytes]]:
    """Lines in blocks: as many as there may be, or as there are for now."""
    waiting: list[bytes] = []
    size = 0
    try:
        for some in rows:
            for row in some:
                waiting.append(row)
                size += len(row)
                if len(waiting) >= max_lines or size >= MAX_BLOCK_BYTES:
                    yield waiting
                    waiting, size = [], 0
            if waiting and not has_more():
                yield waiting
                waiting, size = [], 0
    except (InputError, CorpusError):
        if waiting:
            yield waiting
        raise
    if waiting:
        yield waiting


# --- what a line holds ---------------------------------------------------------------------------------------------


def parse_text_line(row: bytes, location: str) -> InputLine:
    return InputLine(text=decode_line(row.rstrip(b"\r"), location))


def decode_line(row: bytes, location: str) -> str:
    if b"\0" in row:
        raise InputError(
            f"{location}: must be text, but byte {row.index(0) + 1} is 0; is this a text file, and in UTF-8, not UTF-16?"
        )
    try:
        return row.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{location}: must be UTF-8, but byte {error.start + 1} is 0x{row[error.start]:02x}; "
            f"convert the text first, such as by `iconv -f latin1 -t utf-8`"
        ) from error


def parse_json_line(row: bytes, location: str) -> InputLine:
    """A line of JSON; an empty one stays empty."""
    text = decode_line(row, location).strip()
    if not text:
        return InputLine(text="")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{location}: must be a JSON object, but is not JSON ({error}); correct it") from error
    if not isinstance(facts, dict):
        raise InputError(f'{location}: must be a JSON object such as {{"text": "A dog."}}, but is {text[:40]}')
    check_keys(facts, location)
    return InputLine(
        text=check_text(facts.get("text", facts.get("src")), "text", location),
        prefix=None if facts.get("prefix") is None else check_text(facts["prefix"], "prefix", location),
        required=check_texts(facts.get("require"), "require", location),
        banned=check_texts(facts.get("ban"), "ban", location),
    )


def check_keys(fields: dict[str, Any], location: str) -> None:
    for key in fields:
        if key not in JSON_KEYS:
            near = get_close_matches(key, JSON_KEYS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(JSON_KEYS)}"
            raise InputError(f"{location}: `{key[:40]}` is no key of a line to translate: {hint}")
    if ("text" in fields) == ("src" in fields):
        raise InputError(f"{location}: must have a `text` (or `src`, not both) to translate")


def check_text(value: Any, key: str, location: str) -> str:
    if not isinstance(value, str) or any("\ud800" <= sign <= "\udfff" for sign in value):
        raise InputError(f"{location}: `{key}` must be text, but is {json.dumps(value)[:40]}")
    return value


def check_texts(value: Any, key: str, location: str) -> tuple[str, ...]:
    """A word or a list of words."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(check_text(one, key, location) for one in values)
