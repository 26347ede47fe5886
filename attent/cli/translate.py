"""`attent translate`: text in, translations out, line by line; files of translators filled; a talk at a terminal.

What may be asked for is here, what is done with it is `translating`'s, and the search itself `attent.decode`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import CycloptsError, Parameter

from attent.cli.output import OutputType
from attent.cli.searching import BEAM_SIZE, CONTROL, FILES, FIRST, OUTPUT, SEARCH, MachineFlags, SearchFlags
from attent.cli.searching import TranslateError as TranslateError
from attent.cli.searching import asked_language as asked_language
from attent.cli.searching import tokenizer_of as tokenizer_of

InputType = Literal["text", "json"]
Links = Literal["hard", "soft"]
STDIN = Path("-")


@dataclass(frozen=True, kw_only=True)
class Flags(SearchFlags, MachineFlags):
    """What may be asked for; each field is a flag of the command."""

    out: Annotated[
        Path | None, Parameter(name=["--output", "-o"], group=FIRST, help="a file to write; by default standard output")
    ] = None
    to: Annotated[str | None, Parameter(group=FIRST, help="the language to translate into, for a model of several")] = (
        None
    )
    beam_size: Annotated[
        int | None,
        Parameter(
            name=["--beam-size", "-b", "--beam", "--num-beams"],
            group=FIRST,
            help=f"hypotheses followed side by side, by default {BEAM_SIZE}; 1: greedy, several times as fast",
        ),
    ] = None
    interactive: Annotated[
        bool, Parameter(name=["--interactive", "-i"], group=FIRST, negative="", help="a talk, as at a terminal")
    ] = False

    prefix: Annotated[str, Parameter(group=CONTROL, help="what every translation begins with")] = ""
    must: Annotated[
        tuple[str, ...],
        Parameter(group=CONTROL, negative_iterable="", help="a word that must come in each; may be repeated"),
    ] = ()
    must_not: Annotated[
        tuple[str, ...],
        Parameter(
            name=["--must-not", "--avoid"],
            group=CONTROL,
            negative_iterable="",
            help="a word that must not, in whatever case; may be repeated",
        ),
    ] = ()
    glossary: Annotated[
        Path | None,
        Parameter(group=CONTROL, help="a file of lines `term<TAB>translation`: where the one is, the other"),
    ] = None

    ensemble: Annotated[
        tuple[Path, ...],
        Parameter(
            group=SEARCH,
            negative_iterable="",
            help="another model of the same tokenizer to write with; may be repeated",
        ),
    ] = ()
    risk: Annotated[
        int,
        Parameter(
            name=["--risk", "--mbr"],
            group=SEARCH,
            help="of so many candidates the one most like the others (minimum Bayes risk); with sampling, of draws",
        ),
    ] = 0
    sentences: Annotated[
        bool,
        Parameter(group=SEARCH, negative="", help="cut each line into sentences; by default only what is very long"),
    ] = False
    guard: Annotated[bool, Parameter(negative="--no-guard", group=SEARCH, help="let no translation run in circles")] = (
        True
    )

    output_type: Annotated[
        OutputType,
        Parameter(group=OUTPUT, help="text, json (a line each, with all there is) or tsv (source and translation)"),
    ] = "text"
    with_score: Annotated[bool, Parameter(group=OUTPUT, negative="", help="the score, before the text")] = False
    alignment: Annotated[
        Links | None,
        Parameter(group=OUTPUT, help="which word comes from which: hard (0-0 1-2), or with JSON soft (weights)"),
    ] = None
    input_type: Annotated[
        InputType,
        Parameter(
            group=OUTPUT, help='json: a line is {"text": ...}, with "prefix", "must", "must_not" of its own if you like'
        ),
    ] = "text"

    src: Annotated[
        str | None,
        Parameter(
            name=["--src", "-s", "--source-lang", "--from-lang"],
            group=FILES,
            help="language of the file's sources, where it has several",
        ),
    ] = None
    tgt: Annotated[
        str | None,
        Parameter(name=["--tgt", "-t", "--target-lang", "--to-lang"], group=FILES, help="language to fill in"),
    ] = None
    in_place: Annotated[bool, Parameter(group=FILES, negative="", help="write over the file itself")] = False


def translate(
    model: Annotated[Path, Parameter(help="a model folder, ours or a Hugging Face Marian or T5 one")],
    file: Annotated[
        Path | None,
        Parameter(
            help="text, a sentence a line, or .po, .xlf, .tmx, .md: filled where a translation is missing; by default, "
            "or as -, standard input"
        ),
    ] = None,
    /,
    *,
    flags: Annotated[Flags, Parameter(name="*", show_default=False)] = Flags(),  # noqa: B008 - frozen
) -> None:
    """Translate text, one line in, one line out.

    cat text.txt | attent translate runs/en-de > translated.txt
    """
    file = None if file == STDIN else file
    check_usage(file, flags)
    from attent.cli.translating import start

    start(model, file, flags)


def check_usage(file: Path | None, flags: Flags) -> None:
    """What does not go together, before anything is read."""
    problem = None
    if flags.interactive and file is not None:
        problem = "--interactive reads what you type: leave FILE out"
    elif flags.in_place and (file is None or flags.out is not None):
        problem = f"--in-place writes over FILE: {'leave --output out' if file else 'name one'}"
    elif flags.alignment == "soft" and flags.output_type != "json":
        problem = "--alignment soft is for --output-type json: add it, or take --alignment hard"
    elif flags.alignment and flags.n_best > 1 and flags.output_type != "json":
        problem = "--alignment is of the best translation only: leave --n-best out, or add --output-type json"
    elif flags.risk and flags.risk < flags.n_best:
        problem = f"--risk must be at least --n-best, {flags.n_best}, but is {flags.risk}"
    elif flags.threads is not None and flags.threads < 1:
        problem = f"--threads must be 1 or more, but is {flags.threads}"
    elif flags.batch_tokens is not None and flags.batch_tokens < 1:
        problem = f"--batch-tokens must be 1 or more, but is {flags.batch_tokens}"
    if problem:
        raise CycloptsError(msg=problem, command_chain=("translate",))
