"""`attent translate`: text in, translations out, line by line; files of translators filled; a talk at a terminal.

What may be asked for is here, what is done with it is `translating`'s, and the search itself `attent.decode`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import CycloptsError, Parameter

from attent.cli.search_flags import (
    COMMON_GROUP,
    CONSTRAINT_GROUP,
    DEFAULT_BEAM_SIZE,
    DOCUMENT_GROUP,
    OUTPUT_GROUP,
    SEARCH_GROUP,
    DeviceFlags,
    SearchFlags,
)
from attent.decoding.output_format import OutputType

InputType = Literal["text", "json"]
AlignmentFormat = Literal["hard", "soft"]
STDIN = Path("-")


@dataclass(frozen=True, kw_only=True)
class TranslateFlags(SearchFlags, DeviceFlags):
    """What may be asked for; each field is a flag of the command."""

    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], group=COMMON_GROUP, help="a file to write; by default standard output"),
    ] = None
    to: Annotated[
        str | None, Parameter(group=COMMON_GROUP, help="the language to translate into, for a model of several")
    ] = None
    beam_size: Annotated[
        int | None,
        Parameter(
            name=["--beam-size", "-b", "--beam", "--num-beams"],
            group=COMMON_GROUP,
            help=f"hypotheses followed side by side, by default {DEFAULT_BEAM_SIZE}; 1: greedy, several times as fast",
        ),
    ] = None
    interactive: Annotated[
        bool, Parameter(name=["--interactive", "-i"], group=COMMON_GROUP, negative="", help="a talk, as at a terminal")
    ] = False

    prefix: Annotated[str, Parameter(group=CONSTRAINT_GROUP, help="what every translation begins with")] = ""
    require: Annotated[
        tuple[str, ...],
        Parameter(group=CONSTRAINT_GROUP, negative_iterable="", help="a word that must come in each; may be repeated"),
    ] = ()
    ban: Annotated[
        tuple[str, ...],
        Parameter(
            name=["--ban", "--avoid"],
            group=CONSTRAINT_GROUP,
            negative_iterable="",
            help="a word that must not, in whatever case; may be repeated",
        ),
    ] = ()
    glossary: Annotated[
        Path | None,
        Parameter(group=CONSTRAINT_GROUP, help="a file of lines `term<TAB>translation`: where the one is, the other"),
    ] = None

    ensemble: Annotated[
        tuple[Path, ...],
        Parameter(
            group=SEARCH_GROUP,
            negative_iterable="",
            help="another model of the same tokenizer to write with; may be repeated",
        ),
    ] = ()
    mbr_candidates: Annotated[
        int,
        Parameter(
            name=["--mbr", "--mbr"],
            group=SEARCH_GROUP,
            help="of so many candidates the one most like the others (minimum Bayes risk); with sampling, of draws",
        ),
    ] = 0
    split_sentences: Annotated[
        bool,
        Parameter(
            group=SEARCH_GROUP, negative="", help="cut each line into sentences; by default only what is very long"
        ),
    ] = False
    prevent_loops: Annotated[
        bool, Parameter(negative="--allow-loops", group=SEARCH_GROUP, help="let no translation run in circles")
    ] = True

    output_type: Annotated[
        OutputType,
        Parameter(
            group=OUTPUT_GROUP, help="text, json (a line each, with all there is) or tsv (source and translation)"
        ),
    ] = "text"
    with_score: Annotated[bool, Parameter(group=OUTPUT_GROUP, negative="", help="the score, before the text")] = False
    alignment: Annotated[
        AlignmentFormat | None,
        Parameter(group=OUTPUT_GROUP, help="which word comes from which: hard (0-0 1-2), or with JSON soft (weights)"),
    ] = None
    input_type: Annotated[
        InputType,
        Parameter(
            group=OUTPUT_GROUP,
            help='json: a line is {"text": ...}, with "prefix", "require", "ban" of its own if you like',
        ),
    ] = "text"

    src: Annotated[
        str | None,
        Parameter(
            name=["--src", "-s", "--source-lang", "--from-lang"],
            group=DOCUMENT_GROUP,
            help="language of the file's sources, where it has several",
        ),
    ] = None
    tgt: Annotated[
        str | None,
        Parameter(name=["--tgt", "-t", "--target-lang", "--to-lang"], group=DOCUMENT_GROUP, help="language to fill in"),
    ] = None
    in_place: Annotated[bool, Parameter(group=DOCUMENT_GROUP, negative="", help="write over the file itself")] = False


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
    flags: Annotated[TranslateFlags, Parameter(name="*", show_default=False)] = TranslateFlags(),  # noqa: B008 - frozen
) -> None:
    """Translate text, one line in, one line out.

    cat text.txt | attent translate runs/en-de > translated.txt
    """
    file = None if file == STDIN else file
    check_usage(file, flags)
    from attent.decoding.pipeline import run_translate

    run_translate(model, file, flags)


def check_usage(file: Path | None, flags: TranslateFlags) -> None:
    """What does not go together, before anything is read."""
    problem = None
    if flags.interactive and file is not None:
        problem = "--interactive reads what you type: leave FILE out"
    elif flags.in_place and (file is None or flags.output is not None):
        problem = f"--in-place writes over FILE: {'leave --output out' if file else 'name one'}"
    elif flags.alignment == "soft" and flags.output_type != "json":
        problem = "--alignment soft is for --output-type json: add it, or take --alignment hard"
    elif flags.alignment and flags.n_best > 1 and flags.output_type != "json":
        problem = "--alignment is of the best translation only: leave --n-best out, or add --output-type json"
    elif flags.mbr_candidates and flags.mbr_candidates < flags.n_best:
        problem = f"--mbr must be at least --n-best, {flags.n_best}, but is {flags.mbr_candidates}"
    elif flags.threads is not None and flags.threads < 1:
        problem = f"--threads must be 1 or more, but is {flags.threads}"
    elif flags.batch_tokens is not None and flags.batch_tokens < 1:
        problem = f"--batch-tokens must be 1 or more, but is {flags.batch_tokens}"
    if problem:
        raise CycloptsError(msg=problem, command_chain=("translate",))
