"""`attent generate`: a text goes on, word by word, as a decoder-only model writes it; or many, a prompt a line.

What may be asked for is here, what is done with it is `generating`'s, and the writing itself `attent.decode`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import CycloptsError, Parameter

from attent.cli.search_flags import COMMON_GROUP, DEVICE_GROUP, OUTPUT_GROUP, SAMPLING_GROUP, SEARCH_GROUP, DtypeName

STDIN_NAMES = ("-", "./-")  # the second is what the command line makes of the first
SURROGATE = re.compile("[\ud800-\udfff]")  # what is left of a byte that was no text


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """What may be asked for; each field is a flag of the command. What is None is left to `Writing`."""

    file: Annotated[
        Path | None,
        Parameter(name=["--file", "-f"], group=COMMON_GROUP, help="prompts, one a line; without any, standard input"),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        Parameter(
            name=["--max-new-tokens", "--max-length", "-l"],
            group=COMMON_GROUP,
            help="tokens to write at most, the end counted; by default 200",
        ),
    ] = None
    n: Annotated[
        int | None,
        Parameter(name=["-n", "--n", "--num-return-sequences"], group=COMMON_GROUP, help="texts for each prompt"),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Parameter(group=COMMON_GROUP, negative_iterable="", help="end before these words; may be repeated"),
    ] = ()

    temperature: Annotated[
        float | None,
        Parameter(
            name=["--temperature", "-t"],
            group=SAMPLING_GROUP,
            help="by default 0.8; below 1: nearer to the likeliest; above: bolder; 0: always the likeliest (greedy)",
        ),
    ] = None
    top_k: Annotated[int | None, Parameter(group=SAMPLING_GROUP, help="draw among this many likeliest tokens")] = None
    top_p: Annotated[
        float | None,
        Parameter(
            group=SAMPLING_GROUP,
            help="draw among the fewest tokens that have this much probability together, by default 0.95",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Parameter(group=SAMPLING_GROUP, help="the same seed writes the same text; by default another each time"),
    ] = None

    beam_size: Annotated[
        int | None,
        Parameter(
            name=["--beam-size", "-b", "--beam", "--num-beams"],
            group=SEARCH_GROUP,
            help="search for the likeliest text, so many followed side by side, instead of drawing",
        ),
    ] = None
    length_penalty: Annotated[
        float | None, Parameter(group=SEARCH_GROUP, help="of beams: score = log_prob / length^alpha, by default 1")
    ] = None
    min_new_tokens: Annotated[
        int | None, Parameter(name=["--min-new-tokens", "--min-length"], group=SEARCH_GROUP, help="tokens at least")
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None, Parameter(group=SEARCH_GROUP, help="no sequence of so many tokens comes twice in what is written")
    ] = None

    json: Annotated[
        bool,
        Parameter(
            group=OUTPUT_GROUP, negative="", help="a JSON object a line: prompt, text, ids, log_prob, reason, seed"
        ),
    ] = False
    echo: Annotated[
        bool,
        Parameter(group=OUTPUT_GROUP, negative="--no-echo", help="the prompt before the text that goes on from it"),
    ] = True

    device: Annotated[
        str | None, Parameter(group=DEVICE_GROUP, help="cuda, cuda:1, mps or cpu; by default the best there is")
    ] = None
    dtype: Annotated[DtypeName | None, Parameter(group=DEVICE_GROUP, help="by default as the model is stored")] = None
    threads: Annotated[
        int | None, Parameter(name=["--threads", "--cpu-threads"], group=DEVICE_GROUP, help="by default all cores")
    ] = None
    batch_size: Annotated[int | None, Parameter(group=DEVICE_GROUP, help="texts written at once")] = None


def generate(
    model: Annotated[Path, Parameter(help="a folder of a language model, ours or a Hugging Face GPT-2 or LLaMA one")],
    prompt: Annotated[
        str | None, Parameter(help="what to go on from; put it in quotes. -: prompts from standard input, one a line")
    ] = None,
    /,
    *,
    flags: Annotated[GenerateFlags, Parameter(name="*", show_default=False)] = GenerateFlags(),  # noqa: B008 - frozen
) -> None:
    """Go on with a text.

    attent generate runs/shakespeare "O Romeo, Romeo," --max-new-tokens 50
    """
    prompt = None if prompt in STDIN_NAMES else prompt
    problem = find_unused_flag(flags) or find_usage_error(prompt, flags)
    if problem:
        raise CycloptsError(msg=problem, command_chain=("generate",))
    from attent.cli.generating import run_generate

    run_generate(model, prompt, flags)


def find_usage_error(prompt: str | None, flags: GenerateFlags) -> str | None:
    """What cannot be done, as a sentence."""
    if prompt is not None and flags.file is not None:
        return "give a prompt or a --file of them, but not both"
    if prompt is not None and (half := SURROGATE.search(prompt)):
        byte = f", but byte {len(prompt[: half.start()].encode()) + 1} is not"
        return f"the prompt must be UTF-8{byte}; convert it first, such as by `iconv -f latin1 -t utf-8`"
    for name in ("threads", "batch_size"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            return f"--{name.replace('_', '-')} must be 1 or more, but is {value}"
    return None


def find_unused_flag(flags: GenerateFlags) -> str | None:
    """What was asked for and would change nothing, as a sentence."""
    beams = flags.beam_size is not None and flags.beam_size > 1
    drawing = [name for name in ("temperature", "top_k", "top_p", "seed") if getattr(flags, name) is not None]
    if beams and flags.temperature == 0:
        drawing.remove("temperature")  # it says the same
    if beams and drawing:
        why, instead = f"--beam-size {flags.beam_size}", "searches for the likeliest text instead"
    elif flags.temperature == 0 and drawing[1:]:
        drawing, why, instead = drawing[1:], "--temperature 0", "takes the likeliest token each time"
    elif flags.length_penalty is not None and not beams:
        return "--length-penalty is for beams, and would change nothing without; give a --beam-size, or leave it out"
    else:
        return None
    return f"--{drawing[0].replace('_', '-')} is for drawing by chance, but {why} {instead}; leave one of them out"
