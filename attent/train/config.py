"""What a training run is: one table for each part, the same names in `run.toml`, in `--set` and as flags.

A None means "chosen from the data and the machine"; `choose` fills it in and says why, and the resolved run is kept in
the model folder. What a person asked for is kept apart from it (`Asked`), so that a later command can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from attent import settings
from attent.data.estimate import Size
from attent.models import CausalConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, VisionConfig
from attent.nn import StackConfig
from attent.train import shapes
from attent.train.recipe import DataConfig, DecodeConfig, Precision, Task, TrainConfig, TrainError

__all__ = ["Asked", "DataConfig", "DecodeConfig", "Precision", "Run", "Size", "Task", "TrainConfig", "TrainError"]

M = TypeVar("M", Seq2SeqConfig, CausalConfig, EncoderConfig, VisionConfig)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, from files to a model folder. Files are read as the class for their kind of model."""

    task: Task = "translate"
    size: Size | None = None
    start: str | None = None  # a model to begin from (--from)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig | None = None  # None until the vocabulary is known
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)


@dataclass(frozen=True, kw_only=True)
class Seq2SeqRun(Run):
    model: Seq2SeqConfig | None = None


@dataclass(frozen=True, kw_only=True)
class CausalRun(Run):
    model: CausalConfig | None = None


@dataclass(frozen=True, kw_only=True)
class EncoderRun(Run):
    model: EncoderConfig | None = None


@dataclass(frozen=True, kw_only=True)
class VisionRun(Run):
    model: VisionConfig | None = None


RUNS: dict[str, type[Run]] = {
    "translate": Seq2SeqRun,
    "lm": CausalRun,
    "mlm": EncoderRun,
    "spans": Seq2SeqRun,
    "classify": EncoderRun,
    "images": VisionRun,
}
OF_MODEL: dict[type[ModelConfig], type[Run]] = {
    Seq2SeqConfig: Seq2SeqRun,
    CausalConfig: CausalRun,
    EncoderConfig: EncoderRun,
    VisionConfig: VisionRun,
}

# What is otherwise than the paper's recipe where nothing was said. All of them came after it: decay of weights, a rate
# that falls to zero, gradients that are shortened; labels are smoothed only where they are few.
LATER: dict[str, Any] = {
    "optimiser": "adamw", "schedule": "cosine", "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.1,
    "clip_norm": 1.0, "label_smoothing": 0.0, "metric": "loss",
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "translate": {},
    "lm": {"train": LATER | {"betas": [0.9, 0.95]}},
    "mlm": {"train": LATER | {"weight_decay": 0.01}},
    "spans": {"train": LATER | {"weight_decay": 0.01}},
    "classify": {"train": LATER | {"weight_decay": 0.01, "metric": "accuracy"}},
    "images": {
        # The last updates, when the rate is near zero, add the most: accuracy stands still before them, and losing
        # patience there would cost more than it saves.
        "train": LATER
        | {"betas": [0.9, 0.99], "weight_decay": 0.05, "label_smoothing": 0.1, "metric": "accuracy", "patience": 0},
        "data": {"images": {}},
    },
}

# Which tasks read a setting, or a table of them; what is not listed here, all of them do. A setting that would do
# nothing is refused.
TEXTS = ("mlm", "spans", "classify")
READ_BY: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "data.src", "data.tgt", "data.tags", "data.sampling", "data.too_long", "data.filters", "data.reading",
        "data.tokenizer.joint", "train.rdrop", "train.valid_sentences", "decode",
    ),
    ("translate",),
) | {
    "data.tokenizer": ("translate", "lm", *TEXTS),
    "data.longest": ("translate", "lm", *TEXTS),
    "data.layout": ("translate", *TEXTS),
    "data.images": ("images",),
}  # fmt: skip


# What may differ when a run goes on: none of it changes what was learned so far.
HARMLESS = frozenset(
    f"train.{name}"
    for name in (
        "steps", "save_every", "keep_last", "valid_every", "valid_sentences", "patience", "average", "device",
        "threads", "workers", "compile", "piece_tokens", "shard", "tensorboard",
    )
) | {"decode.beam_size", "decode.length_penalty", "data.test"}  # fmt: skip

BOTH_STACKS = {field.name for field in fields(StackConfig)} - {"causal", "cross"}
PLACEHOLDER = 1000  # a vocabulary, to check a model's table before the real one is known
GIVEN = ("vocab", "target_vocab", "labels")  # of a model: as the data are, whatever is said


# ---- what a person asked for -----------------------------------------------------------------------------------------

Asked = dict[str, Any]  # tables inside tables, with only what was said


def read_asked(file: Path | None, flags: Mapping[str, Any], overrides: Iterable[str]) -> Asked:
    """A run file, then flags such as {"train.lr": 0.001}, then `--set` on top; checked, but nothing filled in."""
    asked: Asked = settings.read_tables(file) if file else {}
    where = str(file) if file else "--set"
    in_file = dict(flat(asked))
    for path, value in flags.items():
        _put(asked, path.split("."), value)
    for override in overrides:
        if override.partition("=")[0].strip() == "task":
            settings.override(Run, asked, override)
    kind = kind_of(asked)
    _spread(asked, where, kind)
    for override in overrides:
        for each in _for_all_stacks(override, kind):
            settings.override(kind, asked, each)
    check(asked, where)
    _refuse_unread(asked, in_file)
    return asked


