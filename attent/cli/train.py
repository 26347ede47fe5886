"""`attent train`: train a model in one command, or resume a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from attent.cli.config_flags import add_config_flags
from attent.training.run_options import SETTING_TABLES, Arch, Size
from attent.training.tasks import DATA_HELP, TASK_HELP, TaskName

GROUP_NAMES = ("What to train", "Text", "Images", "Speech", "Recipe", "Scores")
COMMON, TEXT, IMAGES, SPEECH, RECIPE, SCORES = (Group(name, sort_key=number) for number, name in enumerate(GROUP_NAMES))
GROUPS = {"data": TEXT, "data.images": IMAGES, "data.audio": SPEECH, "train": RECIPE, "decode": SCORES}

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
    """Let threads of OpenMP sleep soon instead of spinning; before torch is imported, which reads these variables.

    On a busy machine, spinning threads take the cores from those that they wait for.
    """
    for name, value in {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}.items():
        os.environ.setdefault(name, value)


@add_config_flags({path: (table, GROUPS[path]) for path, table in SETTING_TABLES.items()})
def train(
    *,
    data: DataFlag = None,
    out: Annotated[Path, Parameter(group=COMMON, help="folder of the model; the same folder again resumes the run")],
    task: Annotated[TaskName | None, Parameter(group=COMMON, help=TASK_HELP)] = None,
    arch: Annotated[
        Arch | None, Parameter(group=COMMON, help="architecture of a translation model [default: transformer]")
    ] = None,
    size: Annotated[Size | None, Parameter(group=COMMON, help="model size [default: from the amount of data]")] = None,
    config: Annotated[Path | None, Parameter(group=COMMON, help="a run file, such as the run.toml of a model")] = None,
    set_: SetFlag = None,
    from_: Annotated[
        str | None, Parameter(name="--from", group=COMMON, help="a model to fine-tune, of attent or Hugging Face")
    ] = None,
    tokenizer: Annotated[
        Literal["bpe", "unigram", "char"] | None, Parameter(group=TEXT, help="tokenizer to train [default: bpe]")
    ] = None,
    vocab: Annotated[int | None, Parameter(group=TEXT, help="vocabulary size [default: from the data]")] = None,
    dropout: Annotated[float | None, Parameter(group=RECIPE, help="[default: from the amount of data]")] = None,
    quiet: Annotated[bool, Parameter(group=COMMON, negative="", help="print only warnings and the result")] = False,
    **flags: Any,
) -> int:
    """Train a model; run the same command again to resume.

    attent train --data corpus.tsv --src en --tgt de --out runs/en-de
    attent train --task lm --data text.txt --out runs/lm
    """
    limit_thread_waiting()
    from attent.cli.progress import TrainingDisplay
    from attent.training import run

    with TrainingDisplay(quiet=quiet) as display:
        result = run.train(
            data or (),
            out=out,
            task=task,
            arch=arch,
            size=size,
            init_from=from_,
            config=config,
            overrides=tuple(set_ or ()),
            listeners=[display],
            force_exit=True,
            tokenizer=tokenizer,
            vocab=vocab,
            dropout=dropout,
            **flags,
        )
    if result.resume_command:
        print(f"attent: saved; resume with: {result.resume_command}", file=sys.stderr)
    return result.exit_code
