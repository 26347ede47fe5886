"""`attent train`: train a model in one command, or resume a run. Its flags are derived from the settings."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

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
        consume_multiple=True,
        allow_repeating=True,
        negative_iterable="",
        help="any settings of the run file: model.dropout=0.2 data.filters.script=false",
    ),
]


def add_config_flags(tables: Mapping[type, Group]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags of settings tables (dataclass -> help group) to a command, as its `**flags`.

    An annotated field is a flag; None: it was not given.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        more = [flag for table, group in tables.items() for flag in _iterate_flags(table, group)]
        parameters = [own for own in signature.parameters.values() if own.kind != own.VAR_KEYWORD]
        parameters += [flag for flag in more if flag.name not in signature.parameters]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _iterate_flags(table: type, group: Group) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(table, include_extras=True)
    for field in fields(table):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, help_text = get_args(hint)
            is_list = any(get_origin(option) is tuple for option in (kind, *get_args(kind)))  # also of `tuple | None`
            parameter = Parameter(
                help=help_text,
                group=group,
                consume_multiple=is_list,
                allow_repeating=is_list or None,
                negative_iterable="",
            )
            annotation: Any = Annotated[kind | None, parameter]
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


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
