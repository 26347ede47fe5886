"""`attent train`: from data to a model in one command, and on from where it was when run again.

The parts are `attent.train`'s; here they are put together with what translates and scores, and with those who listen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from attent.cli.config_flags import add_config_flags, collect_overrides
from attent.data.images import ImageDataConfig
from attent.training.run_options import DataConfig, DecodeConfig, Size, TrainConfig
from attent.training.tasks import TASK_HELP, TaskName

COMMON, TEXT, IMAGES, RECIPE, SCORES = (
    Group(name, sort_key=number) for number, name in enumerate(("What to train", "Text", "Images", "Recipe", "Scores"))
)
TABLES: dict[str, tuple[type, Group]] = {
    "data": (DataConfig, TEXT),
    "data.images": (ImageDataConfig, IMAGES),
    "train": (TrainConfig, RECIPE),
    "decode": (DecodeConfig, SCORES),
}


@add_config_flags(TABLES)
def train(
    *,
    data: Annotated[
        list[str] | None,
        Parameter(
            group=COMMON,
            consume_multiple=True,
            allow_repeating=True,
            negative_iterable="",
            help="pairs: files, folders, built-in names, - for stdin, each with a weight if you like: own.tmx:3. "
            "lm: .txt or .jsonl of running text; mlm, spans: a text a line; classify: .tsv of text and label; "
            "images: a folder for each class, or idx files",
        ),
    ] = None,
    out: Annotated[Path, Parameter(group=COMMON, help="folder for the model; run again with it to go on")],
    task: Annotated[
        TaskName | None,
        Parameter(
            group=COMMON,
            help=TASK_HELP,
        ),
    ] = None,
    size: Annotated[Size | None, Parameter(group=COMMON, help="by default what suits the amount of data")] = None,
    config: Annotated[Path | None, Parameter(group=COMMON, help="a run file, such as the run.toml of a model")] = None,
    set_: Annotated[
        list[str] | None,
        Parameter(
            name="--set",
            group=COMMON,
            negative_iterable="",
            help="any setting of the run file: model.dropout=0.2, data.filters.script=false; may be repeated",
        ),
    ] = None,
    from_: Annotated[
        str | None, Parameter(name="--from", group=COMMON, help="a model to train further, ours or Hugging Face's")
    ] = None,
    tokenizer: Annotated[
        Literal["bpe", "unigram", "char"] | None,
        Parameter(group=TEXT, help="how text is cut: subwords by bpe (the default) or unigram, or single characters"),
    ] = None,
    vocab: Annotated[int | None, Parameter(group=TEXT, help="subwords; by default chosen from the data")] = None,
    dropout: Annotated[float | None, Parameter(group=RECIPE, help="by default chosen from the amount of data")] = None,
    quiet: Annotated[bool, Parameter(group=COMMON, negative="", help="print only warnings and the end")] = False,
    **flags: Any,
) -> int:
    """Train a translator, or another model of the family: see --task.

    attent train --data corpus.tsv --src en --tgt de --out runs/en-de
    attent train --task lm --data text.txt --out runs/lm
    """
    from attent.training.run import TrainRequest, run_training

    more = {
        "data.train": tuple(data) if data else None,
        "task": task,
        "size": size,
        "init_from": from_,
        "data.tokenizer.kind": tokenizer,
        "data.tokenizer.vocab": vocab,
        "model.dropout": dropout,
    }
    said = collect_overrides(flags, TABLES) | {name: value for name, value in more.items() if value is not None}
    return run_training(TrainRequest(out=out, config_file=config, flags=said, overrides=tuple(set_ or ()), quiet=quiet))
