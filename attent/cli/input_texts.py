"""Input of `attent fill`, `classify` and `embed`: flags, the predictor, texts from arguments, files or stdin."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attent.cli.line_progress import print_message
from attent.cli.search_flags import flag
from attent.decoding.options import DtypeName

if TYPE_CHECKING:
    from attent.decoding.predictor import Predictor

FILE_NAME_PATTERN = re.compile(r"\S+\.(txt|tsv|jsonl|csv|gz|xz|zst|png|jpe?g|webp)", re.IGNORECASE)
STDIN_NAMES = ("-", "./-")
BLOCK_TEXTS = 1_024
TEXTS_HELP = "texts, or files with one text per line; by default, or with -, standard input"


@dataclass(frozen=True, kw_only=True)
class TextInputFlags:
    json: Annotated[bool, flag("Output", "print one JSON object per line")] = False
    device: Annotated[str | None, flag("Device", "cuda, cuda:1, mps or cpu; by default the fastest available")] = None
    dtype: Annotated[DtypeName, flag("Device", "by default float32")] = "float32"
    threads: Annotated[int | None, flag("Device", "CPU threads, by default all cores")] = None
    batch_tokens: Annotated[int | None, flag("Device", "tokens per batch")] = None


def prepare_loading(folder: Path, threads: int | None) -> None:
    import torch

    from attent.decoding.loading import check_model_exists

    check_model_exists(folder)
    if threads is not None:
        torch.set_num_threads(threads)


def load_predictor(folder: Path, flags: TextInputFlags) -> "Predictor":
    from attent.decoding.predictor import Predictor

    prepare_loading(folder, flags.threads)
    return Predictor.load(
        folder, device=flags.device, dtype=flags.dtype, batch_tokens=flags.batch_tokens, notify=print_message
    )


@dataclass(frozen=True)
class TextBlock:
    texts: list[str]
    first_number: int = 1  # line number of the first
    is_from_command: bool = True  # False: lines of a file or of standard input


def read_inputs(predictor: "Predictor", arguments: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield blocks of texts, or names of images, which may also come from standard input."""
    from attent.models import VisionTransformer

    if isinstance(predictor.model, VisionTransformer) and arguments:
        return iter([arguments])
    return (block.texts for block in read_text_blocks(arguments))


def read_text_blocks(arguments: Sequence[str]) -> Iterator[TextBlock]:
    """Yield the arguments, with files replaced by their lines."""
    texts: list[str] = []
    for argument in arguments or ["-"]:
        if argument not in STDIN_NAMES and not os.path.isfile(os.path.expanduser(argument)):
            if FILE_NAME_PATTERN.fullmatch(argument):  # mistyped
                advice = "check its name (or echo the text to -)"
                raise ValueError(f"{argument}: must be an existing file, but there is none; {advice}")
            texts.append(argument)
            continue
        if texts:
            yield TextBlock(texts)
            texts = []
        yield from read_line_blocks(None if argument in STDIN_NAMES else Path(argument))
    if texts:
        yield TextBlock(texts)


def read_line_blocks(file: Path | None) -> Iterator[TextBlock]:
    from attent.decoding.input_lines import build_line_source, open_input

    if file is None and sys.stdin.isatty():
        print_message("type one text per line; end with Ctrl-D")
    with open_input(file, sys.stdin.buffer) as stream:
        for block in build_line_source(stream, file).read_blocks(BLOCK_TEXTS):
            yield TextBlock(block.lines, block.first_index + 1, is_from_command=False)


def print_result(line: str) -> None:
    print(line, flush=not sys.stdout.isatty())
