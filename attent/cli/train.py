"""`attent train`: train a model in one command, or resume a run."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from attent.cli.config_flags import add_config_flags
from attent.training.run_options import OPTION_GROUPS, PythonOptions, RunOptions
from attent.training.tasks import DATA_HELP

GROUPS = {table: Group(title, sort_key=number) for number, (title, table) in enumerate(OPTION_GROUPS.items())}
COMMON = GROUPS[RunOptions]

DataFlag = Annotated[
    list[str] | None,
    Parameter(group=COMMON, consume_multiple=True, allow_repeating=True, negative_iterable="", help=DATA_HELP),
]
SetFlag = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        group=COMMON,
        negative_iterable="",
        help="any setting of the run file: model.dropout=0.2, data.filters.script=false; repeatable",
    ),
]


def limit_thread_waiting() -> None:
    """Let OpenMP's waiting threads sleep soon: spinning ones take cores. Before torch, which reads these variables."""
    for name, value in {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}.items():
        os.environ.setdefault(name, value)


@add_config_flags({table: group for table, group in GROUPS.items() if table is not PythonOptions})
def train(
    *,
    data: DataFlag = None,
    out: Annotated[Path, Parameter(group=COMMON, help="folder of the model; the same folder again resumes the run")],
    set_: SetFlag = None,
    init_from: Annotated[
        str | None, Parameter(name="--from", group=COMMON, help="a model to fine-tune, of attent or Hugging Face")
    ] = None,
    quiet: Annotated[bool, Parameter(group=COMMON, negative="", help="print only warnings and the result")] = False,
    **flags: Any,
) -> int:
    """Train a model; run the same command again to resume.

    attent train --data corpus.tsv --src en --tgt de --out runs/en-de
    attent train --task lm --data text.txt --out runs/lm
    """
    limit_thread_waiting()
    from attent.training import run

    overrides = tuple(set_ or ())
    return run_with_display(run.train, data or (), quiet, out=out, init_from=init_from, overrides=overrides, **flags)


def run_with_display(run: Callable[..., Any], data: list[str] | tuple[()], quiet: bool, **options: Any) -> int:
    """Train or distil, and return the exit code."""
    from attent.training.progress import TrainingDisplay

    with TrainingDisplay(quiet=quiet) as display:
        result = run(data, callbacks=[display], progress=False, force_exit=True, **options)
    if result.resume_command:
        print(f"attent: saved; resume with: {result.resume_command}", file=sys.stderr)
    return result.exit_code
