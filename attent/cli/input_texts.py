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
    from attent.decoding.encoder_inference import Predictor

DtypeName = Literal["float32", "bfloat16", "float16"]
OUTPUT_GROUP, DEVICE_GROUP = (Group(name, sort_key=number) for number, name in enumerate(("Output", "Machine"), 1))
FILE_NAME_PATTERN = re.compile(r"\S+\.(txt|tsv|jsonl|csv|gz|xz|zst|png|jpe?g|webp)", re.IGNORECASE)
BLOCK_TEXTS = 1_024  # lines that are read together
TEXTS_HELP = "texts, or files with a text a line; by default, or as -, standard input"


@dataclass(frozen=True, kw_only=True)
class TextInputFlags:
    """What all of them may be asked for."""

    json: Annotated[
        bool, Parameter(group=OUTPUT_GROUP, negative="", help="a line of JSON for each, with all there is")
    ] = False
    device: Annotated[
        str | None, Parameter(group=DEVICE_GROUP, help="cuda, cuda:1, mps or cpu; by default the best there is")
    ] = None
    dtype: Annotated[DtypeName, Parameter(group=DEVICE_GROUP, help="in which to compute")] = "float32"
    threads: Annotated[int | None, Parameter(group=DEVICE_GROUP, help="of the CPU, by default all cores")] = None
    batch_tokens: Annotated[
        int | None, Parameter(group=DEVICE_GROUP, help="tokens that go through the model at once; it bounds the memory")
    ] = None


def check_flags(flags: TextInputFlags, command: str, top: int | None = None) -> None:
    for name, value in (("threads", flags.threads), ("batch-tokens", flags.batch_tokens), ("top", top)):
        if value is not None and value < 1:
            raise CycloptsError(msg=f"--{name} must be 1 or more, but is {value}", command_chain=(command,))


def load_predictor(folder: Path, flags: TextInputFlags) -> "Predictor":
    """The reader of a folder, on the machine as it was asked for."""
    from attent.cli.search_flags import check_model_exists, resolve_device

    check_model_exists(folder)
    import torch

    from attent.decoding.encoder_inference import Predictor

    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    device = resolve_device(flags.device)
    return Predictor.load(
        folder, device=device, dtype=flags.dtype, batch_tokens=flags.batch_tokens, notify=print_message
    )


def print_message(message: str) -> None:
    print(f"attent: {message}", file=sys.stderr)


@dataclass(frozen=True)
class TextBlock:
    """Some texts."""

    texts: list[str]
    first_number: int = 1  # the number of the first one in its file
    is_from_command: bool = True  # in the command itself; False: lines of a file or of standard input


def read_text_blocks(arguments: Sequence[str]) -> Iterator[TextBlock]:
    """The texts that were given, some at a time: what names a file stands for its lines."""
    texts: list[str] = []
    for one in arguments or ["-"]:
        if one not in ("-", "./-") and not os.path.isfile(os.path.expanduser(one)):
            check_not_file_name(one)
            texts.append(one)
            continue
        if texts:
            yield TextBlock(texts)
            texts = []
        yield from read_line_blocks(None if one in ("-", "./-") else Path(one))
    if texts:
        yield TextBlock(texts)


def check_not_file_name(text: str) -> None:
    """A name that was mistyped is no text."""
    if FILE_NAME_PATTERN.fullmatch(text):
        raise ValueError(f"{text}: there is no such file; give its right name (or echo a text to -)")


def read_line_blocks(file: Path | None) -> Iterator[TextBlock]:
    """As they come: many where there are many, at once where a pipe or a person gives them one by one."""
    from attent.decoding.input_lines import build_line_source, open_input, parse_text_line

    if file is None and sys.stdin.isatty():
        print_message("reading from the terminal, a text a line; Ctrl-D ends it")
    first = 1
    with open_input(file, sys.stdin.buffer) as stream:
        for block in build_line_source(stream, file).read_blocks(BLOCK_TEXTS, parse_text_line):
            yield TextBlock([line.text for line in block.lines], first, is_from_command=False)
            first += len(block.lines)


def print_result(line: str) -> None:
    """A line of the result; whoever reads it in a pipe has it at once."""
    print(line, flush=not sys.stdout.isatty())
