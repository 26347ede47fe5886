"""`attent distil`: train a small, fast model on the translations of a large one."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from attent.cli.train import SetFlag, add_config_flags, limit_thread_waiting, run_with_display
from attent.training.run_options import DISTIL_GROUPS, PythonOptions, StudentOptions

GROUPS = {table: Group(title, sort_key=number) for number, (title, table) in enumerate(DISTIL_GROUPS.items())}
STUDENT = GROUPS[StudentOptions]


@add_config_flags({table: group for table, group in GROUPS.items() if table is not PythonOptions})
def distil(
    *teacher: Annotated[Path, Parameter(group=STUDENT, help="a translation model; several: an ensemble")],
    data: Annotated[
        list[str] | None,
        Parameter(group=STUDENT, consume_multiple=True, negative_iterable="", help="source text, or pairs"),
    ] = None,
    out: Annotated[Path, Parameter(group=STUDENT, help="folder of the student; the same folder again resumes")],
    set_: SetFlag = None,
    quiet: Annotated[bool, Parameter(group=STUDENT, negative="", help="print only warnings and the result")] = False,
    **flags: Any,
) -> int:
    """Train a small, fast model on the translations of a large one; run the same command again to resume.

    attent distil runs/de-en --data corpus.tsv --src de --tgt en --out runs/de-en-small
    """
    limit_thread_waiting()
    from attent.training.distillation import distil

    overrides = tuple(set_ or ())
    return run_with_display(distil, data or (), quiet, teacher=teacher, out=out, overrides=overrides, **flags)
