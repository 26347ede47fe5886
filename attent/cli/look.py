"""`attent look`: see every head at work on a sentence, in a page, a picture or the terminal; which heads matter.

What may be asked for is here, what is done with it is `looking`'s and `ablating`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import CycloptsError, Group, Parameter

from attent.cli.searching import BEAM_SIZE, Dtype

Kind = Literal["self", "cross"]
Parts = Literal["heads", "sublayers", "layers", "all"]
LOOK, SHOW, LIVE, MATTER, MACHINE = (
    Group(name, sort_key=number)
    for number, name in enumerate(
        ("What to look at", "How to show it", "The live page", "Which heads matter", "Machine"), 1
    )
)
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What may be asked for; each field is a flag of the command."""

    target: Annotated[
        str | None, Parameter(group=LOOK, help="look at the model reading this translation, not at one it searches for")
    ] = None
    pair: Annotated[
        str | None, Parameter(group=LOOK, help="a second text that an encoder (BERT) reads behind the first")
    ] = None
    to: Annotated[str | None, Parameter(group=LOOK, help="the language to translate into, for a model of several")] = (
        None
    )
    beam_size: Annotated[
        int,
        Parameter(
            name=["--beam-size", "-b", "--beam"], group=LOOK, help=f"hypotheses side by side, by default {BEAM_SIZE}"
        ),
    ] = BEAM_SIZE
    silence: Annotated[
        tuple[str, ...],
        Parameter(
            group=LOOK,
            negative_iterable="",
            help="switch off a head (decoder.blocks.3.cross:2), a sub-layer (decoder.blocks.3.cross) or a layer "
            "(decoder.blocks.3); may be repeated",
        ),
    ] = ()
    kind: Annotated[Kind | None, Parameter(group=LOOK, help="self-attention or cross-attention alone")] = None
    layers: Annotated[
        tuple[int, ...],
        Parameter(
            name=["--layers", "--layer"],
            group=LOOK,
            consume_multiple=True,
            negative_iterable="",
            help="these layers of each stack alone, from 0",
        ),
    ] = ()
    heads: Annotated[
        tuple[int, ...],
        Parameter(
            name=["--heads", "--head"],
            group=LOOK,
            consume_multiple=True,
            negative_iterable="",
            help="in pictures these heads alone, from 0",
        ),
    ] = ()
    positions: Annotated[
        bool,
        Parameter(
            group=LOOK, negative="", help="how the model tells places apart: its positional encoding in pictures"
        ),
    ] = False

    out: Annotated[
        Path | None, Parameter(name=["--output", "-o"], group=SHOW, help="the page, by default look.html")
    ] = None
    open: Annotated[bool, Parameter(group=SHOW, help="open the page in a browser")] = True
    terminal: Annotated[
        bool, Parameter(group=SHOW, negative="", help="a small picture here, of the head that aligns best")
    ] = False
    png: Annotated[Path | None, Parameter(group=SHOW, help="a picture for slides (needs attent[viz])")] = None
    svg: Annotated[Path | None, Parameter(group=SHOW, help="a picture for papers; .pdf works too")] = None
    json: Annotated[
        str | None,
        Parameter(group=SHOW, allow_leading_hyphen=True, help="every weight, and the search, as JSON; -: print it"),
    ] = None

    port: Annotated[int, Parameter(group=LIVE, help="by default the first that is free from 8017 on")] = 0

    data: Annotated[
        tuple[str, ...],
        Parameter(
            group=MATTER,
            consume_multiple=True,
            negative_iterable="",
            help="pairs to measure heads on, as for attent score: what each does; with --ablate what each is worth",
        ),
    ] = ()
    src: Annotated[str | None, Parameter(group=MATTER, help="language of the sources, as a tag: en")] = None
    tgt: Annotated[str | None, Parameter(group=MATTER, help="language of the references: de")] = None
    ablate: Annotated[
        bool,
        Parameter(
            group=MATTER, negative="", help="BLEU and loss with each head silenced, one by one; goes on if stopped"
        ),
    ] = False
    parts: Annotated[Parts, Parameter(group=MATTER, help="what to silence one by one")] = "heads"
    limit: Annotated[int | None, Parameter(group=MATTER, help="only the first so many pairs")] = None
    prune: Annotated[
        Path | None, Parameter(group=MATTER, help="a new folder for the model without the heads that are worth nothing")
    ] = None
    within: Annotated[float, Parameter(group=MATTER, help="BLEU that pruning may cost at most, by default 0.2")] = 0.2

    device: Annotated[
        str | None, Parameter(group=MACHINE, help="cuda, cuda:1, mps or cpu; by default the best there is")
    ] = None
    dtype: Annotated[Dtype, Parameter(group=MACHINE, help="of the numbers")] = "float32"
    threads: Annotated[int | None, Parameter(group=MACHINE, help="by default all cores")] = None


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
    flags: Annotated[Flags, Parameter(name="*", show_default=False)] = Flags(),  # noqa: B008 - frozen
) -> int | None:
    """See every head at work on a sentence, in one page that works offline.

    attent look runs/en-de "A man rides a bike."
    attent look runs/gpt "The cat sat on the"
    attent look runs/bert "The [MASK] sat on the mat."
    attent look runs/vit picture.png
    """
    check_usage(sentence, flags)
    if flags.ablate or flags.prune:
        from attent.cli.looking import ablate

        return ablate(model, flags)
    from attent.cli.looking import start

    return start(model, sentence, flags)


def check_usage(sentence: str | None, flags: Flags) -> None:
    """What does not go together, before anything is read."""
    shown: dict[str, object] = {"--output": flags.out, "--png": flags.png, "--svg": flags.svg, "--json": flags.json}
    shown |= {"--terminal": flags.terminal, "--target": flags.target, "--silence": flags.silence, "--pair": flags.pair}
    asked = next((name for name, value in shown.items() if value), None)
    files = {"--png": (flags.png, PICTURES[:1]), "--svg": (flags.svg, PICTURES[1:])}
    problem = None
    if flags.ablate or flags.prune:
        unfit = asked if asked not in ("--png", "--svg") else None
        if sentence is not None or unfit:
            problem = f"--ablate and --prune look at many sentences: leave {unfit or 'the sentence'} out"
        elif not flags.data:
            problem = "--ablate and --prune need pairs to measure on: add --data valid.tsv"
        elif some := chosen(flags):
            problem = f"--ablate and --prune silence every part: leave {some} out (--parts says of which kind)"
    elif flags.positions and sentence is not None:
        problem = "--positions does not depend on a sentence: leave it out"
    elif sentence is not None and not sentence.strip():
        problem = "there must be a sentence to look at, but it is empty; leave it out for the live page"
    elif sentence is None and not flags.positions and (some := chosen(flags)):
        problem = f"{some} needs a sentence; on the live page heads are chosen there: leave it out"
    elif sentence is None and asked and not (flags.positions and asked in ("--output", "--png", "--svg", "--json")):
        problem = f'{asked} needs a sentence: attent look MODEL "A man rides a bike."'
    if not problem:
        problem = file_problem(files, flags)
    if problem:
        raise CycloptsError(msg=problem, command_chain=("look",))


def chosen(flags: Flags) -> str | None:
    """The first flag that chooses among layers and heads."""
    given = {"--kind": flags.kind, "--layers": flags.layers, "--heads": flags.heads}
    return next((name for name, value in given.items() if value), None)


def file_problem(files: dict[str, tuple[Path | None, tuple[str, ...]]], flags: Flags) -> str | None:
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
    return f"--within must be 0 or more, but is {flags.within}" if not flags.within >= 0 else None
