"""`attent score`: score a model or a file of translations on a test set. See `attent.scoring.pipeline`."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import CycloptsError, Group, Parameter

from attent.cli import shared
from attent.cli.shared import DeviceFlags, SearchFlags, flag, print_status
from attent.scoring.metrics import DEFAULT_SCORE_METRICS, SCORE_METRICS, SPEECH_METRICS

if TYPE_CHECKING:
    from attent.scoring.report import ScoreReport

    MetricName = str
else:
    MetricName = Literal[SCORE_METRICS]

input_flag, output_flag = (
    partial(Parameter, group=Group(name, sort_key=number))
    for number, name in enumerate(("What to score", "What to show"), -1)
)
SWITCH, LIST = Parameter(negative=""), Parameter(consume_multiple=True, negative_iterable="")
METRICS_HELP = f"metrics, by default {' '.join(DEFAULT_SCORE_METRICS)}; of transcripts {' '.join(SPEECH_METRICS)}"
ALIGNMENT_HELP = (
    "alignment error rate of every layer and head against gold alignments (0-0 1-2); or auto: select the heads on "
    "which both directions agree most. The best heads are saved in the folder"
)


@dataclass(frozen=True, kw_only=True)
class ScoreFlags(SearchFlags, DeviceFlags):  # type: ignore[misc]  # derived from the options
    src: Annotated[str | None, input_flag(help="language of the sources, as a tag: en")] = None
    tgt: Annotated[str | None, input_flag(help="language of the references: de")] = None
    hypotheses: Annotated[Path | None, input_flag(help="score this file of translations, one line per pair")] = None
    baseline: Annotated[Path | None, input_flag(help="compare with another model or a file of translations")] = None
    force_decode: Annotated[bool, SWITCH, input_flag(help="perplexity of the references or --hypotheses")] = False
    alignment: Annotated[Path | None, input_flag(help=ALIGNMENT_HELP)] = None
    robust: Annotated[
        bool, SWITCH, input_flag(help="score the test set also in capitals, with typos, with tags, ..., each alone")
    ] = False
    metrics: Annotated[tuple[MetricName, ...], LIST, output_flag(name=["--metrics", "-m"], help=METRICS_HELP)] = (
        DEFAULT_SCORE_METRICS
    )
    json: Annotated[bool, SWITCH, output_flag(help="print a JSON object")] = False
    worst: Annotated[int, output_flag(help="number of worst translations to show")] = 5
    save: Annotated[Path | None, output_flag(help="file for the translations")] = None
    n_best: Annotated[int, Parameter(parse=False)] = 1  # one translation of each source is scored
    ensemble: Annotated[tuple[Path, ...], flag("Search", "another model for an ensemble; may be repeated")] = ()


def score(
    model: Annotated[Path | None, Parameter(help="a model folder; none with --hypotheses")] = None,
    /,
    *,
    data: Annotated[
        list[str],
        LIST,
        input_flag(help="the test set: files, - for stdin; of a folder or a built-in corpus its test part"),
    ],
    flags: Annotated[ScoreFlags, Parameter(name="*", show_default=False)] = ScoreFlags(),
) -> int:
    """Translate a test set and score it by BLEU, chrF and TER of sacreBLEU, with 95% confidence intervals. Transcripts
    of a speech model are scored by word and character error rate.

    attent score runs/en-de --data test.tsv --src en --tgt de
    attent score runs/asr --data recordings.tsv
    """
    check_usage(model, flags)
    from attent.scoring import pipeline

    with shared.raise_usage_errors("score"):
        search = shared.build_search_options(flags)
    names = ("src", "tgt", "metrics", "ensemble", "hypotheses", "baseline", "force_decode", "alignment", "robust")
    scores = pipeline.score(
        model,
        data,
        **{name: getattr(flags, name) for name in names},
        search=search,
        save=flags.save,
        device=shared.build_device_options(flags),
        notify=print_status,
        warn=lambda problem: print(f"attent: warning: {problem}", file=sys.stderr),
    )
    print_report(scores, flags)
    return 1 if scores.num_unreadable else 0


def print_report(scores: "ScoreReport", flags: ScoreFlags) -> None:
    import json

    from rich.console import Console

    from attent.scoring import report

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that cannot show a character
    if flags.json:
        data = report.report_to_dict(scores, flags.worst)
        print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        console = Console(highlight=False)
        for line in report.render_page(scores, flags.worst):
            console.print(line, soft_wrap=True)


def check_usage(model: Path | None, flags: ScoreFlags) -> None:
    needs = "--force-decode" if flags.force_decode else "--alignment" if flags.alignment else None
    robust = "--robust" if flags.robust else None
    problem = None
    if model is None and (needs or robust):
        problem = f"{needs or robust} needs a model: attent score MODEL {needs or robust} ..."
    elif model is None and flags.hypotheses is None:
        problem = "there is nothing to score: name a MODEL, or translations with --hypotheses FILE"
    elif model is not None and flags.hypotheses is not None and not flags.force_decode:
        problem = "with --hypotheses nothing is translated: leave MODEL out, or add --force-decode"
    elif needs and (flags.baseline or flags.save or robust):
        problem = f"{needs} translates nothing: leave {'--baseline' if flags.baseline else robust or '--save'} out"
    elif flags.ensemble and (needs or model is None):
        problem = f"--ensemble is for translating, and {needs or '--hypotheses'} translates nothing: leave it out"
    elif flags.alignment and flags.hypotheses:
        problem = "--alignment needs references: leave --hypotheses out"
    elif flags.save and not flags.save.expanduser().absolute().parent.is_dir():
        problem = f"{flags.save}: must be in an existing folder, but is not; make the folder first"
    elif flags.worst < 0:
        problem = f"--worst must be 0 or more, but is {flags.worst}"
    elif not flags.metrics:
        problem = f"-m must be followed by one or more of {', '.join(SCORE_METRICS)}"
    if problem:
        raise CycloptsError(msg=problem, command_chain=("score",))
    shared.check_positive("score", threads=flags.threads, batch_tokens=flags.batch_tokens)
