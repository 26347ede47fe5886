"""What `attent fill`, `classify` and `embed` share: the flags of the machine, a `Reader`, and texts as they come, from
the command itself, from files or from standard input. Torch is imported when there is work to do.
"""

# No `from __future__ import annotations`: classes of other modules inherit these flags, and must know their types.

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import CycloptsError, Group, Parameter

if TYPE_CHECKING:
    from attent.decode.reader import Reader

Dtype = Literal["float32", "bfloat16", "float16"]
OUTPUT, MACHINE = (Group(name, sort_key=number) for number, name in enumerate(("Output", "Machine"), 1))
FILE_NAME = re.compile(r"\S+\.(txt|tsv|jsonl|csv|gz|xz|zst|png|jpe?g|webp)", re.IGNORECASE)
AT_ONCE = 1_024  # lines that are read together
TEXTS = "texts, or files with a text a line; by default, or as -, standard input"


@dataclass(frozen=True, kw_only=True)
class ReadFlags:
    """What all of them may be asked for."""

    json: Annotated[bool, Parameter(group=OUTPUT, negative="", help="a line of JSON for each, with all there is")] = (
        False
    )
    device: Annotated[
        str | None, Parameter(group=MACHINE, help="cuda, cuda:1, mps or cpu; by default the best there is")
    ] = None
    dtype: Annotated[Dtype, Parameter(group=MACHINE, help="in which to compute")] = "float32"
    threads: Annotated[int | None, Parameter(group=MACHINE, help="of the CPU, by default all cores")] = None
    batch_tokens: Annotated[
        int | None, Parameter(group=MACHINE, help="tokens that go through the model at once; it bounds the memory")
    ] = None


def check_flags(flags: ReadFlags, command: str, top: int | None = None) -> None:
    for name, value in (("threads", flags.threads), ("batch-tokens", flags.batch_tokens), ("top", top)):
        if value is not None and value < 1:
            raise CycloptsError(msg=f"--{name} must be 1 or more, but is {value}", command_chain=(command,))


def reader_of(folder: Path, flags: ReadFlags) -> "Reader":
    """The reader of a folder, on the machine as it was asked for."""
    from attent.cli.searching import check_run, device_of

    check_run(folder)
    import torch

    from attent.decode.reader import Reader

    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    device = device_of(flags.device)
    return Reader.load(folder, device=device, dtype=flags.dtype, batch_tokens=flags.batch_tokens, say=say)


def say(text: str) -> None:
    print(f"attent: {text}", file=sys.stderr)


@dataclass(frozen=True)
class Block:
    """Some texts."""

    texts: list[str]
    first: int = 1  # the number of the first one in its file
    typed: bool = True  # in the command itself; False: lines of a file or of standard input


def blocks_of(given: Sequence[str]) -> Iterator[Block]:
    """The texts that were given, some at a time: what names a file stands for its lines."""
    texts: list[str] = []
    for one in given or ["-"]:
        if one not in ("-", "./-") and not os.path.isfile(os.path.expanduser(one)):
            check_no_file(one)
            texts.append(one)
            continue
        if texts:
            yield Block(texts)
            texts = []
        yield from lines_of(None if one in ("-", "./-") else Path(one))
    if texts:
        yield Block(texts)


def check_no_file(text: str) -> None:
    """A name that was mistyped is no text."""
    if FILE_NAME.fullmatch(text):
        raise ValueError(f"{text}: there is no such file; give its right name (or echo a text to -)")


def lines_of(file: Path | None) -> Iterator[Block]:
    """As they come: many where there are many, at once where a pipe or a person gives them one by one."""
    from attent.cli.reading import opened, plain, source_of

    if file is None and sys.stdin.isatty():
        say("reading from the terminal, a text a line; Ctrl-D ends it")
    first = 1
    with opened(file, sys.stdin.buffer) as stream:
        for block in source_of(stream, file).blocks(AT_ONCE, plain):
            yield Block([line.text for line in block.lines], first, typed=False)
            first += len(block.lines)


def write(line: str) -> None:
    """A line of the result; whoever reads it in a pipe has it at once."""
    print(line, flush=not sys.stdout.isatty())
