"""`attent translate`: stdin to stdout, one line in, one line out. The search itself is `attent.decode`'s."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

BLOCK = 256  # lines that are translated together; a person at a terminal gets an answer for each


def translate(
    model: Annotated[Path, Parameter(help="a model folder, ours or a Hugging Face Marian one")],
    file: Annotated[Path | None, Parameter(help="text, one sentence a line; by default standard input")] = None,
    /,
    *,
    to: Annotated[str | None, Parameter(help="the language to translate into, for a model of several")] = None,
    beam_size: Annotated[int, Parameter(name=["--beam-size", "-b"], help="hypotheses followed side by side")] = 4,
    length_penalty: Annotated[float, Parameter(help="alpha: scores are divided by ((5 + length) / 6)^alpha")] = 0.6,
    device: Annotated[str | None, Parameter(help="cuda, mps or cpu; by default the best there is")] = None,
) -> None:
    """Translate text, one line in, one line out."""
    from attent.decode.translate import translate as translated
    from attent.interop import load
    from attent.models.folder import read_files
    from attent.text.tokenizer import Tokenizer
    from attent.train.hardware import pick_device

    loaded = load(model).to(pick_device(device))
    files = read_files(model) if (model / "manifest.json").exists() else {}
    tokenizer = Tokenizer.from_files(files, f"{model}/") if files else Tokenizer.load(model)
    with open(file, encoding="utf-8") if file else open(sys.stdin.fileno(), encoding="utf-8", closefd=False) as source:
        for block in blocks((line.rstrip("\n") for line in source), 1 if source.isatty() else BLOCK):
            for line in translated(loaded, tokenizer, block, to=to, beam_size=beam_size, length_penalty=length_penalty):
                print(" ".join(line.splitlines()))
            sys.stdout.flush()


def blocks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    lines = iter(lines)
    while block := list(islice(lines, size)):
        yield block
