"""`attent translate`: stdin to stdout, one line in, one line out. The search itself is `attent.decode`'s."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

from cyclopts import Parameter

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from attent.text.tokenizer import Tokenizer

BLOCK = 256  # lines that are translated together; a person at a terminal gets an answer for each
STDIN = "standard input"
BOM = b"\xef\xbb\xbf"  # with which some editors begin a file


class TranslateError(ValueError):
    """The text or the language cannot be translated, in a sentence."""


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
    with opened(file) as source:  # first: a wrong name is told before a large model is read
        from attent.decode.translate import translate as translated
        from attent.interop import load
        from attent.train.hardware import pick_device

        if (model / "run.toml").exists() and not (model / "config.json").exists():
            raise TranslateError(
                f"{model}: holds a run without a model yet: its first validation writes one; "
                f"go on with: attent train --out {model}"
            )
        loaded = load(model).to(pick_device(device))
        tokenizer = tokenizer_of(model.expanduser())
        language = asked_language(to, tokenizer.source.tags, model)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8")  # as the input, whatever the terminal's language is
        size = 1 if source.isatty() else BLOCK
        if source.isatty():
            print("Type text, a sentence a line; Ctrl-D ends.", file=sys.stderr)
        for block in blocks(lines(source, str(file or STDIN)), size):
            for line in translated(
                loaded, tokenizer, block, to=language, beam_size=beam_size, length_penalty=length_penalty
            ):
                print(" ".join(line.splitlines()))
            sys.stdout.flush()


def opened(file: Path | None) -> AbstractContextManager[BinaryIO]:
    if file is None:
        return nullcontext(sys.stdin.buffer)
    try:
        return open(file.expanduser(), "rb")
    except OSError as error:
        raise TranslateError(
            f"{file}: must be a text file, but cannot be opened ({error.strerror}); check its name, "
            f"or leave it out and give the text on {STDIN}"
        ) from error


def tokenizer_of(model: Path) -> Tokenizer:
    """Of the same save as the weights, where the folder can tell."""
    from attent.models.folder import MANIFEST, read_files
    from attent.text.tokenizer import Tokenizer

    files = read_files(model) if (model / MANIFEST).exists() else {}
    return Tokenizer.from_files(files, f"{model}/") if files else Tokenizer.load(model)


def asked_language(to: str | None, known: tuple[str, ...], model: Path) -> str | None:
    """The tag to put before each source. "" means none: for a model that was trained further without tags."""
    names = ", ".join(known)
    if to is None and known:
        raise TranslateError(f"{model}: translates into several languages; name one with --to: {names}")
    if to and not known:
        raise TranslateError(f"{model}: has one language only, and --to must be left out, but is `{to}`")
    if to and to not in known:
        raise TranslateError(f"{model}: --to must be one of the model's languages, but is `{to}`; it has {names}")
    return to or None


def lines(source: Iterable[bytes], name: str) -> Iterator[str]:
    """As `wc -l` counts them: no other sign than a line feed ends a line."""
    for number, read in enumerate(source, 1):
        line = read.removeprefix(BOM) if number == 1 else read
        try:
            yield line.rstrip(b"\r\n").decode()
        except UnicodeDecodeError as error:
            raise TranslateError(
                f"{name}, line {number:,}: must be UTF-8, but byte {error.start + 1} is 0x{line[error.start]:02x}; "
                f"convert the text first, such as by `iconv -f latin1 -t utf-8`"
            ) from error


def blocks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    lines = iter(lines)
    while block := list(islice(lines, size)):
        yield block
