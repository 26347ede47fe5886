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

from attent.cli.generate import GenerateFlags
from attent.cli.search_flags import InputError, check_model_exists, resolve_device
from attent.decoding import Generation, GenerationOptions, Generator
from attent.decoding.generation.generator import GenerationError, PromptTooLongError
from attent.decoding.input_lines import build_line_source, open_input, parse_text_line
from attent.decoding.output_format import replace_line_breaks
from attent.decoding.pipeline import ProgressDisplay, use_utf8

BLOCK_PROMPTS = 256  # prompts that are gone on with together
MAX_SEED = 2**31
TEXT_SEPARATOR = "---"
# Line breaks that JSON may hold as they are, and at which some readers would end a line.
JSON_ESCAPES = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"})


def run_generate(model: Path, prompt: str | None, flags: GenerateFlags) -> None:
    """What was asked for is looked at first: a wrong flag or name is told before a large model is read."""
    use_utf8(sys.stdout)
    writing = build_generation_options(flags)
    with ProgressDisplay(sys.stderr) as screen:
        if prompt is None and flags.file is None and sys.stdin.isatty():
            raise InputError(f'there must be a prompt, but none is given; write: attent generate {model} "Once upon"')
        check_model_exists(model)
        generator = load_generator(model, flags, screen)
        try:
            if prompt is None:
                generate_from_lines(generator, writing, flags, screen)
            else:
                generate_from_prompt(generator, prompt, writing, flags)
        except GenerationError as error:
            raise InputError(use_flag_names(str(error))) from error
        if writing.sampling is not None and flags.seed is None:
            screen.print_message(f"drawn with --seed {writing.seed}, which writes the same again")


def build_generation_options(flags: GenerateFlags) -> GenerationOptions:
    """A seed that is not given is drawn: whoever asks twice wants two texts."""
    names = {field.name for field in fields(GenerationOptions)} & {field.name for field in fields(GenerateFlags)}
    given = {name: value for name in names if (value := getattr(flags, name)) is not None}
    try:
        return replace(GenerationOptions(), **({"seed": secrets.randbelow(MAX_SEED)} | given))
    except ValueError as error:
        raise CycloptsError(msg=use_flag_names(str(error)), command_chain=("generate",)) from error


def use_flag_names(message: str) -> str:
    """A sentence about settings as one about flags: `top_k` -> `--top-k`."""
    names = "|".join(field.name for field in fields(GenerationOptions))
    return re.sub(rf"(?<=`)({names})(?=[`=])", lambda name: f"--{name[0].replace('_', '-')}", message)


def load_generator(model: Path, flags: GenerateFlags, progress: ProgressDisplay) -> Generator:
    import torch

    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    return Generator.load(
        model,
        device=resolve_device(flags.device),
        dtype=flags.dtype,
        batch_size=flags.batch_size,
        notify=progress.print_message,
    )


# --- one prompt -------------------------------------------------------------------------------------------------------


def generate_from_prompt(generator: Generator, prompt: str, options: GenerationOptions, flags: GenerateFlags) -> None:
    tell = stream_text if options.n == 1 and not flags.json else write_texts
    try:
        tell(generator, prompt, options, flags, sys.stdout)
    except PromptTooLongError as error:
        raise InputError(f"the prompt {error.problem}") from error


def stream_text(
    generator: Generator, prompt: str, options: GenerationOptions, flags: GenerateFlags, out: TextIO
) -> None:
    """What is written is seen at once, and stays if it is interrupted."""
    pieces = generator.stream(prompt, options)
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


def write_texts(
    generator: Generator, prompt: str, options: GenerationOptions, flags: GenerateFlags, out: TextIO
) -> None:
    (found,) = generator.generate([prompt], options)
    for place, one in enumerate(found):
        if flags.json:
            out.write(format_json(one, options) + "\n")
        else:
            between = f"{TEXT_SEPARATOR}\n" if place else ""
            out.write(between + format_text(one, flags) + "\n")
    out.flush()


# --- many -------------------------------------------------------------------------------------------------------------


def generate_from_lines(
    generator: Generator, options: GenerationOptions, flags: GenerateFlags, progress: ProgressDisplay
) -> None:
    """Each block is written as soon as it is done, so that what is done stays done."""
    with open_input(flags.file, sys.stdin.buffer) as stream:
        source = build_line_source(stream, flags.file)
        progress.start(source.total_bytes, quiet=sys.stdout.isatty())
        number = done = 0
        for block in source.read_blocks(BLOCK_PROMPTS, parse_text_line):
            texts = [line.text for line in block.lines]
            try:
                found = generator.generate(texts, options, first_index=block.first_index)
            except PromptTooLongError as error:
                print_generations(
                    generator.generate(texts[: error.index], options, first_index=block.first_index), options, flags
                )
                where = f"{source.name}, line {block.first_index + error.index + 1:,}"
                raise InputError(f"{where}: {error.problem}") from error
            print_generations(found, options, flags)
            number, done = block.first_index + len(texts), done + block.byte_count
            progress.update(number, done)
        if number == 0:
            progress.print_message(f"{source.name}: is empty, there is nothing to go on from")


def print_generations(generations: list[list[Generation]], options: GenerationOptions, flags: GenerateFlags) -> None:
    for some in generations:
        sys.stdout.writelines(f"{line}\n" for line in format_lines(some, options, flags))
    sys.stdout.flush()


def format_lines(generations: list[Generation], options: GenerationOptions, flags: GenerateFlags) -> Iterator[str]:
    for one in generations:
        yield format_json(one, options) if flags.json else replace_line_breaks(format_text(one, flags))


def format_text(generation: Generation, flags: GenerateFlags) -> str:
    return generation.prompt + generation.text if flags.echo else generation.text


def format_json(generation: Generation, options: GenerationOptions) -> str:
    facts = {
        "prompt": generation.prompt,
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "log_prob": round(generation.log_prob, 6),
        "finish_reason": generation.finish_reason,
        "seed": None if options.sampling is None else options.seed,
    }
    return json.dumps(facts, ensure_ascii=False, allow_nan=False).translate(JSON_ESCAPES)
