"""`attent generate`: continue one prompt, streamed, or many, one per line."""

import re
import secrets
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import CycloptsError, Parameter

from attent.cli import shared
from attent.cli.shared import STDIN_NAMES, derive_flags, flag, prepare_loading, use_flag_names
from attent.decoding.options import DeviceOptions, DtypeName, Generation, GenerationOptions, InputError
from attent.decoding.output_format import format_json_line, replace_line_breaks

if TYPE_CHECKING:
    from attent.decoding.generation.generator import Generator

SURROGATE = re.compile("[\ud800-\udfff]")  # stands for a byte that is not UTF-8
BLOCK_PROMPTS = 256
MAX_SEED = 2**31
TEXT_SEPARATOR = "---"
JSON_HELP = "one JSON object per line: prompt, text, token_ids, log_prob, finish_reason, seed"

_OPTION_NAMES = tuple(field.name for field in fields(GenerationOptions))
GenerationFlags: Any = shared.make_flags_class(
    derive_flags(GenerationOptions, unset=set(_OPTION_NAMES) - {"stop"}),
    derive_flags(DeviceOptions, exclude=("engine", "dtype", "batch_tokens")),
)


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(GenerationFlags):  # type: ignore[misc]  # derived from the options
    file: Annotated[Path | None, flag("Common", "prompts, one per line; by default stdin", "--file", "-f")] = None
    json: Annotated[bool, flag("Output", JSON_HELP)] = False
    echo: Annotated[bool, flag("Output", "print the prompt before the text", negative="--no-echo")] = True
    dtype: Annotated[DtypeName | None, flag("Device", "by default as stored")] = None


def generate(
    model: Annotated[Path, Parameter(help="a language model's folder, ours or Hugging Face's (GPT-2, LLaMA)")],
    prompt: Annotated[
        str | None, Parameter(help="the text to continue, in quotes; -: prompts from standard input, one per line")
    ] = None,
    /,
    *,
    flags: Annotated[GenerateFlags, Parameter(name="*", show_default=False)] = GenerateFlags(),
) -> None:
    """Continue a text.

    attent generate runs/shakespeare "O Romeo, Romeo," --max-new-tokens 50
    """
    prompt = None if prompt in STDIN_NAMES else prompt
    shared.check_positive("generate", threads=flags.threads)
    if problem := find_usage_error(prompt, flags):
        raise CycloptsError(msg=problem, command_chain=("generate",))
    from attent.decoding.generation.generator import GenerationError, Generator, PromptTooLongError

    shared.use_utf8(sys.stdout)
    set_options = {name: value for name in _OPTION_NAMES if (value := getattr(flags, name)) is not None}
    with shared.raise_usage_errors("generate", GenerationOptions):
        options = GenerationOptions(**({"seed": secrets.randbelow(MAX_SEED)} | set_options))
    with shared.ProgressDisplay(sys.stderr) as progress:
        if prompt is None and flags.file is None and sys.stdin.isatty():
            raise InputError(f'there must be a prompt, but none is given; write: attent generate {model} "Once upon"')
        prepare_loading(model, flags.threads)
        loading = {"device": flags.device, "dtype": flags.dtype}
        generator = Generator.load(model, **loading, notify=progress.print_message)
        command = GenerateCommand(generator, options, flags)
        try:
            if prompt is None:
                command.generate_from_lines(progress)
            elif options.n == 1 and not flags.json:
                command.stream_text(prompt)
            else:
                command.write_texts(prompt)
        except PromptTooLongError as error:
            raise InputError(f"the prompt {error.problem}") from error
        except GenerationError as error:
            raise InputError(use_flag_names(str(error), GenerationOptions)) from error
        if options.sampling is not None and flags.seed is None:
            progress.print_message(f"sampled with --seed {options.seed}; give it to repeat the result")


def find_usage_error(prompt: str | None, flags: GenerateFlags) -> str | None:
    if prompt is not None and flags.file is not None:
        return "give a prompt or a --file of prompts, but not both"
    if prompt is not None and (surrogate := SURROGATE.search(prompt)):
        byte = len(prompt[: surrogate.start()].encode()) + 1
        return f"the prompt must be UTF-8, but byte {byte} is not; convert it, as with `iconv -f latin1 -t utf-8`"
    sampling = [name for name in ("top_k", "top_p", "seed") if getattr(flags, name) is not None]
    if flags.temperature == 0 and sampling:
        name = sampling[0].replace("_", "-")
        return f"--{name} is for sampling, but --temperature 0 is greedy search; leave one of them out"
    return None


@dataclass(frozen=True)
class GenerateCommand:
    generator: "Generator"
    options: GenerationOptions
    flags: GenerateFlags

    def stream_text(self, prompt: str) -> None:
        pieces = self.generator.stream(prompt, self.options)
        first = next(pieces, "")  # an error of the prompt is raised before the prompt is echoed
        try:
            print(prompt + first if self.flags.echo else first, end="", flush=True)
            for piece in pieces:
                print(piece, end="", flush=True)
        finally:
            print(flush=True)

    def write_texts(self, prompt: str) -> None:
        (generations,) = self.generator.generate([prompt], self.options)
        separator = "\n" if self.flags.json else f"\n{TEXT_SEPARATOR}\n"
        print(*map(self.format_item, generations), sep=separator, flush=True)

    def generate_from_lines(self, progress: shared.ProgressDisplay) -> None:
        """Continue each line; each block is written as soon as it is done."""
        from attent.decoding.generation.generator import PromptTooLongError
        from attent.decoding.input_lines import build_line_source, open_input

        with open_input(self.flags.file, sys.stdin.buffer) as stream:
            source = build_line_source(stream, self.flags.file)
            progress.start(source.total_bytes, quiet=sys.stdout.isatty())
            line_count = done_bytes = 0
            for block in source.read_blocks(BLOCK_PROMPTS):
                texts, first = block.lines, block.first_index
                try:
                    self.write_block(texts, first)
                except PromptTooLongError as error:
                    self.write_block(texts[: error.index], first)
                    raise InputError(f"{source.name}, line {first + error.index + 1:,}: {error.problem}") from error
                line_count, done_bytes = first + len(texts), done_bytes + block.byte_count
                progress.update(line_count, done_bytes)
            if line_count == 0:
                progress.print_message(f"{source.name}: is empty, there is nothing to continue")

    def write_block(self, prompts: list[str], first_index: int) -> None:
        for generations in self.generator.generate(prompts, self.options, first_index=first_index):
            for text in map(self.format_item, generations):
                print(text if self.flags.json else replace_line_breaks(text))
        sys.stdout.flush()

    def format_item(self, generation: Generation) -> str:
        if not self.flags.json:
            return generation.prompt + generation.text if self.flags.echo else generation.text
        return format_json_line(
            {
                "prompt": generation.prompt,
                "text": generation.text,
                "token_ids": list(generation.token_ids),
                "log_prob": round(generation.log_prob, 6),
                "finish_reason": generation.finish_reason,
                "seed": None if self.options.sampling is None else self.options.seed,
            }
        )
