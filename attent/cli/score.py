"""`attent score`: how good a model's translations of a test set are, or those in a file; how likely a model holds given
translations; how well its attention aligns words. The figures are `attent.score`'s; here they are asked for and shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import CycloptsError, Group, Parameter

from attent.cli.search_flags import DEFAULT_BEAM_SIZE, SEARCH_GROUP, DeviceFlags, SearchFlags

MetricName = Literal["bleu", "chrf", "chrf++", "ter"]
METRICS: tuple[MetricName, ...] = ("bleu", "chrf", "chrf++", "ter")
INPUT_GROUP, OUTPUT_GROUP = (
    Group(name, sort_key=number) for number, name in enumerate(("What to score", "What to show"), -1)
)


@dataclass(frozen=True, kw_only=True)
class ScoreFlags(SearchFlags, DeviceFlags):  # type: ignore[misc]  # derived from the options
    """What may be asked for; each field is a flag of the command."""

    src: Annotated[str | None, Parameter(group=INPUT_GROUP, help="language of the sources, as a tag: en")] = None
    tgt: Annotated[str | None, Parameter(group=INPUT_GROUP, help="language of the references: de")] = None
    hypotheses: Annotated[
        Path | None,
        Parameter(group=INPUT_GROUP, help="a file of translations, a line for each pair: nothing is translated"),
    ] = None
    baseline: Annotated[
        Path | None,
        Parameter(group=INPUT_GROUP, help="another model, or a file of its translations: is this one better?"),
    ] = None
    force_decode: Annotated[
        bool,
        Parameter(group=INPUT_GROUP, negative="", help="how likely the model holds the references, or --hypotheses"),
    ] = False
    alignment: Annotated[
        Path | None,
        Parameter(
            group=INPUT_GROUP,
            help="alignments by hand (0-0 1-2): the error rate of every layer and head; or auto: the head on which "
            "both languages agree most. The best is kept in the folder",
        ),
    ] = None
    metrics: Annotated[
        tuple[MetricName, ...],
        Parameter(
            name=["--metrics", "-m"], group=OUTPUT_GROUP, consume_multiple=True, negative_iterable="", help="which"
        ),
    ] = METRICS
    score_only: Annotated[
        bool,
        Parameter(name=["--score-only", "-b"], group=OUTPUT_GROUP, negative="", help="print nothing but the numbers"),
    ] = False
    json: Annotated[bool, Parameter(group=OUTPUT_GROUP, negative="", help="print everything as one JSON object")] = (
        False
    )
    sentences: Annotated[
        str | None,
        Parameter(
            group=OUTPUT_GROUP,
            allow_leading_hyphen=True,
            help="a TSV file for the scores of each sentence; -: print them",
        ),
    ] = None
    worst: Annotated[int, Parameter(group=OUTPUT_GROUP, help="how many of the worst translations to show")] = 5
    save: Annotated[Path | None, Parameter(group=OUTPUT_GROUP, help="a file for the translations")] = None
    beam_size: Annotated[
        int | None,
        Parameter(
            name=["--beam-size", "--beam", "--num-beams"],
            group=SEARCH_GROUP,
            help=f"hypotheses followed side by side, by default {DEFAULT_BEAM_SIZE}; 1: greedy",
        ),
    ] = None
    n_best: Annotated[int, Parameter(parse=False)] = 1  # one translation of a source is scored
    ensemble: Annotated[
        tuple[Path, ...],
        Parameter(
            group=SEARCH_GROUP,
            negative_iterable="",
            help="another model to write with MODEL, as in translate; may be repeated",
        ),
    ] = ()


def score(
    model: Annotated[Path | None, Parameter(help="a model folder; none with --hypotheses")] = None,
    /,
    *,
    data: Annotated[
        list[str],
        Parameter(
            group=INPUT_GROUP,
            consume_multiple=True,
            negative_iterable="",
            help="the test set: files, - for stdin; of a folder or a built-in name its test part",
        ),
    ],
    flags: Annotated[ScoreFlags, Parameter(name="*", show_default=False)] = ScoreFlags(),  # noqa: B008 - frozen
) -> None:
    """Translate a test set and score it: BLEU, chrF, chrF++ and TER by sacreBLEU, with 95% confidence intervals.

    attent score runs/en-de --data test.tsv --src en --tgt de
    """
    check_usage(model, flags)
    from attent.scoring.pipeline import score_test_set
    from attent.scoring.report import write_report

    write_report(score_test_set(model, data, flags), flags)


def has_parent_dir(file: Path | str) -> bool:
    return str(file) == "-" or Path(file).expanduser().absolute().parent.is_dir()


def check_usage(model: Path | None, flags: ScoreFlags) -> None:
    needs = "--force-decode" if flags.force_decode else "--alignment" if flags.alignment else None
    problem = None
    if model is None and needs:
        problem = f"{needs} needs a model: attent score MODEL {needs} ..."
    elif model is None and flags.hypotheses is None:
        problem = "there is nothing to score: name a MODEL, or translations with --hypotheses FILE"
    elif model is not None and flags.hypotheses is not None and not flags.force_decode:
        problem = "with --hypotheses nothing is translated: leave MODEL out, or add --force-decode"
    elif needs and (flags.baseline or flags.save):
        problem = f"{needs} translates nothing: leave {'--baseline' if flags.baseline else '--save'} out"
    elif flags.ensemble and (needs or model is None):
        problem = f"--ensemble is for translating, and {needs or '--hypotheses'} translates nothing: leave it out"
    elif flags.alignment and flags.hypotheses:
        problem = "--alignment is of the references: leave --hypotheses out"
    elif flags.sentences and flags.alignment and not flags.force_decode:
        problem = "--sentences has nothing to tell of --alignment: leave it out"
    elif flags.json and flags.score_only:
        problem = "--json has the numbers, too: leave --score-only out"
    elif missing := [one for one in (flags.save, flags.sentences) if one and not has_parent_dir(one)]:
        problem = f"{missing[0]}: must be in a folder that is there, but is not; make the folder first"
    elif flags.worst < 0:
        problem = f"--worst must be 0 or more, but is {flags.worst}"
    elif flags.threads is not None and flags.threads < 1:
        problem = f"--threads must be 1 or more, but is {flags.threads}"
    elif flags.batch_tokens is not None and flags.batch_tokens < 1:
        problem = f"--batch-tokens must be 1 or more, but is {flags.batch_tokens}"
    elif not flags.metrics:
        problem = f"-m must be followed by one or more of {', '.join(METRICS)}"
    if problem:
        raise CycloptsError(msg=problem, command_chain=("score",))