def _refuse_unread(asked: Asked, in_file: Mapping[str, Any]) -> None:
    """A file may state what would be so anyway, as `run.toml` does; its layout was chosen for every task."""
    task = asked.get("task", "translate")
    usual = dict(flat(settings.to_dict(Run())))
    for path, value in flat(asked):
        readers = next((READ_BY[name] for name in _heads_of(path) if name in READ_BY), (task,))
        said_by_file = path == "data.layout" and path in in_file
        nothing_said = path in usual and (value == usual[path] or not (value or usual[path]))
        if task not in readers and not nothing_said and not said_by_file:
            raise TrainError(f"`{path}` means nothing for --task {task}; leave it out")


def _heads_of(path: str) -> list[str]:
    """a.b.c -> a.b.c, a.b, a"""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def kind_of(asked: Asked) -> type[Run]:
    """The class of a run: by its task, of which nonsense is told when the whole is checked."""
    task = asked.get("task", "translate")
    return RUNS[task] if isinstance(task, str) and task in RUNS else Seq2SeqRun


def read_run(path: Path) -> Run:
    """The resolved run of a file, whichever its task is."""
    tables = settings.read_tables(path)
    return settings.from_dict(kind_of(tables), tables, where=str(path))


def check(asked: Asked, where: str) -> Run:
    """The run as asked for; its model is tried with a vocabulary that stands in for the real one."""
    kind = kind_of(asked)
    tables = {name: table for name, table in asked.items() if name != "model"}
    settings.from_dict(kind, tables, where=where)  # what was said alone: a mistake in it is told of it
    run = settings.from_dict(kind, _merged(DEFAULTS[asked.get("task", "translate")], tables), where=where)
    model = asked.get("model")
    patch = model.get("patch") if isinstance(model, dict) else None
    try_model(asked, shapes.placeholder(run.task, PLACEHOLDER, patch), where)
    return run


def try_model(asked: Asked, preset: ModelConfig, where: str) -> None:
    model_of(asked, preset, where)  # type: ignore[type-var]  # one of them


def model_of(asked: Asked, preset: M, where: str = "run.toml") -> M:
    """The preset with what was asked for on top. Its vocabulary is the tokenizer's, whatever was said."""
    table = {name: value for name, value in asked.get("model", {}).items() if name not in GIVEN}
    merged = _merged(settings.to_dict(preset), table)
    try:
        found = settings.from_dict(OF_MODEL[type(preset)], {"model": merged}, where=where).model
        assert isinstance(found, type(preset))
        return found
    except settings.SettingsError:
        raise
    except ValueError as error:
        raise settings.SettingsError(f"{where}: {error}") from error


def _put(tables: Asked, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tables = tables.setdefault(name, {})
    tables[path[-1]] = list(value) if isinstance(value, tuple) else value


def _spread(asked: Asked, where: str, kind: type[Run]) -> None:
    """`model.dropout` means both stacks, or the one there is; what is said of one of them counts more."""
    model = asked.get("model")
    if isinstance(model, dict):
        for name in [name for name in model if _of_all_stacks(name, where)]:
            value = model.pop(name)
            for stack in stacks(kind):
                if isinstance(table := model.setdefault(stack, {}), dict):
                    table.setdefault(name, value)


def stacks(kind: type[Run]) -> tuple[str, ...]:
    """What a model's stacks are called in its table."""
    return ("encoder", "decoder") if kind is Seq2SeqRun else ("stack",)


OTHERS = {
    field.name for config in (Seq2SeqConfig, CausalConfig, EncoderConfig, VisionConfig) for field in fields(config)
}


def _of_all_stacks(name: str, where: str) -> bool:
    near = get_close_matches(name, BOTH_STACKS, n=1)
    if near and near[0] != name and name not in OTHERS:
        raise settings.SettingsError(f"{where}: unknown key `model.{name}`; did you mean `model.{near[0]}`?")
    return name in BOTH_STACKS


def _for_all_stacks(override: str, kind: type[Run]) -> list[str]:
    path, equals, value = override.partition("=")
    parts = path.strip().split(".")
    if equals and len(parts) > 1 and parts[0] == "model" and _of_all_stacks(parts[1], "--set"):
        rest = ".".join(parts[1:])
        return [f"model.{stack}.{rest}={value}" for stack in stacks(kind)]
    return [override]


def _merged(base: Asked, table: Asked) -> Asked:
    """`base` with `table` on top; another `kind` of a part starts from nothing."""
    merged = dict(base)
    for name, value in table.items():
        old = merged.get(name)
        same = (
            isinstance(value, dict) and isinstance(old, dict) and value.get("kind", old.get("kind")) == old.get("kind")
        )
        merged[name] = _merged(old, value) if same and isinstance(old, dict) else value
    return merged


def completed(asked: Asked, before: Asked) -> Asked:
    """What the command means for a run that is there: without --data, all that it does not say is as before."""
    return asked if asked.get("data", {}).get("train") else _merged(before, asked)


def changes(before: Asked, now: Asked) -> dict[str, tuple[Any, Any]]:
    """Every setting that differs: its path -> (before, now); None where it was not said."""
    old, new = dict(flat(before)), dict(flat(now))
    return {path: (old.get(path), new.get(path)) for path in {**old, **new} if old.get(path) != new.get(path)}


def flat(tables: Asked, before: str = "") -> Iterable[tuple[str, Any]]:
    """Every setting by its path, such as `train.lr`."""
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
