"""`attent look`: see every head at work on a sentence, in a page, a picture or the terminal; which heads matter.

What may be asked for is here, what is done with it is `looking`'s and `ablating`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import CycloptsError, Group, Parameter

from attent.cli.search_flags import DEFAULT_BEAM_SIZE
from attent.decoding.options import DtypeName

AttentionKind = Literal["self", "cross"]
PartSelection = Literal["heads", "sublayers", "layers", "all"]
INPUT_GROUP, OUTPUT_GROUP, SERVER_GROUP, ABLATION_GROUP, MACHINE_GROUP = (
    Group(name, sort_key=number)
    for number, name in enumerate(
        ("What to look at", "How to show it", "The live page", "Which heads matter", "Machine"), 1
    )
)
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class LookFlags:
    """What may be asked for; each field is a flag of the command."""

    target: Annotated[
        str | None,
        Parameter(group=INPUT_GROUP, help="look at the model reading this translation, not at one it searches for"),
    ] = None
    text_pair: Annotated[
        str | None, Parameter(group=INPUT_GROUP, help="a second text that an encoder (BERT) reads behind the first")
    ] = None
    to: Annotated[
        str | None, Parameter(group=INPUT_GROUP, help="the language to translate into, for a model of several")
    ] = None
    beam_size: Annotated[
        int,
        Parameter(
            name=["--beam-size", "-b", "--beam"],
            group=INPUT_GROUP,
            help=f"hypotheses side by side, by default {DEFAULT_BEAM_SIZE}",
        ),
    ] = DEFAULT_BEAM_SIZE
    mask: Annotated[
        tuple[str, ...],
        Parameter(
            group=INPUT_GROUP,
            negative_iterable="",
            help="switch off a head (decoder.blocks.3.cross_attn:2), a sub-layer (decoder.blocks.3.cross_attn) or a layer "
            "(decoder.blocks.3); may be repeated",
        ),
    ] = ()
    kind: Annotated[
        AttentionKind | None, Parameter(group=INPUT_GROUP, help="self-attention or cross-attention alone")
    ] = None
    layers: Annotated[
        tuple[int, ...],
        Parameter(
            name=["--layers", "--layer"],
            group=INPUT_GROUP,
            consume_multiple=True,
            negative_iterable="",
            help="these layers of each stack alone, from 0",
        ),
    ] = ()
    heads: Annotated[
        tuple[int, ...],
        Parameter(
            name=["--heads", "--head"],
            group=INPUT_GROUP,
            consume_multiple=True,
            negative_iterable="",
            help="in pictures these heads alone, from 0",
        ),
    ] = ()
    positions: Annotated[
        bool,
        Parameter(
            group=INPUT_GROUP, negative="", help="how the model tells places apart: its positional encoding in pictures"
        ),
    ] = False

    out: Annotated[
        Path | None, Parameter(name=["--output", "-o"], group=OUTPUT_GROUP, help="the page, by default look.html")
    ] = None
    open: Annotated[bool, Parameter(group=OUTPUT_GROUP, help="open the page in a browser")] = True
    terminal: Annotated[
        bool, Parameter(group=OUTPUT_GROUP, negative="", help="a small picture here, of the head that aligns best")
    ] = False
    png: Annotated[Path | None, Parameter(group=OUTPUT_GROUP, help="a picture for slides (needs attent[viz])")] = None
    svg: Annotated[Path | None, Parameter(group=OUTPUT_GROUP, help="a picture for papers; .pdf works too")] = None
    json: Annotated[
        str | None,
        Parameter(
            group=OUTPUT_GROUP, allow_leading_hyphen=True, help="every weight, and the search, as JSON; -: print it"
        ),
    ] = None

    port: Annotated[int, Parameter(group=SERVER_GROUP, help="by default the first that is free from 8017 on")] = 0

    data: Annotated[
        tuple[str, ...],
        Parameter(
            group=ABLATION_GROUP,
            consume_multiple=True,
            negative_iterable="",
            help="pairs to measure heads on, as for attent score: what each does; with --ablate what each is worth",
        ),
    ] = ()
    src: Annotated[str | None, Parameter(group=ABLATION_GROUP, help="language of the sources, as a tag: en")] = None
    tgt: Annotated[str | None, Parameter(group=ABLATION_GROUP, help="language of the references: de")] = None
    ablate: Annotated[
        bool,
        Parameter(
            group=ABLATION_GROUP,
            negative="",
            help="BLEU and loss with each head silenced, one by one; goes on if stopped",
        ),
    ] = False
    parts: Annotated[PartSelection, Parameter(group=ABLATION_GROUP, help="what to silence one by one")] = "heads"
    limit: Annotated[int | None, Parameter(group=ABLATION_GROUP, help="only the first so many pairs")] = None
    prune: Annotated[
        Path | None,
        Parameter(group=ABLATION_GROUP, help="a new folder for the model without the heads that are worth nothing"),
    ] = None
    max_bleu_drop: Annotated[
        float, Parameter(group=ABLATION_GROUP, help="BLEU that pruning may cost at most, by default 0.2")
    ] = 0.2

    device: Annotated[
        str | None, Parameter(group=MACHINE_GROUP, help="cuda, cuda:1, mps or cpu; by default the best there is")
    ] = None
    dtype: Annotated[DtypeName, Parameter(group=MACHINE_GROUP, help="of the numbers")] = "float32"
    threads: Annotated[int | None, Parameter(group=MACHINE_GROUP, help="by default all cores")] = None


def look(
    model: Annotated[Path, Parameter(help="a model folder, ours or one that transformers has saved")],
    sentence: Annotated[
        str | None,
        Parameter(
            help="to look at, or an image file for a model of images; without one the live page opens, with a box to "
            "type in"
        ),
    ] = None,
    /,
    *,
    flags: Annotated[LookFlags, Parameter(name="*", show_default=False)] = LookFlags(),  # noqa: B008 - frozen
) -> int | None:
    """See every head at work on a sentence, in one page that works offline.

    attent look runs/en-de "A man rides a bike."
    attent look runs/gpt "The cat sat on the"
    attent look runs/bert "The [MASK] sat on the mat."
    attent look runs/vit picture.png
    """
    check_usage(sentence, flags)
    if flags.ablate or flags.prune:
        from attent.cli.look_session import run_look_ablation

        return run_look_ablation(model, flags)
    from attent.cli.look_session import run_look

    return run_look(model, sentence, flags)


def check_usage(sentence: str | None, flags: LookFlags) -> None:
    """What does not go together, before anything is read."""
    shown: dict[str, object] = {"--output": flags.out, "--png": flags.png, "--svg": flags.svg, "--json": flags.json}
    shown |= {
        "--terminal": flags.terminal,
        "--target": flags.target,
        "--mask": flags.mask,
        "--text-pair": flags.text_pair,
    }
    asked = next((name for name, value in shown.items() if value), None)
    files = {"--png": (flags.png, FIGURE_SUFFIXES[:1]), "--svg": (flags.svg, FIGURE_SUFFIXES[1:])}
    problem = None
    if flags.ablate or flags.prune:
        unfit = asked if asked not in ("--png", "--svg") else None
        if sentence is not None or unfit:
            problem = f"--ablate and --prune look at many sentences: leave {unfit or 'the sentence'} out"
        elif not flags.data:
            problem = "--ablate and --prune need pairs to measure on: add --data valid.tsv"
        elif some := find_layer_flag(flags):
            problem = f"--ablate and --prune silence every part: leave {some} out (--parts says of which kind)"
    elif flags.positions and sentence is not None:
        problem = "--positions does not depend on a sentence: leave it out"
    elif sentence is not None and not sentence.strip():
        problem = "there must be a sentence to look at, but it is empty; leave it out for the live page"
    elif sentence is None and not flags.positions and (some := find_layer_flag(flags)):
        problem = f"{some} needs a sentence; on the live page heads are chosen there: leave it out"
    elif sentence is None and asked and not (flags.positions and asked in ("--output", "--png", "--svg", "--json")):
        problem = f'{asked} needs a sentence: attent look MODEL "A man rides a bike."'
    if not problem:
        problem = find_file_problem(files, flags)
    if problem:
        raise CycloptsError(msg=problem, command_chain=("look",))


def find_layer_flag(flags: LookFlags) -> str | None:
    """The first flag that chooses among layers and heads."""
    given = {"--kind": flags.kind, "--layers": flags.layers, "--heads": flags.heads}
    return next((name for name, value in given.items() if value), None)


def find_file_problem(files: dict[str, tuple[Path | None, tuple[str, ...]]], flags: LookFlags) -> str | None:
    """Names that cannot be written to, and numbers that are none."""
    for flag, (path, endings) in files.items():
        if path is not None and path.suffix.lower() not in endings:
            return f"{flag} must be a file that ends in {' or '.join(endings)}, but is {path}"
    written = [flags.out, flags.png, flags.svg, Path(flags.json) if flags.json and flags.json != "-" else None]
    for path in written:
        if path is not None and path.expanduser().is_dir():
            return f"{path}: must be a file, but is a folder; name a file in it"
        if path is not None and not path.expanduser().absolute().parent.is_dir():
            return f"{path}: must be in a folder that is there, but is not; make the folder first"
    least = (("--beam-size", flags.beam_size, 1), ("--limit", flags.limit, 1), ("--threads", flags.threads, 1))
    for name, value, smallest in least:
        if value is not None and value < smallest:
            return f"{name} must be {smallest} or more, but is {value}"
    if not 0 <= flags.port <= 65_535:
        return f"--port must be from 0 to 65535, but is {flags.port}"
    return f"--max-bleu-drop must be 0 or more, but is {flags.max_bleu_drop}" if not flags.max_bleu_drop >= 0 else None
