"""What `attent generate` does: one prompt is gone on with as its text is written, many come out in their order.

a prompt given          prompt and text as they are; of several texts, a line of --- between them
prompts from a file     one line each, line breaks become spaces
--json                  a JSON object a line
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TextIO

from cyclopts import CycloptsError

from attent.cli.generate import Flags
from attent.cli.output import one_line
from attent.cli.reading import opened, plain, source_of
from attent.cli.searching import TranslateError, check_run, device_of
from attent.cli.translating import Screen, utf8
from attent.decode import Generation, Generator, Writing
from attent.decode.generator import GenerationError, TooLong

BLOCK = 256  # prompts that are gone on with together
SEEDS = 2**31
BETWEEN = "---"
# Line breaks that JSON may hold as they are, and at which some readers would end a line.
ESCAPED = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"})


def start(model: Path, prompt: str | None, flags: Flags) -> None:
    """What was asked for is looked at first: a wrong flag or name is told before a large model is read."""
    utf8(sys.stdout)
    writing = asked(flags)
    with Screen(sys.stderr) as screen:
        if prompt is None and flags.file is None and sys.stdin.isatty():
            raise TranslateError(
                f'there must be a prompt, but none is given; write: attent generate {model} "Once upon"'
            )
        check_run(model)
        generator = loaded(model, flags, screen)
        try:
            if prompt is None:
                from_lines(generator, writing, flags, screen)
            else:
                from_one(generator, prompt, writing, flags)
        except GenerationError as error:
            raise TranslateError(in_flags(str(error))) from error
        if writing.sampling is not None and flags.seed is None:
            screen.tell(f"drawn with --seed {writing.seed}, which writes the same again")


def asked(flags: Flags) -> Writing:
    """A seed that is not given is drawn: whoever asks twice wants two texts."""
    names = {field.name for field in fields(Writing)} & {field.name for field in fields(Flags)}
    given = {name: value for name in names if (value := getattr(flags, name)) is not None}
    try:
        return replace(Writing(), **({"seed": secrets.randbelow(SEEDS)} | given))
    except ValueError as error:
        raise CycloptsError(msg=in_flags(str(error)), command_chain=("generate",)) from error


def in_flags(message: str) -> str:
    """A sentence about settings as one about flags: `top_k` -> `--top-k`."""
    names = "|".join(field.name for field in fields(Writing))
    return re.sub(rf"(?<=`)({names})(?=[`=])", lambda name: f"--{name[0].replace('_', '-')}", message)


def loaded(model: Path, flags: Flags, screen: Screen) -> Generator:
    import torch

    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    return Generator.load(
        model,
        device=device_of(flags.device),
        dtype=flags.dtype,
        batch_rows=flags.batch_rows,
        say=screen.tell,
    )


# --- one prompt -------------------------------------------------------------------------------------------------------


def from_one(generator: Generator, prompt: str, writing: Writing, flags: Flags) -> None:
    tell = streamed if writing.n == 1 and not flags.json else whole
    try:
        tell(generator, prompt, writing, flags, sys.stdout)
    except TooLong as error:
        raise TranslateError(f"the prompt {error.problem}") from error


def streamed(generator: Generator, prompt: str, writing: Writing, flags: Flags, out: TextIO) -> None:
    """What is written is seen at once, and stays if it is interrupted."""
    pieces = generator.stream(prompt, writing)
    first = next(pieces, "")  # what is wrong with the prompt is told before it is repeated
    try:
        out.write(prompt + first if flags.echo else first)
        out.flush()
        for piece in pieces:
            out.write(piece)
            out.flush()
    finally:
        out.write("\n")
        out.flush()


def whole(generator: Generator, prompt: str, writing: Writing, flags: Flags, out: TextIO) -> None:
    (found,) = generator.generate([prompt], writing)
    for place, one in enumerate(found):
        if flags.json:
            out.write(as_json(one, writing) + "\n")
        else:
            between = f"{BETWEEN}\n" if place else ""
            out.write(between + text_of(one, flags) + "\n")
    out.flush()


# --- many -------------------------------------------------------------------------------------------------------------


def from_lines(generator: Generator, writing: Writing, flags: Flags, screen: Screen) -> None:
    """Each block is written as soon as it is done, so that what is done stays done."""
    with opened(flags.file, sys.stdin.buffer) as stream:
        source = source_of(stream, flags.file)
        screen.start(source.size, quiet=sys.stdout.isatty())
        number = done = 0
        for block in source.blocks(BLOCK, plain):
            texts = [line.text for line in block.lines]
            try:
                found = generator.generate(texts, writing, first=block.first)
            except TooLong as error:
                print_all(generator.generate(texts[: error.place], writing, first=block.first), writing, flags)
                where = f"{source.name}, line {block.first + error.place + 1:,}"
                raise TranslateError(f"{where}: {error.problem}") from error
            print_all(found, writing, flags)
            number, done = block.first + len(texts), done + block.bytes
            screen.show(number, done)
        if number == 0:
            screen.tell(f"{source.name}: is empty, there is nothing to go on from")


def print_all(found: list[list[Generation]], writing: Writing, flags: Flags) -> None:
    for some in found:
        sys.stdout.writelines(f"{line}\n" for line in lines_of(some, writing, flags))
    sys.stdout.flush()


def lines_of(found: list[Generation], writing: Writing, flags: Flags) -> Iterator[str]:
    for one in found:
        yield as_json(one, writing) if flags.json else one_line(text_of(one, flags))


def text_of(one: Generation, flags: Flags) -> str:
    return one.prompt + one.text if flags.echo else one.text


def as_json(one: Generation, writing: Writing) -> str:
    facts = {
        "prompt": one.prompt,
        "text": one.text,
        "ids": list(one.ids),
        "log_prob": round(one.log_prob, 6),
        "reason": one.reason,
        "seed": None if writing.sampling is None else writing.seed,
    }
    return json.dumps(facts, ensure_ascii=False, allow_nan=False).translate(ESCAPED)
